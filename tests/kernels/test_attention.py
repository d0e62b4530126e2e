"""Attention beyond parity: against other formulations, and the same bits however a step is cut."""

import math

import pytest
import torch
from torch.nn import functional

from camshaft.core.device import probe_cpu
from camshaft.kernels.attention.ref import attention, attention_op, paged_attention, paged_sample
from camshaft.kernels.dispatch import bind, choose, explain
from camshaft.kernels.op import OPS, OpCall, TensorInfo, load_families
from tests.kernels.implementations import as_function, implementations

load_families("cuda")  # the kernels of a GPU too, where there is Triton: their tests are marked so
PAGED = OPS.get("paged_attention")
CPU = torch.device("cpu")


@pytest.fixture(params=implementations(PAGED))
def paged(request, library):
    """Each implementation of paged_attention as a plain function."""
    return as_function(PAGED, request.param, library)


@pytest.fixture
def native(library):
    if library is None:
        pytest.skip("no C compiler")
    return bind(PAGED, "native", library)


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def cache_of(k, v, page_size):
    """Pool and page-table row that hold k, v [S, Hkv, D] as one request, in pages two apart, the rest NaN."""
    length, heads, dim = k.shape
    count = -(-length // page_size)
    pool = torch.full((2 * count + 1, 2, heads, page_size, dim), math.nan, dtype=k.dtype)
    table = torch.arange(count, dtype=torch.int32) * 2 + 1
    for position in range(length):
        page = int(table[position // page_size])
        pool[page, 0, :, position % page_size] = k[position]
        pool[page, 1, :, position % page_size] = v[position]
    return pool, table


def tensors(length, heads, kv_heads, dim, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(length, count, dim, generator=generator) for count in (heads, kv_heads, kv_heads))


@pytest.mark.parametrize(("window", "sinks"), [(None, 0), (5, 0), (5, 3), (70, 2)])
@pytest.mark.parametrize("dim", [16, 20])
def test_nan_in_a_chunk_reaches_no_query_that_does_not_see_it(paged, window, sinks, dim):
    q, k, v = tensors(90, 4, 2, dim)
    clean = attention(q, k, v, 0, 0.125, window, None, sinks)
    for spoilt in (40, 41, 66):
        values = v.clone()
        values[spoilt, 1, dim - 1] = math.nan
        found = run_rows(paged, [(q, 90)], *cache_of(k, values, 16), window=window, sinks=sinks)
        seen = torch.arange(90) >= spoilt
        if window is not None:
            seen &= torch.arange(90) < spoilt + window
        assert found[seen, 2:].isnan().any(-1).all()
        torch.testing.assert_close(found[~seen], clean[~seen], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found[:, :2], clean[:, :2], rtol=1e-4, atol=1e-5)


def run_rows(paged, rows, pool, table, *, scale=0.125, window=None, softcap=None, sinks=0):
    """One step over ``rows`` of (q, cached tokens after the step), all of the same cache."""
    starts = torch.tensor([0, *(len(q) for q, _ in rows)]).cumsum(0).int()
    lens = torch.tensor([length for _, length in rows], dtype=torch.int32)
    return paged(torch.cat([q for q, _ in rows]), pool, table.expand(len(rows), -1).contiguous(), starts, lens, scale,
                 window, softcap, sinks)


def test_attention_is_causal_softmax_attention():
    q, k, v = tensors(37, 6, 2, 16)
    wanted = functional.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (q, k, v)), is_causal=True, scale=0.3, enable_gqa=True)[0].transpose(0, 1)
    torch.testing.assert_close(attention(q, k, v, 0, 0.3, None, None, 0), wanted, rtol=1e-5, atol=1e-5)


def test_attention_survives_export_as_one_node():
    class Layer(torch.nn.Module):
        def forward(self, q, k, v):
            return attention_op(q, k, v, 3, 0.125, None, None, 0)

    arguments = tensors(5, 4, 2, 8)
    tokens = torch.export.Dim("tokens", min=1, max=64)
    exported = torch.export.export(Layer(), arguments, dynamic_shapes=({0: tokens},) * 3)
    calls = [node for node in exported.graph.nodes if node.op == "call_function"]
    assert [node.target for node in calls] == [torch.ops.camshaft.attention.default]
    assert calls[0].args[3] == 3


@pytest.mark.parametrize("sinks", [0, 1, 4, 5, 40])
@pytest.mark.parametrize("window", [1, 6, 7, 8, 100])
def test_a_window_of_w_sees_exactly_the_last_w_tokens_and_the_sinks(paged, window, sinks):
    """Values name their position, scores are all equal: the output is the mean of the visible positions."""
    length = 30
    k, v = torch.zeros(length, 1, 8), torch.arange(float(length)).reshape(-1, 1, 1).expand(-1, -1, 8).contiguous()
    pool, table = cache_of(k, v, page_size=4)
    out = run_rows(paged, [(torch.ones(length, 2, 8), length)], pool, table, window=window, sinks=sinks)
    visible = [[j for j in range(i + 1) if j > i - window or j < sinks] for i in range(length)]
    wanted = torch.tensor([sum(positions) / len(positions) for positions in visible])
    torch.testing.assert_close(out, wanted.reshape(-1, 1, 1).expand_as(out).contiguous())
    pure = attention(torch.ones(length, 2, 8), k, v, 0, 0.125, window, None, sinks)
    torch.testing.assert_close(pure, out)


@pytest.mark.parametrize(("window", "sinks"), [(5, 0), (9, 3), (70, 66)])
def test_pages_out_of_reach_are_not_read(paged, window, sinks):
    """They are NaN, or named as page 0, which is NaN."""
    length = 200
    q, k, v = tensors(length, 4, 2, 16)
    pool, table = cache_of(k, v, page_size=4)
    wanted = attention(q, k, v, 0, 0.125, window, None, sinks)
    for first in (199, 150, 80):
        seen = [column for column in range(len(table)) if column * 4 < sinks or column * 4 + 3 > first - window]
        rest = torch.tensor([column not in seen for column in range(len(table))])
        poisoned = pool.clone()
        poisoned[table[rest].long()] = math.nan
        for names in (table, table.masked_fill(rest, 0)):
            out = run_rows(paged, [(q[first:], length)], poisoned, names, window=window, sinks=sinks)
            torch.testing.assert_close(out, wanted[first:], rtol=2e-5, atol=2e-6)


def test_softcap_bounds_the_scores(paged):
    """Scores of 40 and 0 under a cap of 2 weigh e^(2 tanh 20) to 1."""
    k, v = torch.zeros(2, 1, 4), torch.tensor([[[1.0] * 4], [[0.0] * 4]])
    k[0] = 10.0
    pool, table = cache_of(k, v, page_size=16)
    out = run_rows(paged, [(torch.ones(1, 1, 4), 2)], pool, table, scale=1.0, softcap=2.0)
    weight = math.exp(2.0) / (math.exp(2.0) + 1.0)
    torch.testing.assert_close(out, torch.full((1, 1, 4), weight))


@pytest.mark.parametrize("page_size", [4, 16, 32, 64, 128])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 150])
def test_paged_equals_dense(paged, page_size, length):
    q, k, v = tensors(length, 6, 2, 64, seed=length)
    out = run_rows(paged, [(q, length)], *cache_of(k, v, page_size))
    torch.testing.assert_close(out, attention(q, k, v, 0, 0.125, None, None, 0), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(6, 2, 64), (1, 1, 20), (9, 3, 64), (70, 1, 16)])
