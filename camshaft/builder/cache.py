"""The on-disk engine cache: the second start of a model skips the whole build.

Owns the key, the lock that lets two processes share one build, and eviction. Imports nothing of the build side
until an engine has to be built. A cache that cannot be used costs a warning and a build in memory, never a failure.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import filelock
import torch

import camshaft
from camshaft.config.build import BuildConfig
from camshaft.core import device as devices
from camshaft.core import env
from camshaft.core.errors import EngineError, UserError
from camshaft.core.log import logger
from camshaft.engine import storage
from camshaft.engine.artifact import Engine, is_engine_folder
from camshaft.frontend.hub import resolve_model
from camshaft.kernels.native import find_compiler

DEFAULT_MAX_BYTES = 50 * 10**9
_BUILD_SOURCES = ("builder", "config", "engine", "frontend", "ir", "kernels", "layers", "models", "passes")
_CHECKPOINT_SUFFIXES = (".json", ".safetensors", ".jinja", ".model", ".gguf")
_HEADER_BYTES = 64 << 10
_PATIENCE_SECONDS = 5.0


def cached_engine(model: str | Path, cfg: BuildConfig | None = None, *, use_cache: bool = True,
                  show_progress: bool = False) -> Engine:
    """The engine of ``model``, from the cache when an equal one was built before.

    ``model`` is a folder, a ``.gguf`` file, a hub id, or an engine folder (loaded as it is; ``cfg`` must then be
    None). Raises what resolving and building raise.
    """
    path = resolve_model(model, show_progress=show_progress)
    if is_engine_folder(path):
        if cfg is not None:
            raise UserError("build", _asked(cfg), "no build settings for an engine that is already built",
                            "Leave them out, or give the checkpoint the engine was built from")
        return Engine.load(path, show_progress=show_progress)
    wanted = cfg or BuildConfig()
    if use_cache:
        try:
            cache = _Cache(env.cache_dir() / "engines")
            return cache.get(path, wanted, cache_key(path, wanted), show_progress)
        except OSError as error:
            # where it is the checkpoint that cannot be read, the build below says so
            logger.warning("the engine cache cannot be used (%s); building in memory", error)
    from camshaft.builder.build import build

    return build(path, wanted, show_progress=show_progress)


def _asked(cfg: BuildConfig) -> dict[str, Any]:
    """The fields of ``cfg`` that are not the defaults."""
    usual = BuildConfig().to_dict()
    return {name: value for name, value in cfg.to_dict().items() if value != usual[name]}


def cache_key(path: Path, cfg: BuildConfig) -> str:
    """SHA-256 in hex over everything an engine depends on: checkpoint files, configuration, device, sources, torch."""
    device = devices.probe(cfg.device)
    facts = {
        "camshaft": camshaft.__version__, "torch": torch.__version__.split(".")[:2],
        "build": {**cfg.to_dict(), "device": device.kind},
        "device": [device.kind, device.name, *device.features],
        "compiler": find_compiler() if device.kind == "cpu" else None,
        "checkpoint": [str(path.absolute()), *map(_file_facts, _checkpoint_files(path))],
        "sources": _sources_hash(),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _checkpoint_files(path: Path) -> list[Path]:
    """Every file whose change may change the model. More than the reader will use is harmless."""
    if path.is_file():
        return [path]
    return sorted(file for file in path.iterdir() if file.suffix in _CHECKPOINT_SUFFIXES and file.is_file())


def _file_facts(path: Path) -> list[Any]:
    stat = path.stat()
    with path.open("rb") as file:
        header = hashlib.sha256(file.read(_HEADER_BYTES)).hexdigest()
    return [path.name, stat.st_size, stat.st_mtime_ns, header]


def _sources_hash() -> str:
    package = Path(camshaft.__file__).parent
    digest = hashlib.sha256()
    for folder in _BUILD_SOURCES:
        for source in sorted((package / folder).rglob("*")):
            if source.suffix in (".py", ".c", ".h"):
                content = source.read_bytes()
                digest.update(f"{source.relative_to(package)}:{len(content)}:".encode() + content)
    return digest.hexdigest()


@dataclasses.dataclass(frozen=True, slots=True)
class _Cache:
    """One folder of engines: ``<key>/``, beside it ``<key>.lock`` (building) and ``<key>.use`` (shared by users)."""

    folder: Path

    def get(self, path: Path, cfg: BuildConfig, key: str, show_progress: bool) -> Engine:
        """Load entry ``key``, built first where it is missing or damaged. OSError where the disk cannot be used."""
        limit = env.read_int("CAMSHAFT_CACHE_MAX_BYTES") or DEFAULT_MAX_BYTES
        entry, built = self.folder / key, False
        engine = self._ready(entry, show_progress)
        if engine is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._locked(key, _PATIENCE_SECONDS), contextlib.ExitStack() as undo:
                use = _hold_shared(self._use_file(key))
                undo.callback(os.close, use)
                engine = self._load(entry, show_progress)
                built = engine is None
                if engine is None:
                    engine = self._build(entry, path, cfg, show_progress)
                undo.pop_all()
                weakref.finalize(engine, os.close, use)
        with contextlib.suppress(OSError):
            os.utime(entry)
        if built:
            storage.remove_leftovers(self.folder)
            self.evict(limit, keep=key)
        return engine

    def _ready(self, entry: Path, show_progress: bool) -> Engine | None:
        """The entry when it is there whole. Takes no lock and writes nothing it needs, so starts of one model run
        beside each other and from a read-only cache. None: something is amiss, look again under the lock."""
        if not entry.exists():
            return None
        with contextlib.ExitStack() as undo:
            use = self._hold_if_possible(entry.name)
            if use is not None:
                undo.callback(os.close, use)
                if not _is_file_at(use, self._use_file(entry.name)):  # the entry was evicted while we waited
                    return None
            try:
                engine = Engine.load(entry, show_progress=show_progress)
            except EngineError:
                return None
            undo.pop_all()
        if use is not None:
            weakref.finalize(engine, os.close, use)
        return engine

    def _hold_if_possible(self, key: str) -> int | None:
        """As ``_hold_shared``; None where the cache is read-only and has no such file: nobody evicts there."""
        for flags in (os.O_RDWR | os.O_CREAT, os.O_RDONLY):
            with contextlib.suppress(OSError):
                return _hold_shared(self._use_file(key), flags)
        return None

    def evict(self, limit: int, keep: str) -> None:
        """Remove entries, least recently used first, until ``limit`` bytes hold; never ``keep`` nor one in use."""
        entries = sorted((_last_use(entry), entry) for entry in self.folder.glob("[!.]*") if entry.is_dir())
        sizes = {entry: _folder_bytes(entry) for _, entry in entries}
        total = sum(sizes.values())
        for _, entry in entries:
            if total <= limit:
                return
            if entry.name != keep and self._remove_unused(entry):
                total -= sizes[entry]
        if total > limit:
            logger.info("the engine cache holds %d bytes, over its limit of %d: the rest is in use", total, limit)

    def _load(self, entry: Path, show_progress: bool) -> Engine | None:
        if not entry.exists():
            return None
        try:
            return Engine.load(entry, show_progress=show_progress)
        except EngineError as error:
            logger.warning("a cached engine is damaged and is built again: %s", error)
            shutil.rmtree(entry)
            return None

    def _build(self, entry: Path, path: Path, cfg: BuildConfig, show_progress: bool) -> Engine:
        from camshaft.builder.build import build

        return build(path, cfg, output=entry, show_progress=show_progress, allow_pointers=True)

    def _remove_unused(self, entry: Path) -> bool:
        try:
            with self._locked(entry.name), _exclusive(self._use_file(entry.name)) as unused:
                if unused:
                    shutil.rmtree(entry)
                    self._use_file(entry.name).unlink(missing_ok=True)
                return unused
        except OSError:
            # its lock is taken (a Timeout is an OSError), or it cannot be removed: then it stays
            return False

    @contextlib.contextmanager
    def _locked(self, key: str, patience: float | None = None) -> Iterator[None]:
        """Hold the lock of ``key``: at once or not at all (OSError); with ``patience`` until it is free, saying so."""
        path = self.folder / f"{key}.lock"
        path.touch()  # refused at once where it cannot be written; the lock alone would be tried for ever
        lock = filelock.FileLock(path)
        try:
            lock.acquire(timeout=patience or 0)
        except filelock.Timeout:
            if patience is None:
                raise
            logger.warning("another process is building this engine; waiting for it")
            lock.acquire()
        except RuntimeError as error:
            raise OSError(errno.ENOLCK, f"{self.folder} does not support locks ({error})") from error
        try:
            yield
        finally:
            lock.release()

    def _use_file(self, key: str) -> Path:
        return self.folder / f"{key}.use"


def _hold_shared(path: Path, flags: int = os.O_RDWR | os.O_CREAT) -> int:
    """A descriptor holding ``path`` as in use until it is closed; only marks by existing where there is no flock."""
    descriptor = os.open(path, flags, 0o644)
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_SH)
    except ImportError:
        return descriptor
    except BaseException:  # Ctrl-C while waiting included
        os.close(descriptor)
        raise
    return descriptor


def _is_file_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[bool]:
    """Whether nobody holds ``path``, kept so for the length of the block."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    except BlockingIOError:
        yield False
    except ImportError:
        yield True
    finally:
        os.close(descriptor)


def _last_use(entry: Path) -> float:
    try:
        return entry.stat().st_mtime
    except OSError:
        return 0.0


def _folder_bytes(folder: Path) -> int:
    total = 0
    for file in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += file.stat().st_size
    return total
