"""Names and values of other engines are refused with what to write here instead; slips with the nearest name."""

import dataclasses
import functools
import inspect
import re

import pytest

from camshaft import LLM, BuildConfig, KvCacheConfig, SamplingParams, SchedulerConfig, UserError
from camshaft.config.other_names import HINTS
from camshaft.config.sampling import SamplingFields

CONFIGS = {"kv_cache": KvCacheConfig, "scheduler": SchedulerConfig, "SamplingParams": SamplingFields}


def fields(config):
    return {field.name for field in dataclasses.fields(config)}


KNOWN = {"LLM": {*inspect.signature(LLM.__init__).parameters, *fields(BuildConfig)},
         **{where: fields(config) for where, config in CONFIGS.items()}}
CASES = [(where, name) for where, hints in HINTS.items() for name in hints]


@pytest.mark.parametrize(("where", "name"), CASES)
def test_a_hint_is_of_a_name_that_is_not_ours_and_leads_to_one_that_is(where, name):
    assert name not in KNOWN[where]
    hint = HINTS[where][name]
    if nested := re.search(r'(\w+)=\{"(\w+)"', hint):
        assert nested[1] in KNOWN["LLM"]
        assert nested[2] in KNOWN[nested[1]]
    elif elsewhere := re.match(r"Here it is (\w+)\((\w+)=", hint):
        assert elsewhere[2] in KNOWN[elsewhere[1]]
    elif here := re.match(r"Here it is (\w+)", hint):
        assert here[1] in KNOWN[where]
    else:
        assert hint.startswith(("Leave it out", "Set the environment variable"))


@pytest.mark.parametrize(("where", "name"), CASES)
def test_a_name_of_another_engine_is_answered_with_the_one_used_here(where, name):
    make = SamplingParams if where == "SamplingParams" else functools.partial(LLM, "never opened")
    given = {where: {name: 1}} if where in ("kv_cache", "scheduler") else {name: "anything"}
    with pytest.raises(UserError, match=re.escape(HINTS[where][name])) as caught:
        make(**given)
    assert caught.value.field == name


def test_max_num_seqs_is_not_taken_for_max_num_tokens():
    with pytest.raises(UserError, match="max_batch_size"):
        LLM("never opened", max_num_seqs=4)


@pytest.mark.parametrize(("given", "meant"), [("temperture", "temperature"), ("max_token", "max_tokens")])
def test_a_slip_in_a_sampling_parameter_is_answered_with_the_nearest_name(given, meant):
    with pytest.raises(UserError, match=f"Did you mean '{meant}'"):
        SamplingParams(**{given: 1})


def test_an_unknown_option_of_an_llm_lists_its_own_arguments_too():
    with pytest.raises(UserError, match=r"Known: .*\bkv_cache\b.*\bscheduler\b"):
        LLM("never opened", qwertz=1)


def test_an_argument_of_an_llm_among_its_build_fields_is_refused_by_name():
    with pytest.raises(UserError, match="Give it as an argument of LLM") as caught:
        LLM("never opened", build={"kv_cache": {}})
    assert caught.value.field == "kv_cache"


def test_every_argument_of_an_llm_is_known_beside_its_build_fields():
    own = set(inspect.signature(LLM.__init__).parameters) - {"self", "build_fields"}
    for name in own:
        with pytest.raises(UserError, match="Give it as an argument of LLM"):
            LLM("never opened", build={name: None})


@pytest.mark.parametrize(("name", "value", "remedy"), [("top_k", -1, "0 for all"), ("max_tokens", None, "a large one"),
                                                      ("embedding_bias", [1.0], "logit_bias")])
def test_a_value_that_means_something_elsewhere_is_refused_with_what_says_it_here(name, value, remedy):
    with pytest.raises(UserError, match=remedy):
        SamplingParams(**{name: value})
