"""8-bit and 16-bit weights: what is replaced, what stays, what a step then computes, and how little is held."""

import pytest
import torch

from camshaft.core.errors import CheckpointError, UserError
from camshaft.ir.verify import verify
from camshaft.ir.weight import Weight, constant, quantised
from camshaft.passes.narrow_weights import NarrowWeights
from camshaft.passes.pipeline import run_passes
from camshaft.passes.quantize import Quantize
from camshaft.testing.parity import relative_error
from tests.passes.graphs import Builder, context, pure_inputs, run_program, tiny_llama

HEAD = "model.embed_tokens.weight"


def calls(program, name):
    target = name if name.startswith("aten") else f"{name}.default"
    return [node for node in program.graph.nodes if node.op == "call_function" and str(node.target) == target]


@pytest.mark.parametrize("kind", ["w8a16", "w8a8"])
def test_every_product_reads_8_bit_weights_and_the_embedding_keeps_its_table(kind):
    program = tiny_llama(tied=True, bias=True)
    table = program.weights[HEAD]
    products = len(calls(program, "camshaft.linear"))
    result = Quantize().run(program, context(quantization=kind))
    verify(program)
    assert result.matches == products == len(calls(program, f"camshaft.linear_{kind}"))
    assert not calls(program, "camshaft.linear")
    assert f"{products} × linear_{kind}" in result.notes[0]
    assert program.weights[HEAD] is table
    assert program.weights[f"{HEAD}@int8"].dtype == torch.int8
    assert program.weights[f"{HEAD}@scale"].shape == table.shape[:1]
    assert [name for name in program.weights if name.endswith("_proj.weight")] == []
    assert calls(program, "aten.embedding.default")[0].args[0].target == HEAD


def test_nothing_is_quantised_unless_asked():
    program = tiny_llama()
    assert Quantize().run(program, context()).matches == 0
    assert not any("@" in name for name in program.weights)


def test_a_product_with_something_computed_stays():
    b = Builder()
    product = b.call("camshaft.linear", b.call("aten.embedding.default", b.weight("table", 11, 8), b.token_ids),
                     b.call("aten.mul.Tensor", b.weight("scaled", 6, 8), b.weight("by", 8)), None)
    program = b.finish(product)
    assert Quantize().run(program, context(quantization="w8a8")).matches == 0


def test_merged_weights_are_rounded_after_merging_a_row_at_a_time():
    program = tiny_llama()
    plain = program.weights["model.layers.0.self_attn.k_proj.weight"].read()
    run_passes(program, context(quantization="w8a16"))
    name = "model.layers.0.self_attn.q_proj+k_proj+v_proj.weight"
    values, scale = program.weights[f"{name}@int8"].read(), program.weights[f"{name}@scale"].read()
    rows = slice(16, 16 + len(plain))
    assert (values[rows].abs().amax(dim=1) == 127).all()
    assert ((values[rows] * scale[rows, None] - plain).abs() <= scale[rows, None] * 0.5001).all()


def rounded_llama(**made):
    """The tiny Llama whose product weights hold what their 8-bit form stands for, in fp32."""
    program = tiny_llama(**made)
    for node in calls(program, "camshaft.linear"):
        name = node.args[1].target
        values, scale = quantised(program.weights[name])
        if not any(reader is not node for reader in node.args[1].users):
            program.weights[name] = constant(values.read() * scale.read()[:, None], name)
    return program


@pytest.mark.parametrize(("kind", "tolerance"), [("w8a16", 1e-5), ("w8a8", 2e-2)])
def test_logits_are_those_of_the_same_quantised_weights(kind, tolerance):
    expected = run_program(rounded_llama(bias=True), pure_inputs())
    program = tiny_llama(bias=True)
    Quantize().run(program, context(quantization=kind))
    assert relative_error(run_program(program, pure_inputs()), expected) <= tolerance


def test_a_weight_is_read_once_where_its_values_come_first():
    reads = []
    matrix = torch.randn(5, 8)
    source = Weight(shape=(5, 8), dtype=torch.float32, read=lambda: reads.append(1) or matrix, origin="m")
    values, scale = quantised(source)
    assert not reads
    stored, by = values.read(), scale.read()
    assert len(reads) == 1
    assert torch.equal(quantised(source)[1].read(), by)
    torch.testing.assert_close(stored * by[:, None], matrix, rtol=0, atol=float(by.max()) * 0.5001)


