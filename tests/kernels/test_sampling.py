"""Sampling and log-probabilities beyond parity: distributions, cuts, extremes, independence of the batch, and the
uniform numbers."""

import itertools
import math

import numpy as np
import pytest
import torch

from camshaft.core.device import probe_cpu
from camshaft.kernels.dispatch import bind, choose, explain
from camshaft.kernels.op import OPS, OpCall, TensorInfo, load_families
from camshaft.kernels.sampling.philox import philox4x32, uniforms
from tests.kernels.implementations import as_function, implementations

load_families("cuda")  # the kernels of a GPU too, where there is Triton: their tests are marked so
SAMPLE, LOGPROBS = OPS.get("sample"), OPS.get("logprobs")


@pytest.fixture(params=implementations(SAMPLE))
def sample(request, library):
    """Each implementation, called with parameters that repeat over the rows of the logits."""
    function = as_function(SAMPLE, request.param, library)

    def run(logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, uniform=0.0):
        rows = len(logits)

        def column(value, dtype=torch.float32):
            return torch.as_tensor(value, dtype=dtype).expand(rows).contiguous()

        return function(logits, column(temperature), column(top_k, torch.int32), column(top_p), column(min_p),
                        column(uniform))

    return run


def grid(count):
    """Uniform numbers that cover [0, 1) evenly."""
    return (torch.arange(count) + 0.5) / count


def frequencies(sample, logits, **parameters):
    """Share of each token over an even grid of 4000 uniform numbers."""
    ids, finite = sample(logits.expand(4000, -1), uniform=grid(4000), **parameters)
    assert finite.all()
    return torch.bincount(ids, minlength=logits.shape[-1]) / 4000


def test_frequencies_are_the_softmax(sample):
    logits = torch.randn(23, generator=torch.Generator().manual_seed(0))
    for temperature in (0.5, 1.0, 3.0):
        found = frequencies(sample, logits, temperature=temperature)
        torch.testing.assert_close(found, torch.softmax(logits / temperature, 0), rtol=0, atol=6e-4)


@pytest.mark.parametrize(("parameters", "kept"), [
    ({"top_k": 2}, 2), ({"top_k": 1}, 1), ({"top_k": 99}, 5), ({"top_p": 0.5}, 1), ({"top_p": 0.65}, 2),
    ({"top_p": 0.95}, 4), ({"top_p": 1e-9}, 1), ({"min_p": 0.5}, 2), ({"min_p": 0.3}, 3), ({"min_p": 1.0}, 1),
    ({"top_k": 3, "top_p": 0.95}, 3), ({"top_k": 2, "top_p": 0.64}, 1), ({"top_k": 4, "min_p": 0.3}, 3),
    ({"top_p": 0.65, "min_p": 0.9}, 1),
])
def test_cuts_keep_the_likeliest_and_renormalise(sample, parameters, kept):
    """Probabilities 0.5, 0.26, 0.16, 0.05, 0.03 of tokens 3, 1, 4, 0, 2."""
    order, mass = torch.tensor([3, 1, 4, 0, 2]), torch.tensor([0.5, 0.26, 0.16, 0.05, 0.03])
    logits, wanted = torch.empty(5), torch.zeros(5)
    logits[order] = mass.log()
    wanted[order[:kept]] = mass[:kept] / mass[:kept].sum()
    torch.testing.assert_close(frequencies(sample, logits, **parameters), wanted, rtol=0, atol=6e-4)


def test_tokens_come_in_descending_order_then_by_id(sample):
    logits = torch.tensor([0.0, 1.0, 0.0, 1.0, -2.0])
    ids, _ = sample(logits.expand(500, -1), uniform=grid(500))
    assert ids.unique_consecutive().tolist() == [1, 3, 0, 2, 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_takes_the_lowest_id_of_the_largest(sample, dtype):
    logits = torch.zeros(40, 1000, dtype=dtype)
    for row in range(40):
        logits[row, [row * 25, row * 25 + 7, 999]] = 2.5
    ids, finite = sample(logits, temperature=0.0, uniform=0.999)
    assert ids.tolist() == [row * 25 for row in range(40)]
    assert finite.all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [1e-6, 0.01, 1.0, 100.0])
def test_b33_legal_extremes_yield_a_token_of_the_vocabulary(sample, temperature, dtype):
    logits = (20 * torch.randn(16, 100, generator=torch.Generator().manual_seed(7))).to(dtype)
    for top_p, top_k in itertools.product((1e-30, 1e-6, 0.5, 1.0), (0, 1, 99, 100, 101, 2**31 - 1)):
        ids, finite = sample(logits, temperature=temperature, top_k=top_k, top_p=top_p, uniform=grid(16))
        assert finite.all()
        assert ((ids >= 0) & (ids < 100)).all()
        if temperature == 1e-6 or top_k == 1 or top_p <= 1e-6:
            assert (logits.gather(1, ids[:, None]) == logits.amax(1, keepdim=True)).all()
        if top_k >= 100:
            off, _ = sample(logits, temperature=temperature, top_p=top_p, uniform=grid(16))
            assert torch.equal(ids, off)


