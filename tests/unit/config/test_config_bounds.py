"""Bounds of configuration and sampling parameters: exact at their edges, and a UserError whatever is given."""

import dataclasses

import numpy as np
import pytest

from camshaft.config.build import BuildConfig, resolve_build
from camshaft.config.doc import INT32_MAX
from camshaft.config.model import ModelConfig, RopeConfig
from camshaft.config.runtime import KvCacheConfig, SchedulerConfig
from camshaft.config.sampling import SamplingParams
from camshaft.core.errors import UserError

HUGE = 10**5000
"""A whole number that neither becomes a float nor prints."""


@pytest.mark.parametrize("fields", [
    {"seed": 2**64 - 1}, {"seed": 0}, {"top_k": INT32_MAX}, {"top_p": 1}, {"min_p": 1.0}, {"temperature": 100},
    {"n": 1}, {"embedding_bias": None}, {"n": 128}, {"n": 2, "best_of": 2}, {"best_of": 128},
    {"repetition_penalty": 0.01}, {"repetition_penalty": 100}, {"presence_penalty": -2}, {"frequency_penalty": 2.0},
    {"presence_penalty": None}, {"no_repeat_ngram_size": 0}, {"no_repeat_ngram_size": INT32_MAX}, {"bad": []},
    {"bad": ["a"] * 1024}, {"bad_token_ids": []}, {"logit_bias": {0: -100, 5: 100.0}}, {"logit_bias": {}},
    {"allowed_token_ids": [0]}, {"logprobs": 0}, {"logprobs": 1024}, {"prompt_logprobs": 0},
    {"max_tokens": 0, "prompt_logprobs": 0}, {"temperature": 1e-6}])
def test_sampling_parameters_at_their_bounds_are_accepted(fields):
    params = SamplingParams(**fields)
    for name, value in fields.items():
        kept = tuple(value.items()) if isinstance(value, dict) else tuple(value) if isinstance(value, list) else value
        assert name == "embedding_bias" or getattr(params, name) == kept


def test_what_may_be_given_in_several_ways_is_kept_in_one():
    def change(token_ids, logits):
        return logits

    one = SamplingParams(stop="x", bad="y", logits_processor=change, logit_bias={3: 1.0}, stop_token_ids=[1])
    assert one == SamplingParams(stop=["x"], bad=("y",), logits_processor=[change], logit_bias=((3, 1.0),),
                                 stop_token_ids=(1,))
    assert (one.stop, one.bad, one.logits_processor, one.logit_bias) == (("x",), ("y",), (change,), ((3, 1.0),))
    assert dataclasses.replace(one, seed=1).logits_processor == (change,)


@pytest.mark.parametrize("fields", [
    {"seed": 2**64}, {"seed": HUGE}, {"seed": True}, {"top_k": INT32_MAX + 1}, {"top_k": -1}, {"top_k": 1.0},
    {"top_p": 0.0}, {"top_p": float("nan")}, {"top_p": True}, {"min_p": 1.01}, {"temperature": HUGE},
    {"temperature": -0.1}, {"temperature": "1"}, {"max_tokens": 0}, {"min_tokens": 33}, {"stop": ""}, {"stop": [1]},
    {"stop": "x", "detokenize": False}, {"stop_token_ids": [-1]}, {"stop_token_ids": 5}, {"end_id": -1},
    {"ignore_eos": 1}, {"temprature": 1.0}, {"embedding_bias": np.zeros(3)}])
def test_other_sampling_parameters_are_refused_by_name(fields):
    with pytest.raises(UserError) as refused:
        SamplingParams(**fields)
    assert refused.value.field == next(iter(fields))


