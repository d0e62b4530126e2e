"""Every architecture of GGUF files reads as the Hugging Face folder it was converted from, or is refused by name."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from camshaft.config.model import RopeConfig
from camshaft.core.errors import CheckpointError
from camshaft.frontend.gguf import GgufCheckpoint
from camshaft.frontend.gguf_architectures import ARCHITECTURES, Gemma3, Sizes
from camshaft.frontend.gguf_metadata import Metadata
from camshaft.models.registry import family_of
from tests.unit.frontend.gguf_files import CONFIGS, YARN, Types, random_tensors, write_gguf

LINEAR = {"rope_type": "linear", "factor": 8.0}
CASES = {
    "llama": ("llama", {}),
    "llama_yarn": ("llama", {"rope_scaling": YARN}),
    "qwen2": ("qwen2", {}),
    "qwen2_yarn": ("qwen2", {"rope_scaling": YARN}),
    "qwen3": ("qwen3", {}),
    "qwen3_bias": ("qwen3", {"attention_bias": True}),
    "gemma3": ("gemma3", {}),
    "gemma3_linear": ("gemma3", {"rope_scaling": LINEAR, "final_logit_softcapping": 30.0}),
}


@pytest.mark.parametrize("case", sorted(CASES))
def test_configuration_and_tensors_are_those_of_the_folder(tmp_path, case):
    architecture, changes = CASES[case]
    config = {**CONFIGS[architecture], **changes}
    tensors = random_tensors(config)
    checkpoint = GgufCheckpoint(write_gguf(tmp_path / "m.gguf", architecture, config, tensors))
    expected = family_of(config["architectures"][0]).config_from_hf(config)
    if architecture == "gemma3":  # both say 1 / sqrt(head size)
        assert expected.attention_scale == expected.head_dim ** -0.5
        expected = dataclasses.replace(expected, attention_scale=None)
    assert checkpoint.config == expected
    assert checkpoint.tensors.keys() == tensors.keys()
    for name, values in tensors.items():
        found = checkpoint.tensors[name]
        assert (found.shape, found.dtype) == (tuple(values.shape), torch.float32)
        # 1 + w in float32, and back
        torch.testing.assert_close(found.read(), values, rtol=0, atol=1.2e-7 if architecture == "gemma3" else 0)


def test_every_architecture_has_a_case():
    assert {architecture for architecture, _ in CASES.values()} == set(ARCHITECTURES.names()) == set(CONFIGS)


@pytest.mark.parametrize("architecture", sorted(CONFIGS))
def test_quantised_matrices_keep_their_place(tmp_path, architecture):
    config = {**CONFIGS[architecture], "intermediate_size": 256, "hidden_size": 256}
    tensors = random_tensors(config)
    checkpoint = GgufCheckpoint(write_gguf(tmp_path / "m.gguf", architecture, config, tensors, matrix_type=Types.Q8_0))
    for name, values in tensors.items():
        found = checkpoint.tensors[name].read()
        assert float((found - values).abs().max()) <= float(values.abs().max()) / 127 + 1e-6, name


def test_norms_that_hold_one_plus_point_at_no_bytes(tmp_path):
    config = CONFIGS["gemma3"]
    path = write_gguf(tmp_path / "m.gguf", "gemma3", config, random_tensors(config))
    tensors = GgufCheckpoint(path).tensors
    assert tensors["model.layers.0.self_attn.q_norm.weight"].span is None
    assert tensors["model.norm.weight"].span is None
    assert tensors["model.layers.0.self_attn.q_proj.weight"].span is not None


def gemma(num_layers=8, **values):
    """The attention fields of a Gemma 3 file with the given metadata (names without the prefix, _ for .)."""
    sizes = Sizes(num_layers=num_layers, hidden_size=5376, num_heads=32, max_position=32768)
    metadata = {f"gemma3.{key.replace('__', '.')}": value for key, value in values.items()}
    return Gemma3().attention(Metadata("m.gguf", metadata).under("gemma3"), sizes)


def test_every_sixth_layer_sees_everything():
    found = gemma(attention__sliding_window=512)
    assert found.windows == (512, 512, 512, 512, 512, None, 512, 512)
    assert found.local_rope == RopeConfig(theta=10000.0)
    assert (found.attention_scale, found.attention_softcap, found.logits_softcap) == (None, None, None)


@pytest.mark.parametrize(("pattern", "expected"), [
    (2, (9, None, 9, None)), (4, (9, 9, 9, None)), (6, (9, 9, 9, 9)), (1, ()),
    (np.array([False, True, True, False]), (None, 9, 9, None)), (np.array([0, 1, 0, 1]), (None, 9, None, 9)),
    (np.zeros(4, bool), ()),
])
def test_a_pattern_is_a_period_or_a_flag_a_layer(pattern, expected):
    found = gemma(num_layers=4, attention__sliding_window=9, attention__sliding_window_pattern=pattern)
    assert found.windows == expected
    assert (found.local_rope is None) == (expected == ())


def test_without_a_window_no_layer_has_one():
    assert gemma() == gemma(rope__freq_base_swa=5000.0)
    assert gemma().windows == ()


def test_local_base_frequency_and_soft_caps():
    found = gemma(attention__sliding_window=9, rope__freq_base_swa=5000.0, attn_logit_softcapping=50.0,
                  final_logit_softcapping=30.0)
    assert found.local_rope == RopeConfig(theta=5000.0)
    assert (found.attention_softcap, found.logits_softcap) == (50.0, 30.0)


def test_gemma3_27b_scales_by_its_hidden_size_a_head():
    assert gemma(num_layers=62).attention_scale == 168 ** -0.5


def test_a_window_of_the_whole_context_is_none(tmp_path):
    config = CONFIGS["llama"]
    for window, expected in ((0, ()), (511, (511,) * 3), (512, ())):
        path = write_gguf(tmp_path / "m.gguf", "llama", config, random_tensors(config),
                          extra=[("add_uint32", "llama.attention.sliding_window", window)])
        assert GgufCheckpoint(path).config.windows == expected


WINDOW = ("add_uint32", "gemma3.attention.sliding_window", 8)
REFUSED = {
    "window 0": ("gemma3", [("add_uint32", "gemma3.attention.sliding_window", 0)], "sliding_window=0.*from 1"),
    "window of words": ("gemma3", [("add_string", "gemma3.attention.sliding_window", "all")], "sliding_window='all'"),
    "pattern 0": ("gemma3", [WINDOW, ("add_uint32", "gemma3.attention.sliding_window_pattern", 0)],
                  "sliding_window_pattern=0"),
    "pattern of words": ("gemma3", [WINDOW, ("add_string", "gemma3.attention.sliding_window_pattern", "six")],
                         "sliding_window_pattern='six'"),
    "pattern too short": ("gemma3", [WINDOW, ("add_array", "gemma3.attention.sliding_window_pattern", [True, False])],
                          "a flag for each of 7 layers"),
    "pattern of numbers": ("gemma3", [WINDOW, ("add_array", "gemma3.attention.sliding_window_pattern", [5] * 7)],
                           "a flag for each of 7 layers"),
    "soft cap 0": ("gemma3", [("add_float32", "gemma3.final_logit_softcapping", 0.0)], "final_logit_softcapping=0.0"),
    "negative soft cap": ("gemma3", [("add_float32", "gemma3.attn_logit_softcapping", -1.0)],
                          "attn_logit_softcapping=-1.0"),
    "local base infinite": ("gemma3", [WINDOW, ("add_float32", "gemma3.rope.freq_base_swa", float("inf"))],
                            "freq_base_swa=inf"),
    "factor too large": ("qwen2", [("add_float64", "qwen2.rope.scaling.factor", 1e300)], r"scaling\.factor=1e\+300"),
    "soft cap of qwen": ("qwen3", [("add_float32", "qwen3.final_logit_softcapping", 30.0)],
                         "final_logit_softcapping=30.0.*qwen3 definition"),
    "window of qwen": ("qwen2", [("add_uint32", "qwen2.attention.sliding_window", 100)], "sliding_window=100.*absent"),
    "embedding scale": ("llama", [("add_float32", "llama.embedding_scale", 12.0)], "embedding_scale=12.0"),
    "yarn without factor": ("qwen2", [("add_string", "qwen2.rope.scaling.type", "yarn")], "scaling.factor=None"),
    "yarn without original": ("qwen2", [("add_string", "qwen2.rope.scaling.type", "yarn"),
                                        ("add_float32", "qwen2.rope.scaling.factor", 4.0)],
                              "original_context_length=None"),
    "yarn with a factor of attention": (
        "qwen2", [("add_string", "qwen2.rope.scaling.type", "yarn"),
                  ("add_float32", "qwen2.rope.scaling.yarn_attn_factor", 1.0)], "yarn_attn_factor=1.0.*absent"),
    "yarn that shrinks": ("qwen2", [("add_string", "qwen2.rope.scaling.type", "yarn"),
                                    ("add_float32", "qwen2.rope.scaling.factor", 0.5)], "factor=0.5.*1 or more"),
    "yarn upside down": ("qwen2", [("add_string", "qwen2.rope.scaling.type", "yarn"),
                                   ("add_float32", "qwen2.rope.scaling.yarn_beta_slow", 64.0)], "yarn_beta_fast"),
    "yarn by halves": ("qwen2", [("add_string", "qwen2.rope.scaling.type", "yarn"),
                                 ("add_float32", "qwen2.rope.scaling.yarn_ext_factor", 0.5)], "yarn_ext_factor=0.5"),
}


@pytest.mark.parametrize("case", sorted(REFUSED))
def test_what_is_not_usable_is_refused_by_name(tmp_path, case):
    architecture, extra, message = REFUSED[case]
    config = {**CONFIGS[architecture], "sliding_window": None}
    path = write_gguf(tmp_path / "m.gguf", architecture, config, random_tensors(CONFIGS[architecture]), extra=extra)
    with pytest.raises(CheckpointError, match=message):
        GgufCheckpoint(path)


@pytest.mark.parametrize(("architecture", "name"), [
    ("llama", "attn_q_norm"), ("qwen2", "attn_q_norm"), ("qwen3", "post_ffw_norm")])
def test_a_tensor_of_another_architecture_is_refused(tmp_path, architecture, name):
    config = CONFIGS[architecture]
    path = write_gguf(tmp_path / "m.gguf", architecture, config, random_tensors(config),
                      extra_tensors=[(f"blk.0.{name}.weight", np.ones(32, np.float32))])
    with pytest.raises(CheckpointError, match=rf"blk\.0\.{name}.*a tensor of a {architecture} model"):
        GgufCheckpoint(path)


def test_more_layers_than_tensors_are_refused_before_any_is_made(tmp_path):
    config = CONFIGS["gemma3"]
    path = write_gguf(tmp_path / "m.gguf", "gemma3", config, random_tensors(config))
    key = b"gemma3.block_count"
    data = bytearray(path.read_bytes())
    at = data.index(key) + len(key) + 4
    data[at:at + 4] = (1 << 27).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"gemma3\.block_count=134217728.*no more layers than"):
        GgufCheckpoint(path)


@pytest.fixture(scope="module")
def whole_file(tmp_path_factory):
    config = {**CONFIGS["gemma3"], "rope_scaling": LINEAR, "final_logit_softcapping": 30.0}
    extra = [("add_array", "gemma3.attention.sliding_window_pattern", [True] * 6 + [False]),
             ("add_float32", "gemma3.rope.freq_base_swa", 5000.0)]
    path = write_gguf(tmp_path_factory.mktemp("gguf") / "whole.gguf", "gemma3", config, random_tensors(config),
                      extra=extra)
    assert GgufCheckpoint(path).config.windows == (8,) * 6 + (None,)
    data = path.read_bytes()
    return data, data.index(b"token_embd.weight")


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_flipped_bytes_are_read_or_refused_in_words(whole_file, tmp_path, data):
    whole, header_bytes = whole_file
    broken = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 3))):
        broken[data.draw(st.integers(0, header_bytes - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "flipped.gguf"
    path.write_bytes(broken)
    try:
        checkpoint = GgufCheckpoint(path)
    except CheckpointError as error:
        assert str(error)  # noqa: PT017 - either outcome is right; any other exception is the failure
    else:
        assert len(checkpoint.config.windows) in (0, checkpoint.config.num_layers)
