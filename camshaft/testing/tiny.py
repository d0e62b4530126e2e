"""Tiny random checkpoints on disk: Hugging Face folders of every family that any test can build, serve or break.

Owns their shape, their seeded weights and their tokenizer. Public: authors of kernels, passes and models test with
the same folders. Needs torch, safetensors and tokenizers; never transformers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

EOS_TOKEN = "<|end|>"
TURN_START, TURN_END = "<|turn|>", "<|over|>"
SPECIAL_TOKENS = (EOS_TOKEN, TURN_START, TURN_END)

CHAT_TEMPLATE = (
    "{% for message in messages %}" + TURN_START + "{{ message['role'] }}\n{{ message['content'] }}" + TURN_END
    + "\n{% endfor %}{% if add_generation_prompt %}" + TURN_START + "assistant\n{% endif %}"
)

_CORPUS = (
    "The camshaft turns once for every two turns of the crankshaft.",
    "A valve opens when its lobe passes, and closes when the spring returns it.",
    "What is the capital of France? The capital of France is Paris.",
    "def add(left, right):\n    return left + right\n",
    "It's the engine's timing that decides how the engine breathes.",
)


_FAMILIES: Mapping[str, Mapping[str, Any]] = MappingProxyType({
    "llama": {"architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "hidden_act": "silu", "use_sliding_window": False},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "hidden_act": "silu", "attention_bias": False},
    "gemma3": {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "num_hidden_layers": 3,
               "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False, "query_pre_attn_scalar": 16,
               "tie_word_embeddings": True, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0,
               "sliding_window": 32, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
})
_GEMMA_SHARE = 0.04
"""Size of a tiny Gemma's scaled embedding beside 1, the size of what each block adds to it."""

TINY_FAMILIES = tuple(_FAMILIES)
"""Families a tiny checkpoint can be of."""


def tiny_config(family: str = "llama", **changes: Any) -> dict[str, Any]:
    """A ``config.json`` of a tiny model of ``family``; ``changes`` replace or add keys.

    Two layers with grouped heads and an untied head; Gemma 3 has three, two of them with a window of 32 tokens, and a
    tied head.
    """
    return {
        "model_type": family, "vocab_size": 320, "hidden_size": 64,
        "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": 0, "torch_dtype": "float32",
        **_FAMILIES[family], **changes,
    }


def tiny_tensors(config: Mapping[str, Any], *, seed: int) -> dict[str, torch.Tensor]:
    """Random weights for ``config`` by their Hugging Face names, in the config's dtype.

    Matrices keep the activations' scale and the head spreads the logits, so that greedy output is varied
    (8 or more distinct tokens in 64) instead of one token repeated.
    """
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, config["torch_dtype"])
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    kind = config["model_type"]
    gemma = kind == "gemma3_text"

    def normal(*shape: int, std: float, mean: float = 0.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * std + mean).to(dtype)

    found: dict[str, torch.Tensor] = {}

    def linear(name: str, rows: int, columns: int, *, bias: bool) -> None:
        found[f"{name}.weight"] = normal(rows, columns, std=1.5 / math.sqrt(columns))
        if bias:
            found[f"{name}.bias"] = normal(rows, std=0.2)

    def norm(name: str, size: int = hidden, *, mean: float = 1.0) -> None:
        # Gemma keeps what is added to 1
        found[f"{name}.weight"] = normal(size, std=0.1, mean=mean - 1.0 if gemma else mean)

    found["model.embed_tokens.weight"] = normal(config["vocab_size"], hidden, std=_embedding_std(config))
    bias = config.get("attention_bias", False)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        norm(f"{prefix}.input_layernorm")
        norm(f"{prefix}.post_attention_layernorm")
        for part, rows, columns in (("q", queries, hidden), ("k", keys, hidden), ("v", keys, hidden),
                                    ("o", hidden, queries)):
            linear(f"{prefix}.self_attn.{part}_proj", rows, columns, bias=bias or (kind == "qwen2" and part != "o"))
        for part, rows, columns in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
            linear(f"{prefix}.mlp.{part}_proj", rows, columns, bias=config.get("mlp_bias", False))
        if gemma:
            norm(f"{prefix}.pre_feedforward_layernorm")
            norm(f"{prefix}.post_feedforward_layernorm")
        if gemma or kind == "qwen3":
            norm(f"{prefix}.self_attn.q_norm", head_dim)
            norm(f"{prefix}.self_attn.k_norm", head_dim)
    # so small a table as Gemma's tied head needs its input enlarged for logits that spread
    norm("model.norm", mean=1.5 / _GEMMA_SHARE if gemma and config["tie_word_embeddings"] else 1.0)
    if not config["tie_word_embeddings"]:
        linear("lm_head", config["vocab_size"], hidden, bias=False)
    return found


def _embedding_std(config: Mapping[str, Any]) -> float:
    """A tied head would mostly repeat its input token if the embedding outweighed what the blocks add to it; Gemma
    multiplies it by the root of the hidden size."""
    if config["model_type"] != "gemma3_text":
        return 0.2 if config["tie_word_embeddings"] else 1.0
    return (_GEMMA_SHARE if config["tie_word_embeddings"] else 0.3) / math.sqrt(config["hidden_size"])


def tiny_tokenizer(vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer of at most ``vocab_size`` tokens (259 at least) that decodes what it encodes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, show_progress=False,
                                  special_tokens=[AddedToken(text, special=True) for text in SPECIAL_TOKENS],
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return tokenizer


def write_tensors(folder: Path, tensors: Mapping[str, torch.Tensor], *, num_shards: int = 1) -> None:
    """Write ``tensors`` as ``model.safetensors``, or as shards with ``model.safetensors.index.json`` beside them."""
    if num_shards == 1:
        save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map, names = {}, list(tensors)
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        part = {name: tensors[name] for name in names[shard::num_shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def write_tiny(folder: Path, family: str = "llama", *, seed: int = 0, num_shards: int = 1, tokenizer: bool = True,
               **changes: Any) -> Path:
    """Write a tiny checkpoint of ``family`` (one of ``TINY_FAMILIES``) into ``folder`` (made when missing); return it.

    ``changes`` are keys of ``config.json`` (see :func:`tiny_config`), e.g. ``tie_word_embeddings=True`` or
    ``torch_dtype="bfloat16"``. The same arguments write the same weights. ``tokenizer=False`` leaves the tokenizer
    files out: such a model takes and gives token ids only.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = tiny_config(family, **changes)
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    write_tensors(folder, tiny_tensors(config, seed=seed), num_shards=num_shards)
    generation = {"eos_token_id": config["eos_token_id"], "pad_token_id": config["eos_token_id"]}
    (folder / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    if tokenizer:
        tiny_tokenizer(config["vocab_size"]).save(str(folder / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS_TOKEN, "bos_token": None,
                    "add_bos_token": False, "clean_up_tokenization_spaces": False,
                    "model_max_length": config["max_position_embeddings"], "chat_template": CHAT_TEMPLATE}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
    return folder


def write_tiny_llama(folder: Path, *, seed: int = 0, num_shards: int = 1, tokenizer: bool = True,
                     **changes: Any) -> Path:
    """:func:`write_tiny` of the Llama family."""
    return write_tiny(folder, seed=seed, num_shards=num_shards, tokenizer=tokenizer, **changes)
