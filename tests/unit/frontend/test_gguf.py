"""GGUF files as checkpoints: header, names, rotary layout, and every way a file can be broken."""

import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from camshaft.config.model import RopeConfig
from camshaft.core.errors import CheckpointError
from camshaft.frontend.gguf import GgufCheckpoint
from camshaft.frontend.gguf_names import generation_defaults
from camshaft.frontend.gguf_rope import llama3_factors
from tests.unit.frontend.gguf_files import Types, gguf, interleaved

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 2, 64, 96, 4, 2, 16, 40


def tiny_tensors(seed=0, tied=False):
    """Hugging Face name → values of a tiny Llama."""
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return rng.standard_normal(shape, dtype=np.float32)

    tensors = {"model.embed_tokens.weight": draw(VOCAB, HIDDEN), "model.norm.weight": draw(HIDDEN)}
    if not tied:
        tensors["lm_head.weight"] = draw(VOCAB, HIDDEN)
    for layer in range(LAYERS):
        shapes = {"input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,),
                  "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN), "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
                  "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN), "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
                  "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER)}
        tensors |= {f"model.layers.{layer}.{name}.weight": draw(*shape) for name, shape in shapes.items()}
    return tensors


GGUF_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
              "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
              "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
              "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}


def gguf_name(name):
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        return f"blk.{layer}.{GGUF_NAMES[rest]}.{kind}"
    return f"{GGUF_NAMES[stem]}.{kind}"


def write_gguf(path, *, tensors=None, matrix_type=Types.F32, architecture="llama", extra=(), extra_tensors=()):
    """A tiny Llama as llama.cpp's converter would write it. ``extra`` are (method, key, value) of GGUFWriter."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    for method, key, value in extra:
        getattr(writer, method)(key, value)
    for name, values in (tiny_tensors() if tensors is None else tensors).items():
        heads = {"self_attn.q_proj": HEADS, "self_attn.k_proj": KV_HEADS}.get(".".join(name.split(".")[3:5]))
        values = interleaved(values, heads) if heads else values
        kind = matrix_type if values.ndim == 2 else Types.F32
        if kind == Types.F32:
            writer.add_tensor(gguf_name(name), values)
        elif kind == Types.F16:
            writer.add_tensor(gguf_name(name), values.astype(np.float16))
        else:
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(values, kind), raw_dtype=kind)
    for name, values in extra_tensors:
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_config_names_and_values(tmp_path):
    tensors = tiny_tensors()
    checkpoint = GgufCheckpoint(write_gguf(tmp_path / "m.gguf", tensors=tensors))
    config = checkpoint.config
    assert (config.architecture, config.vocab_size, config.hidden_size) == ("LlamaForCausalLM", VOCAB, HIDDEN)
    assert (config.intermediate_size, config.num_layers, config.num_heads) == (INNER, LAYERS, HEADS)
    assert (config.num_kv_heads, config.head_dim, config.max_position) == (KV_HEADS, HEAD_DIM, 512)
    assert (config.norm_eps, config.rope, config.tie_word_embeddings) == (1e-5, RopeConfig(theta=10000.0), False)
    assert config.checkpoint_dtype == "float32"
    assert checkpoint.files == (tmp_path / "m.gguf",)
    assert checkpoint.tensors.keys() == tensors.keys()
    for name, values in tensors.items():
        weight = checkpoint.tensors[name]
        assert (weight.shape, weight.dtype) == (values.shape, torch.float32)
        np.testing.assert_array_equal(weight.read().numpy(), values)


def test_spans_point_at_the_very_bytes(tmp_path):
    tensors = tiny_tensors()
    path = write_gguf(tmp_path / "m.gguf", tensors=tensors)
    checkpoint = GgufCheckpoint(path)
    span = checkpoint.tensors["model.layers.1.mlp.down_proj.weight"].span
    assert path.read_bytes()[span.offset:span.offset + span.num_bytes] == \
        tensors["model.layers.1.mlp.down_proj.weight"].tobytes()
    assert checkpoint.tensors["model.layers.1.self_attn.q_proj.weight"].span is None


@pytest.mark.parametrize("kind", [Types.F16, Types.BF16, Types.Q8_0, Types.Q4_0, Types.Q4_1, Types.Q5_0],
                         ids=lambda kind: kind.name)
def test_storage_types_read_as_the_reference_dequantises(tmp_path, kind):
    tensors = tiny_tensors(seed=3)
    checkpoint = GgufCheckpoint(write_gguf(tmp_path / "m.gguf", tensors=tensors, matrix_type=kind))
    plain = {Types.F16: torch.float16, Types.BF16: torch.bfloat16}.get(kind)
    assert checkpoint.config.checkpoint_dtype == str(plain or torch.float32).removeprefix("torch.")
    for name, values in tensors.items():
        found = checkpoint.tensors[name].read()
        if values.ndim == 1:
            np.testing.assert_array_equal(found.numpy(), values)
            continue
        assert found.dtype == (plain or torch.float32)
        expected = gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)
        np.testing.assert_array_equal(found.float().numpy(), expected)


def test_rotary_biases_are_reordered_too(tmp_path):
    bias = np.arange(HEADS * HEAD_DIM, dtype=np.float32)
    path = write_gguf(tmp_path / "m.gguf", extra_tensors=[("blk.0.attn_q.bias", interleaved(bias, HEADS))])
    checkpoint = GgufCheckpoint(path)
    assert checkpoint.config.qkv_bias
    np.testing.assert_array_equal(checkpoint.tensors["model.layers.0.self_attn.q_proj.bias"].read().numpy(), bias)


def test_without_an_output_tensor_the_embedding_is_tied(tmp_path):
    checkpoint = GgufCheckpoint(write_gguf(tmp_path / "m.gguf", tensors=tiny_tensors(tied=True)))
    assert checkpoint.config.tie_word_embeddings
    assert "lm_head.weight" not in checkpoint.tensors


def llama3_reference(theta, head_dim, factor, original):
    """Llama 3.1's rule, frequency by frequency, as its model card gives it."""
    divisors = []
    for index in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (index / head_dim)
        if wavelength < original / 4:
            divisors.append(1.0)
        elif wavelength > original:
            divisors.append(factor)
        else:
            smooth = (original / wavelength - 1) / 3
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, dtype=np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_rope_freqs_of_llama3_become_its_scaling(tmp_path, factor):
    freqs = llama3_reference(10000.0, HEAD_DIM, factor, 8192)
    checkpoint = GgufCheckpoint(write_gguf(tmp_path / "m.gguf", extra_tensors=[("rope_freqs.weight", freqs)]))
    rope = checkpoint.config.rope
    assert (rope.kind, rope.factor, rope.low_freq_factor, rope.high_freq_factor) == ("llama3", factor, 1.0, 4.0)
    assert rope.original_max_position == 8192
    assert not any("rope" in name for name in checkpoint.tensors)
    np.testing.assert_allclose(llama3_factors(rope, HEAD_DIM).numpy(), freqs, rtol=1e-6)


def test_rope_freqs_that_follow_no_known_rule_are_refused(tmp_path):
    freqs = np.linspace(1, 8, HEAD_DIM // 2, dtype=np.float32)
    path = write_gguf(tmp_path / "m.gguf", extra_tensors=[("rope_freqs.weight", freqs)])
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight.*Llama 3\.1"):
        GgufCheckpoint(path)


def test_rope_freqs_of_ones_change_nothing(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", extra_tensors=[("rope_freqs.weight", np.ones(HEAD_DIM // 2, np.float32))])
    assert GgufCheckpoint(path).config.rope.kind == "default"


def test_linear_scaling(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", extra=[("add_string", "llama.rope.scaling.type", "linear"),
                                                  ("add_float32", "llama.rope.scaling.factor", 4.0)])
    assert GgufCheckpoint(path).config.rope == RopeConfig(theta=10000.0, kind="linear", factor=4.0)


REFUSED = {
    "longrope": (dict(extra=[("add_string", "llama.rope.scaling.type", "longrope")]),
                 r"llama\.rope\.scaling\.type='longrope'.*one of linear, none, yarn"),
    "architecture": (dict(architecture="gemma2"), r"general\.architecture='gemma2'.*gemma3, llama, qwen2, qwen3"),
    "experts": (dict(extra=[("add_uint32", "llama.expert_count", 8)]), r"expert_count=8.*experts"),
    "split": (dict(extra=[("add_uint16", "split.count", 3)]), r"split\.count=3.*one part.*merge"),
    "partial rotation": (dict(extra=[("add_uint32", "llama.rope.dimension_count", 8)]), "dimension_count=8"),
    "wrong kind": (dict(extra=[("add_string", "llama.attention.key_length", "x")]), "key_length='x'"),
    "layer too many": (dict(extra_tensors=[("blk.2.attn_norm.weight", np.ones(HIDDEN, np.float32))]),
                       r"blk\.2\.attn_norm\.weight.*2 layers"),
    "unknown tensor": (dict(extra_tensors=[("blk.0.ffn_gate_inp.weight", np.ones((8, HIDDEN), np.float32))]),
                       r"ffn_gate_inp"),
}


@pytest.mark.parametrize("case", sorted(REFUSED))
def test_what_is_not_supported_is_refused_by_name(tmp_path, case):
    options, message = REFUSED[case]
    with pytest.raises(CheckpointError, match=message):
        GgufCheckpoint(write_gguf(tmp_path / "m.gguf", **options))


def test_an_unsupported_quantisation_is_refused_by_name(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", matrix_type=Types.Q8_0)
    data = bytearray(path.read_bytes())
    at = data.index(b"blk.0.ffn_up.weight") + len("blk.0.ffn_up.weight") + 4 + 16
    assert data[at:at + 4] == struct.pack("<I", Types.Q8_0)
    data[at:at + 4] = struct.pack("<I", Types.IQ4_XS)
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"tensor type='IQ4_XS'.*blk\.0\.ffn_up\.weight"):
        GgufCheckpoint(path)


def test_missing_embedding(tmp_path):
    tensors = tiny_tensors()
    del tensors["model.embed_tokens.weight"]
    with pytest.raises(CheckpointError, match=r"token_embd\.weight.*present"):
        GgufCheckpoint(write_gguf(tmp_path / "m.gguf", tensors=tensors))


@pytest.mark.parametrize(("data", "message"), [
    (b"", "an empty file"),
    (b"PK\x03\x04" + bytes(60), "no GGUF magic"),
    (b"GGUF" + struct.pack("<I", 1) + bytes(60), "this is version 1"),
    (b"GGUF" + struct.pack(">I", 3) + bytes(60), "big-endian"),
    (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "1152921504606846976 tensors, more than the file can hold"),
    (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), "metadata entries, more than the file can hold"),
    (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 62) + bytes(20), "the file ends"),
    (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 8, 1 << 61) + bytes(20), "strings, more than"),
    (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 4, 1 << 61) + bytes(20), "array items, more than"),
    (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 77) + bytes(20), "unknown value type 77 in metadata 'k'"),
    (b"GGUF" + struct.pack("<IQQQ1sIQ", 3, 0, 1, 1, b"k", 8, 2) + b"\xff\xfe" + bytes(20), "not UTF-8"),
])
def test_broken_headers_say_what_and_where(tmp_path, data, message):
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=message) as caught:
        GgufCheckpoint(path)
    assert str(path) in str(caught.value)


