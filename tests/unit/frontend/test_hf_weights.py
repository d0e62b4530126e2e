"""Binding tensors to parameters: exactly once each, and the tied head decided from configuration and tensors."""

import logging

import pytest
import torch

from camshaft.core.errors import CheckpointError
from camshaft.frontend.weights import bind_weights, settle_head
from camshaft.ir.weight import constant
from camshaft.models.registry import family_of
from camshaft.testing.tiny import tiny_config, tiny_tensors

FAMILY = family_of("LlamaForCausalLM")
HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"


def load(*, tied=False, **changes):
    """(config, tensors as weights) of a tiny model; a tied one has no head tensor."""
    data = tiny_config(tie_word_embeddings=tied, **changes)
    tensors = {name: constant(tensor, name) for name, tensor in tiny_tensors(data, seed=0).items()}
    return FAMILY.config_from_hf(data), tensors


def bind(config, tensors):
    return bind_weights(FAMILY, *settle_head(FAMILY, config, tensors))


def test_every_parameter_gets_the_tensor_of_its_name():
    config, tensors = load(attention_bias=True, mlp_bias=True)
    bound = bind(config, tensors)
    assert {weight.origin for weight in bound.values()} == tensors.keys()
    assert bound["model.layers.1.self_attn.k_proj.bias"] is tensors["model.layers.1.self_attn.k_proj.bias"]


def test_missing_tensors_are_named():
    config, tensors = load()
    del tensors["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight.*missing"):
        bind(config, tensors)


def test_leftover_tensors_are_named():
    config, tensors = load()
    tensors["model.layers.0.self_attn.q_norm.weight"] = constant(torch.ones(16), "q_norm")
    with pytest.raises(CheckpointError, match=r"q_norm\.weight"):
        bind(config, tensors)


def test_many_names_are_counted():
    config, tensors = load()
    kept = {name: weight for name, weight in tensors.items() if "layers.1" not in name}
    with pytest.raises(CheckpointError, match="and 6 more"):
        bind(config, kept)


def test_biases_the_configuration_denies_are_leftover():
    config, _ = load()
    _, tensors = load(attention_bias=True)
    with pytest.raises(CheckpointError, match=r"proj\.bias"):
        bind(config, tensors)


def test_tables_of_old_exporters_are_ignored():
    config, tensors = load()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = constant(torch.ones(8), "inv_freq")
    assert len(bind(config, tensors)) == len(tensors) - 1


def test_a_shape_that_differs_names_tensor_and_both_shapes():
    config, tensors = load()
    tensors["model.norm.weight"] = constant(torch.ones(65), "norm")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight=\[65\]: expected shape \[64\]"):
        bind(config, tensors)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_a_tensor_type_that_needs_scales_is_refused(dtype):
    config, tensors = load()
    tensors["model.norm.weight"] = constant(torch.ones(64).to(dtype), "norm")
    with pytest.raises(CheckpointError, match=str(dtype)):
        bind(config, tensors)


def test_b58_tied_without_a_head_tensor_shares_the_embedding(caplog):
    config, tensors = load(tied=True)
    assert HEAD not in bind(config, tensors)
    assert settle_head(FAMILY, config, tensors) == (config, tensors)
    assert not caplog.records


def test_b58_tied_with_an_equal_head_tensor_shares_the_embedding(caplog):
    config, tensors = load(tied=True)
    tensors[HEAD] = constant(tensors[TABLE].read().clone(), HEAD)
    settled, kept = settle_head(FAMILY, config, tensors)
    assert settled.tie_word_embeddings
    assert HEAD not in kept
    assert HEAD not in bind(config, tensors)
    assert not caplog.records


def test_b58_a_tied_head_may_be_stored_in_another_type():
    config, tensors = load(tied=True, torch_dtype="bfloat16")
    tensors[HEAD] = constant(tensors[TABLE].read().float(), HEAD)
    assert HEAD not in bind(config, tensors)
    tensors[HEAD] = constant(tensors[TABLE].read().to(torch.int8), HEAD)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight.*int8"):
        bind(config, tensors)


def test_b58_tied_with_another_head_tensor_uses_it_and_warns_with_norms(caplog):
    config, tensors = load(tied=True)
    tensors[HEAD] = constant(tensors[TABLE].read() * 2.0, HEAD)
    with caplog.at_level(logging.WARNING, logger="camshaft"):
        settled, kept = settle_head(FAMILY, config, tensors)
    assert not settled.tie_word_embeddings
    assert bind_weights(FAMILY, settled, kept)[HEAD] is tensors[HEAD]
    norm = float(tensors[TABLE].read().norm())
    assert f"{norm:.6g}" in caplog.text
    assert f"{2 * norm:.6g}" in caplog.text


def test_b58_untied_with_a_head_tensor_uses_it():
    config, tensors = load()
    assert bind(config, tensors)[HEAD] is tensors[HEAD]


def test_b58_untied_without_a_head_tensor_is_refused():
    config, tensors = load()
    del tensors[HEAD]
    with pytest.raises(CheckpointError, match=r"lm_head\.weight.*tie_word_embeddings"):
        bind(config, tensors)


def test_b58_a_head_is_never_dropped_unseen():
    config, tensors = load(tied=True)
    tensors[HEAD] = tensors[TABLE]
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        bind_weights(FAMILY, config, tensors)
