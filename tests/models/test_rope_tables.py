"""Rotary tables against transformers' own module: every kind, both spellings, at 0, L - 1, L and 4L."""

import dataclasses

import pytest
import torch

from camshaft.builder.build import build
from camshaft.config.build import DEFAULT_MAX_SEQ_LEN, BuildConfig, resolve_build
from camshaft.config.model import RopeConfig
from camshaft.core.errors import InternalError, UserError
from camshaft.kernels.rope.ref import rope_cos_sin
from camshaft.layers.rope import ROPE_KINDS, attention_factor, inverse_frequencies
from camshaft.models.registry import family_of
from camshaft.models.rope_fields import ROPE_READERS
from camshaft.testing.tiny import tiny_config, write_tiny

L = 256
HEAD_DIM = 16
SHORT = [1.0, 1.1, 1.25, 1.5, 2.0, 2.5, 3.0, 3.5]
LONG = [1.0, 1.5, 2.5, 4.0, 8.0, 16.0, 24.0, 32.0]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": L}
LONGROPE = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG}

CASES = {
    "default": {},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": YARN,
    "yarn_attention_factor": {**YARN, "attention_factor": 0.75},
    "yarn_betas": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn_mscales": {**YARN, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.8},
    "yarn_one_mscale": {**YARN, "mscale": 0.7},
    "yarn_untruncated": {**YARN, "truncate": False},
    "yarn_no_stretch": {**YARN, "factor": 1.0},
    "yarn_all_pairs_kept": {**YARN, "beta_fast": 0.02, "beta_slow": 0.01},
    "longrope": {**LONGROPE, "factor": 4.0, "original_max_position_embeddings": L},
    "longrope_attention_factor": {**LONGROPE, "factor": 4.0, "attention_factor": 1.5,
                                  "original_max_position_embeddings": L},
    "longrope_factor_from_lengths": {**LONGROPE, "original_max_position_embeddings": L, "max_position": 4 * L},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": L // 2},
}


def spelled(settings, spelling):
    """Keys of config.json: ``rope_type`` or ``type`` in rope_scaling; rope_parameters; the original length beside."""
    settings = dict(settings)
    found = {"head_dim": HEAD_DIM, "max_position_embeddings": settings.pop("max_position", L)}
    if spelling == "rope_parameters":
        settings = {"rope_type": "default", "rope_theta": 5000.0, **settings}
        return {**found, "rope_theta": None, "rope_parameters": settings}
    if "rope_type" not in settings:
        return {**found, "rope_theta": 5000.0, "rope_scaling": None}
    if spelling == "type":
        settings["type"] = settings.pop("rope_type")
    if spelling == "original_beside" and "original_max_position_embeddings" in settings:
        found["original_max_position_embeddings"] = settings.pop("original_max_position_embeddings")
    return {**found, "rope_theta": 5000.0, "rope_scaling": settings}


def read(settings, spelling):
    return family_of("LlamaForCausalLM").config_from_hf(tiny_config(**spelled(settings, spelling)))


def their_table(settings, length):
    """``[length, head_dim]`` cosines then sines of a fresh transformers module that sees one sequence."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    settings = {"rope_type": "default", "rope_theta": 5000.0, **settings}
    longest = settings.pop("max_position", L)
    module = LlamaRotaryEmbedding(LlamaConfig(head_dim=HEAD_DIM, max_position_embeddings=longest,
                                              rope_parameters=settings))
    cos, sin = module(torch.zeros(1, 1, 1), torch.arange(length)[None])
    return torch.cat((cos[0, :, :HEAD_DIM // 2], sin[0, :, :HEAD_DIM // 2]), dim=-1)


def our_table(rope, rows):
    """``[rows, head_dim]`` as a forward pass makes it."""
    return rope_cos_sin(torch.tensor(rows), inverse_frequencies(rope, HEAD_DIM), attention_factor(rope))


@pytest.mark.parametrize("spelling", ["rope_type", "type", "rope_parameters", "original_beside"])
@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
def test_b60_tables_equal_transformers_at_every_length_in_every_spelling(settings, spelling):
    rope = read(settings, spelling).rope
    for length in (1, L, L + 1, 4 * L + 1):
        rows = [row for row in (0, L - 1, L, 4 * L) if row < length]
        ours, theirs = our_table(rope.at_length(length), rows), their_table(settings, length)[rows]
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_every_kind_has_a_case():
    assert {settings.get("rope_type", "default") for settings in CASES.values()} == set(ROPE_KINDS)
    assert ROPE_READERS.names() == tuple(sorted(ROPE_KINDS))


@pytest.mark.parametrize("name", ["dynamic", "longrope", "yarn", "llama3"])
def test_the_stretched_table_differs_from_the_plain_one(name):
    rope = read(CASES[name], "rope_type").rope.at_length(4 * L)
    plain = RopeConfig(theta=rope.theta)
    assert float((our_table(rope, [L]) - our_table(plain, [L])).abs().max()) > 0.1


def resolved_length(settings, asked=None):
    config = read(settings, "rope_type")
    return resolve_build(BuildConfig(max_seq_len=asked), config, device="cpu").max_seq_len


@pytest.mark.parametrize(("settings", "default", "most"), [
    ({}, L, L),
    (CASES["linear"], L, L),
    (CASES["dynamic"], L, 4 * L),
    (CASES["longrope_factor_from_lengths"], L, 4 * L),
    (CASES["longrope"], L, L),
    (CASES["yarn"], 4 * L, 4 * L),
    ({**CASES["yarn"], "max_position": 4 * L}, 4 * L, 4 * L),
    ({**CASES["yarn"], "factor": 1000.0}, DEFAULT_MAX_SEQ_LEN, 1000 * L),
    (CASES["yarn_no_stretch"], L, L),
    (CASES["llama3"], L, L),
])
def test_b60_an_engine_is_as_long_as_its_positions_allow_and_by_default_stretches_none(settings, default, most):
    assert resolved_length(settings) == default
    assert resolved_length(settings, most) == most
    with pytest.raises(UserError, match=f"at most the model's {most} positions"):
        resolved_length(settings, most + 1)


@pytest.mark.parametrize("name", ["dynamic", "longrope", "longrope_factor_from_lengths"])
def test_b60_short_sequences_are_never_stretched_by_a_default_engine(name):
    config = read(CASES[name], "type")
    rope = config.at_length(config.default_sequence).rope
    rows = [0, 1, L - 1]
    torch.testing.assert_close(our_table(rope, rows), their_table(CASES[name], L)[rows], rtol=0, atol=1e-6)
    if name == "dynamic":
        assert torch.equal(our_table(rope, rows), our_table(RopeConfig(theta=5000.0), rows))


def test_only_tables_that_depend_on_the_length_take_one():
    config = read(CASES["yarn"], "rope_type")
    assert config.at_length(100) == config
    local = dataclasses.replace(config, local_rope=read(CASES["dynamic"], "rope_type").rope).at_length(100)
    assert local.rope == config.rope
    assert local.local_rope.longest_sequence == 100


def test_the_wrong_kind_is_our_bug():
    with pytest.raises(InternalError, match="'mrope'"):
        inverse_frequencies(RopeConfig(kind="mrope"), HEAD_DIM)


def test_engines_whose_tables_differ_never_share_cached_keys(tmp_path):
    model = write_tiny(tmp_path, tokenizer=False, rope_scaling={"type": "dynamic", "factor": 4.0},
                       max_position_embeddings=L)
    ids = [build(model, BuildConfig(device="cpu", max_seq_len=length)).manifest.weights_id for length in (L, L + 1)]
    assert ids[0] != ids[1]
