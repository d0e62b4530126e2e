"""The whole way from an opened checkpoint to a Program: settle the head, bind the weights, export the definition."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from camshaft.config.model import ModelConfig
from camshaft.frontend.checkpoint import Checkpoint
from camshaft.frontend.export import export_program
from camshaft.frontend.weights import bind_weights, settle_head
from camshaft.ir.program import Program
from camshaft.ir.weight import Weight
from camshaft.models.registry import ModelFamily, family_of


def program_from_checkpoint(checkpoint: Checkpoint, dtype: torch.dtype, max_seq_len: int | None = None) -> Program:
    """The Program of ``checkpoint`` computing in ``dtype``. CheckpointError where tensors and configuration differ.

    ``program.config`` says what the tensors say: its ``tie_word_embeddings`` may differ from the checkpoint's.
    ``max_seq_len`` is the longest sequence rotary tables are made for; None: the model's ``default_sequence``.
    """
    family = family_of(checkpoint.config.architecture)
    config, tensors = settle_head(family, checkpoint.config, family.adapt_weights(checkpoint.tensors))
    return _program(family, config, tensors, dtype, max_seq_len)


def program_from_headers(checkpoint: Checkpoint, dtype: torch.dtype, max_seq_len: int | None = None) -> Program:
    """The same without reading a tensor, for sizes only: a head that the configuration ties counts as shared."""
    family, config = family_of(checkpoint.config.architecture), checkpoint.config
    tensors = family.adapt_weights(checkpoint.tensors)
    if config.tie_word_embeddings and family.embedding_tensor in tensors:
        tensors.pop(family.head_tensor, None)
    config, tensors = settle_head(family, config, tensors)
    return _program(family, config, tensors, dtype, max_seq_len)


def _program(family: ModelFamily, config: ModelConfig, tensors: Mapping[str, Weight], dtype: torch.dtype,
             max_seq_len: int | None) -> Program:
    config = config.at_length(config.default_sequence if max_seq_len is None else max_seq_len)
    return export_program(config, bind_weights(family, config, tensors), dtype)
