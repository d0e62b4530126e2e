"""The architectures of GGUF files: what each calls its tensors, how it stores them, which layers it gives a window.

Owns one description an architecture, registered under the name in ``general.architecture``. What all of them share
(sizes, heads, rotary scaling) is read by ``gguf_names`` and ``gguf_rope``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

import numpy as np

from camshaft.config.model import RopeConfig
from camshaft.core.registry import Registry
from camshaft.frontend.gguf_metadata import Metadata

_SHARED_BLOCK = MappingProxyType({
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
})
_HEAD_NORMS = MappingProxyType({"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"})
_SCALES = ("attention.scale", "attention.clamp_kqv", "logit_scale", "embedding_scale", "residual_scale")
_SOFTCAPS = ("attn_logit_softcapping", "final_logit_softcapping")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What a description may need of the model's shape."""

    num_layers: int
    hidden_size: int
    num_heads: int
    max_position: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionFields:
    """The fields of ``ModelConfig`` with the same names."""

    windows: tuple[int | None, ...] = ()
    local_rope: RopeConfig | None = None
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logits_softcap: float | None = None


class GgufArchitecture:
    """What architectures share; the docstring of each lists what differs."""

    architecture: ClassVar[str]
    """The Hugging Face name of the definition."""
    block: ClassVar[Mapping[str, str]] = MappingProxyType({**_SHARED_BLOCK, "ffn_norm": "post_attention_layernorm"})
    """Names within a block: GGUF → Hugging Face."""
    interleaved: ClassVar[bool] = False
    """Whether the rows of q and k are stored with the two elements that rotate together side by side."""
    norms_hold_one_plus: ClassVar[bool] = False
    """Whether norm weights are stored as 1 + w where the Hugging Face checkpoint has w."""
    refused_keys: ClassVar[tuple[str, ...]] = (*_SCALES, *_SOFTCAPS, "attention.sliding_window_pattern")
    """Keys that would change the result and that this architecture's definition does not compute."""

    def attention(self, meta: Metadata, sizes: Sizes) -> AttentionFields:
        """Windows, scale and caps of the attention. CheckpointError naming the key that is not usable."""
        if 0 < meta.whole("attention.sliding_window", 0) < sizes.max_position:
            raise meta.refuse("attention.sliding_window", "to be absent, as this architecture has no window")
        return AttentionFields()


ARCHITECTURES: Registry[type[GgufArchitecture]] = Registry("general.architecture")


@ARCHITECTURES.register("llama")
class Llama(GgufArchitecture):
    """Llama 2 and 3, Mistral, SmolLM2: interleaved rotary rows, and one window for all layers or none."""

    architecture = "LlamaForCausalLM"
    interleaved = True

    def attention(self, meta: Metadata, sizes: Sizes) -> AttentionFields:
        """See :meth:`GgufArchitecture.attention`; a window of 0, or of the whole context, is none."""
        window = meta.whole("attention.sliding_window", 0)
        return AttentionFields(windows=(window,) * sizes.num_layers if 0 < window < sizes.max_position else ())


@ARCHITECTURES.register("qwen2")
class Qwen2(GgufArchitecture):
    """Qwen2 and 2.5: biases of q, k and v, which are found by their tensors."""

    architecture = "Qwen2ForCausalLM"


@ARCHITECTURES.register("qwen3")
class Qwen3(GgufArchitecture):
    """Qwen3: norms of q and k a head."""

    architecture = "Qwen3ForCausalLM"
    block: ClassVar[Mapping[str, str]] = MappingProxyType({**GgufArchitecture.block, **_HEAD_NORMS})


@ARCHITECTURES.register("gemma3")
class Gemma3(GgufArchitecture):
    """Gemma 3 (text): four norms a block and two a head, all stored as 1 + w; windows by a pattern of layers, with
    rotary settings of their own."""

    architecture = "Gemma3ForCausalLM"
    block: ClassVar[Mapping[str, str]] = MappingProxyType({
        **_SHARED_BLOCK, **_HEAD_NORMS, "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm", "post_ffw_norm": "post_feedforward_layernorm"})
    norms_hold_one_plus = True
    refused_keys = _SCALES

    _PERIOD: ClassVar[int] = 6
    """Every sixth layer sees everything, unless the file has a pattern."""
    _LAYERS_OF_27B: ClassVar[int] = 62

    def attention(self, meta: Metadata, sizes: Sizes) -> AttentionFields:
        """See :meth:`GgufArchitecture.attention`. Without a window in the file no layer has one.

        The scale has no key: the 27B model, known by its layers, scales by its hidden size a head, all others by the
        head size (``query_pre_attn_scalar`` of the published configurations).
        """
        scale = None
        if sizes.num_layers == self._LAYERS_OF_27B:
            scale = max(sizes.hidden_size // sizes.num_heads, 1) ** -0.5
        caps = [meta.real(key) if key in meta else None for key in _SOFTCAPS]
        windows = self._windows(meta, sizes.num_layers)
        local = RopeConfig(theta=meta.real("rope.freq_base_swa", 10000.0)) if any(windows) else None
        return AttentionFields(windows=windows if any(windows) else (), local_rope=local, attention_scale=scale,
                               attention_softcap=caps[0], logits_softcap=caps[1])

    def _windows(self, meta: Metadata, num_layers: int) -> tuple[int | None, ...]:
        if "attention.sliding_window" not in meta:
            return ()
        window = meta.size("attention.sliding_window")
        pattern = meta.get("attention.sliding_window_pattern", self._PERIOD)
        if isinstance(pattern, np.ndarray):
            if pattern.shape != (num_layers,) or not np.isin(pattern, (0, 1)).all():
                raise meta.refuse("attention.sliding_window_pattern", f"a flag for each of {num_layers} layers")
            return tuple(window if windowed else None for windowed in pattern)
        period = meta.size("attention.sliding_window_pattern", self._PERIOD)
        return tuple(window if (layer + 1) % period else None for layer in range(num_layers))