def test_a_tiny_temperature_is_greedy_and_a_huge_one_uniform(sample):
    logits = 5 * torch.randn(64, 100, generator=torch.Generator().manual_seed(1))
    cold, finite = sample(logits, temperature=1e-6, uniform=0.9999)
    assert torch.equal(cold, logits.argmax(1))
    assert finite.all()
    hot = frequencies(sample, torch.linspace(-1, 1, 50), temperature=100.0)
    torch.testing.assert_close(hot, torch.full((50,), 0.02), rtol=0, atol=6e-4)


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 0.5, 100.0])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e4, 1e37])
def test_extreme_logits_yield_a_valid_token(sample, temperature, scale):
    logits = scale * torch.randn(30, 77, generator=torch.Generator().manual_seed(2))
    logits[:, 40:50] = -math.inf
    ids, finite = sample(logits, temperature=temperature, top_p=0.9, min_p=0.01, uniform=grid(30))
    assert finite.all()
    assert ((ids >= 0) & (ids < 77)).all()
    assert not ((ids >= 40) & (ids < 50)).any()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_masked_tokens_are_never_picked(sample, temperature):
    logits = torch.full((50, 300), -math.inf)
    logits[:, 17], logits[:, 203] = -5.0, -5.5
    ids, finite = sample(logits, temperature=temperature, uniform=grid(50))
    assert finite.all()
    assert set(ids.tolist()) == ({17} if temperature == 0 else {17, 203})


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("where", [0, 15, 16, 99])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_broken_row_is_reported_and_harms_no_other(sample, bad, where, temperature):
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(3))
    wanted, _ = sample(logits, temperature=temperature, uniform=0.4)
    logits[1, where] = bad
    logits[1, (where + 1) % 100] = -math.inf
    ids, finite = sample(logits, temperature=temperature, uniform=0.4)
    assert finite.tolist() == [True, False, True]
    assert ids.tolist() == [wanted[0].item(), 0, wanted[2].item()]


def test_a_row_with_everything_masked_is_reported(sample):
    _, finite = sample(torch.full((2, 33), -math.inf), temperature=torch.tensor([0.0, 1.0]))
    assert finite.tolist() == [False, False]


def test_a_row_does_not_depend_on_its_batch(sample):
    generator = torch.Generator().manual_seed(4)
    logits = 4 * torch.randn(12, 3000, generator=generator)
    parameters = {"temperature": torch.tensor([0.0, 1.0, 0.3, 2.0] * 3), "top_k": torch.tensor([0, 40, 5] * 4),
                  "top_p": torch.tensor([1.0, 0.9] * 6), "min_p": torch.tensor([0.0, 0.0, 0.05] * 4),
                  "uniform": torch.rand(12, generator=generator)}
    together, _ = sample(logits, **parameters)
    alone = [sample(logits[row:row + 1], **{name: value[row] for name, value in parameters.items()})[0]
             for row in range(12)]
    assert torch.equal(together, torch.cat(alone))


def test_native_agrees_with_the_reference_over_a_real_vocabulary(library):
    if library is None:
        pytest.skip("no C compiler")
    generator = torch.Generator().manual_seed(5)
    logits = 3 * torch.randn(40, 49152, generator=generator)
    logits[20:] = logits[20:].round()
    arguments = (logits, torch.tensor([1.0, 0.2, 1.5, 100.0, 0.6] * 8),
                 torch.tensor([0, 50, 0, 1000, 0] * 8, dtype=torch.int32), torch.tensor([1.0, 0.9, 0.99, 0.5] * 10),
                 torch.tensor([0.0, 0.0, 0.02, 0.3] * 10), torch.rand(40, generator=generator))
    found, wanted = bind(SAMPLE, "native", library)(*arguments), SAMPLE.spec.reference(*arguments)
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])
    assert len(set(found[0].tolist())) > 20


