"""Gemma 3 (Gemma Team, 2025), text: the language models, and the text part of the multimodal checkpoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from camshaft.config.model import ModelConfig, RopeConfig
from camshaft.core.errors import CheckpointError
from camshaft.core.log import logger
from camshaft.ir.weight import Weight
from camshaft.layers.attention import Attention
from camshaft.layers.decoder import CausalLM
from camshaft.layers.mlp import GatedMLP
from camshaft.layers.norm import WideRMSNorm
from camshaft.models.config_fields import (
    MAX_LAYERS,
    bool_field,
    check_heads,
    float_field,
    int_field,
    optional_float,
    require,
    windows_field,
)
from camshaft.models.registry import ModelFamily, register_family
from camshaft.models.rope_fields import rope_field

_TEXT_PREFIXES = (("language_model.model.", "model."), ("language_model.lm_head.", "lm_head."),
                  ("model.language_model.", "model."))
"""How multimodal checkpoints name their text part (before and since transformers 4.52), and how the others do."""
_VISION_PREFIXES = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")


class Block(nn.Module):
    """Attention and gated feed-forward, each between two norms, added to the residual stream."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = WideRMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config, layer, qk_norm=WideRMSNorm)
        self.post_attention_layernorm = WideRMSNorm(config.hidden_size, config.norm_eps)
        self.pre_feedforward_layernorm = WideRMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, activation="gelu_tanh")
        self.post_feedforward_layernorm = WideRMSNorm(config.hidden_size, config.norm_eps)

    def forward(self, x_TH: torch.Tensor, cos_sin_TD: torch.Tensor) -> torch.Tensor:
        """``[T, H]`` to ``[T, H]``."""
        x_TH = x_TH + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x_TH), cos_sin_TD))
        out_TH: torch.Tensor = x_TH + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x_TH)))
        return out_TH


@register_family
class Gemma3(ModelFamily):
    """Differs from Llama in:

    - five layers of six see a window, and rotate by a base frequency of their own without scaling;
    - four norms a block, and RMS-normalised query and key heads;
    - norm weights are kept as w and used as 1 + w, in float32 also where the rest is 16-bit;
    - the embedding is multiplied by the root of the hidden size; the head is tied to it;
    - attention scores are scaled by ``query_pre_attn_scalar``, soft-capped where configured, as are the logits;
    - the gate's activation is GELU by its tanh approximation.
    """

    architectures: ClassVar[tuple[str, ...]] = ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")

    def config_from_hf(self, data: Mapping[str, Any]) -> ModelConfig:
        """See :meth:`ModelFamily.config_from_hf`. Missing fields have the values transformers gives them."""
        architecture = data["architectures"][0]
        text = _text_part(data) if architecture == "Gemma3ForConditionalGeneration" else data
        heads, kv_heads = int_field(text, "num_attention_heads", 8), int_field(text, "num_key_value_heads", 4)
        head_dim = int_field(text, "head_dim", 256)
        check_heads("config.json num_attention_heads, num_key_value_heads, head_dim", heads, kv_heads, head_dim)
        for name in ("hidden_activation", "hidden_act"):
            require(text, name, ("gelu_pytorch_tanh",))
        require(text, "use_bidirectional_attention", (False,))
        max_position = int_field(text, "max_position_embeddings", 131072)
        num_layers = int_field(text, "num_hidden_layers", 26, most=MAX_LAYERS)
        bias = bool_field(text, "attention_bias", False)
        rope, local_rope = _ropes(text, head_dim, max_position)
        return ModelConfig(
            architecture=architecture, vocab_size=int_field(text, "vocab_size", 262208),
            hidden_size=int_field(text, "hidden_size", 2304),
            intermediate_size=int_field(text, "intermediate_size", 9216), num_layers=num_layers,
            num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, max_position=max_position,
            norm_eps=float_field(text, "rms_norm_eps", 1e-6), rope=rope, local_rope=local_rope,
            tie_word_embeddings=bool_field(data, "tie_word_embeddings", bool_field(text, "tie_word_embeddings", True)),
            qkv_bias=bias, attention_out_bias=bias, windows=_windows(text, num_layers),
            attention_scale=float_field(text, "query_pre_attn_scalar", 256.0) ** -0.5,
            attention_softcap=optional_float(text, "attn_logit_softcapping"),
            logits_softcap=optional_float(text, "final_logit_softcapping"))

    def module(self, config: ModelConfig) -> nn.Module:
        """See :meth:`ModelFamily.module`."""
        return CausalLM(config, Block, embed_scale=config.hidden_size ** 0.5, norm=WideRMSNorm)

    def adapt_weights(self, tensors: Mapping[str, Weight]) -> dict[str, Weight]:
        """The text part under the names of a text checkpoint, norm weights as 1 + w in float32.

        The vision tower and the projector are left out, with a line in the log.
        """
        adapted: dict[str, Weight] = {}
        vision = [name for name in tensors if name.startswith(_VISION_PREFIXES)]
        if vision:
            logger.info("%d tensors of the vision tower and its projector are left out (%s, …): text only",
                        len(vision), vision[0])
        for name in tensors.keys() - set(vision):
            known = _text_name(name)
            if known in adapted:
                raise CheckpointError(name, "a second time", f"one tensor for {known}", "Download the model again")
            adapted[known] = _one_more(tensors[name]) if known.endswith("norm.weight") else tensors[name]
        return adapted

    def tiny_config(self) -> ModelConfig:
        """Three layers, two with a window and a base frequency of their own, both soft caps, a tied head."""
        return ModelConfig(architecture="Gemma3ForCausalLM", vocab_size=96, hidden_size=32, intermediate_size=48,
                           num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16, max_position=256, norm_eps=1e-6,
                           rope=RopeConfig(theta=1000000.0, kind="linear", factor=8.0), local_rope=RopeConfig(),
                           tie_word_embeddings=True, qkv_bias=True, attention_out_bias=True, windows=(12, 12, None),
                           attention_scale=32 ** -0.5, attention_softcap=50.0, logits_softcap=30.0)


