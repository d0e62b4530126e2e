"""What a build may be asked for. "auto" is replaced by ``resolve_build`` once, then stored in the engine."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

from camshaft.config.doc import INT32_MAX, Doc, check_choice, check_int, check_names
from camshaft.config.model import ModelConfig
from camshaft.core.errors import InternalError, UserError

DTYPES = ("float32", "bfloat16", "float16")
DEVICES = ("cpu", "cuda")
QUANTIZATIONS = ("none", "w8a16", "w8a8", "fp8")
PAGE_SIZES = (16, 32, 64, 128)
DEFAULT_MAX_SEQ_LEN = 8192
MIN_LOGITS_ROWS = 64
"""Tokens of a step that an engine can always compute logits of: prompts are scored so many at a time at least."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BuildConfig:
    """Build-time choices. Every field that is accepted is enforced."""

    dtype: Annotated[str, Doc("Type of weights, activations and KV cache: auto, float32, bfloat16 or float16. "
                              "auto is float32 on a CPU and the checkpoint's own type on a GPU.")] = "auto"
    weight_dtype: Annotated[str, Doc("Type in which matrices are stored: auto (that of dtype), float32, bfloat16 or "
                                     "float16. A 16-bit one under dtype float32 halves the bytes a step reads; "
                                     "arithmetic stays fp32. CPU only.")] = "auto"
    quantization: Annotated[str, Doc("8-bit weights, one scale an output channel: none, w8a16 (int8, arithmetic in "
                                     "fp32; CPU only), w8a8 (inputs of products rounded to int8 too, one scale for 64 "
                                     "of a token; CPU only) or fp8 (e4m3, inputs too, one scale a token; the head "
                                     "keeps its type; for GPUs: slow on a CPU).")] = "none"
    device: Annotated[str, Doc("Device the engine is built for: auto, cpu or cuda.")] = "auto"
    max_batch_size: Annotated[int, Doc("Most requests in one step.")] = 256
    max_seq_len: Annotated[int | None, Doc("Longest prompt plus output in tokens; default: the model's own limit, "
                                           f"at most {DEFAULT_MAX_SEQ_LEN}.")] = None
    max_num_tokens: Annotated[int, Doc("Most tokens in one step, over all its requests.")] = 2048
    page_size: Annotated[int, Doc("Tokens a KV page: 16, 32, 64 or 128.")] = 16
    max_attention_window: Annotated[int | None, Doc(
        "No layer sees further back than so many tokens, the current one included, and the KV cache keeps no more; "
        "default: as the model was trained.")] = None
    sink_tokens: Annotated[int, Doc("Tokens at the start that layers with a window see however far back they are "
                                    "(attention sinks); only with a window.")] = 0
    skip_passes: Annotated[tuple[str, ...], Doc("Names of optimiser passes to leave out (see camshaft inspect).")] = ()
    kernels: Annotated[tuple[str, ...], Doc("Kernel choices to force, as op=implementation, "
                                            "e.g. linear=ref.")] = ()

    def __post_init__(self) -> None:
        check_choice("dtype", self.dtype, ("auto", *DTYPES))
        check_choice("weight_dtype", self.weight_dtype, ("auto", *DTYPES))
        check_choice("quantization", self.quantization, QUANTIZATIONS)
        check_choice("device", self.device, ("auto", *DEVICES))
        check_int("max_batch_size", self.max_batch_size, 1, 4096)
        if self.max_seq_len is not None:
            check_int("max_seq_len", self.max_seq_len, 1, INT32_MAX)
        check_int("max_num_tokens", self.max_num_tokens, 1, INT32_MAX)
        if self.max_num_tokens < self.max_batch_size:
            raise UserError("max_num_tokens", self.max_num_tokens, f"at least max_batch_size ({self.max_batch_size})",
                            "Every running request needs one token a step: raise it or lower max_batch_size")
        if not isinstance(self.page_size, int) or self.page_size not in PAGE_SIZES:
            raise UserError("page_size", self.page_size, "one of " + ", ".join(map(str, PAGE_SIZES)))
        if self.max_attention_window is not None:
            check_int("max_attention_window", self.max_attention_window, 1, INT32_MAX)
        check_int("sink_tokens", self.sink_tokens, 0, INT32_MAX)
        check_names("skip_passes", self.skip_passes)
        if self.quantization != "none" and "quantize" in self.skip_passes:
            raise UserError("skip_passes", "quantize", f"no such name with quantization={self.quantization!r}",
                            "Leave the pass in, or leave quantization out")
        check_names("kernels", self.kernels)
        for choice in self.kernels:
            if choice.count("=") != 1 or "" in choice.split("="):
                raise UserError("kernels", choice, "op=implementation, e.g. linear=ref")
        if len({choice.partition("=")[0] for choice in self.kernels}) < len(self.kernels):
            raise UserError("kernels", self.kernels, "one choice an op")

    @property
    def longest_sequence(self) -> int:
        """``max_seq_len``, resolved; InternalError before :func:`resolve_build`."""
        if self.max_seq_len is None:
            raise InternalError("the build configuration is not resolved")
        return self.max_seq_len

    @property
    def max_logits_rows(self) -> int:
        """Most tokens of a step whose logits are computed: those sampled from, and prompt tokens that are scored."""
        return max(self.max_batch_size, MIN_LOGITS_ROWS)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data; ``BuildConfig(**data)`` with tuples restored reads it back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> BuildConfig:
        """Inverse of :meth:`to_dict`."""
        return cls(**{**data, "skip_passes": tuple(data["skip_passes"]), "kernels": tuple(data["kernels"])})


def resolve_build(cfg: BuildConfig, model: ModelConfig, *, device: str) -> BuildConfig:
    """Replace every "auto" and None of ``cfg`` for ``model`` on ``device`` ("cpu" or "cuda")."""
    dtype = cfg.dtype
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else model.checkpoint_dtype
    longest = cfg.max_seq_len
    if longest is None:
        longest = min(model.default_sequence, DEFAULT_MAX_SEQ_LEN)
    elif longest > model.max_sequence:
        raise UserError("max_seq_len", longest, f"at most the model's {model.max_sequence} positions",
                        "Lower max_seq_len, or use a model with a longer context")
    if cfg.sink_tokens and cfg.max_attention_window is None and not any(model.windows):
        raise UserError("sink_tokens", cfg.sink_tokens, "0: no layer of this model has a window",
                        "Set max_attention_window too, or leave sink_tokens out")
    return dataclasses.replace(cfg, dtype=dtype, weight_dtype=_weight_dtype(cfg, dtype, device), device=device,
                               max_seq_len=longest)


def _weight_dtype(cfg: BuildConfig, dtype: str, device: str) -> str:
    """The type matrices are stored in. UserError where this device or ``dtype`` has no kernel for what is asked."""
    if device != "cpu" and cfg.quantization not in ("none", "fp8"):
        raise UserError("quantization", cfg.quantization, f"none or fp8 on {device}",
                        "Use quantization='fp8', device='cpu', or leave it out")
    if cfg.weight_dtype in ("auto", dtype):
        return dtype
    if dtype != "float32" or device != "cpu":
        raise UserError("weight_dtype", cfg.weight_dtype, f"{dtype}, the dtype, on {device}",
                        "Only float32 arithmetic on a CPU reads weights of another type")
    if "narrow_weights" in cfg.skip_passes:
        raise UserError("skip_passes", "narrow_weights", f"no such name with weight_dtype={cfg.weight_dtype!r}",
                        "Leave the pass in, or leave weight_dtype out")
    return cfg.weight_dtype