@pytest.mark.parametrize(("window", "sinks"), [(None, 0), (50, 0), (50, 70)])
def test_native_bits_do_not_depend_on_the_chunk(native, heads, kv_heads, dim, window, sinks):
    length = 200
    q, k, v = tensors(length, heads, kv_heads, dim)
    pool, table = cache_of(k, v, 16)
    options = {"window": window, "sinks": sinks}
    whole = run_rows(native, [(q, length)], pool, table, **options)
    for chunk in (1, 7, 16, 129):
        steps = [run_rows(native, [(q[i:i + chunk], min(i + chunk, length))], pool, table, **options)
                 for i in range(0, length, chunk)]
        assert torch.equal(torch.cat(steps), whole), f"chunks of {chunk}"


def test_native_bits_do_not_depend_on_neighbours_or_threads(native, one_thread):
    q, k, v = tensors(300, 9, 3, 64)
    pool, table = cache_of(k, v, 32)
    rows = [(q[i:i + 1], i + 1) for i in range(0, 300, 7)]
    rows += [(q[100:140], 140), (q[:0], 5), (q[:33], 33)]
    alone = torch.cat([run_rows(native, [row], pool, table) for row in rows])
    together = run_rows(native, rows, pool, table)
    torch.set_num_threads(2)
    split = torch.cat([run_rows(native, [row], pool, table) for row in rows])
    assert torch.equal(alone, together)
    assert torch.equal(alone, split)
    assert torch.equal(alone, run_rows(native, rows, pool, table))


