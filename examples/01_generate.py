"""Generate for several prompts at once with the default model. Give a model as the first argument to use another."""

import sys

from camshaft import LLM, SamplingParams

with LLM(sys.argv[1] if len(sys.argv) > 1 else None) as llm:
    prompts = ["The capital of France is", "Two plus two makes", "Water boils at"]
    for output in llm.generate(prompts, SamplingParams(max_tokens=16)):
        print(f"{output.prompt!r} -> {output.outputs[0].text!r}")
