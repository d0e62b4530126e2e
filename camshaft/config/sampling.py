"""How one request is sampled and stopped.

Owns the parameters, their bounds, and the names that are known but have no engine behind them yet
(refused by name, never ignored). Does not sample.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Annotated, Any

from camshaft.config.doc import INT32_MAX, Doc, check_bool, check_int, check_range
from camshaft.config.other_names import HINTS
from camshaft.config.parse import reject_unknown
from camshaft.core.errors import UserError

UNSUPPORTED_DEFAULTS: Mapping[str, Any] = MappingProxyType({
    "additional_model_outputs": None, "apply_batched_logits_processor": False, "beam_search_diversity_rate": None,
    "beam_width_array": None, "early_stopping": None, "embedding_bias": None, "exclude_input_from_output": True,
    "guided_decoding": None, "length_penalty": None, "lookahead_config": None, "pad_id": None,
    "prompt_ignore_length": None, "return_context_logits": False, "return_encoder_output": False,
    "return_generation_logits": False, "return_perf_metrics": False, "spaces_between_special_tokens": True,
    "thinking_token_budget": None, "top_p_decay": None, "top_p_min": None, "top_p_reset_ids": None,
    "truncate_prompt_tokens": None, "use_beam_search": False,
})
"""SamplingParams fields of TensorRT-LLM that this version refuses unless they hold these values."""

MAX_SEQUENCES = 128
"""Most sequences one request may generate."""
MAX_LOGPROBS = 1024
"""Most likeliest tokens whose log-probabilities may be asked for at each place."""
MAX_BAD_WORDS = 1024
MAX_LENGTH = 2**63 - 1
"""Largest max_tokens and min_tokens: far beyond any sequence, and still a number that can be printed."""
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0
"""Within these, no finite logit of a model overflows."""

_LISTS = ("stop", "stop_token_ids", "bad", "bad_token_ids", "allowed_token_ids", "logits_processor")
"""Fields that are kept as tuples, whatever sequence or single value they were given as."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingFields:
    """The parameters that are enforced. Use :class:`SamplingParams`, which also knows the refused ones."""

    max_tokens: Annotated[int, Doc("Most tokens to generate; the engine's max_seq_len may end it sooner. 0 with "
                                   "prompt_logprobs: the prompt is scored and nothing generated.")] = 32
    min_tokens: Annotated[int, Doc("No stop of any kind before this many tokens.")] = 0
    n: Annotated[int, Doc("Sequences to return.", flag=False)] = 1
    best_of: Annotated[int | None, Doc("Sequences to sample, of which the n with the largest sum of log-probabilities "
                                       "are returned, the best first; more than n needs a temperature above 0; "
                                       "default: n.")] = None
    temperature: Annotated[float | None, Doc("Divides the logits; 0 is greedy; default: the checkpoint's, else "
                                             "greedy.")] = None
    top_k: Annotated[int | None, Doc("Sample among the k likeliest tokens; 0: all; default: the checkpoint's, "
                                         "else all.")] = None
    top_p: Annotated[float | None, Doc("Sample among the likeliest tokens whose probabilities reach p; default: "
                                           "the checkpoint's, else 1.")] = None
    min_p: Annotated[float | None, Doc("Drop tokens less likely than min_p times the likeliest; default: the "
                                           "checkpoint's, else 0.")] = None
    seed: Annotated[int | None, Doc("Same seed, same prompt, same tokens; default: drawn anew.")] = None
    repetition_penalty: Annotated[float | None, Doc("Above 1, tokens of the prompt and the output so far become less "
                                                    "likely, below 1 likelier; default: the checkpoint's, else "
                                                    "1.")] = None
    presence_penalty: Annotated[float | None, Doc("Taken off the logit of every token that is in the output; default: "
                                                  "0.")] = None
    frequency_penalty: Annotated[float | None, Doc("Taken off the logit of every token in the output, once an "
                                                   "occurrence; default: 0.")] = None
    no_repeat_ngram_size: Annotated[int | None, Doc("No run of so many tokens comes twice in prompt and output; 0: "
                                                    "off; default: the checkpoint's, else off.")] = None
    bad: Annotated[str | tuple[str, ...] | None, Doc("Words the output must not have, as the tokens they are encoded "
                                                     "to, with and without a space in front.")] = None
    bad_token_ids: Annotated[tuple[int, ...] | None, Doc("Token ids that are never picked.")] = None
    logit_bias: Annotated[Mapping[int, float] | tuple[tuple[int, float], ...] | None, Doc(
        "What is added to the logits of token ids, from -100 to 100.")] = None
    allowed_token_ids: Annotated[tuple[int, ...] | None, Doc("The only token ids that may be picked.")] = None
    logits_processor: Annotated[Callable[..., Any] | tuple[Callable[..., Any], ...] | None, Doc(
        "Code of your own that changes the logits before a token is picked: one camshaft.LogitsProcessor or a list.",
        flag=False)] = None
    logprobs: Annotated[int | None, Doc("Log-probabilities of each output token and of so many likeliest beside it; "
                                        "0: its own alone.", flag=False)] = None
    prompt_logprobs: Annotated[int | None, Doc("The same for the tokens of the prompt.", flag=False)] = None
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

    Lists may be given as lists, ``stop``, ``bad`` and ``logits_processor`` as one alone, ``logit_bias`` as a dict;
    they are kept as tuples. Raises UserError for a value out of bounds, for an unknown name, and for the names in
    ``UNSUPPORTED_DEFAULTS`` when they ask for something this version cannot do.
    """

    __slots__ = ()

    def __init__(self, **kwargs: Any) -> None:
        for name in sorted(kwargs.keys() & UNSUPPORTED_DEFAULTS.keys()):
            value, default = kwargs.pop(name), UNSUPPORTED_DEFAULTS[name]
            if value is not None and not (isinstance(value, bool | int) and value == default):
                raise UserError(name, value, f"{default!r}, all that this version supports",
                                HINTS["SamplingParams"].get(name, "Leave it out"))
        reject_unknown(kwargs, tuple(field.name for field in dataclasses.fields(SamplingFields)),
                       where="SamplingParams")
        for name in _LISTS:
            value = kwargs.get(name)
            if isinstance(value, list):
                kwargs[name] = tuple(value)
            elif isinstance(value, str) or callable(value):
                kwargs[name] = (value,)
        if isinstance(kwargs.get("logit_bias"), Mapping):
            kwargs["logit_bias"] = tuple(kwargs["logit_bias"].items())
        super().__init__(**kwargs)
        self._check_lengths()
        self._check_sampling()
        self._check_edits()
        self._check_stops()

    @property
    def num_sequences(self) -> int:
        """How many sequences are generated; ``n`` of them are returned."""
        return self.n if self.best_of is None else self.best_of

    def _check_lengths(self) -> None:
        if self.max_tokens is None:
            raise UserError("max_tokens", None, "a whole number", "Give a large one for as many as max_seq_len leaves")
        check_int("max_tokens", self.max_tokens, 0, MAX_LENGTH)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 0, MAX_LOGPROBS)
        check_int("n", self.n, 1, MAX_SEQUENCES)
        if self.best_of is not None:
            check_int("best_of", self.best_of, self.n, MAX_SEQUENCES)
        if self.max_tokens == 0:
            if self.prompt_logprobs is None:
                raise UserError("max_tokens", 0, "at least 1, or prompt_logprobs beside it",
                                "Give prompt_logprobs=0 to score the prompt alone")
            if self.num_sequences > 1:
                raise UserError("n" if self.n > 1 else "best_of", self.num_sequences,
                                "1 beside max_tokens=0, where nothing is generated")
        check_int("min_tokens", self.min_tokens, 0, MAX_LENGTH)
        if self.min_tokens > self.max_tokens:
            raise UserError("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")

    def _check_sampling(self) -> None:
        for name, low, high in (("temperature", 0.0, 100.0), ("top_p", 0.0, 1.0), ("min_p", 0.0, 1.0),
                                ("repetition_penalty", MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
                                ("presence_penalty", -2.0, 2.0), ("frequency_penalty", -2.0, 2.0)):
            value = getattr(self, name)
            if value is not None:
                check_range(name, value, low, high)
        if self.top_p == 0.0:
            raise UserError("top_p", self.top_p, "a number above 0, up to 1", "Use temperature=0 for greedy")
        if self.top_k == -1:
            raise UserError("top_k", self.top_k, "a whole number of 0 or more", "Use 0 for all tokens")
        for name in ("top_k", "no_repeat_ngram_size"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 0, INT32_MAX)
        if self.seed is not None:
            check_int("seed", self.seed, 0, 2**64 - 1)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "add_special_tokens",
                     "detokenize"):
            check_bool(name, getattr(self, name))

    def _check_edits(self) -> None:
        _check_texts("bad", self.bad)
        _check_ids("bad_token_ids", self.bad_token_ids)
        for name in ("bad", "bad_token_ids"):
            if len(getattr(self, name) or ()) > MAX_BAD_WORDS:
                raise UserError(name, f"{len(getattr(self, name))} of them", f"at most {MAX_BAD_WORDS}")
        _check_ids("allowed_token_ids", self.allowed_token_ids)
        if self.allowed_token_ids == ():
            raise UserError("allowed_token_ids", [], "at least one token id", "Leave it out to allow all")
        bias = self.logit_bias
        if bias is not None:
            if not isinstance(bias, tuple) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in bias):
                raise UserError("logit_bias", bias, "a dict of token ids and what is added to their logits")
            for token, value in bias:
                check_int("logit_bias", token, 0)
                check_range("logit_bias", value, -100.0, 100.0)
        processors = self.logits_processor
        if processors is not None and (not isinstance(processors, tuple) or not all(map(callable, processors))):
            raise UserError("logits_processor", processors, "a callable, or a list of them")

    def _check_stops(self) -> None:
        _check_texts("stop", self.stop)
        if self.stop and not self.detokenize:
            raise UserError("stop", self.stop, "detokenize=True beside it", "Use stop_token_ids for token-only output")
        _check_ids("stop_token_ids", self.stop_token_ids)
        if self.end_id is not None:
            check_int("end_id", self.end_id, 0)


def _check_texts(field: str, value: object) -> None:
    texts = () if value is None else value
    if not isinstance(texts, tuple) or not all(isinstance(text, str) and text for text in texts):
        raise UserError(field, value, "a non-empty string or a list of them")


def _check_ids(field: str, value: object) -> None:
    ids = () if value is None else value
    if not isinstance(ids, tuple):
        raise UserError(field, value, "a list of token ids")
    for token in ids:
        check_int(field, token, 0)