TOKENIZER = [("add_string", "tokenizer.ggml.model", "gpt2"), ("add_string", "tokenizer.ggml.pre", "gpt-2"),
             ("add_array", "tokenizer.ggml.tokens", ["a", "b", "ab", "<|im_end|>"]),
             ("add_array", "tokenizer.ggml.token_type", [1, 1, 1, 3]),
             ("add_array", "tokenizer.ggml.merges", ["a b"]), ("add_uint32", "tokenizer.ggml.eos_token_id", 2)]


@pytest.fixture(scope="module")
def whole_file(tmp_path_factory):
    path = write_gguf(tmp_path_factory.mktemp("gguf") / "whole.gguf", extra=TOKENIZER)
    checkpoint = GgufCheckpoint(path)
    header_bytes = min(path.stat().st_size, path.read_bytes().index(b"output_norm.weight") + 4000)
    assert checkpoint.generation.eos_token_ids == (2, 3)
    assert checkpoint.tokenizer_files()
    return path.read_bytes(), header_bytes


def open_and_read_all(path):
    """Everything a caller may do; a broken file must not get past a CheckpointError."""
    checkpoint = GgufCheckpoint(path)
    for weight in checkpoint.tensors.values():
        assert weight.read().shape == weight.shape
    checkpoint.tokenizer_files()


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_truncated_files_are_refused(whole_file, tmp_path, data):
    whole, _ = whole_file
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[:data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(CheckpointError):
        open_and_read_all(path)


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
        open_and_read_all(path)
    except CheckpointError as error:
        assert str(error)  # noqa: PT017 - either outcome is right; any other exception is the failure


def test_ends_of_a_turn_are_found_by_name_among_control_tokens():
    values = {"tokenizer.ggml.tokens": ["<|eot_id|>", "<|im_end|>", "x"], "tokenizer.ggml.eos_token_id": 2,
              "tokenizer.ggml.token_type": np.array([3, 1, 1]), "tokenizer.ggml.bos_token_id": 99,
              "general.sampling.temp": 0.6, "general.sampling.top_k": 20}
    found = generation_defaults(values)
    assert found.eos_token_ids == (2, 0)
    assert found.bos_token_id is None
    assert (found.temperature, found.top_k, found.top_p) == (0.6, 20, None)


def test_the_real_default_model(smollm2_gguf):
    checkpoint = GgufCheckpoint(smollm2_gguf)
    config = checkpoint.config
    assert (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads) == (30, 576, 9, 3)
    assert (config.rope.theta, config.tie_word_embeddings, len(checkpoint.tensors)) == (100000.0, True, 272)
    assert checkpoint.generation.eos_token_ids == (2,)
    reference = {tensor.name: tensor for tensor in gguf.GGUFReader(smollm2_gguf).tensors}["blk.7.attn_k.weight"]
    values = gguf.quants.dequantize(reference.data, reference.tensor_type)
    found = checkpoint.tensors["model.layers.7.self_attn.k_proj.weight"].read().numpy()
    np.testing.assert_array_equal(interleaved(found, 3), values)