def test_native_sizes_of_scratch_follow_the_widest_row(native):
    """A decode row beside a long prefill, first and last: partials have one stride, rows of several widths."""
    args = paged_sample(torch.float32, CPU, torch.Generator().manual_seed(3), rows=((64, 1), (0, 3), (190, 2)),
                        heads=(2, 1))
    wanted = paged_attention(*args)
    torch.testing.assert_close(native(*args), wanted, rtol=2e-5, atol=2e-6)


def test_rows_without_queries_are_left_out(paged):
    generator = torch.Generator().manual_seed(1)
    args = paged_sample(torch.float32, CPU, generator, rows=((0, 0), (7, 2), (31, 0), (3, 1), (0, 0)))
    out = paged(*args)
    assert out.shape == (3, 4, 16)
    assert out.isfinite().all()
    torch.testing.assert_close(out, paged_attention(*args), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("side", [0, 1])
def test_nan_in_a_visible_token_comes_through(paged, side):
    q, k, v = tensors(70, 2, 1, 16)
    pool, table = cache_of(k, v, 16)
    pool[table[1], side, :, 3] = math.nan
    out = run_rows(paged, [(q[-1:], 70), (q[:8], 8)], pool, table)
    assert out[0].isnan().all()
    assert out[1:].isfinite().all()


@pytest.mark.parametrize(("scale", "error"), [(1e-4, 1e-6), (30.0, 2e-4)])
def test_flat_and_peaked_scores_stay_exact(paged, scale, error):
    """Scores reach 500 at scale 30, where one unit in the last place of a score is a weight's 3e-5."""
    q, k, v = tensors(90, 2, 2, 32)
    out = run_rows(paged, [(q, 90)], *cache_of(k, v, 16), scale=scale)
    wanted = attention(q.double(), k.double(), v.double(), 0, scale, None, None, 0).float()
    torch.testing.assert_close(out, wanted, rtol=0, atol=error)


@pytest.mark.parametrize("pool_dtype", [torch.bfloat16, torch.float16])
def test_float32_queries_read_a_half_precision_cache(paged, pool_dtype):
    q, k, v = tensors(45, 4, 2, 24)
    pool, table = cache_of(k.to(pool_dtype), v.to(pool_dtype), 8)
    out = run_rows(paged, [(q, 45)], pool, table)
    wanted = attention(q, k.to(pool_dtype).float(), v.to(pool_dtype).float(), 0, 0.125, None, None, 0)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, wanted, rtol=2e-5, atol=2e-6)


def test_queries_with_strided_lanes_are_accepted(paged):
    q, k, v = tensors(12, 2, 2, 16)
    pool, table = cache_of(k, v, 16)
    turned = q.transpose(1, 2).contiguous().transpose(1, 2)
    assert turned.stride(2) != 1
    torch.testing.assert_close(run_rows(paged, [(q, 12)], pool, table), paged(
        turned, pool, table[None], torch.tensor([0, 12], dtype=torch.int32), torch.tensor([12], dtype=torch.int32),
        0.125, None, None, 0))


def call(q_dtype=torch.float32, index_dtype=torch.int32):
    pool = TensorInfo(torch.float32, (None, 2, 3, 32, 64))
    return OpCall(probe_cpu(), (TensorInfo(q_dtype, (None, 9, 64)), pool, TensorInfo(index_dtype, (None, None)),
                                TensorInfo(torch.int32, (None,)), TensorInfo(torch.int32, (None,)),
                                0.125, None, None, 0))


def test_selection_prefers_native_and_falls_back_to_rows():
    assert choose(PAGED, call(), native=True).impl == "native"
    assert choose(PAGED, call(), native=False).impl == "rows"


@pytest.mark.parametrize(("options", "reason"), [
    ({"q_dtype": torch.float64}, "q is torch.float64"), ({"index_dtype": torch.int64}, "page_table is torch.int64"),
])
def test_native_says_why_it_cannot_serve(options, reason):
    verdict = next(v for v in explain(PAGED, call(**options), native=True) if v.impl == "native")
    assert not verdict.ok
    assert reason in verdict.reason
