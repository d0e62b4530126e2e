"""Ordering, skipping, recording, verification between passes, and the golden dumps."""

import pytest
import torch

from camshaft.core.errors import InternalError, UserError
from camshaft.ir.text import dump_graph
from camshaft.passes.base import Pass, PassResult, load_passes
from camshaft.passes.pipeline import order_passes, run_passes, select_passes
from tests.passes.graphs import context, tiny_llama
from tests.passes.regenerate_golden import FOLDER, golden_texts


def make_pass(pass_name, pass_stage="fuse", *, after=(), needs=(), rewrite=lambda program: 0):
    class Made(Pass):
        name = pass_name
        stage = pass_stage

        def run(self, program, ctx):
            return PassResult(matches=rewrite(program))

    Made.after, Made.needs = after, needs
    return Made()


def names(passes):
    return [step.name for step in passes]


def test_passes_are_found_and_ordered():
    assert names(select_passes(())) == ["cleanup", "fuse_linear", "fuse_pointwise", "quantize", "narrow_weights",
                                        "narrow_attention", "page_attention", "select_kernels"]


def test_stage_comes_before_name_and_after_before_both():
    made = [make_pass("a", "lower"), make_pass("b", after=("c",)), make_pass("c"), make_pass("z", "cleanup")]
    assert names(order_passes(made)) == ["z", "c", "b", "a"]
    assert names(order_passes(made[::-1])) == ["z", "c", "b", "a"]


@pytest.mark.parametrize(("made", "message"), [
    ([("a", "fuse", ("b",)), ("b", "fuse", ("a",))], "wait for each other"),
    ([("a", "fuse", ("nothing",))], "does not exist"),
    ([("a", "polish", ())], "unknown stage"),
    ([("a", "fuse", ()), ("a", "lower", ())], "share a name"),
    ([("a", "fuse", ("b",)), ("b", "lower", ())], "later stage"),
])
def test_orders_that_cannot_be(made, message):
    with pytest.raises(InternalError, match=message):
        order_passes([make_pass(name, stage, after=after) for name, stage, after in made])


@pytest.mark.parametrize(("skip", "message"), [
    ("fuse_liner", "Did you mean 'fuse_linear'"), ("page_attention", "cannot run without"),
    ("select_kernels", "cannot run without"), ("nonsense", "may be skipped"),
])
def test_what_cannot_be_skipped(skip, message):
    with pytest.raises(UserError, match=message) as caught:
        select_passes((skip,))
    assert caught.value.field == "skip_passes"


def test_skipping_what_another_needs():
    made = [make_pass("base"), make_pass("top", needs=("base",))]
    with pytest.raises(UserError, match="top needs it"):
        select_passes(("base",), made)
    assert select_passes(("base", "top"), made) == ()


def test_skipped_passes_do_not_run():
    program = tiny_llama()
    run_passes(program, context(skip_passes=("fuse_linear", "cleanup")))
    assert [record.name for record in program.history] == ["fuse_pointwise", "quantize", "narrow_weights",
                                                           "narrow_attention", "page_attention", "select_kernels"]
    assert "q_proj+k_proj" not in dump_graph(program)


def test_history_counts_and_explains():
    program = tiny_llama()
    run_passes(program, context())
    found = {record.name: (record.matches, record.notes) for record in program.history}
    assert found["cleanup"] == (0, ())
    assert found["fuse_linear"] == (4, ("2 × q_proj+k_proj+v_proj", "2 × gate_proj+up_proj"))
    assert found["fuse_pointwise"] == (6, ("4 × add_rms_norm", "2 × silu_mul"))
    assert found["page_attention"][0] == 2
    assert "2048 bytes a page of 16 tokens" in found["page_attention"][1][0]
    assert found["select_kernels"][0] == 23


def test_a_pass_that_breaks_the_program_fails_the_build_by_name():
    def break_it(program):
        next(node for node in program.graph.nodes if node.op == "call_function").target = torch.ops.aten.cos.default
        return 1

    with pytest.raises(InternalError, match=r"after pass 'vandal'.*allowed aten op"):
        run_passes(tiny_llama(), context(), passes=[make_pass("vandal", rewrite=break_it)])


def test_a_result_that_was_right_before_a_pass_is_looked_at_again_when_the_pass_changed_it():
    def lie(program):
        node = next(node for node in program.graph.nodes if node.op == "call_function")
        with node.meta["val"].fake_mode:
            node.meta["val"] = node.meta["val"].to(torch.float64)
        return 1

    with pytest.raises(InternalError, match=r"after pass 'liar'.*recorded result"):
        run_passes(tiny_llama(), context(), passes=[make_pass("honest"), make_pass("liar", rewrite=lie)])


@pytest.mark.parametrize("asked", [{}, {"quantization": "w8a16"}, {"quantization": "w8a8", "weight_dtype": "float16"},
                                   {"weight_dtype": "bfloat16"}])
@pytest.mark.parametrize("made", [{}, {"bias": True}, {"tied": True}, {"up_first": True}, {"dtype": torch.bfloat16}])
def test_every_pass_is_idempotent(made, asked):
    program, ctx = tiny_llama(**made), context(**asked)
    for step in order_passes(load_passes()):
        step.run(program, ctx)
        text, weights = dump_graph(program), sorted(program.weights)
        assert step.run(program, ctx).matches == 0, step.name
        assert dump_graph(program) == text, step.name
        assert sorted(program.weights) == weights, step.name


def test_the_tiny_llama_matches_its_golden_dumps():
    texts = golden_texts()
    assert sorted(path.name for path in FOLDER.glob("*.txt")) == sorted(texts)
    for name, text in texts.items():
        assert (FOLDER / name).read_text(encoding="utf-8") == text, (
            f"{name} changed; if that is meant: python -m tests.passes.regenerate_golden")
