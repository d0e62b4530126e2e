"""The lowered program: its signature, its life cycles, and the same logits from a paged cache."""

import dataclasses

import pytest
import torch

from camshaft.core.errors import InternalError
from camshaft.ir.verify import verify
from camshaft.passes.page_attention import PageAttention
from camshaft.passes.pipeline import run_passes
from tests.passes.graphs import CONFIG, Builder, context, pure_inputs, run_program, tiny_llama


def placeholders(program):
    return [node.name for node in program.graph.nodes if node.op == "placeholder"]


def step_inputs(start, count, page_size, pools, specs=None):
    """Inputs of a step feeding tokens ``start .. start+count`` of one sequence whose pages are 3, 1, 4, 2 in order.

    With ``specs``, pages that the step's tokens do not reach are called page 0 in each of these life cycles.
    """
    tokens = pure_inputs(40)["token_ids"]
    positions = torch.arange(start, start + count)
    inputs = {"token_ids": tokens[start:start + count], "positions": positions,
              "query_start": torch.tensor([0, count], dtype=torch.int32),
              "seq_lens": torch.tensor([start + count], dtype=torch.int32), "logits_rows": torch.arange(count), **pools}
    for c, spec in enumerate(specs or (None,)):
        pages = torch.tensor([3, 1, 4, 2])
        if spec is not None and spec.window is not None:
            gone = [column for column in range(4) if column * page_size >= spec.sinks
                    and (column + 1) * page_size <= start - spec.window + 1]
            pages[gone] = 0
        inputs[f"slot_mapping_{c}"] = pages[positions // page_size] * page_size + positions % page_size
        inputs[f"page_table_{c}"] = pages[None].to(torch.int32)
    return inputs


def make_pools(page_size):
    shape = (5, 2, CONFIG.num_kv_heads, page_size, CONFIG.head_dim)
    return {f"kv_pool_{layer}": torch.full(shape, float("nan")) for layer in range(CONFIG.num_layers)}


def test_signature_and_life_cycle():
    program = tiny_llama()
    result = PageAttention().run(program, context(page_size=32))
    verify(program)
    assert result.matches == 2
    assert placeholders(program) == ["token_ids", "positions", "query_start", "seq_lens", "logits_rows",
                                     "slot_mapping_0", "page_table_0", "kv_pool_0", "kv_pool_1"]
    spec = program.life_cycles[0]
    assert (spec.kind, spec.layers, spec.num_kv_heads, spec.head_dim, spec.page_size, spec.dtype) == (
        "full", (0, 1), CONFIG.num_kv_heads, CONFIG.head_dim, 32, "float32")


def test_the_cache_has_the_activations_dtype():
    program = tiny_llama(dtype=torch.bfloat16)
    PageAttention().run(program, context())
    assert program.life_cycles[0].dtype == "bfloat16"
    verify(program)


@pytest.mark.parametrize("skip", [(), ("cleanup", "fuse_linear", "fuse_pointwise")])
@pytest.mark.parametrize("chunks", [(12,), (5, 7), (1,) * 12])
def test_paged_steps_equal_one_pure_run(skip, chunks):
    inputs = {**pure_inputs(12), "logits_rows": torch.arange(12)}
    expected = run_program(tiny_llama(bias=True), inputs)
    program = tiny_llama(bias=True)
    run_passes(program, context(skip_passes=skip))
    pools, start, found = make_pools(16), 0, []
    for count in chunks:
        found.append(run_program(program, step_inputs(start, count, 16, pools)))
        start += count
    torch.testing.assert_close(torch.cat(found), expected, rtol=1e-5, atol=1e-5)


def test_window_and_softcap_are_handed_on():
    program = tiny_llama()
    for node in program.graph.find_nodes(op="call_function", target=torch.ops.camshaft.attention.default):
        node.args = (*node.args[:5], 3, 20.0, 2)
    PageAttention().run(program, context())
    for node in program.graph.find_nodes(op="call_function", target=torch.ops.camshaft.paged_attention.default):
        assert node.args[5:] == (0.5, 3, 20.0, 2)


def set_windows(program, *windows):
    """Give the program's layers (window, sinks)."""
    found = program.graph.find_nodes(op="call_function", target=torch.ops.camshaft.attention.default)
    for node, (width, sinks) in zip(found, windows, strict=True):
        node.args = (*node.args[:5], width, node.args[6], sinks)
    return program


@pytest.mark.parametrize(("windows", "cycles"), [
    (((None, 0), (None, 2)), [("full", None, 0, (0, 1))]),
    (((5, 0), (5, 0)), [("window", 5, 0, (0, 1))]),
    (((5, 0), (None, 0)), [("window", 5, 0, (0,)), ("full", None, 0, (1,))]),
    (((5, 0), (5, 2)), [("window", 5, 0, (0,)), ("window", 5, 2, (1,))]),
    (((64, 3), (63, 3)), [("full", None, 0, (0,)), ("window", 63, 3, (1,))]),
])
def test_layers_that_keep_the_same_tokens_share_a_life_cycle(windows, cycles):
    program = set_windows(tiny_llama(), *windows)
    result = PageAttention().run(program, context())
    verify(program)
    assert [(spec.kind, spec.window, spec.sinks, spec.layers) for spec in program.life_cycles] == cycles
    assert len(result.notes) == len(cycles)
    assert all(("keeps everything" in note) == (kind == "full")
               for note, (kind, *_) in zip(result.notes, cycles, strict=True))
    reads = program.graph.find_nodes(op="call_function", target=torch.ops.camshaft.paged_attention.default)
    for layer, node in enumerate(reads):
        (c,) = (c for c, spec in enumerate(program.life_cycles) if layer in spec.layers)
        assert (node.args[1].name, node.args[2].name) == (f"kv_pool_{layer}", f"page_table_{c}")


@pytest.mark.parametrize("windows", [((5, 0), (None, 0)), ((7, 3), (7, 3)), ((3, 0), (18, 17))])
@pytest.mark.parametrize("chunks", [(40,), (13, 27), (1,) * 40])
def test_paged_steps_with_windows_equal_one_pure_run(windows, chunks):
    expected = run_program(set_windows(tiny_llama(), *windows), {**pure_inputs(40), "logits_rows": torch.arange(40)})
    program = set_windows(tiny_llama(), *windows)
    run_passes(program, context())
    pools, start, found = make_pools(16), 0, []
    for count in chunks:
        found.append(run_program(program, step_inputs(start, count, 16, pools, program.life_cycles)))
        start += count
    torch.testing.assert_close(torch.cat(found), expected, rtol=1e-5, atol=1e-5)


def test_layers_of_different_shapes_have_life_cycles_of_their_own():
    b = Builder()
    x = b.call("aten.embedding.default", b.weight("table", CONFIG.vocab_size, 8), b.token_ids)
    for layer, heads in enumerate((2, 4)):
        h = b.call("aten.view.default", x, [-1, heads, 8 // heads])
        h = b.call("camshaft.attention", h, h, h, layer, 1.0, None, None, 0)
        x = b.call("aten.view.default", h, [-1, 8])
    program = b.finish(b.call("aten.index_select.default", x, 0, b.logits_rows))
    PageAttention().run(program, context())
    verify(program)
    assert [(spec.num_kv_heads, spec.head_dim) for spec in program.life_cycles] == [(2, 4), (4, 2)]
    assert placeholders(program)[5:] == ["slot_mapping_0", "page_table_0", "slot_mapping_1", "page_table_1",
                                         "kv_pool_0", "kv_pool_1"]


def test_keys_and_values_of_different_shapes_are_refused():
    b = Builder()
    x = b.call("aten.embedding.default", b.weight("table", CONFIG.vocab_size, 8), b.token_ids)
    k, v = (b.call("aten.view.default", x, [-1, heads, 8 // heads]) for heads in (2, 4))
    h = b.call("camshaft.attention", k, k, k, 0, 1.0, None, None, 0)
    h.args = (k, k, v, *h.args[3:])
    with pytest.raises(InternalError, match="layer 0 differ"):
        PageAttention().run(b.finish(b.call("aten.view.default", h, [-1, 8])), context())


def test_a_program_without_attention_is_refused():
    b = Builder()
    x = b.call("aten.embedding.default", b.weight("table", CONFIG.vocab_size, 8), b.token_ids)
    with pytest.raises(InternalError, match="no attention"):
        PageAttention().run(b.finish(x), context())


def test_page_size_is_the_build_configurations():
    program = tiny_llama()
    PageAttention().run(program, dataclasses.replace(context(page_size=64)))
    pool = next(node for node in program.graph.nodes if node.name == "kv_pool_0")
    assert pool.meta["val"].shape[3] == 64
