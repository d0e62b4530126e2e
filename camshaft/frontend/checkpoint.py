"""What every kind of checkpoint looks like to the rest of the frontend, and how a path becomes one.

Owns the ``Checkpoint`` interface and the choice of reader by what lies at a path. Each reader is a file
of its own: ``hf_folder.py`` (config.json + safetensors) and ``gguf.py``.
"""

from __future__ import annotations

import abc
from pathlib import Path

from camshaft.config.model import GenerationDefaults, ModelConfig
from camshaft.core.errors import CheckpointError, ModelNotFoundError
from camshaft.ir.weight import Weight

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


class Checkpoint(abc.ABC):
    """An opened model: headers read, no tensor bytes touched."""

    path: Path
    """Folder or file it was opened from."""
    config: ModelConfig
    generation: GenerationDefaults
    tensors: dict[str, Weight]
    """Every tensor by its Hugging Face name, in checkpoint dtype (dequantised to float32 where it was quantised),
    in Hugging Face layout (GGUF q/k permutation undone)."""
    files: tuple[Path, ...]
    """Every file whose change changes the model: the engine cache keys on their names, sizes, times and headers."""

    @abc.abstractmethod
    def tokenizer_files(self) -> dict[str, bytes]:
        """Contents of ``TOKENIZER_FILES`` that exist or can be rebuilt; empty when the model has no tokenizer.

        ``tokenizer_config.json`` holds chat_template (string), bos_token, eos_token, add_bos_token, … as
        Hugging Face spells them.
        """


def open_checkpoint(path: Path) -> Checkpoint:
    """Open the model at ``path``: a ``.gguf`` file, or a folder with ``config.json``.

    Raises ModelNotFoundError when nothing is there and CheckpointError when it is no model, or cannot be read.
    """
    try:
        return _open(path)
    except OSError as error:
        raise CheckpointError("model", str(path), f"files that can be read ({error})",
                              "Check their permissions and the disk") from error


def _open(path: Path) -> Checkpoint:
    if path.is_file():
        if path.suffix == ".gguf":
            from camshaft.frontend.gguf import GgufCheckpoint

            return GgufCheckpoint(path)
        raise CheckpointError("model", str(path), "a folder with config.json, or a .gguf file",
                              "Give the folder that holds the file, or a GGUF file")
    if not path.is_dir():
        raise ModelNotFoundError("model", str(path), "an existing folder or .gguf file", "Check the path")
    if (path / "config.json").is_file():
        from camshaft.frontend.hf_folder import HfFolderCheckpoint

        return HfFolderCheckpoint(path)
    found = sorted(path.glob("*.gguf"))
    if found:
        raise CheckpointError("model", str(path), "a folder with config.json",
                              f"To use a GGUF model name the file itself, e.g. {found[0]}")
    raise CheckpointError("model", str(path), "a folder with config.json and safetensors, or a .gguf file",
                          "Check that the download is complete")
