"""Logits of the pure Program against transformers, on tiny random models saved and read as real folders."""

import pytest
import torch

from camshaft.frontend.checkpoint import open_checkpoint
from camshaft.frontend.load import program_from_checkpoint

NUM_TOKENS = 100
SHAPE = {"vocab_size": 199, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
         "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-3,
         "bos_token_id": None, "eos_token_id": None}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 256}

LLAMA_CASES = {
    "grouped": {},
    "multi_query": {"num_key_value_heads": 1},
    "multi_head": {"num_key_value_heads": 6},
    "wide_heads": {"head_dim": 16},
    "tied": {"tie_word_embeddings": True},
    "attention_bias": {"attention_bias": True},
    "mlp_bias": {"mlp_bias": True},
    "rope_linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "rope_llama3": {"rope_parameters": LLAMA3},
    "rope_theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}},
}
MISTRAL_CASES = {
    "no_window": {"sliding_window": None},
    "window_beyond_context": {"sliding_window": 4096},
    "window": {"sliding_window": 17},
}
CASES = [pytest.param("Llama", changes, id=f"llama-{name}") for name, changes in LLAMA_CASES.items()] + \
        [pytest.param("Mistral", changes, id=f"mistral-{name}") for name, changes in MISTRAL_CASES.items()]


def make_reference(kind, changes, dtype, folder):
    """A random transformers model of ``dtype``, saved into ``folder``.

    Matrices keep the scale of activations. Every token strongly suggests one other token, as in a trained model:
    without that the best two logits are often nearer than bfloat16 can tell apart, in transformers as in ours.
    """
    import transformers

    config = getattr(transformers, f"{kind}Config")(**{**SHAPE, **changes})
    generator = torch.Generator().manual_seed(len(repr(changes)))
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    table, head = model.model.embed_tokens.weight, model.lm_head.weight
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            std = 0.1 if parameter.ndim == 1 else parameter.shape[1] ** -0.5
            parameter.normal_(1.0 if "norm" in name else 0.0, std, generator=generator)
        table.normal_(0.0, 1.5, generator=generator)
        if head is not table:
            head += table[torch.randperm(len(table), generator=generator)]
    model = model.to(dtype)
    model.save_pretrained(folder)
    return model


def relative_error(logits, expected):
    return float((logits.float() - expected.float()).abs().max() / expected.float().abs().max())


def compare(kind, changes, dtype, folder, run_program):
    """(our logits, those of transformers, those of transformers in float32 with the same weights)."""
    model = make_reference(kind, changes, dtype, folder)
    program = program_from_checkpoint(open_checkpoint(folder), dtype)
    ids = torch.randint(0, SHAPE["vocab_size"], (NUM_TOKENS,), generator=torch.Generator().manual_seed(1))
    ours = run_program(program, ids)
    with torch.inference_mode():
        theirs = model(ids[None]).logits[0]
        exact = model.float()(ids[None]).logits[0]
    assert ours.dtype == dtype
    assert ours.shape == theirs.shape == (NUM_TOKENS, SHAPE["vocab_size"])
    return ours, theirs, exact


@pytest.mark.parametrize(("kind", "changes"), CASES)
def test_float32_logits_equal_transformers(kind, changes, tmp_path, run_program):
    ours, theirs, _ = compare(kind, changes, torch.float32, tmp_path, run_program)
    assert relative_error(ours, theirs) <= 1e-4
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


@pytest.mark.parametrize(("kind", "changes"), [CASES[0], CASES[4], CASES[8], CASES[-1]])
def test_bfloat16_logits_are_as_near_as_those_of_transformers(kind, changes, tmp_path, run_program):
    ours, theirs, exact = compare(kind, changes, torch.bfloat16, tmp_path, run_program)
    assert relative_error(ours, theirs) <= 2e-2
    assert float((ours.argmax(-1) == theirs.argmax(-1)).float().mean()) >= 0.99
    assert relative_error(ours, exact) <= 1.5 * relative_error(theirs, exact)
    assert len(set(exact.argmax(-1).tolist())) >= 8


def test_a_token_sees_neither_later_tokens_nor_its_own_row_number(tmp_path, run_program):
    make_reference("Llama", {}, torch.float32, tmp_path)
    program = program_from_checkpoint(open_checkpoint(tmp_path), torch.float32)
    ids = torch.randint(0, SHAPE["vocab_size"], (20,), generator=torch.Generator().manual_seed(2))
    full = run_program(program, ids)
    torch.testing.assert_close(run_program(program, ids[:1]), full[:1])
    torch.testing.assert_close(run_program(program, ids[:13]), full[:13])
    torch.testing.assert_close(run_program(program, ids, rows=torch.tensor([19, 0, 7])), full[[19, 0, 7]])
