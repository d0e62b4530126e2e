"""Kernel calls noted and made again: the same calls on what lies at the same addresses by then, in the same order."""

import ctypes

import pytest
import torch

from camshaft.kernels.capture import CallList, KernelCall, NotingLibrary
from camshaft.kernels.dispatch import bind
from camshaft.kernels.op import OPS, load_families

load_families("cpu")


@pytest.fixture
def compiled(library):
    if library is None:
        pytest.skip("needs a C compiler")
    return library


def test_noted_calls_run_at_once_and_again_on_new_values(compiled):
    noted = []
    linear = bind(OPS.get("linear"), "native", NotingLibrary(compiled, noted.append))
    silu_mul = bind(OPS.get("silu_mul"), "native", NotingLibrary(compiled, noted.append))
    x, weight = torch.randn(3, 24), torch.randn(40, 24)
    hidden = linear(x, weight, None)
    result = silu_mul(hidden)
    assert [call.name for call in noted] == ["camshaft_linear", "camshaft_gated"]
    plain = [bind(OPS.get(name), "native", compiled) for name in ("linear", "silu_mul")]
    assert torch.equal(result, plain[1](plain[0](x, weight, None)))
    x.copy_(torch.randn(3, 24))
    result.zero_()
    CallList(compiled, noted)()
    assert torch.equal(result, plain[1](plain[0](x, weight, None)))
    assert result.abs().sum() > 0


def test_a_list_stops_at_the_call_that_fails_and_names_it(compiled):
    made = []
    callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
    functions = [callback(lambda _, index=index: made.append(index) or int(index == 1)) for index in range(3)]
    calls = [KernelCall(f"call_{index}", ctypes.cast(function, ctypes.c_void_p).value, bytes(8))
             for index, function in enumerate(functions)]
    with pytest.raises(MemoryError, match=r"^call_1: no memory"):
        CallList(compiled, calls)()
    assert made == [0, 1]


def test_structs_of_any_size_reach_their_calls_whole(compiled):
    seen = []
    callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
    sizes = [1, 7, 16, 17, 33, 120]

    def reader(size):
        def read(pointer):
            assert pointer % 16 == 0
            seen.append(ctypes.string_at(pointer, size))
            return 0

        return callback(read)

    readers = [reader(size) for size in sizes]
    structs = [bytes((7 * i + size) % 251 for i in range(size)) for size in sizes]
    CallList(compiled, [KernelCall("read", ctypes.cast(each, ctypes.c_void_p).value, struct)
                        for each, struct in zip(readers, structs, strict=True)])()
    assert seen == structs


def test_no_calls_are_none(compiled):
    CallList(compiled, [])()
