"""Kernel calls noted as they are made, to be made again without Python between them.

Owns what a call is to native code and how many become one. ``NotingLibrary`` stands where a loaded library does when
kernels are bound: every call then runs as ever and is told to a listener besides.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

Listener = Callable[["KernelCall"], None]
_ALIGNMENT = 16


@dataclasses.dataclass(frozen=True, slots=True)
class KernelCall:
    """One call: the C function's name and address, and the struct it takes."""

    name: str
    address: int
    arguments: bytes


class NotingLibrary(ctypes.CDLL):
    """A loaded library whose entries tell ``listener`` every call they make.

    They are ``library``'s own functions: one of ctypes' is in a cycle with itself and holds its library, which here
    would hold the listener, and with it all that was noted, for as long as no collection comes.
    """

    def __init__(self, library: ctypes.CDLL, listener: Listener) -> None:
        super().__init__(library._name, handle=library._handle)
        self._library = library
        self._listener = listener

    def __getitem__(self, name: str) -> Any:  # as its base has it
        run = self._library[name]
        run.argtypes, run.restype = (ctypes.c_char_p,), ctypes.c_int
        address, listener = ctypes.cast(run, ctypes.c_void_p).value or 0, self._listener

        def entry(arguments: bytes) -> int:
            status: int = run(arguments)
            listener(KernelCall(name, address, arguments))
            return status

        return entry


class CallList:
    """Kernel calls made in order by one call into ``library``; the interpreter's lock is free meanwhile.

    Their structs are copied; the memory these point at must outlive the list.
    """

    def __init__(self, library: ctypes.CDLL, calls: Sequence[KernelCall]) -> None:
        self._names = tuple(call.name for call in calls)
        starts, size = [], 0
        for call in calls:
            starts.append(size)
            size += -(-len(call.arguments) // _ALIGNMENT) * _ALIGNMENT
        self._structs = ctypes.create_string_buffer(size + _ALIGNMENT)
        base = ctypes.addressof(self._structs)
        base += -base % _ALIGNMENT
        for call, start in zip(calls, starts, strict=True):
            ctypes.memmove(base + start, call.arguments, len(call.arguments))
        pairs = [value for call, start in zip(calls, starts, strict=True) for value in (call.address, base + start)]
        self._calls = (ctypes.c_void_p * len(pairs))(*pairs)
        self._run = library["camshaft_make_calls"]
        self._run.argtypes, self._run.restype = (ctypes.c_void_p, ctypes.c_long), ctypes.c_long

    def __call__(self) -> None:
        """Make the calls. MemoryError where one had no memory for scratch space."""
        failed = self._run(self._calls, len(self._names))
        if failed:
            raise MemoryError(f"{self._names[failed - 1]}: no memory for scratch space")
