"""Binding: every parameter of a definition gets exactly one tensor of the checkpoint, and no tensor is left over.

Owns shape checks, leftovers and the tied-head decision. Reads tensor bytes only where a head must be compared.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Mapping

import torch

from camshaft.config.model import ModelConfig
from camshaft.core.errors import CheckpointError
from camshaft.core.log import logger
from camshaft.ir.weight import Weight
from camshaft.models.registry import ModelFamily

IGNORABLE = ("*.rotary_emb.inv_freq",)
"""Tensors old exporters wrote that carry nothing: they follow from the configuration."""

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def settle_head(family: ModelFamily, config: ModelConfig,
                tensors: Mapping[str, Weight]) -> tuple[ModelConfig, dict[str, Weight]]:
    """Decide whether the head shares the embedding, from the configuration *and* the tensors.

    ============  =============  ==================================================================
    config        head tensor    outcome
    ============  =============  ==================================================================
    tied          absent         shared
    tied          equal          shared; the copy is dropped from the tensors
    tied          different      separate, with a warning that gives both norms
    not tied      present        separate
    not tied      absent         CheckpointError: sharing would be a guess, leaving it out is noise
    ============  =============  ==================================================================
    """
    head, table = tensors.get(family.head_tensor), tensors.get(family.embedding_tensor)
    if head is None:
        if not config.tie_word_embeddings:
            raise CheckpointError(family.head_tensor, "missing", "a tensor of the checkpoint, since config.json does "
                                  "not tie the head to the embedding",
                                  'Download the model again, or set "tie_word_embeddings": true if it is tied')
        return config, dict(tensors)
    if not config.tie_word_embeddings or table is None:
        return config, dict(tensors)
    for name, weight in ((family.head_tensor, head), (family.embedding_tensor, table)):
        _check_dtype(name, weight)
    left, right = head.read(), table.read()
    if _equal(left, right):
        return config, {name: weight for name, weight in tensors.items() if name != family.head_tensor}
    logger.warning("config.json ties %s to %s, but the checkpoint holds both and they differ (norms %.6g and %.6g): "
                   "using the separate head", family.head_tensor, family.embedding_tensor,
                   float(torch.linalg.vector_norm(left, dtype=torch.float32)),
                   float(torch.linalg.vector_norm(right, dtype=torch.float32)))
    return dataclasses.replace(config, tie_word_embeddings=False), dict(tensors)


def bind_weights(family: ModelFamily, config: ModelConfig, tensors: Mapping[str, Weight]) -> dict[str, Weight]:
    """Parameter name → weight, for every parameter of the family's definition of ``config``.

    CheckpointError naming the tensors that are missing, of another shape or type, or left over. Call
    :func:`settle_head` first: a head that ``config`` says is shared counts as left over.
    """
    if config.num_layers > len(tensors):  # before a definition of any number of layers is made
        raise CheckpointError("num_layers", config.num_layers, f"no more layers than the checkpoint's {len(tensors)} "
                              "tensors", "config.json and the weights belong to different models")
    names = family.weight_names(config)
    shapes = _parameter_shapes(family, config)
    missing = sorted(name for name in names.values() if name not in tensors)
    if missing:
        raise CheckpointError("tensors", _some(missing), "to be present in the checkpoint; they are missing",
                              "Download the model again")
    left_over = sorted(name for name in tensors.keys() - set(names.values())
                       if not any(fnmatch.fnmatchcase(name, pattern) for pattern in IGNORABLE))
    if left_over:
        raise CheckpointError("tensors", _some(left_over), f"to be known to the {config.architecture} definition",
                              "The checkpoint holds weights this definition would not use, so its output would differ")
    bound = {}
    for parameter, name in names.items():
        weight = tensors[name]
        if weight.shape != shapes[parameter]:
            raise CheckpointError(name, list(weight.shape), f"shape {list(shapes[parameter])}, from config.json",
                                  "config.json and the weights belong to different models")
        _check_dtype(name, weight)
        bound[parameter] = weight
    return bound


def _check_dtype(name: str, weight: Weight) -> None:
    if weight.dtype not in _FLOATS:
        raise CheckpointError(name, str(weight.dtype), "float32, bfloat16, float16 or float64",
                              "Quantised tensors of this kind are not supported; use the original model")


def _equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.dtype != right.dtype:
        left, right = left.float(), right.float()
    return left.shape == right.shape and torch.equal(left, right)


def _parameter_shapes(family: ModelFamily, config: ModelConfig) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {name: tuple(parameter.shape) for name, parameter in family.module(config).named_parameters()}


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
