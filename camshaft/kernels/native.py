"""Compiles every family's ``cpu*.c`` into one shared library and loads it.

Owns the compiler's discovery, its flags and the library's file name. Where there is no compiler, or it
fails, the answer is None with the reason logged: callers then use the torch implementations.

``-ffast-math`` is left out on purpose: NaN and infinity must stay detectable. Sums are written with
explicit lanes instead, which vectorises them and fixes their order. Threads are ``pool.c``'s, not OpenMP's: each
call says how many may work on it (``torch.get_num_threads()``), and waiting ones do not hold cores others need.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType

import torch

from camshaft.core import env
from camshaft.core.device import probe_cpu
from camshaft.core.errors import EngineCorruptError, EngineError, EngineVersionError
from camshaft.core.log import logger
from camshaft.kernels.op import OpCall, TensorInfo

FLAGS = ("-std=gnu11", "-O3", "-march=native", "-pthread", "-ffp-contract=fast", "-fno-math-errno",
         "-fno-trapping-math", "-fPIC", "-fvisibility=default")
X86_FLAGS = ("-mtune=haswell",)
"""Tuned for CPUs on which compilers do not split some chains of multiply-adds and leave others fused: whether a sum is
rounded once or twice must not depend on which loop it stands in."""
_STAMP = "camshaft_sources"
"""Name of the string inside a library that says which sources it was compiled from."""
KINDS = MappingProxyType({torch.float32: 0, torch.bfloat16: 1, torch.float16: 2})
"""The dtype codes of ``native.h``; kernels take only these."""
_COMPILERS = ("cc", "gcc", "clang")
_TIMEOUT_SECONDS = 300
_FOLDER = Path(__file__).parent


class _BuildError(Exception):
    """The compiler said no; the text is its reason."""


def source_files() -> tuple[Path, ...]:
    """Every family's ``cpu*.c``, sorted."""
    return tuple(sorted(_FOLDER.glob("*/cpu*.c")))


def _all_sources() -> tuple[Path, ...]:
    """The families' files, and those that serve all of them."""
    return (*source_files(), *sorted(_FOLDER.glob("*.c")))


def _flags() -> tuple[str, ...]:
    return FLAGS + (X86_FLAGS if platform.machine() in ("x86_64", "AMD64") else ())


def find_compiler() -> str | None:
    """The C compiler command: ``CAMSHAFT_CC`` ("none": do without) or ``CC``, else the first of cc, gcc and clang on
    PATH; None where there is none."""
    chosen = env.read("CAMSHAFT_CC") or env.read("CC")
    if chosen is None:
        return next((found for name in _COMPILERS if (found := shutil.which(name))), None)
    if chosen.strip().lower() == "none":
        return None
    words = shlex.split(chosen)
    if not words or shutil.which(words[0]) is None:
        logger.warning("the C compiler %s is not a command on PATH; CPU kernels fall back to torch", chosen)
        return None
    return chosen


def library_name(compiler: str) -> str:
    """File name of the library, by a hash of sources, flags, compiler and CPU: equal names, equal code."""
    return f"libcamshaft_cpu-{_fingerprint(compiler)}.so"


@functools.lru_cache(maxsize=4)
def _compiler_version(compiler: str) -> str:
    return _run([*shlex.split(compiler), "--version"])


def _fingerprint(compiler: str) -> str:
    digest = hashlib.sha256()
    cpu = probe_cpu()
    facts = (compiler, _compiler_version(compiler), *_flags(), cpu.name, *cpu.features, sources_hash())
    digest.update("\0".join(facts).encode())
    return digest.hexdigest()[:12]


