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

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64, "factor": 8.0,
            "short_factor": [1.0, 1.25, 1.5, 2.0], "long_factor": [1.0, 2.0, 4.0, 8.0]}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 17}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"]}
GEMMA = {"num_hidden_layers": 3, "head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 17,
         "sliding_window_pattern": 2}
GEMMA_ROPE = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 20000.0},
              "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}

CASES_BY_KIND = {
    "Llama": {
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
        "rope_yarn": {"rope_parameters": YARN},
        "rope_dynamic_short": {"rope_parameters": DYNAMIC},
        "rope_dynamic_long": {"rope_parameters": DYNAMIC, "max_position_embeddings": 64},
        "rope_longrope": {"rope_parameters": LONGROPE},
    },
    "Mistral": {
        "no_window": {"sliding_window": None},
        "window_beyond_context": {"sliding_window": 4096},
        "window": {"sliding_window": 17},
    },
    "Qwen2": {
        "full": {},
        "tied": {"tie_word_embeddings": True, "num_key_value_heads": 1},
        "wide_heads": {"head_dim": 16, "num_key_value_heads": 6},
        "window_after_a_layer": {**QWEN_WINDOW, "max_window_layers": 1},
        "window_everywhere": {**QWEN_WINDOW, "max_window_layers": 0},
        "window_by_layer_types": {**QWEN_WINDOW, **ALTERNATING},
        "window_unused": {"sliding_window": 17, "max_window_layers": 0},
        "rope_yarn": {"rope_parameters": YARN},
    },
    "Qwen3": {
        "full": {"head_dim": 16},
        "tied": {"head_dim": 8, "tie_word_embeddings": True},
        "attention_bias": {"head_dim": 16, "attention_bias": True, "num_key_value_heads": 1},
        "window_after_a_layer": {"head_dim": 8, **QWEN_WINDOW, "max_window_layers": 1},
        "window_by_layer_types": {"head_dim": 8, **QWEN_WINDOW, **ALTERNATING},
    },
    "Gemma3": {
        "pattern": GEMMA,
        "layer_types": {**GEMMA, "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
        "all_full": {**GEMMA, "layer_types": ["full_attention"] * 3},
        "all_sliding": {**GEMMA, "layer_types": ["sliding_attention"] * 3},
        "window_beyond_context": {**GEMMA, "sliding_window": 4096, "rope_parameters": GEMMA_ROPE},
        "rope_by_layer_type": {**GEMMA, "rope_parameters": GEMMA_ROPE},
        "untied": {**GEMMA, "tie_word_embeddings": False},
        "attention_bias": {**GEMMA, "attention_bias": True, "num_key_value_heads": 6},
        "logits_softcap": {**GEMMA, "final_logit_softcapping": 4.0},
        "wide_logits_softcap": {**GEMMA, "final_logit_softcapping": 30.0},
        "attention_softcap": {**GEMMA, "attn_logit_softcapping": 0.5},
        "multi_query": {**GEMMA, "num_key_value_heads": 1, "query_pre_attn_scalar": 256},
    },
}
CASES = {f"{kind.lower()}-{name}": (kind, changes)
         for kind, cases in CASES_BY_KIND.items() for name, changes in cases.items()}


def make_reference(kind, changes, dtype, folder):
    """A random transformers model, saved into ``folder`` and opened again in ``dtype`` (``to`` would round tables too).

    Matrices keep the scale of activations. Every token strongly suggests one other token, as in a trained model:
    without that the best two logits are often nearer than bfloat16 can tell apart, in transformers as in ours.
    """
    model = transformers_model(kind, changes)
    generator = torch.Generator().manual_seed(len(repr(changes)))
    table, head = model.model.embed_tokens.weight, model.lm_head.weight
    embed_scale = table.shape[1] ** 0.5 if kind == "Gemma3" else 1.0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            std = 0.1 if parameter.ndim == 1 else parameter.shape[1] ** -0.5
            parameter.normal_(norm_mean(kind, name) if "norm" in name else 0.0, std, generator=generator)
        table.normal_(0.0, 1.5 / embed_scale, generator=generator)
        if head is not table:
            head += embed_scale * table[torch.randperm(len(table), generator=generator)]
    model.to(dtype).save_pretrained(folder)
    attention = model.config._attn_implementation
    return type(model).from_pretrained(folder, dtype=dtype, attn_implementation=attention).eval()


def norm_mean(kind, name):
    """Gemma keeps w of 1 + w; what its blocks add is normalised, and would drown the token at a weight of 1."""
    if kind != "Gemma3":
        return 1.0
    added = name.endswith(("post_attention_layernorm.weight", "post_feedforward_layernorm.weight"))
    return -0.6 if added else 0.0


def transformers_model(kind, changes):
    import transformers

    name = "Gemma3TextConfig" if kind == "Gemma3" else f"{kind}Config"
    config = getattr(transformers, name)(**{**SHAPE, **changes})
    if changes.get("attn_logit_softcapping"):
        config._attn_implementation = "softcapped"
        transformers.AttentionInterface.register("softcapped", softcapped_attention)
        transformers.AttentionMaskInterface.register("softcapped", transformers.masking_utils.eager_mask)
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


def softcapped_attention(module, *args, **kwargs):
    """transformers' own attention with the cap that its Gemma 3 keeps in the configuration and does not hand on."""
    from transformers.models.gemma3.modeling_gemma3 import eager_attention_forward

    return eager_attention_forward(module, *args, softcap=module.attn_logit_softcapping, **kwargs)


def relative_error(logits, expected):
    return float((logits.float() - expected.float()).abs().max() / expected.float().abs().max())


def mean_error(logits, expected):
    """Root mean square: how the last bit of one logit falls counts for nothing, a rounding too many shows."""
    return float((logits.float() - expected.float()).square().mean().sqrt())


def compare(kind, changes, dtype, folder, run_program):
    """(our logits, those of transformers, those of transformers in float32 with the same weights)."""
    model = make_reference(kind, changes, dtype, folder)
    program = program_from_checkpoint(open_checkpoint(folder), dtype, NUM_TOKENS)
    ids = torch.randint(0, SHAPE["vocab_size"], (NUM_TOKENS,), generator=torch.Generator().manual_seed(1))
    ours = run_program(program, ids)
    with torch.inference_mode():
        theirs = model(ids[None]).logits[0]
        exact = model.float()(ids[None]).logits[0]
    assert ours.dtype == dtype
    assert ours.shape == theirs.shape == (NUM_TOKENS, SHAPE["vocab_size"])
    return ours, theirs, exact


@pytest.mark.parametrize(("kind", "changes"), CASES.values(), ids=CASES)
def test_float32_logits_equal_transformers(kind, changes, tmp_path, run_program):
    ours, theirs, _ = compare(kind, changes, torch.float32, tmp_path, run_program)
    assert relative_error(ours, theirs) <= 1e-5
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


@pytest.mark.parametrize(("kind", "changes"), CASES.values(), ids=CASES)
def test_bfloat16_logits_are_as_near_as_those_of_transformers(kind, changes, tmp_path, run_program):
    ours, theirs, exact = compare(kind, changes, torch.bfloat16, tmp_path, run_program)
    assert relative_error(ours, theirs) <= 2e-2
    assert float((ours.argmax(-1) == theirs.argmax(-1)).float().mean()) >= 0.99
    assert relative_error(ours, exact) <= 2e-2
    assert mean_error(ours, exact) <= 1.1 * mean_error(theirs, exact)
    assert len(set(exact.argmax(-1).tolist())) >= 8


def test_a_token_sees_neither_later_tokens_nor_its_own_row_number(tmp_path, run_program):
    make_reference("Llama", {}, torch.float32, tmp_path)
    program = program_from_checkpoint(open_checkpoint(tmp_path), torch.float32)
    ids = torch.randint(0, SHAPE["vocab_size"], (20,), generator=torch.Generator().manual_seed(2))
    full = run_program(program, ids)
    torch.testing.assert_close(run_program(program, ids[:1]), full[:1])
    torch.testing.assert_close(run_program(program, ids[:13]), full[:13])
    torch.testing.assert_close(run_program(program, ids, rows=torch.tensor([19, 0, 7])), full[[19, 0, 7]])
