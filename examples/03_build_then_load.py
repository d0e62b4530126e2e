"""Build a self-contained engine folder once, then run it without the checkpoint."""

import sys
import tempfile
from pathlib import Path

import camshaft
from camshaft import LLM, BuildConfig, SamplingParams

with tempfile.TemporaryDirectory() as folder:
    engine = Path(folder) / "engine"
    camshaft.build(sys.argv[1] if len(sys.argv) > 1 else None, BuildConfig(max_seq_len=1024), output=engine)
    print("built:", sorted(path.name for path in engine.iterdir()))
    with LLM(engine) as llm:
        print(llm.generate("The sun is", SamplingParams(max_tokens=12)).outputs[0].text)
