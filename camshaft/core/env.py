"""The one reader of environment variables. Owns their names; values are read at the call, never at import."""

from __future__ import annotations

import os
from pathlib import Path
from types import MappingProxyType

from camshaft.core.errors import UserError

VARIABLES = MappingProxyType({
    "CAMSHAFT_CACHE_DIR": "Folder of cached engines and downloads; default: ~/.cache/camshaft.",
    "CAMSHAFT_CACHE_MAX_BYTES": "Most bytes of cached engines kept on disk; default: 50 GB.",
    "CAMSHAFT_CC": "C compiler of the CPU kernels; none: do without, torch does the work.",
    "CAMSHAFT_LOG": "Log level: debug, info, warning or error; default: warning.",
    "CAMSHAFT_NUM_THREADS": "CPU threads of kernels; default: the cores this process may use.",
    "CC": "C compiler, where CAMSHAFT_CC names none; default: cc, gcc or clang, whichever is found.",
    "HF_HUB_OFFLINE": "1: never ask the Hugging Face hub, use what is cached.",
    "HF_TOKEN": "Access token of the Hugging Face hub.",
    "XDG_CACHE_HOME": "Folder of all caches; CAMSHAFT_CACHE_DIR goes before it.",
})
"""Every variable the package reads, with its documentation."""


def read(name: str) -> str | None:
    """The value of a known variable; None when unset or empty."""
    if name not in VARIABLES:
        raise KeyError(name)
    return os.environ.get(name) or None


def read_int(name: str, *, highest: int = 2**63 - 1) -> int | None:
    """The value of a known variable as a whole number from 1 to ``highest``; None when unset."""
    text = read(name)
    if text is None:
        return None
    # Python refuses to convert texts of thousands of digits, with an error of its own
    if not text.isdecimal() or len(text) > 20 or not 0 < int(text) <= highest:
        raise UserError(name, text, f"a whole number from 1 to {highest}", "Mend the environment variable")
    return int(text)


def cache_dir() -> Path:
    """Folder of cached engines and downloads. It may not exist or not be writable.

    Where the user has no home at all it is a path that can never be made, so that whoever tries to write there hears
    so: a place in the temporary folder could be filled by others.
    """
    chosen = read("CAMSHAFT_CACHE_DIR")
    try:
        if chosen:
            return Path(chosen).expanduser()
        home = read("XDG_CACHE_HOME")
        return (Path(home) if home else Path("~/.cache").expanduser()) / "camshaft"
    except RuntimeError as error:
        if chosen:
            raise UserError("CAMSHAFT_CACHE_DIR", chosen, f"a folder ({error})", "Give its full path") from error
        return Path(os.devnull) / "camshaft"


def for_child(**changes: str) -> dict[str, str]:
    """The environment of a program that is started, with ``changes`` on top."""
    return {**os.environ, **changes}