def sources_hash() -> str:
    """SHA-256, in hex and cut to 16 digits, of every C source and header: libraries of equal hash take equal calls."""
    digest = hashlib.sha256()
    for path in (*_all_sources(), *sorted(_FOLDER.glob("**/*.h"))):
        digest.update(str(path.relative_to(_FOLDER)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _BuildError(f"{command[0]}: {error}") from error
    if done.returncode != 0:
        raise _BuildError(f"{shlex.join(command)} exited with {done.returncode}: {done.stderr.strip()[-2000:]}")
    return done.stdout


def same_kind(call: OpCall) -> str | None:
    """Capability check of kernels whose tensors all share one dtype of ``KINDS``; None where they do."""
    found = [argument.dtype for argument in call.args if isinstance(argument, TensorInfo)]
    if found[0] not in KINDS:
        return f"{found[0]} is not one of {', '.join(map(str, KINDS))}"
    if len(set(found)) > 1:
        return f"mixes {' and '.join(sorted(map(str, set(found))))}"
    return None


def compile_library(folder: Path) -> Path | None:
    """Compile all families into ``folder`` (made if missing) and return the library's path.

    An equal library already there is reused. None where there is no compiler, it fails, the folder
    cannot be written, or the result cannot be loaded; the reason is logged. Safe against other
    processes doing the same: the file appears by an atomic rename.
    """
    compiler = find_compiler()
    if compiler is None:
        logger.info("no C compiler: CPU kernels fall back to torch")
        return None
    try:
        target = folder / library_name(compiler)
        if not target.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            _compile(compiler, folder, target)
        load_library(target)
    except (OSError, _BuildError, EngineError) as error:
        logger.warning("CPU kernels fall back to torch: %s", error)
        return None
    return target


def _compile(compiler: str, folder: Path, target: Path) -> None:
    command = [*shlex.split(compiler), *_flags()]
    for left in folder.glob(".compile-*"):  # of a process that was killed: no living one takes so long
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > 2 * _TIMEOUT_SECONDS * len(source_files()):
                shutil.rmtree(left)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".compile-") as scratch:
        stamp = Path(scratch) / "stamp.c"
        stamp.write_text(f'const char {_STAMP}[] = "{sources_hash()}";\n', encoding="ascii")
        sources = (*_all_sources(), stamp)
        objects = [str(Path(scratch) / f"{source.parent.name}-{source.stem}.o") for source in sources]
        commands = [[*command, "-c", f"-I{_FOLDER}", str(source), "-o", made]
                    for source, made in zip(sources, objects, strict=True)]
        with ThreadPoolExecutor(max_workers=max(1, probe_cpu().num_threads)) as pool:
            list(pool.map(_run, commands))
        linked = Path(scratch) / target.name
        _run([*command, "-shared", *objects, "-o", str(linked), "-lm"])
        os.replace(linked, target)


def entry(library: ctypes.CDLL, name: str, layout: str) -> tuple[Callable[[bytes], int], Callable[..., bytes]]:
    """A kernel taking one C struct, as ``run(pack(*fields))``: 0.5 µs a call where a dozen ctypes arguments cost 2.

    ``layout`` is the struct in ``struct`` notation (P pointer, l long, f float, i int); a null pointer is 0. All that
    a kernel reads is in the struct or behind its pointers: an equal struct is an equal call (``capture.py``).
    """
    run = library[name]
    run.argtypes = (ctypes.c_char_p,)
    run.restype = ctypes.c_int
    return run, struct.Struct(layout).pack


def load_library(path: Path) -> ctypes.CDLL:
    """Load a compiled library and check that it was made from the C sources of this version.

    Raises EngineCorruptError where the file is missing, damaged or not executable here, EngineVersionError where
    its kernels may take other arguments than this version passes.
    """
    try:
        library = ctypes.CDLL(str(path.resolve()))
    except OSError as error:
        raise EngineCorruptError("native library", found=str(error), needed=f"a loadable {path.name}",
                                 remedy="Build the engine again on this machine") from error
    needed = sources_hash()
    try:
        found = (ctypes.c_char * len(needed)).in_dll(library, _STAMP).value.decode("ascii", "replace")
    except ValueError:
        found = "none"
    if found != needed:
        raise EngineVersionError("native library's sources", found=found, needed=needed,
                                 remedy="Build the engine again with this version of camshaft")
    return library
