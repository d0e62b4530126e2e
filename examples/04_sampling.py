"""Sampling options: several answers, penalties, log-probabilities, scoring a prompt, logits of your own making.

    python examples/04_sampling.py
"""

import sys

import torch

from camshaft import LLM, SamplingParams


def no_digits(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    """A logits processor: sees prompt and output so far, returns logits for the next token."""
    logits[digits] = float("-inf")
    return logits


with LLM(sys.argv[1] if len(sys.argv) > 1 else None) as llm:
    digits = [token for text in "0123456789" for token in llm.tokenizer.encode(text, add_special_tokens=False)]
    question = "My favourite colour is"

    # Three answers of one seed: choice i of (seed, i) is always the same, whatever runs beside it.
    several = llm.generate(question, SamplingParams(n=3, temperature=0.9, seed=7, max_tokens=8))
    for choice in several.outputs:
        print(f"choice {choice.index}:{choice.text!r}")

    # Against repetition, and without digits.
    for name, options in (("plain", {}), ("penalty", {"repetition_penalty": 1.3}),
                          ("no digits", {"logits_processor": no_digits})):
        output = llm.generate("The number of days in a year is", SamplingParams(max_tokens=16, **options))
        print(f"{name}:{output.outputs[0].text!r}")

    # How likely each picked token was, and the two likeliest in its place.
    probed = llm.generate("The capital of France is", SamplingParams(max_tokens=2, logprobs=2)).outputs[0]
    for token, entries in zip(probed.token_ids, probed.logprobs, strict=True):
        others = ", ".join(f"{entry.decoded_token!r} {entry.logprob:.2f}" for entry in entries.values())
        print(f"picked {entries[token].decoded_token!r} among {others}")

    # Only score a text: nothing is generated.
    for text in ("Paris is in France.", "Paris is in Peru."):
        scored = llm.generate(text, SamplingParams(max_tokens=0, prompt_logprobs=0))
        total = sum(entries[token].logprob for token, entries in
                    zip(scored.prompt_token_ids, scored.prompt_logprobs, strict=True) if entries is not None)
        print(f"{text!r}: {total:.2f}")
