"""Reading config.json: every spelling of the rotary settings, defaults, and what is refused by name."""

import pytest

from camshaft.config.model import RopeConfig
from camshaft.core.errors import CheckpointError
from camshaft.models.registry import family_of
from camshaft.testing.tiny import tiny_config

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
LLAMA3_ROPE = RopeConfig(theta=500000.0, kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                         original_max_position=8192)


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
])
def test_rope_in_every_spelling(changes, expected):
    assert read(**changes).rope == expected


@pytest.mark.parametrize(("changes", "named"), [
    ({"rope_scaling": {"rope_type": "mrope", "factor": 4.0}}, "mrope"),
    ({"rope_scaling": "linear"}, "rope_scaling"),
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
