"""A GGUF file of every architecture computes what the Hugging Face folder with the same weights computes."""

import pytest
import torch

from camshaft.frontend.checkpoint import open_checkpoint
from camshaft.frontend.load import program_from_checkpoint
from tests.unit.frontend.gguf_files import CONFIGS, YARN, random_tensors, write_folder, write_gguf

CASES = {
    "llama": ("llama", {}),
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", {}),
    "qwen2_yarn": ("qwen2", {"rope_scaling": YARN}),
    "qwen3": ("qwen3", {"attention_bias": True}),
    "gemma3": ("gemma3", {}),
    "gemma3_stretched": ("gemma3", {"rope_scaling": {"rope_type": "linear", "factor": 8.0},
                                    "final_logit_softcapping": 30.0}),
}


@pytest.mark.parametrize("case", sorted(CASES))
def test_logits_are_those_of_the_folder(tmp_path, run_program, case):
    architecture, changes = CASES[case]
    config = {**CONFIGS[architecture], **changes}
    tensors = random_tensors(config, seed=5)
    folder = write_folder(tmp_path / "folder", config, tensors)
    file = write_gguf(tmp_path / "m.gguf", architecture, config, tensors)
    ids = torch.randint(0, config["vocab_size"], (90,), generator=torch.Generator().manual_seed(1))
    expected, found = (run_program(program_from_checkpoint(open_checkpoint(path), torch.float32), ids)
                       for path in (folder, file))
    # 1 + w went through float32 once more
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6 * float(expected.abs().max()))
    assert len(set(expected.argmax(-1).tolist())) >= 8
