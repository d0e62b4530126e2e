"""Tiny random checkpoints on disk: a Llama-shaped Hugging Face folder that any test can build, serve or break.

Owns their shape, their seeded weights and their tokenizer. Public: authors of kernels, passes and models test with
the same folders. Needs torch, safetensors and tokenizers; never transformers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
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


def tiny_config(**changes: Any) -> dict[str, Any]:
    """A ``config.json`` of a two-layer Llama with grouped heads and an untied head; ``changes`` replace or add keys."""
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 320, "hidden_size": 64,
        "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "hidden_act": "silu", "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False,
        "bos_token_id": None, "eos_token_id": 0, "torch_dtype": "float32", **changes,
    }


def tiny_tensors(config: Mapping[str, Any], *, seed: int) -> dict[str, torch.Tensor]:
    """Random weights for ``config`` by their Hugging Face names, in the config's dtype.

    Matrices keep the activations' scale and the head spreads the logits, so that greedy output is varied
    (8 or more distinct tokens in 64) instead of one token repeated.
    """
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, config["torch_dtype"])
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]

    def normal(*shape: int, std: float, mean: float = 0.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * std + mean).to(dtype)

    found: dict[str, torch.Tensor] = {}

    def linear(name: str, rows: int, columns: int, *, bias: bool) -> None:
        found[f"{name}.weight"] = normal(rows, columns, std=1.5 / math.sqrt(columns))
        if bias:
            found[f"{name}.bias"] = normal(rows, std=0.2)

    # A tied head would mostly repeat its input token if the embedding outweighed what the blocks add to it.
    found["model.embed_tokens.weight"] = normal(config["vocab_size"], hidden,
                                                std=0.2 if config["tie_word_embeddings"] else 1.0)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        found[f"{prefix}.input_layernorm.weight"] = normal(hidden, std=0.1, mean=1.0)
        found[f"{prefix}.post_attention_layernorm.weight"] = normal(hidden, std=0.1, mean=1.0)
        for part, rows, columns in (("q", queries, hidden), ("k", keys, hidden), ("v", keys, hidden),
                                    ("o", hidden, queries)):
            linear(f"{prefix}.self_attn.{part}_proj", rows, columns, bias=config["attention_bias"])
        for part, rows, columns in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
            linear(f"{prefix}.mlp.{part}_proj", rows, columns, bias=config["mlp_bias"])
    found["model.norm.weight"] = normal(hidden, std=0.1, mean=1.0)
    if not config["tie_word_embeddings"]:
        linear("lm_head", config["vocab_size"], hidden, bias=False)
    return found


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


def write_tiny_llama(folder: Path, *, seed: int = 0, num_shards: int = 1, tokenizer: bool = True,
                     **changes: Any) -> Path:
    """Write a tiny Llama checkpoint into ``folder`` (made when missing) and return it.

    ``changes`` are keys of ``config.json`` (see :func:`tiny_config`), e.g. ``tie_word_embeddings=True`` or
    ``torch_dtype="bfloat16"``. The same arguments write the same weights. ``tokenizer=False`` leaves the tokenizer
    files out: such a model takes and gives token ids only.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = tiny_config(**changes)
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
