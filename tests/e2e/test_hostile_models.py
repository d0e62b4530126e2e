"""Models whose parts do not fit each other: LLM refuses them whole, or only what cannot work."""

import json
import threading

import pytest

from camshaft import LLM, SamplingParams, UserError
from camshaft.core.errors import CheckpointError, NonFiniteLogitsError
from camshaft.testing.tiny import tiny_tensors, tiny_tokenizer, write_tensors, write_tiny_llama

KV = {"max_bytes": 2**20}


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch):
    monkeypatch.setenv("CAMSHAFT_CC", "none")


@pytest.fixture
def model(tmp_path):
    return write_tiny_llama(tmp_path / "model", seed=2)


def edit_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_token_ids_beyond_the_model_are_refused_and_the_rest_runs(model):
    other = tiny_tokenizer(300)
    other.add_tokens([f"extra{index}" for index in range(100)])
    other.save(str(model / "tokenizer.json"))
    with LLM(model, kv_cache=KV) as llm:
        with pytest.raises(UserError, match="belongs to another model"):
            llm.generate("extra99", SamplingParams(max_tokens=2))
        assert llm.generate("a valve", SamplingParams(max_tokens=2, ignore_eos=True)).outputs[0].token_ids


def test_end_ids_beyond_the_model_and_min_tokens(model):
    edit_json(model / "generation_config.json", eos_token_id=[0, 2**40, 320])
    with LLM(model, kv_cache=KV) as llm:
        assert len(llm.generate("a", SamplingParams(max_tokens=4, min_tokens=3)).outputs[0].token_ids) >= 3


@pytest.mark.parametrize("template", ["{% for %}", "{{ 'x'", 7, [{"name": "other", "template": "x"}]])
def test_a_broken_chat_template_leaves_plain_prompts(model, caplog, template):
    edit_json(model / "tokenizer_config.json", chat_template=template)
    with LLM(model, kv_cache=KV) as llm:
        assert not llm.has_chat_template
        with pytest.raises(UserError, match="no chat template"):
            llm.chat([{"role": "user", "content": "hi"}])
        assert llm.generate("a", SamplingParams(max_tokens=2, ignore_eos=True)).outputs[0].token_ids
    assert ("chat template cannot be used" in caplog.text) == (not isinstance(template, list))


def test_weights_that_are_not_numbers_fail_requests_not_the_start(model):
    config = json.loads((model / "config.json").read_text())
    tensors = tiny_tensors(config, seed=2)
    tensors["model.norm.weight"][:] = float("nan")
    write_tensors(model, tensors)
    with LLM(model, kv_cache=KV) as llm, pytest.raises(NonFiniteLogitsError):
        llm.generate("a", SamplingParams(max_tokens=2))


@pytest.mark.parametrize(("options", "named"), [
    ({"kv_cache": {"max_bytes": 2**60}}, "max_bytes"), ({"kv_cache": {"max_bytes": 1}}, "max_bytes"),
    ({"kv_cache": {"max_byte": 1}}, "max_byte"), ({"max_seq_len": 513}, "max_seq_len"), ({"colour": 1}, "colour"),
    ({"dtype": 7}, "dtype"), ({"kernels": ["linear=none"]}, "none"), ({"scheduler": {"max_batch_size": 500}}, "256"),
    ({"skip_passes": "cleanup"}, "skip_passes"), ({"page_size": [16]}, "page_size"), ({"build": 3}, "LLM"),
])
def test_a_start_that_fails_leaves_no_thread(model, options, named):
    before = threading.active_count()
    with pytest.raises(UserError, match=named):
        LLM(model, **options)
    assert threading.active_count() == before


def test_a_broken_tokenizer_fails_the_start_unless_it_is_left_out(model):
    (model / "tokenizer.json").write_text('{"model": 1}')
    before = threading.active_count()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        LLM(model, kv_cache=KV)
    assert threading.active_count() == before
    with LLM(model, kv_cache=KV, skip_tokenizer_init=True) as llm:
        assert llm.generate([1, 2], SamplingParams(max_tokens=2, ignore_eos=True)).outputs[0].token_ids
