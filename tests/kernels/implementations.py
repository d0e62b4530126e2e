"""Implementations as fixture parameters and as plain functions of tensors in this process's memory."""

import pytest
import torch

from camshaft.kernels.dispatch import bind


def implementations(op):
    """Names of the op's implementations, those of a GPU marked as such."""
    return [pytest.param(name, marks=pytest.mark.gpu) if op.impls[name].device == "cuda" else name
            for name in sorted(op.impls)]


def as_function(op, name, library):
    """The implementation; one of a GPU gets its arguments there, and what it writes and returns comes back."""
    if op.impls[name].native and library is None:
        pytest.skip("no C compiler")
    function = bind(op, name, library)
    if op.impls[name].device != "cuda":
        return function

    def on_card(*args):
        moved = [argument.cuda() if isinstance(argument, torch.Tensor) else argument for argument in args]
        results = function(*moved)
        for written in op.spec.mutates:
            place = op.arg_names.index(written)
            args[place].copy_(moved[place])
        if isinstance(results, tuple):
            return tuple(result.cpu() for result in results)
        return None if results is None else results.cpu()

    return on_card
