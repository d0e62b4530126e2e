"""What an architecture family declares, and how families are found.

Owns the ``ModelFamily`` contract and the scan of this folder; adding a family is adding a file. Reads no files:
the frontend brings the configuration and the tensors.
"""

from __future__ import annotations

import abc
import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from camshaft.config.model import ModelConfig
from camshaft.core.errors import CheckpointError
from camshaft.core.registry import Registry
from camshaft.ir.weight import Weight


class ModelFamily(abc.ABC):
    """One architecture family: its configuration map, its definition and its weight names.

    The class docstring of a family lists what differs from Llama.
    """

    architectures: ClassVar[tuple[str, ...]]
    """Names in ``config.json``'s ``architectures`` that this family serves."""
    embedding_tensor: ClassVar[str] = "model.embed_tokens.weight"
    """Checkpoint name of the token embedding, which a tied head shares."""
    head_tensor: ClassVar[str] = "lm_head.weight"
    """Checkpoint name of the head of an untied model."""

    @abc.abstractmethod
    def config_from_hf(self, data: Mapping[str, Any]) -> ModelConfig:
        """The model's shape from ``config.json``. CheckpointError for anything the definition does not compute."""

    @abc.abstractmethod
    def module(self, config: ModelConfig) -> nn.Module:
        """The definition: ``forward(token_ids[T], positions[T], logits_rows[L]) -> logits[L, V]``."""

    def weight_names(self, config: ModelConfig) -> dict[str, str]:
        """Parameter name of :meth:`module` → tensor name in a Hugging Face checkpoint; every parameter, once.

        By default the parameters bear the checkpoint's names already.
        """
        with torch.device("meta"):
            return {name: name for name, _ in self.module(config).named_parameters()}

    def adapt_weights(self, tensors: Mapping[str, Weight]) -> dict[str, Weight]:
        """A checkpoint's tensors under the names of :meth:`weight_names`, with the values the definition computes with.

        Read lazily. As they are unless a family renames, leaves out (and says so in the log) or folds some.
        """
        return dict(tensors)

    @abc.abstractmethod
    def tiny_config(self) -> ModelConfig:
        """A shape small enough for tests that still exercises every branch of the definition."""


MODELS: Registry[ModelFamily] = Registry("architecture")

_Family = TypeVar("_Family", bound=ModelFamily)


def register_family(family: type[_Family]) -> type[_Family]:
    """Class decorator: serve every architecture the family names."""
    instance = family()
    for architecture in family.architectures:
        MODELS.add(architecture, instance)
    return family


def load_models() -> Registry[ModelFamily]:
    """Import every model file of this folder and return all families. Idempotent."""
    package = importlib.import_module("camshaft.models")
    for module in sorted(info.name for info in pkgutil.iter_modules(package.__path__)):
        importlib.import_module(f"camshaft.models.{module}")
    return MODELS


def family_of(architecture: str) -> ModelFamily:
    """The family serving ``architecture``; CheckpointError naming the known ones otherwise."""
    models = load_models()
    if architecture not in models:
        raise CheckpointError("architectures", architecture, f"one of {', '.join(models.names())}",
                              "Use a model of a supported family, or add one (docs/adding/model.md)")
    return models.get(architecture)
