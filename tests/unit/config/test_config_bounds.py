"""Bounds of configuration and sampling parameters: exact at their edges, and a UserError whatever is given."""

import numpy as np
import pytest

from camshaft.config.build import BuildConfig
from camshaft.config.doc import INT32_MAX
from camshaft.config.runtime import KvCacheConfig, SchedulerConfig
from camshaft.config.sampling import SamplingParams
from camshaft.core.errors import UserError

HUGE = 10**5000
"""A whole number that neither becomes a float nor prints."""


@pytest.mark.parametrize("fields", [
    {"seed": 2**64 - 1}, {"seed": 0}, {"top_k": INT32_MAX}, {"top_p": 1}, {"min_p": 1.0}, {"temperature": 100},
    {"n": 1}, {"embedding_bias": None}])
def test_sampling_parameters_at_their_bounds_are_accepted(fields):
    SamplingParams(**fields)


@pytest.mark.parametrize("fields", [
    {"seed": 2**64}, {"seed": HUGE}, {"seed": True}, {"top_k": INT32_MAX + 1}, {"top_k": -1}, {"top_k": 1.0},
    {"top_p": 0.0}, {"top_p": float("nan")}, {"top_p": True}, {"min_p": 1.01}, {"temperature": HUGE},
    {"temperature": -0.1}, {"temperature": "1"}, {"max_tokens": 0}, {"min_tokens": 33}, {"stop": ""}, {"stop": [1]},
    {"stop": "x", "detokenize": False}, {"stop_token_ids": [-1]}, {"stop_token_ids": 5}, {"end_id": -1},
    {"ignore_eos": 1}, {"temprature": 1.0}, {"n": 2}, {"embedding_bias": np.zeros(3)}, {"bad": ["x"]}])
def test_other_sampling_parameters_are_refused_by_name(fields):
    with pytest.raises(UserError) as refused:
        SamplingParams(**fields)
    assert refused.value.field == next(iter(fields))


@pytest.mark.parametrize("fields", [
    {"page_size": 16.0}, {"page_size": 8}, {"page_size": True}, {"kernels": "linear=ref"}, {"kernels": (1,)},
    {"kernels": ("linear",)}, {"kernels": ("linear=ref", "linear=native")}, {"skip_passes": "cleanup"},
    {"skip_passes": ["cleanup"]}, {"max_seq_len": HUGE}, {"max_seq_len": 0}, {"max_num_tokens": 255},
    {"max_batch_size": 0}, {"dtype": "fp32"}, {"device": "tpu"}])
def test_build_settings_out_of_bounds_are_refused_by_name(fields):
    with pytest.raises(UserError) as refused:
        BuildConfig(**fields)
    assert refused.value.field == next(iter(fields))


@pytest.mark.parametrize(("config", "fields"), [
    (KvCacheConfig, {"max_bytes": HUGE}), (KvCacheConfig, {"max_bytes": 0}), (KvCacheConfig, {"memory_fraction": 1.0}),
    (KvCacheConfig, {"enable_block_reuse": 1}), (KvCacheConfig, {"enable_partial_reuse": None}),
    (SchedulerConfig, {"max_batch_size": 0}), (SchedulerConfig, {"max_num_tokens": HUGE}),
    (SchedulerConfig, {"context_chunk_tokens": 0}), (SchedulerConfig, {"max_waiting": 0}),
    (SchedulerConfig, {"overlap_depth": 2}), (SchedulerConfig, {"capacity_policy": ""})])
def test_run_settings_out_of_bounds_are_refused_by_name(config, fields):
    with pytest.raises(UserError) as refused:
        config(**fields)
    assert refused.value.field.endswith("." + next(iter(fields)))


def test_an_error_about_a_value_that_does_not_print_is_still_that_error():
    assert "too long to print" in str(UserError("seed", HUGE, "smaller"))
    assert len(str(UserError("prompt", "x" * 1000, "shorter"))) < 300
