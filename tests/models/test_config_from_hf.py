"""Reading config.json: every spelling of the rotary settings, defaults, and what is refused by name."""

import dataclasses
import json

import pytest

from camshaft.config.model import ModelConfig, RopeConfig
from camshaft.core.errors import CheckpointError
from camshaft.models.registry import family_of
from camshaft.testing.tiny import tiny_config

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
LLAMA3_ROPE = RopeConfig(theta=500000.0, kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                         original_max_position=8192)
YARN = RopeConfig(theta=10000.0, kind="yarn", factor=4.0, original_max_position=64)
LONGROPE = {"type": "longrope", "factor": 2.0, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


def read(**changes):
    data = tiny_config(**changes)
    return family_of(data["architectures"][0]).config_from_hf(data)


@pytest.mark.parametrize(("changes", "expected"), [
    ({}, RopeConfig(theta=10000.0)),
    ({"rope_scaling": None, "rope_theta": 7}, RopeConfig(theta=7.0)),
    ({"rope_theta": None}, RopeConfig(theta=10000.0)),
    ({"rope_scaling": {"type": "linear", "factor": 2}}, RopeConfig(theta=10000.0, kind="linear", factor=2.0)),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, RopeConfig(theta=10000.0, kind="linear", factor=2.0)),
    ({"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}}, LLAMA3_ROPE),
    ({"rope_theta": 500000.0, "rope_scaling": {"type": "llama3", **LLAMA3}}, LLAMA3_ROPE),
    ({"rope_theta": None, "rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3}}, LLAMA3_ROPE),
    ({"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}, RopeConfig(theta=5.0)),
    ({"rope_parameters": {"full_attention": {"rope_theta": 5.0}, "sliding_attention": {"rope_theta": 5.0}}},
     RopeConfig(theta=5.0)),
    ({"rope_scaling": {"type": "dynamic", "factor": 2}},
     RopeConfig(theta=10000.0, kind="dynamic", factor=2.0, original_max_position=512)),
    ({"rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 64, "beta_fast": None}}, YARN),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 64}, YARN),
    ({"rope_scaling": {"rope_type": "yarn"}, "original_max_position_embeddings": 128}, dataclasses.replace(
        YARN, original_max_position=128)),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8},
      "original_max_position_embeddings": 64}, YARN),
])
def test_rope_in_every_spelling(changes, expected):
    assert read(**changes).rope == expected


@pytest.mark.parametrize(("changes", "named"), [
    ({"rope_scaling": {"rope_type": "mrope", "factor": 4.0}}, "mrope"),
    ({"rope_scaling": {"rope_type": ["yarn"]}}, "yarn"),
    ({"rope_scaling": "linear"}, "rope_scaling"),
    ({"rope_parameters": {"full_attention": 3}}, "rope_parameters"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 5.0}, "sliding_attention": {}}}, "rope_parameters"),
    ({"rope_scaling": {"type": "linear", "factor": 1e300}}, "factor"),
    ({"rope_scaling": {"type": "dynamic"}}, "factor"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}, "head_dim": 2}, "head_dim"),
    ({"rope_scaling": {"type": "yarn", "factor": 2.0}, "rope_theta": 1.0}, "rope_theta"),
    ({"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": 1}}, "truncate"),
    ({"rope_scaling": {"type": "yarn", "factor": 2.0, "attention_factor": -1.0}}, "attention_factor"),
    ({"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_slow": "1"}}, "beta_slow"),
    ({"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0}}, "original_max"),
    ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "short_factor"),
    ({"rope_scaling": {**LONGROPE, "short_factor": [1.0] * 7}}, "short_factor='7 values'"),
    ({"rope_scaling": {**LONGROPE, "long_factor": [1.0] * 7 + [0.0]}}, "long_factor"),
    ({"rope_scaling": {**LONGROPE, "long_factor": [1.0] * 7 + ["2"]}}, "long_factor"),
    ({"rope_scaling": {**LONGROPE, "original_max_position_embeddings": 1}}, "original_max"),
    ({"layer_types": "full_attention"}, "layer_types"),
    ({"layer_types": ["full_attention"]}, "layer_types"),
    ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types"),
    ({"layer_types": ["full_attention", ["sliding_attention"]]}, "layer_types"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window"),
    ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 0}, "sliding_window"),
    ({"num_hidden_layers": 4097}, "num_hidden_layers"),
    ({"rope_scaling": {"type": "linear"}}, "factor"),
    ({"rope_scaling": {"type": "llama3", **LLAMA3, "low_freq_factor": 4.0}}, "low_freq_factor"),
    ({"rope_scaling": {"type": "llama3", **LLAMA3, "original_max_position_embeddings": None}}, "original_max"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"hidden_act": "gelu"}, "gelu"),
    ({"num_key_value_heads": 3}, "num_key_value_heads"),
    ({"head_dim": 15}, "head_dim"),
    ({"hidden_size": "64"}, "hidden_size"),
    ({"vocab_size": True}, "vocab_size"),
    ({"num_hidden_layers": 0}, "num_hidden_layers"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    ({"attention_bias": "no"}, "attention_bias"),
])
def test_what_the_definition_does_not_compute_is_refused_by_name(changes, named):
    with pytest.raises(CheckpointError, match=named):
        read(**changes)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize("changes", [
    {"rope_theta": 1e-320}, {"rope_scaling": {"type": "linear", "factor": 1e-300}},
    {"rope_scaling": {"type": "llama3", **LLAMA3, "factor": 1e-300}},
    {"rope_scaling": {"type": "llama3", **LLAMA3, "high_freq_factor": 1e308, "low_freq_factor": 1e300}},
    {"rope_scaling": {**YARN, "beta_fast": 1e308}}, {"rope_scaling": {**YARN, "beta_slow": 1e-320}},
    {"rope_scaling": {**YARN, "mscale": 1e308, "mscale_all_dim": 1e-308}},
    {"rope_scaling": {**YARN, "attention_factor": 1e300}}, {"rope_scaling": {**YARN, "factor": 1e-300}}])
