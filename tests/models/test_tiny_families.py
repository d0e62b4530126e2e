"""Tiny checkpoints of every family: varied greedy output, and our greedy tokens those of transformers."""

import pytest
import torch

from camshaft.frontend.checkpoint import open_checkpoint
from camshaft.frontend.load import program_from_checkpoint
from camshaft.testing.tiny import TINY_FAMILIES, tiny_config, write_tiny

PROMPT = [5, 9, 17, 40]
NUM_OUTPUTS = 64


@pytest.mark.parametrize(("family", "seed", "changes"), [
    *((family, 7, {}) for family in TINY_FAMILIES),
    ("llama", 0, {}), ("llama", 1, {"tie_word_embeddings": True}),
    ("qwen3", 0, {"tie_word_embeddings": True}), ("gemma3", 1, {"tie_word_embeddings": False}),
    ("gemma3", 0, {"torch_dtype": "bfloat16"}),
])
def test_greedy_output_is_varied_and_that_of_transformers(family, seed, changes, tmp_path, run_program):
    from transformers import AutoModelForCausalLM

    folder = write_tiny(tmp_path, family, seed=seed, eos_token_id=None, tokenizer=False, **changes)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = torch.tensor([PROMPT])
    theirs = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NUM_OUTPUTS,
                            do_sample=False, pad_token_id=0)[0]
    assert len(set(theirs[len(PROMPT):].tolist())) >= 8
    program = program_from_checkpoint(open_checkpoint(folder), torch.float32)
    ours = run_program(program, theirs[:-1]).argmax(-1)[len(PROMPT) - 1:]
    assert torch.equal(ours, theirs[len(PROMPT):])


def test_the_tiny_gemma_is_longer_than_its_window():
    config = tiny_config("gemma3")
    assert config["sliding_window"] < len(PROMPT) + NUM_OUTPUTS
    assert config["layer_types"].count("sliding_attention") == 2


def test_a_family_that_is_none_is_named():
    with pytest.raises(KeyError, match="mamba"):
        tiny_config("mamba")
