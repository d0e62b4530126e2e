"""Token embedding, and the head that may share its table."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class Embedding(nn.Module):
    """A table ``weight[V, H]`` read by token id, or multiplied with as a tied head."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))

    def forward(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """Rows of the table: ``[T, H]``."""
        return F.embedding(token_ids_T, self.weight)

    def as_head(self, x_LH: torch.Tensor) -> torch.Tensor:
        """Logits ``[L, V]`` of a model whose head is this same table."""
        logits: torch.Tensor = torch.ops.camshaft.linear(x_LH, self.weight, None)
        return logits