def test_rows_of_zeros_and_of_tiny_numbers_become_zeros():
    matrix = torch.zeros(2, 8)
    matrix[1] = 1e-38
    values, scale = quantised(constant(matrix, "m"))
    assert not values.read().any()
    assert scale.read().isfinite().all()


def test_a_weight_that_is_not_finite_is_refused_by_name():
    matrix = torch.ones(4, 8)
    matrix[2, 3] = float("nan")
    with pytest.raises(CheckpointError, match=r"layer\.weight"):
        quantised(constant(matrix, "layer.weight"))[1].read()


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
@pytest.mark.parametrize("tied", [True, False])
def test_matrices_are_stored_in_16_bits_and_arithmetic_stays_fp32(kind, tied):
    program, dtype = tiny_llama(tied=tied), getattr(torch, kind)
    rounded = tiny_llama(tied=tied)
    for name, weight in rounded.weights.items():
        if len(weight.shape) == 2:
            rounded.weights[name] = weight.cast(dtype).cast(torch.float32)
    result = NarrowWeights().run(program, context(weight_dtype=kind))
    verify(program)
    assert result.matches == len(calls(program, "camshaft.linear")) + 1
    assert {weight.dtype for weight in program.weights.values() if len(weight.shape) == 2} == {dtype}
    assert {weight.dtype for weight in program.weights.values() if len(weight.shape) == 1} == {torch.float32}
    found = run_program(program, pure_inputs())
    assert found.dtype == torch.float32
    assert torch.equal(found, run_program(rounded, pure_inputs()))


def test_8_bit_products_beside_a_16_bit_embedding():
    program = tiny_llama(tied=True)
    run_passes(program, context(quantization="w8a8", weight_dtype="bfloat16"))
    assert sorted({str(weight.dtype) for weight in program.weights.values()}) == [
        "torch.bfloat16", "torch.float32", "torch.int8"]
    assert program.weights[f"{HEAD}@bfloat16"].shape == program.weights[f"{HEAD}@int8"].shape
    assert HEAD not in program.weights


def test_leaving_the_pass_out_of_a_quantised_build_is_refused():
    with pytest.raises(UserError, match="quantization='w8a8'"):
        context(quantization="w8a8", skip_passes=("quantize",))
    assert Quantize().run(tiny_llama(), context(skip_passes=("quantize",))).matches == 0


def test_fp8_takes_every_product_but_the_head():
    program = tiny_llama(tied=True, bias=True)
    products = len(calls(program, "camshaft.linear"))
    result = Quantize().run(program, context(quantization="fp8"))
    verify(program)
    head, = calls(program, "camshaft.linear")
    assert head.args[1].target == HEAD
    assert result.matches == products - 1 == len(calls(program, "camshaft.linear_fp8"))
    assert Quantize().run(program, context(quantization="fp8")).matches == 0
    values = [weight for name, weight in program.weights.items() if name.endswith("@fp8")]
    assert {weight.dtype for weight in values} == {torch.float8_e4m3fn}


def test_fp8_weights_stand_for_the_matrix_within_their_rounding():
    matrix = torch.randn(4, 300, generator=torch.Generator().manual_seed(1))
    matrix *= torch.tensor([1e-6, 1, 1e4, 1])[:, None]
    values, scale = (part.read() for part in quantised(constant(matrix, "m"), torch.float8_e4m3fn))
    assert (values.float().abs().amax(dim=1) == 448).all()
    # three bits of mantissa: half a unit in the last place is 1/16; below the smallest normal number, 2^-10 units
    bound = torch.maximum(matrix.abs() / 16, scale[:, None] * 2.0**-10)
    assert ((values.float() * scale[:, None] - matrix).abs() <= bound * 1.0001).all()


def test_logits_of_an_fp8_model_are_near_those_of_its_rounded_weights():
    rounded = tiny_llama(bias=True)
    head = calls(rounded, "camshaft.linear")[-1].args[1].target
    for node in calls(rounded, "camshaft.linear"):
        name = node.args[1].target
        if name != head:
            values, scale = quantised(rounded.weights[name], torch.float8_e4m3fn)
            rounded.weights[name] = constant(values.read().float() * scale.read()[:, None], name)
    program = tiny_llama(bias=True)
    Quantize().run(program, context(quantization="fp8"))
    assert relative_error(run_program(program, pure_inputs()), run_program(rounded, pure_inputs())) <= 0.1
