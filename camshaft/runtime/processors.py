"""Running a caller's logits processors on one row, and holding them to their contract.

Owns the calls and the checks: whatever custom code raises or returns ends its own request and no other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from camshaft.core.errors import UserError, words_of
from camshaft.runtime.step import LogitsProcessor

_FIELD = "logits_processor"


def run_processors(processors: Sequence[LogitsProcessor], token_ids: list[int],
                   logits_V: torch.Tensor) -> torch.Tensor:
    """The logits, float32 on the CPU, after every processor in turn; ``token_ids`` is prompt and output so far.

    Each gets copies it may keep or change. Raises UserError naming logits_processor where one raises, or
    returns anything but a float32 tensor ``[V]`` of numbers and -inf.
    """
    with torch.inference_mode(False), torch.no_grad():
        logits = logits_V.clone()
        for processor in processors:
            logits = _processed(processor, list(token_ids), logits)
    return logits


def _processed(processor: LogitsProcessor, token_ids: list[int], logits_V: torch.Tensor) -> torch.Tensor:
    vocab_size = len(logits_V)
    try:
        return _checked(processor, processor(token_ids, logits_V), vocab_size)
    except UserError as error:
        if error.field == _FIELD:
            raise
        raise _raised(processor, error) from error
    # whatever a caller's code raises, SystemExit too: its own request alone may end by it, not a thread that serves all
    except BaseException as error:
        raise _raised(processor, error) from error


def _raised(processor: LogitsProcessor, error: BaseException) -> UserError:
    return UserError(_FIELD, processor, f"code that does not raise; it raised {words_of(error)}",
                     "Mend the processor; this request alone ends")


def _checked(processor: LogitsProcessor, logits: object, vocab_size: int) -> torch.Tensor:
    needed = f"one that returns a float32 tensor of shape [{vocab_size}]"
    if not isinstance(logits, torch.Tensor):
        raise UserError(_FIELD, processor, f"{needed}; it returned {type(logits).__name__}")
    if logits.layout != torch.strided:
        raise UserError(_FIELD, processor, f"{needed}; it returned one in layout {logits.layout}")
    if logits.dtype != torch.float32 or tuple(logits.shape) != (vocab_size,):
        raise UserError(_FIELD, processor, f"{needed}; it returned {logits.dtype} of shape {list(logits.shape)}")
    logits = logits.detach().as_subclass(torch.Tensor).to("cpu")
    if logits.isnan().any() or logits.isposinf().any():
        raise UserError(_FIELD, processor, "one that returns no NaN and no positive infinity",
                        "Mask a token with -inf")
    return logits
