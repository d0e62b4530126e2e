"""Tiny checkpoints written twice: as a Hugging Face folder, and as the GGUF file llama.cpp's converter makes of it.

Names come from the ``gguf`` package's own table, so that ours are checked against it. Modules that import this one
skip where that package is missing.
"""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from camshaft.models.registry import family_of

gguf = pytest.importorskip("gguf")
Types = gguf.GGMLQuantizationType
SHAPE = {"vocab_size": 40, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512,
         "rms_norm_eps": 1e-5, "rope_theta": 50000.0, "tie_word_embeddings": False}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
CONFIGS = {
    "llama": {**SHAPE, "architectures": ["LlamaForCausalLM"]},
    "qwen2": {**SHAPE, "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True},
    "qwen3": {**SHAPE, "architectures": ["Qwen3ForCausalLM"]},
    "gemma3": {**SHAPE, "architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 7, "num_key_value_heads": 1,
               "tie_word_embeddings": True, "sliding_window": 8, "query_pre_attn_scalar": 32,
               "rope_local_base_freq": 10000.0},
}


def random_tensors(config, seed=0):
    """Hugging Face name → float32 values for ``config`` (of a config.json)."""
    family = family_of(config["architectures"][0])
    shape = family.config_from_hf(config)
    with torch.device("meta"):
        sizes = {name: tuple(value.shape) for name, value in family.module(shape).named_parameters()}
    generator = torch.Generator().manual_seed(seed)
    centre = 0.0 if "Gemma" in config["architectures"][0] else 1.0
    found = {}
    for parameter, name in family.weight_names(shape).items():
        size = sizes[parameter]
        mean, std = (centre, 0.1) if "norm" in name else (0.0, 0.1 if len(size) == 1 else 1.5 * size[1] ** -0.5)
        found[name] = torch.randn(size, generator=generator) * std + mean
    return found


def write_folder(folder, config, tensors):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")
    return folder


def interleaved(weight, num_heads):
    """A rotary weight as llama.cpp stores Llama's: the two elements that rotate together side by side."""
    rows = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return rows.swapaxes(1, 2).reshape(weight.shape)


def _add_shape(writer, config):
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    scaling = config.get("rope_scaling")
    if scaling:
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling["rope_type"]))
        writer.add_rope_scaling_factor(scaling["factor"])
        if "original_max_position_embeddings" in scaling:
            writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])


def _stored(architecture, config, name, values):
    """The values of a tensor as the converter stores them."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
    if architecture == "llama" and heads:
        return interleaved(values, config[heads])
    return values + np.float32(1) if architecture == "gemma3" and "norm" in name else values


def write_gguf(path, architecture, config, tensors, *, matrix_type=Types.F32, extra=(), extra_tensors=()):
    """``extra`` are (method of GGUFWriter, key, value); ``extra_tensors`` (GGUF name, values)."""
    writer = gguf.GGUFWriter(path, architecture)
    _add_shape(writer, config)
    for method, key, value in extra:
        getattr(writer, method)(key, value)
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    for name, tensor in tensors.items():
        values = _stored(architecture, config, name, tensor.numpy())
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if values.ndim == 1 or matrix_type == Types.F32:
            writer.add_tensor(target, values)
        else:
            writer.add_tensor(target, gguf.quants.quantize(values, matrix_type), raw_dtype=matrix_type)
    for name, values in extra_tensors:
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
