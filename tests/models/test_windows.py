"""Sliding windows token by token: what the last token sees at window - 1, window and window + 1, as transformers."""

import pytest
import torch

from camshaft.frontend.checkpoint import open_checkpoint
from camshaft.frontend.load import program_from_checkpoint
from camshaft.models.registry import family_of
from camshaft.testing.tiny import tiny_config, write_tiny

WINDOW = 12
SLIDING, FULL = ["sliding_attention"], ["full_attention"]
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
ONE_LAYER = {"num_hidden_layers": 1, "sliding_window": WINDOW}
CASES = {
    "mistral": ("llama", {**MISTRAL, **ONE_LAYER}),
    "qwen2": ("qwen2", {**ONE_LAYER, "use_sliding_window": True, "max_window_layers": 0}),
    "qwen3": ("qwen3", {**ONE_LAYER, "use_sliding_window": True, "layer_types": SLIDING}),
    "gemma3": ("gemma3", {**ONE_LAYER, "layer_types": SLIDING}),
}
FULL_CASES = {
    "qwen2": ("qwen2", {**ONE_LAYER, "use_sliding_window": True, "layer_types": FULL}),
    "qwen3": ("qwen3", {**ONE_LAYER, "use_sliding_window": True, "layer_types": FULL}),
    "gemma3": ("gemma3", {**ONE_LAYER, "layer_types": FULL}),
}


def both_last_logits(folder, run_program, sequences):
    """The last token's logits of each sequence: ours, then those of transformers."""
    from transformers import AutoModelForCausalLM

    program = program_from_checkpoint(open_checkpoint(folder), torch.float32)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.inference_mode():
        return ([run_program(program, ids)[-1] for ids in sequences],
                [model(ids[None]).logits[0, -1] for ids in sequences])


def differ(left, right):
    return float((left - right).abs().max()) > 1e-3


def key_token_seen(folder, run_program, length):
    """(by ours, by transformers) whether the first of ``length`` tokens changes the last one's logits."""
    ids = torch.arange(20, 20 + length)
    other = ids.clone()
    other[0] = 7
    ours, theirs = both_last_logits(folder, run_program, (ids, other))
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, reference, rtol=0, atol=1e-4 * float(reference.abs().max()))
    return differ(*ours), differ(*theirs)


@pytest.mark.parametrize(("length", "seen"), [(WINDOW - 1, True), (WINDOW, True), (WINDOW + 1, False)])
@pytest.mark.parametrize(("family", "changes"), CASES.values(), ids=CASES)
def test_b50_a_window_ends_where_it_does_in_transformers(family, changes, length, seen, tmp_path, run_program):
    write_tiny(tmp_path, family, tokenizer=False, **changes)
    assert key_token_seen(tmp_path, run_program, length) == (seen, seen)


@pytest.mark.parametrize(("family", "changes"), FULL_CASES.values(), ids=FULL_CASES)
def test_b50_a_window_that_no_layer_type_asks_for_hides_nothing(family, changes, tmp_path, run_program):
    write_tiny(tmp_path, family, tokenizer=False, **changes)
    assert open_checkpoint(tmp_path).config.windows == ()
    assert key_token_seen(tmp_path, run_program, 3 * WINDOW) == (True, True)


def windows(**changes):
    data = tiny_config(**changes)
    return family_of(data["architectures"][0]).config_from_hf(data).windows


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "MistralForCausalLM"])
def test_b50_layer_types_decide_layer_by_layer(architecture):
    llama = {"architectures": [architecture], "sliding_window": WINDOW}
    assert windows(**llama, layer_types=FULL * 2) == ()
    assert windows(**llama, layer_types=SLIDING + FULL) == (WINDOW, None)
    assert windows(**llama, layer_types=SLIDING * 2) == (WINDOW, WINDOW)


@pytest.mark.parametrize(("changes", "expected"), [
    ({}, ()),
    ({"max_window_layers": 1}, ()),
    ({"use_sliding_window": True, "max_window_layers": 1}, (None, WINDOW)),
    ({"use_sliding_window": True, "max_window_layers": 0}, (WINDOW, WINDOW)),
    ({"use_sliding_window": True, "max_window_layers": 2}, ()),
    ({"use_sliding_window": True}, ()),
    ({"use_sliding_window": True, "max_window_layers": 0, "sliding_window": None}, ()),
    ({"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 512}, ()),
    ({"use_sliding_window": True, "max_window_layers": 0, "layer_types": FULL + SLIDING}, (None, WINDOW)),
])
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_qwen_windows_follow_every_setting_there_is(family, changes, expected):
    assert windows(family=family, **{"sliding_window": WINDOW, **changes}) == expected


@pytest.mark.parametrize(("changes", "expected"), [
    ({"layer_types": None, "num_hidden_layers": 7}, (32,) * 5 + (None, 32)),
    ({"layer_types": None, "sliding_window_pattern": 2}, (32, None, 32)),
    ({"layer_types": None, "sliding_window_pattern": 1}, ()),
    ({"sliding_window": 4096}, (4096, 4096, None)),
    ({"layer_types": FULL * 3}, ()),
])
def test_gemma_windows_follow_the_pattern_or_the_layer_types(changes, expected):
    assert windows(family="gemma3", **changes) == expected
