"""Windows and sinks from build option to token: the answers of the pure model with them, in pages that come back."""

import dataclasses

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from camshaft import LLM, SamplingParams
from camshaft.builder.build import build
from camshaft.config.build import BuildConfig
from camshaft.core.errors import EngineCorruptError, UserError
from camshaft.engine.artifact import Engine
from camshaft.frontend.checkpoint import open_checkpoint
from camshaft.frontend.load import program_from_checkpoint
from camshaft.runtime.binding import bind_graph
from camshaft.testing.tiny import write_tensors, write_tiny
from tests.passes.graphs import run_program

WINDOW, SINKS = 20, 3
GREEDY = {"temperature": 0.0, "ignore_eos": True}
KINDS = {"llama": [(20, 3)] * 2, "gemma3": [(20, 3)] * 3}
SPARSE = dict(max_batch_size=4, max_num_tokens=16)


@pytest.fixture(scope="module", params=sorted(KINDS))
def family(request):
    return request.param


@pytest.fixture(scope="module")
def checkpoint(family, tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp(family) / "model", family, seed=7)


@pytest.fixture(scope="module")
def engine(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("built") / "engine"
    build(checkpoint, BuildConfig(max_attention_window=WINDOW, sink_tokens=SINKS, **SPARSE), output=folder)
    return folder


def reference(checkpoint, windows):
    """The pure Program of the checkpoint with (window, sinks) for each layer, as a function of token ids."""
    program = program_from_checkpoint(open_checkpoint(checkpoint), torch.float32, 512)
    found = program.graph.find_nodes(op="call_function", target=torch.ops.camshaft.attention.default)
    for node, (window, sinks) in zip(found, windows, strict=True):
        node.args = (*node.args[:5], window, node.args[6], sinks)

    def logits(token_ids):
        every = torch.arange(len(token_ids))
        return run_program(program, {"token_ids": torch.tensor(token_ids), "positions": every, "logits_rows": every})

    return logits


def check_greedy(output, prompt, logits_of):
    """Every token is the likeliest after those before it, or as likely as makes no difference."""
    tokens = list(output.outputs[0].token_ids)
    logits = logits_of(prompt + tokens)[len(prompt) - 1:-1]
    chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert (logits.max(1).values - chosen).max() < 1e-4
    assert len(set(tokens)) >= 8, "a model that repeats itself proves nothing"


def test_window_and_sinks_equal_the_pure_model_with_them(family, checkpoint, engine):
    prompt = np.random.default_rng(1).integers(3, 300, size=70).tolist()
    with LLM(engine, kv_cache={"max_bytes": 2**22}) as llm:
        output = llm.generate(prompt, SamplingParams(max_tokens=100, **GREEDY))
    check_greedy(output, prompt, reference(checkpoint, KINDS[family]))
    whole = reference(checkpoint, [(None, 0)] * len(KINDS[family]))(prompt + list(output.outputs[0].token_ids))
    assert whole[:-1].argmax(1)[len(prompt) - 1:].tolist() != list(output.outputs[0].token_ids), "the window shows"


def test_layers_narrower_than_the_window_stay_as_they_are(tmp_path):
    checkpoint = write_tiny(tmp_path / "model", "gemma3", seed=7)
    made = build(checkpoint, BuildConfig(max_attention_window=48, sink_tokens=2, **SPARSE))
    assert [(spec.window, spec.sinks, spec.layers) for spec in made.manifest.life_cycles] == [
        (32, 2, (0, 1)), (48, 2, (2,))]
    assert made.manifest.model.windows == (32, 32, None), "the model stays what it was trained as"
    prompt = list(range(5, 95))
    with LLM(made_folder(checkpoint, tmp_path, 48, 2), kv_cache={"max_bytes": 2**22}) as llm:
        output = llm.generate(prompt, SamplingParams(max_tokens=60, **GREEDY))
    check_greedy(output, prompt, reference(checkpoint, [(32, 2), (32, 2), (48, 2)]))


def made_folder(checkpoint, tmp_path, window, sinks):
    folder = tmp_path / "engine"
    build(checkpoint, BuildConfig(max_attention_window=window, sink_tokens=sinks, **SPARSE), output=folder)
    return folder


def test_a_generation_ten_windows_long_fits_a_cache_of_four(engine):
    page_bytes = 2 * 2 * 16 * 16 * 4 * 3
    with LLM(engine, kv_cache={"max_bytes": page_bytes * 9}) as llm:
        output = llm.generate([5, 6, 7], SamplingParams(max_tokens=10 * WINDOW, **GREEDY))
        stats = llm.get_stats()["kv"]
    assert len(output.outputs[0].token_ids) == 10 * WINDOW
    assert stats["num_pages"] * 16 < 10 * WINDOW
    assert stats["num_referenced"] == 0


def test_b46_an_answer_comes_from_its_own_pages_however_often_pages_are_evicted(engine):
    """Needles lead, the pages after them hold the same text: only a key of the whole prefix tells them apart."""
    random = np.random.default_rng(3)
    filler = random.integers(3, 300, size=40).tolist()
    needles = [random.integers(3, 300, size=SINKS).tolist() for _ in range(6)]
    prompts = [needle + filler[:length] for needle in needles for length in (29, 33, 40)]
    params = SamplingParams(max_tokens=12, **GREEDY)
    with LLM(engine, kv_cache={"max_bytes": 2**22, "enable_block_reuse": False}) as llm:
        alone = [llm.generate(prompt, params).outputs[0].token_ids for prompt in prompts]
    assert len({tuple(answer) for answer in alone[2::3]}) == len(needles), "every needle shows in the answer"
    page_bytes = 2 * 2 * 16 * 16 * 4 * 3
    with LLM(engine, kv_cache={"max_bytes": page_bytes * 16}) as llm:
        for _ in range(4):
            order = random.permutation(len(prompts)).tolist()
            outputs = llm.generate([prompts[index] for index in order], params)
            for index, output in zip(order, outputs, strict=True):
                assert output.outputs[0].token_ids == alone[index], f"prompt {index}"
        kv = llm._parts.executor._kv
        kv.check_integrity()
        stats = kv.stats()
    assert stats.num_evictions > 20
    assert stats.num_reused_tokens > 100


@pytest.mark.parametrize(("sinks", "chunk"), [(0, 8), (1, 5)])
def test_a_request_that_outlives_its_nan_leaves_no_poisoned_page_to_others(tmp_path, sinks, chunk):
    """Once a window has passed a NaN, finite logits say nothing of the pages before it, which others begin with."""
    poison, shared = 2, list(range(10, 16))
    checkpoint = write_tiny(tmp_path / "model", seed=7)
    weights = load_file(checkpoint / "model.safetensors")
    weights["model.embed_tokens.weight"][poison] = torch.nan
    write_tensors(checkpoint, weights)
    engine = made_folder(checkpoint, tmp_path, 2, sinks)
    params = SamplingParams(max_tokens=5, bad_token_ids=[poison], **GREEDY)
    prompts = [[*shared, poison, *range(30, 40)], [*shared, 50, 51, 52]]
    with LLM(engine, kv_cache={"max_bytes": 2**22, "enable_block_reuse": False}) as llm:
        alone = [llm.generate(prompt, params).outputs[0].token_ids for prompt in prompts]
    with LLM(engine, kv_cache={"max_bytes": 2**22}, scheduler={"context_chunk_tokens": chunk}) as llm:
        outputs = [llm.generate(prompt, params) for prompt in prompts]
    assert [output.outputs[0].token_ids for output in outputs] == alone
    assert outputs[1].num_cached_tokens == len(shared)


@pytest.mark.parametrize("change", [
    {"window": 19}, {"window": 21}, {"window": None, "sinks": 0, "kind": "full", "num_kv_heads": 1}, {"sinks": 2},
    {"head_dim": 8}, {"num_kv_heads": 4}, {"page_size": 32}, {"dtype": "bfloat16"}, {"layers": (0,)},
    {"layers": (1, 2, 3)}])
def test_life_cycles_that_do_not_fit_the_graph_are_refused(engine, change):
    edited = Engine.load(engine)
    first, *others = edited.manifest.life_cycles
    edited.manifest = dataclasses.replace(edited.manifest,
                                          life_cycles=(dataclasses.replace(first, **change), *others))
    with pytest.raises(EngineCorruptError, match="KV life cycles"):
        bind_graph(edited, torch.device("cpu"))


def test_sinks_without_any_window_are_refused(tmp_path):
    folder = write_tiny(tmp_path / "model")
    with pytest.raises(UserError, match=r"sink_tokens=4.*no layer"):
        build(folder, BuildConfig(sink_tokens=4))


@pytest.mark.parametrize("field", [{"max_attention_window": 0}, {"sink_tokens": -1}, {"max_attention_window": 1.5}])
def test_windows_and_sinks_out_of_bounds_are_refused(field):
    with pytest.raises(UserError, match=next(iter(field))):
        BuildConfig(**field)