def test_rotary_settings_whose_table_is_not_finite_are_refused_and_never_built(changes):
    with pytest.raises(CheckpointError, match="rope"):
        read(**changes)


def test_an_unknown_architecture_names_the_known_ones():
    with pytest.raises(CheckpointError, match=r"MambaForCausalLM.*LlamaForCausalLM"):
        family_of("MambaForCausalLM")


def test_missing_fields_take_the_values_transformers_gives_them():
    config = read(num_key_value_heads=None, head_dim=None, attention_bias=None, tie_word_embeddings=None)
    assert (config.num_kv_heads, config.head_dim) == (4, 16)
    assert not config.qkv_bias
    assert not config.tie_word_embeddings


@pytest.mark.parametrize(("changes", "window"), [
    ({"sliding_window": None, "max_position_embeddings": 32768}, None),
    ({"sliding_window": 4096, "max_position_embeddings": 32768}, 4096),
    ({"max_position_embeddings": 32768}, 4096),
    ({"sliding_window": 4096, "max_position_embeddings": 4096}, None),
])
def test_a_mistral_window_counts_only_where_it_hides_something(changes, window):
    assert read(architectures=["MistralForCausalLM"], **changes).window(0) == window


def test_llama_has_no_window():
    assert read(sliding_window=16).window(0) is None


@pytest.mark.parametrize(("family", "changes", "named"), [
    ("qwen2", {"hidden_act": "gelu"}, "hidden_act"),
    ("qwen2", {"use_sliding_window": "yes"}, "use_sliding_window"),
    ("qwen2", {"max_window_layers": -1}, "max_window_layers"),
    ("qwen2", {"use_sliding_window": True, "sliding_window": True, "max_window_layers": 0}, "sliding_window"),
    ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window"),
    ("qwen2", {"num_hidden_layers": 10**6}, "num_hidden_layers"),
    ("qwen3", {"num_hidden_layers": 10**6}, "num_hidden_layers"),
    ("qwen3", {"head_dim": 15}, "head_dim"),
    ("qwen3", {"attention_bias": 1}, "attention_bias"),
    ("gemma3", {"num_hidden_layers": 10**6, "layer_types": None}, "num_hidden_layers"),
    ("gemma3", {"hidden_activation": "gelu"}, "hidden_activation"),
    ("gemma3", {"hidden_act": "silu"}, "hidden_act"),
    ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("gemma3", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
    ("gemma3", {"final_logit_softcapping": -30.0}, "final_logit_softcapping"),
    ("gemma3", {"attn_logit_softcapping": "50"}, "attn_logit_softcapping"),
    ("gemma3", {"sliding_window_pattern": 0, "layer_types": None}, "sliding_window_pattern"),
    ("gemma3", {"sliding_window": None}, "sliding_window"),
    ("gemma3", {"rope_local_base_freq": 0}, "rope_local_base_freq"),
    ("gemma3", {"rope_parameters": {"sliding_attention": []}}, "rope_parameters"),
    ("gemma3", {"rope_parameters": 7}, "rope_parameters"),
    ("gemma3", {"architectures": ["Gemma3ForConditionalGeneration"]}, "text_config"),
])
def test_a_family_refuses_by_name_what_it_does_not_compute(family, changes, named):
    with pytest.raises(CheckpointError, match=named):
        read(family=family, **changes)


FULL, LOCAL = RopeConfig(theta=1e6), RopeConfig(theta=1e4)


@pytest.mark.parametrize(("changes", "rope", "local"), [
    ({}, FULL, LOCAL),
    ({"rope_theta": None, "rope_local_base_freq": None}, FULL, LOCAL),
    ({"rope_theta": 7.0, "rope_local_base_freq": 5.0}, RopeConfig(theta=7.0), RopeConfig(theta=5.0)),
    ({"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, RopeConfig(theta=1e6, kind="linear", factor=8.0), LOCAL),
    ({"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 3.0},
                          "sliding_attention": {"rope_type": "default", "rope_theta": 2.0}}},
     RopeConfig(theta=3.0, kind="linear", factor=8.0), RopeConfig(theta=2.0)),
    ({"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 3.0}, "sliding_attention": None}},
     RopeConfig(theta=3.0), LOCAL),
])
def test_gemma_rotates_by_the_type_of_layer(changes, rope, local):
    config = read(family="gemma3", **changes)
    assert (config.rope, config.local_rope) == (rope, local)


def test_a_multimodal_gemma_is_read_from_its_text_part():
    text = tiny_config("gemma3", architectures=None)
    tied = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    config = family_of("Gemma3ForConditionalGeneration").config_from_hf(tied)
    assert config == dataclasses.replace(read(family="gemma3"), architecture="Gemma3ForConditionalGeneration")
    untied = family_of("Gemma3ForConditionalGeneration").config_from_hf({**tied, "tie_word_embeddings": False})
    assert not untied.tie_word_embeddings


def test_a_configuration_survives_its_way_through_an_engine():
    for family in ("llama", "qwen2", "qwen3", "gemma3"):
        config = read(family=family, rope_scaling={**LONGROPE, "original_max_position_embeddings": 64}).at_length(99)
        assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
