"""Token embedding, and the head that may share its table."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Embedding(nn.Module):
    """A table ``weight[V, H]`` read by token id, or multiplied with as a tied head.

    ``scale`` multiplies what is read, not the head. It is rounded to the table's dtype first, as in training.
    """

    def __init__(self, vocab_size: int, hidden_size: int, *, scale: float | None = None) -> None:
        super().__init__()
        self.scales = None if scale is None else {
            dtype: float(torch.tensor(scale, dtype=dtype, device="cpu")) for dtype in _DTYPES}
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))

    def forward(self, token_ids_T: torch.Tensor) -> torch.Tensor:
        """Rows of the table: ``[T, H]``."""
        rows_TH = F.embedding(token_ids_T, self.weight)
        return rows_TH if self.scales is None else rows_TH * self.scales[rows_TH.dtype]

    def as_head(self, x_LH: torch.Tensor) -> torch.Tensor:
        """Logits ``[L, V]`` of a model whose head is this same table."""
        logits: torch.Tensor = torch.ops.camshaft.linear(x_LH, self.weight, None)
        return logits
