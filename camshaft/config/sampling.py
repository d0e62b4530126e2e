"""How one request is sampled and stopped.

Owns the parameters, their bounds, and the names that are known but have no engine behind them yet
(refused by name, never ignored). Does not sample.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

from camshaft.config.doc import INT32_MAX, Doc, check_bool, check_int, check_range
from camshaft.core.errors import UserError

UNSUPPORTED_DEFAULTS: dict[str, Any] = {
    "additional_model_outputs": None, "apply_batched_logits_processor": False, "bad": None, "bad_token_ids": None,
    "beam_search_diversity_rate": None, "beam_width_array": None, "best_of": None, "early_stopping": None,
    "embedding_bias": None, "exclude_input_from_output": True, "frequency_penalty": None, "guided_decoding": None,
    "length_penalty": None, "logits_processor": None, "logprobs": None, "lookahead_config": None, "n": 1,
    "no_repeat_ngram_size": None, "pad_id": None, "presence_penalty": None, "prompt_ignore_length": None,
    "prompt_logprobs": None, "repetition_penalty": None, "return_context_logits": False,
    "return_encoder_output": False, "return_generation_logits": False, "return_perf_metrics": False,
    "spaces_between_special_tokens": True, "thinking_token_budget": None, "top_p_decay": None, "top_p_min": None,
    "top_p_reset_ids": None, "truncate_prompt_tokens": None, "use_beam_search": False,
}
"""SamplingParams fields of TensorRT-LLM that this version refuses unless they hold these values."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingFields:
    """The parameters that are enforced. Use :class:`SamplingParams`, which also knows the refused ones."""

    max_tokens: Annotated[int, Doc("Most tokens to generate; the engine's max_seq_len may end it sooner.")] = 32
    min_tokens: Annotated[int, Doc("No stop of any kind before this many tokens.")] = 0
    temperature: Annotated[float | None, Doc("Divides the logits; 0 is greedy; default: the checkpoint's, else "
                                             "greedy.")] = None
    top_k: Annotated[int | None, Doc("Sample among the k likeliest tokens; 0: all; default: the checkpoint's, "
                                         "else all.")] = None
    top_p: Annotated[float | None, Doc("Sample among the likeliest tokens whose probabilities reach p; default: "
                                           "the checkpoint's, else 1.")] = None
    min_p: Annotated[float | None, Doc("Drop tokens less likely than min_p times the likeliest; default: the "
                                           "checkpoint's, else 0.")] = None
    seed: Annotated[int | None, Doc("Same seed, same prompt, same tokens; default: drawn anew.")] = None
    stop: Annotated[str | tuple[str, ...] | None, Doc("Strings that end the output.")] = None
    stop_token_ids: Annotated[tuple[int, ...] | None, Doc("Token ids that end the output.")] = None
    end_id: Annotated[int | None, Doc("Replaces the checkpoint's end-of-sequence ids.")] = None
    ignore_eos: Annotated[bool, Doc("Keep generating past end-of-sequence ids.")] = False
    include_stop_str_in_output: Annotated[bool, Doc("Keep the stop string or stop token's text in the output.")] = False
    skip_special_tokens: Annotated[bool, Doc("Leave special tokens out of the text.")] = True
    add_special_tokens: Annotated[bool, Doc("Let the tokenizer add its special tokens to a text prompt.")] = True
    detokenize: Annotated[bool, Doc("Produce text; without it only token ids come back, and stop strings are "
                                    "refused.")] = True


class SamplingParams(SamplingFields):
    """Sampling and stopping of one request; keyword arguments only.

    Raises UserError for a value out of bounds, for an unknown name, and for the names in
    ``UNSUPPORTED_DEFAULTS`` when they ask for something this version cannot do.
    """

    __slots__ = ()

    def __init__(self, **kwargs: Any) -> None:
        for name in sorted(kwargs.keys() & UNSUPPORTED_DEFAULTS.keys()):
            value, default = kwargs.pop(name), UNSUPPORTED_DEFAULTS[name]
            if value is not None and not (isinstance(value, bool | int) and value == default):
                raise UserError(name, value, f"{default!r}, all that this version supports",
                                "Leave it out")
        known = {field.name for field in dataclasses.fields(SamplingFields)}
        for name in sorted(kwargs.keys() - known):
            raise UserError(name, kwargs[name], "a sampling parameter", f"Known: {', '.join(sorted(known))}")
        for name in ("stop", "stop_token_ids"):
            if isinstance(kwargs.get(name), list):
                kwargs[name] = tuple(kwargs[name])
        if isinstance(kwargs.get("stop"), str):
            kwargs["stop"] = (kwargs["stop"],)
        super().__init__(**kwargs)
        self._check_bounds()
        self._check_stops()

    def _check_bounds(self) -> None:
        check_int("max_tokens", self.max_tokens, 1)
        check_int("min_tokens", self.min_tokens, 0)
        if self.min_tokens > self.max_tokens:
            raise UserError("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        for name, low, high in (("temperature", 0.0, 100.0), ("top_p", 0.0, 1.0), ("min_p", 0.0, 1.0)):
            value = getattr(self, name)
            if value is not None:
                check_range(name, value, low, high)
        if self.top_p == 0.0:
            raise UserError("top_p", self.top_p, "a number above 0, up to 1", "Use temperature=0 for greedy")
        if self.top_k is not None:
            check_int("top_k", self.top_k, 0, INT32_MAX)
        if self.seed is not None:
            check_int("seed", self.seed, 0, 2**64 - 1)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "add_special_tokens",
                     "detokenize"):
            check_bool(name, getattr(self, name))

    def _check_stops(self) -> None:
        stop = self.stop or ()
        if not isinstance(stop, tuple) or not all(isinstance(text, str) and text for text in stop):
            raise UserError("stop", self.stop, "a non-empty string or a list of them")
        if stop and not self.detokenize:
            raise UserError("stop", self.stop, "detokenize=True beside it", "Use stop_token_ids for token-only output")
        ids = self.stop_token_ids or ()
        if not isinstance(ids, tuple):
            raise UserError("stop_token_ids", self.stop_token_ids, "a list of token ids")
        for token in ids:
            check_int("stop_token_ids", token, 0)
        if self.end_id is not None:
            check_int("end_id", self.end_id, 0)
