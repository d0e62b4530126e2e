"""Contract of ``linear``, in readable torch."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from camshaft.kernels.op import OpSpec, Sample, Tolerance, define_op


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [T, K] times weight [N, K] transposed, plus bias [N] -> [T, N] contiguous, in x's dtype."""
    return torch.nn.functional.linear(x, weight, bias)


def _fake(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


def _samples(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterable[Sample]:
    """(T, N, K): none, one, the sizes around register tiles and vectors, many; then strided rows and an outlier."""

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    for tokens, rows, depth in ((0, 8, 16), (1, 1, 1), (1, 64, 48), (2, 5, 17), (3, 7, 33), (4, 9, 64), (5, 4, 15),
                                (7, 13, 100), (8, 257, 31), (17, 66, 576), (65, 130, 70), (100, 12, 1536)):
        x, weight = draw(tokens, depth), draw(rows, depth)
        yield Sample(f"{tokens}x{rows}x{depth}", (x, weight, None))
        yield Sample(f"{tokens}x{rows}x{depth}_bias", (x, weight, draw(rows)))
    yield Sample("strided_rows", (draw(6, 80)[:, 16:64], draw(10, 48), None))
    yield Sample("every_second_row", (draw(6, 48)[::2], draw(20, 48)[::2], None))
    yield Sample("column_major", (draw(48, 6).t(), draw(48, 10).t(), None))
    loud = draw(9, 64)
    loud[4] *= 1000
    yield Sample("outlier_neighbour", (loud, draw(12, 64), None))


linear_op = define_op(OpSpec(
    name="linear", schema="(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    reference=linear, fake=_fake, samples=_samples, tolerance=Tolerance(float32=2e-6),
))
