"""A prompt that makes the model give NaN fails alone: neighbours and later requests share nothing of it."""

import pytest
from safetensors.torch import load_file, save_file

from camshaft import LLM, SamplingParams
from camshaft.core.errors import NonFiniteLogitsError
from camshaft.testing.tiny import write_tiny_llama

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
POISON = {300: float("nan"), 301: float("inf")}
CLEAN = [[first, *range(20, 60)] for first in range(3, 7)]
BAD = [[*prompt[:33], 300 + index % 2, *prompt[33:]] for index, prompt in enumerate(CLEAN)]


@pytest.fixture(scope="module", params=["native", "none"])
def poisoned(request, tmp_path_factory):
    """Engine folder of a tiny model in which two token ids have broken embeddings, with and without C kernels."""
    from camshaft.builder.build import build
    from camshaft.config.build import BuildConfig

    folder = tmp_path_factory.mktemp("poisoned")
    model = write_tiny_llama(folder / "model", seed=7)
    tensors = load_file(model / "model.safetensors")
    for token, value in POISON.items():
        tensors["model.embed_tokens.weight"][token] = value
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "none":
            patch.setenv("CAMSHAFT_CC", "none")
        build(model, BuildConfig(max_batch_size=8, max_num_tokens=512), output=folder / "engine")
    return folder / "engine"


@pytest.mark.parametrize("overlap_depth", [0, 1])
@pytest.mark.parametrize("chunk", [5, 512])
def test_a_poisoned_prompt_fails_alone(poisoned, chunk, overlap_depth):
    scheduler = {"context_chunk_tokens": chunk, "overlap_depth": overlap_depth}
    with LLM(poisoned, kv_cache={"max_bytes": 2**22, "enable_block_reuse": False}) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(CLEAN, GREEDY)]
    with LLM(poisoned, kv_cache={"max_bytes": 2**22}, scheduler=scheduler) as llm:
        outputs = llm.generate([prompt for pair in zip(BAD, CLEAN, strict=True) for prompt in pair], GREEDY)
        assert all(isinstance(output.error, NonFiniteLogitsError) for output in outputs[::2])
        assert [output.outputs[0].token_ids for output in outputs[1::2]] == expected
        with pytest.raises(NonFiniteLogitsError):
            llm.generate(BAD[0], GREEDY)
        again = llm.generate(CLEAN, GREEDY)
        assert [output.outputs[0].token_ids for output in again] == expected
        assert all(output.num_cached_tokens >= 32 for output in again)
        assert llm.get_stats()["kv"]["num_referenced"] == 0