@pytest.mark.parametrize("fields", [
    {"n": 0}, {"n": 129}, {"n": 5_000_000}, {"n": HUGE}, {"n": True}, {"n": None}, {"best_of": 1, "n": 2},
    {"best_of": 0}, {"best_of": 129}, {"repetition_penalty": 0}, {"repetition_penalty": -1},
    {"repetition_penalty": 101}, {"repetition_penalty": float("inf")}, {"presence_penalty": 2.1},
    {"presence_penalty": float("nan")}, {"frequency_penalty": -2.1}, {"frequency_penalty": "1"},
    {"no_repeat_ngram_size": -1}, {"no_repeat_ngram_size": INT32_MAX + 1}, {"no_repeat_ngram_size": 2.0},
    {"bad": ""}, {"bad": [1]}, {"bad": ["a"] * 1025}, {"bad_token_ids": [-1]}, {"bad_token_ids": 5},
    {"bad_token_ids": list(range(1025))}, {"logit_bias": {1: 100.1}}, {"logit_bias": {1: float("nan")}},
    {"logit_bias": {-1: 1.0}}, {"logit_bias": {"1": 1.0}}, {"logit_bias": [1]}, {"allowed_token_ids": []},
    {"allowed_token_ids": [-1]}, {"allowed_token_ids": 3}, {"logprobs": -1}, {"logprobs": 1025},
    {"logprobs": 1_000_000_000}, {"logprobs": HUGE}, {"logprobs": True}, {"prompt_logprobs": -1},
    {"prompt_logprobs": 1025}, {"max_tokens": -1}, {"max_tokens": 10**5000}, {"min_tokens": 10**5000},
    {"max_tokens": 0, "logprobs": 1},
    {"n": 2, "max_tokens": 0, "prompt_logprobs": 0}, {"min_tokens": 1, "max_tokens": 0, "prompt_logprobs": 0},
    {"logits_processor": 5}, {"logits_processor": [None]}, {"top_p": -1}, {"temperature": 999999}])
def test_b32_b33_numbers_beyond_their_bounds_are_refused_by_name(fields):
    with pytest.raises(UserError) as refused:
        SamplingParams(**fields)
    assert refused.value.field == next(iter(fields))
    assert refused.value.allowed


@pytest.mark.parametrize("fields", [
    {"page_size": 16.0}, {"page_size": 8}, {"page_size": True}, {"kernels": "linear=ref"}, {"kernels": (1,)},
    {"kernels": ("linear",)}, {"kernels": ("linear=ref", "linear=native")}, {"skip_passes": "cleanup"},
    {"skip_passes": ["cleanup"]}, {"max_seq_len": HUGE}, {"max_seq_len": 0}, {"max_num_tokens": 255},
    {"max_batch_size": 0}, {"dtype": "fp32"}, {"device": "tpu"}, {"weight_dtype": "int8"},
    {"quantization": "w4a16"}, {"quantization": None}, {"skip_passes": ("quantize",), "quantization": "w8a8"}])
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


MODEL = ModelConfig(architecture="LlamaForCausalLM", vocab_size=8, hidden_size=8, intermediate_size=8, num_layers=1,
                    num_heads=1, num_kv_heads=1, head_dim=8, max_position=64, norm_eps=1e-5, rope=RopeConfig())


@pytest.mark.parametrize(("fields", "device", "field"), [
    ({"quantization": "w8a8"}, "cuda", "quantization"), ({"quantization": "w8a16"}, "cuda", "quantization"),
    ({"weight_dtype": "bfloat16", "dtype": "float32"}, "cuda", "weight_dtype"),
    ({"weight_dtype": "float16", "dtype": "bfloat16"}, "cpu", "weight_dtype"),
    ({"weight_dtype": "float32", "dtype": "float16"}, "cpu", "weight_dtype"),
    ({"weight_dtype": "float16", "skip_passes": ("narrow_weights",)}, "cpu", "skip_passes")])
def test_weights_this_device_or_type_cannot_read_are_refused_by_name(fields, device, field):
    with pytest.raises(UserError) as refused:
        resolve_build(BuildConfig(**fields), MODEL, device=device)
    assert refused.value.field == field


@pytest.mark.parametrize(("fields", "device", "stored"), [
    ({}, "cpu", "float32"), ({"weight_dtype": "float32"}, "cpu", "float32"), ({"dtype": "bfloat16"}, "cpu", "bfloat16"),
    ({"weight_dtype": "float16"}, "cpu", "float16"), ({"dtype": "float16"}, "cuda", "float16"),
    ({"weight_dtype": "bfloat16", "dtype": "bfloat16"}, "cuda", "bfloat16")])
def test_weights_are_stored_in_the_type_of_the_arithmetic_unless_asked(fields, device, stored):
    assert resolve_build(BuildConfig(**fields), MODEL, device=device).weight_dtype == stored