@pytest.mark.parametrize(("counter", "key", "words"), [
    ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
     (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
])
def test_philox_gives_the_published_answers(counter, key, words):
    found = philox4x32(np.array([counter], dtype=np.uint32), np.array([key], dtype=np.uint32))
    assert tuple(found[0].tolist()) == words


def test_uniforms_depend_on_seed_choice_and_index_alone():
    seeds = np.array([0, 1, 2**32, 2**64 - 1, 0, 0], dtype=np.uint64)
    choices, indices = np.array([0, 0, 0, 0, 1, 0]), np.array([0, 0, 0, 0, 0, 1])
    together = uniforms(seeds, choices, indices)
    alone = np.concatenate([uniforms(seeds[i:i + 1], choices[i:i + 1], indices[i:i + 1]) for i in range(6)])
    assert together.dtype == np.float32
    assert np.array_equal(together, alone)
    assert len(set(together.tolist())) == 6
    assert together[0] == np.float32((0x6627E8D5 >> 8) * 2.0**-24)


def test_uniforms_fill_the_unit_interval_evenly():
    count = 20000
    drawn = uniforms(np.full(count, 7, dtype=np.uint64), np.zeros(count, dtype=np.int32), np.arange(count))
    assert 0 <= drawn.min() < 1e-3
    assert 0.999 < drawn.max() < 1
    shares = np.histogram(drawn, bins=20, range=(0, 1))[0] / count
    assert np.abs(shares - 0.05).max() < 0.006
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.03


def call(logits_dtype=torch.float32, top_k_dtype=torch.int32):
    row = TensorInfo(torch.float32, (None,))
    return OpCall(probe_cpu(), (TensorInfo(logits_dtype, (None, 49152)), row, TensorInfo(top_k_dtype, (None,)), row,
                                row, row))


def test_native_is_chosen_where_it_can_serve():
    assert choose(SAMPLE, call(), native=True).impl == "native"
    assert choose(SAMPLE, call(), native=False).impl == "greedy_first"


@pytest.mark.parametrize(("options", "reason"), [
    ({"logits_dtype": torch.float64}, "logits are torch.float64"),
    ({"top_k_dtype": torch.int64}, "top_k is torch.int64"),
])
def test_native_says_why_it_cannot_serve(options, reason):
    verdict = next(v for v in explain(SAMPLE, call(**options), native=True) if v.impl == "native")
    assert not verdict.ok
    assert reason in verdict.reason


@pytest.fixture(params=implementations(LOGPROBS))
def logprobs(request, library):
    """Each implementation of ``logprobs``."""
    return as_function(LOGPROBS, request.param, library)


@pytest.mark.parametrize("count", [1, 15, 16, 17, 1000, 49152])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logprobs_are_torchs_log_softmax(logprobs, dtype, count):
    generator = torch.Generator().manual_seed(6)
    logits = (5 * torch.randn(3, count, generator=generator)).to(dtype)
    targets = torch.randint(count, (3,), generator=generator)
    wanted = torch.log_softmax(logits.double(), 1)
    found, ranks, top_ids, top, finite = logprobs(logits, targets, min(count, 12))
    torch.testing.assert_close(found, wanted.gather(1, targets[:, None])[:, 0].float(), rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(top, wanted.gather(1, top_ids).float(), rtol=1e-6, atol=2e-6)
    order = logits.float().sort(dim=1, descending=True, stable=True).indices
    assert torch.equal(top_ids, order[:, :12])
    assert torch.equal(order.gather(1, ranks[:, None] - 1)[:, 0], targets)
    assert finite.all()


def test_ties_are_ranked_by_id_and_signed_zeros_tie(logprobs):
    logits = torch.tensor([[0.0, -0.0, 1.0, 0.0, -0.0, 1.0]] * 6)
    _, ranks, top_ids, _, _ = logprobs(logits, torch.arange(6), 6)
    assert ranks.tolist() == [3, 4, 1, 5, 6, 2]
    assert top_ids.tolist() == [[2, 5, 0, 1, 3, 4]] * 6


def test_masked_tokens_have_no_likelihood_and_come_last(logprobs):
    logits = torch.full((2, 40), -math.inf)
    logits[:, 31], logits[:, 33] = -5.0, -5.0
    found, ranks, top_ids, top, finite = logprobs(logits, torch.tensor([33, 0]), 4)
    assert finite.all()
    assert found[0].item() == pytest.approx(math.log(0.5))
    assert found[1].item() == -math.inf
    assert ranks.tolist() == [2, 3]
    assert top_ids.tolist() == [[31, 33, 0, 1]] * 2
    assert top[:, 2:].tolist() == [[-math.inf] * 2] * 2


def test_b36_a_broken_row_of_logprobs_is_reported_alone_and_holds_numbers(logprobs):
    logits = torch.randn(4, 90, generator=torch.Generator().manual_seed(8))
    targets = torch.tensor([3, 4, 5, 6])
    wanted = logprobs(logits, targets, 5)
    logits[1, 80], logits[2] = math.nan, -math.inf
    found = logprobs(logits, targets, 5)
    assert found[4].tolist() == [True, False, False, True]
    for mine, before in zip(found, wanted, strict=True):
        assert torch.equal(mine[[0, 3]], before[[0, 3]])
        assert not mine[1:3].any()


def test_native_logprobs_are_chosen_where_they_can_serve_and_say_why_not():
    def asked(logits_dtype, targets_dtype):
        return OpCall(probe_cpu(), (TensorInfo(logits_dtype, (None, 64)), TensorInfo(targets_dtype, (None,)), 1))

    assert choose(LOGPROBS, asked(torch.bfloat16, torch.int64), native=True).impl == "native"
    assert choose(LOGPROBS, asked(torch.bfloat16, torch.int64), native=False).impl == "top_only"
    for dtypes, reason in (((torch.float64, torch.int64), "logits are torch.float64"),
                           ((torch.float32, torch.int32), "targets are torch.int32")):
        verdict = next(v for v in explain(LOGPROBS, asked(*dtypes), native=True) if v.impl == "native")
        assert not verdict.ok
        assert reason in verdict.reason
