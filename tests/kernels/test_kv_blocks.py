"""KV writes beyond parity: where exactly a token lands, and what stays untouched."""

import pytest
import torch

from camshaft.core.device import probe_cpu
from camshaft.kernels.dispatch import choose, explain
from camshaft.kernels.op import OPS, OpCall, TensorInfo, load_families
from tests.kernels.implementations import as_function, implementations

load_families("cuda")  # the kernels of a GPU too, where there is Triton: their tests are marked so
WRITE = OPS.get("kv_write")


@pytest.fixture(params=implementations(WRITE))
def kv_write(request, library):
    """Each implementation as a plain function."""
    return as_function(WRITE, request.param, library)


def keys_values(tokens, heads, dim, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(tokens, heads, dim, generator=generator) for _ in range(2))


def test_a_token_lands_in_its_page_and_offset_and_nowhere_else(kv_write):
    k, v = keys_values(2, 3, 8)
    pool = torch.full((5, 2, 3, 4, 8), 7.0)
    kv_write(k, v, pool, torch.tensor([2 * 4 + 3, 4 * 4]))
    for page, offset, token in ((2, 3, 0), (4, 0, 1)):
        assert torch.equal(pool[page, 0, :, offset], k[token])
        assert torch.equal(pool[page, 1, :, offset], v[token])
        pool[page, :, :, offset] = 7.0
    assert (pool == 7.0).all()


@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_are_cast_as_torch_casts(kv_write, dtype, pool_dtype):
    k, v = (100 * x.to(dtype) for x in keys_values(9, 2, 20))
    k[0, 0, :4] = torch.tensor([float("inf"), -0.0, float("nan"), 1e-7], dtype=torch.float32).to(dtype)
    pool = torch.zeros(3, 2, 2, 4, 20, dtype=pool_dtype)
    kv_write(k, v, pool, torch.arange(9))
    written = pool.permute(1, 0, 3, 2, 4).flatten(1, 2)
    assert torch.equal(written[0, :9].nan_to_num(nan=1.5), k.to(pool_dtype).nan_to_num(nan=1.5))
    assert torch.equal(written[0, :9].isnan(), k.isnan())
    assert torch.equal(written[1, :9], v.to(pool_dtype))


def test_enough_tokens_for_several_threads(kv_write):
    k, v = keys_values(600, 4, 64)
    pool = torch.zeros(40, 2, 4, 16, 64)
    slots = torch.randperm(640, generator=torch.Generator().manual_seed(1))[:600]
    kv_write(k, v, pool, slots)
    stored = pool.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, slots]
    assert torch.equal(stored[0], k)
    assert torch.equal(stored[1], v)


def test_views_of_a_merged_product_are_read_in_place(kv_write):
    merged = torch.randn(5, 9 * 16, generator=torch.Generator().manual_seed(2)).view(5, 9, 16)
    k, v = merged[:, 5:7], merged[:, 7:]
    pool = torch.zeros(2, 2, 2, 8, 16)
    kv_write(k, v, pool, torch.arange(5) + 8)
    assert torch.equal(pool[1, 0, :, :5], k.transpose(0, 1))
    assert torch.equal(pool[1, 1, :, :5], v.transpose(0, 1))


def test_padding_may_share_slots_of_the_trash_page(kv_write):
    k, v = keys_values(3, 1, 8)
    pool = torch.zeros(2, 2, 1, 4, 8)
    kv_write(k, v, pool, torch.tensor([4, 0, 0]))
    assert torch.equal(pool[1, 0, :, 0], k[0])
    assert (pool[1, :, :, 1:] == 0).all()


def test_strided_lanes_are_accepted(kv_write):
    k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in keys_values(3, 2, 16))
    pool = torch.zeros(1, 2, 2, 4, 16)
    kv_write(k, v, pool, torch.arange(3))
    assert torch.equal(pool[0, 0, :, :3], k.transpose(0, 1))


def call(k_dtype=torch.float32, v_dtype=torch.float32, slot_dtype=torch.int64):
    return OpCall(probe_cpu(), (TensorInfo(k_dtype, (None, 3, 64)), TensorInfo(v_dtype, (None, 3, 64)),
                                TensorInfo(torch.float32, (None, 2, 3, 32, 64)), TensorInfo(slot_dtype, (None,))))


def test_native_is_chosen_where_it_can_serve():
    assert choose(WRITE, call(), native=True).impl == "native"
    assert choose(WRITE, call(), native=False).impl == "ref"


@pytest.mark.parametrize(("options", "reason"), [
    ({"k_dtype": torch.float64, "v_dtype": torch.float64}, "k is torch.float64"),
    ({"v_dtype": torch.float16}, "v is torch.float16"), ({"slot_dtype": torch.int32}, "slot_mapping is torch.int32"),
])
def test_native_says_why_it_cannot_serve(options, reason):
    verdict = next(v for v in explain(WRITE, call(**options), native=True) if v.impl == "native")
    assert not verdict.ok
    assert reason in verdict.reason
