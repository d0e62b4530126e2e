"""The error tree. Every error names what was found and what to do about it.

    CamshaftError
    ├── UserError (ValueError)        the caller can mend it: field, value, allowed, remedy
    │   ├── CheckpointError           a model folder or file is broken, incomplete or unsupported
    │   ├── ModelNotFoundError        a name resolves to no model (missing, gated, offline)
    │   └── RequestTooLargeError      this request can never fit this engine
    ├── CapacityError                 no room now; the scheduler may preempt, the caller may retry
    │   └── QueueFullError            the bounded intake is full
    ├── EngineError                   an engine artifact and this process do not match
    │   ├── EngineVersionError        written by another engine format
    │   ├── EngineDeviceError         built for another device or feature set
    │   └── EngineCorruptError        truncated, edited or missing parts
    └── InternalError                 our bug
        ├── EngineDeadError           the executor stopped after a failure; nothing more runs
        └── NonFiniteLogitsError      the model gave NaN or infinity for one request, which ends alone

Owns the types and their wording; decides nothing about who catches them.
"""

from __future__ import annotations

__all__ = [
    "CamshaftError",
    "CapacityError",
    "CheckpointError",
    "EngineCorruptError",
    "EngineDeadError",
    "EngineDeviceError",
    "EngineError",
    "EngineVersionError",
    "InternalError",
    "ModelNotFoundError",
    "NonFiniteLogitsError",
    "QueueFullError",
    "RequestTooLargeError",
    "UserError",
    "words_of",
]


def _shown(value: object) -> str:
    try:
        shown = repr(value)
    except ValueError:  # Python prints no whole number of more than a few thousand digits
        return f"a {type(value).__name__} too long to print"
    except Exception:  # noqa: BLE001 - a caller's own object may do anything when asked for its words
        return f"a {type(value).__name__} that cannot be shown"
    return shown if len(shown) <= 200 else shown[:197] + "..."


def words_of(error: BaseException) -> str:
    """Type and message of an error, whoever's it is: one that fails to say its message is named by its type alone."""
    name = type(error).__name__
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - as above
        return name
    return f"{name}: {text}" if text else name


class CamshaftError(Exception):
    """Base of every error raised on purpose by this package."""


class UserError(CamshaftError, ValueError):
    """Input the caller can mend.

    ``field`` is the name the caller typed, ``value`` what it held, ``allowed`` the accepted
    range or set in words that go on from "expected", ``remedy`` the next thing to do.
    """

    def __init__(self, field: str, value: object, allowed: str, remedy: str = "") -> None:
        self.field = field
        self.value = value
        self.allowed = allowed
        self.remedy = remedy
        text = f"{field}={_shown(value)}: expected {allowed}"
        super().__init__(f"{text}. {remedy}" if remedy else text)


class CheckpointError(UserError):
    """A checkpoint is broken, incomplete, ambiguous or of an unsupported kind."""


class ModelNotFoundError(UserError):
    """A model name, folder or file resolves to nothing that can be read."""


class RequestTooLargeError(UserError):
    """A request that no amount of waiting would make fit; refused before it queues."""


class CapacityError(CamshaftError):
    """There is no room at the moment; waiting, preempting or retrying may help."""


class QueueFullError(CapacityError):
    """The bounded intake queue is full; retry later."""


class EngineError(CamshaftError):
    """An engine artifact does not match this process. ``found``, ``needed`` and ``remedy`` are words."""

    def __init__(self, what: str, *, found: object, needed: object, remedy: str) -> None:
        self.what = what
        self.found = found
        self.needed = needed
        self.remedy = remedy
        super().__init__(f"{what}: found {found}, needed {needed}. {remedy}")


class EngineVersionError(EngineError):
    """The engine was written by another engine format version."""


class EngineDeviceError(EngineError):
    """The engine was built for another device class or feature set."""


class EngineCorruptError(EngineError):
    """An engine file is truncated, edited or missing."""


class InternalError(CamshaftError):
    """A broken invariant of our own."""


class EngineDeadError(InternalError):
    """The executor stopped after a failure; every later request gets this error."""


class NonFiniteLogitsError(InternalError):
    """A request's logits held NaN or infinity; that request ends and no other is touched."""