def _text_part(data: Mapping[str, Any]) -> Mapping[str, Any]:
    text = data.get("text_config")
    if not isinstance(text, Mapping):
        raise CheckpointError("config.json text_config", text, "an object with the language model's settings")
    return text


def _ropes(text: Mapping[str, Any], head_dim: int, max_position: int) -> tuple[RopeConfig, RopeConfig]:
    """Rotary settings of the layers that see everything, to which ``rope_scaling`` belongs, and of the others."""
    local = {**text, "rope_theta": float_field(text, "rope_local_base_freq", 10000.0), "rope_scaling": None}
    return (rope_field(text, head_dim=head_dim, max_position=max_position, default_theta=1000000.0,
                       layer_type="full_attention"),
            rope_field(local, head_dim=head_dim, max_position=max_position, layer_type="sliding_attention"))


def _windows(text: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """Every sixth layer sees everything, or every ``sliding_window_pattern``-th, unless ``layer_types`` says which.

    A window longer than any sequence stays one: its layers rotate by their own frequencies.
    """
    pattern = int_field(text, "sliding_window_pattern", int_field(text, "_sliding_window_pattern", 6))
    return windows_field({"sliding_window": 4096, **text}, num_layers, lambda layer: (layer + 1) % pattern != 0)


def _text_name(name: str) -> str:
    for prefix, plain in _TEXT_PREFIXES:
        if name.startswith(prefix):
            return plain + name.removeprefix(prefix)
    return name


def _one_more(weight: Weight) -> Weight:
    """``1 + weight``, added in float32; a type that is no model's weight stays, to be refused as such."""
    if weight.dtype.itemsize < 2 or not weight.dtype.is_floating_point:
        return weight
    return dataclasses.replace(weight, dtype=torch.float32, read=lambda: weight.read().to(torch.float32) + 1.0,
                               span=None)
