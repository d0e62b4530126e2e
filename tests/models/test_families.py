"""What every architecture family must hold, whichever files lie in the folder."""

import dataclasses
import inspect
import operator

import pytest
import torch
from torch import nn

from camshaft.config.model import ModelConfig
from camshaft.core.errors import InternalError
from camshaft.frontend.export import export_module, export_program
from camshaft.ir.program import ALLOWED_ATEN, PURE_INPUTS
from camshaft.ir.verify import verify
from camshaft.ir.weight import Weight, constant
from camshaft.models.registry import MODELS, load_models

FAMILIES = tuple({type(family): family for family in load_models()}.values())


@pytest.fixture(params=FAMILIES, ids=lambda family: type(family).__name__)
def family(request):
    return request.param


def random_weights(family, config, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    with torch.device("meta"):
        module = family.module(config)
    return {name: constant(torch.randn(parameter.shape, generator=generator).mul(0.3).to(dtype), name)
            for name, parameter in module.named_parameters()}


def test_a_family_serves_its_architectures_and_reads_like_its_paper(family):
    assert all(MODELS.get(name) is family for name in family.architectures)
    assert family.tiny_config().architecture in family.architectures
    assert inspect.getdoc(type(family)) != inspect.getdoc(type(family).__mro__[1])
    assert len(inspect.getsource(inspect.getmodule(type(family))).splitlines()) <= 250


@pytest.mark.parametrize("tied", [False, True])
def test_weight_names_cover_every_parameter_once(family, tied):
    config = dataclasses.replace(family.tiny_config(), tie_word_embeddings=tied)
    names = family.weight_names(config)
    assert names.keys() == random_weights(family, config).keys()
    assert len(set(names.values())) == len(names)
    assert family.embedding_tensor in names.values()
    assert (family.head_tensor in names.values()) is not tied


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_tiny_model_exports_to_allowed_ops_only(family, dtype, run_program):
    config = family.tiny_config()
    program = export_program(config, random_weights(family, config), dtype)
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    assert tuple(node.target for node in placeholders) == PURE_INPUTS
    for node in program.graph.nodes:
        assert "val" in node.meta
        if node.op == "call_function" and node.target is not operator.getitem:
            assert node.target.namespace == "camshaft" or str(node.target) in ALLOWED_ATEN
            assert str(node.target) != "aten.sym_size.int"
    logits = run_program(program, torch.arange(5))
    assert logits.shape == (5, config.vocab_size)
    assert logits.dtype == dtype
    assert logits.isfinite().all()


def test_the_exported_graph_runs_any_number_of_tokens_as_eager_does(family, run_program):
    config = family.tiny_config()
    weights = random_weights(family, config)
    program = export_program(config, weights, torch.float32)
    eager = family.module(config)
    eager.load_state_dict({name: weight.read() for name, weight in weights.items()})
    for num_tokens in (1, 2, 29):
        ids = torch.arange(num_tokens) % config.vocab_size
        with torch.inference_mode():
            expected = eager(ids, torch.arange(num_tokens), torch.arange(num_tokens))
        assert torch.equal(run_program(program, ids), expected)


def test_tables_stay_float32_whatever_the_model_computes_in(family):
    config = family.tiny_config()
    program = export_program(config, random_weights(family, config), torch.bfloat16)
    computed = [weight for weight in program.weights.values() if weight.origin == "computed"]
    assert computed
    assert all(weight.dtype == weight.read().dtype == torch.float32 for weight in computed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_norms_of_gemma_stay_float32_and_those_of_other_families_do_not(family, dtype):
    config = family.tiny_config()
    program = export_program(config, random_weights(family, config, torch.float64), dtype)
    norms = {name: weight for name, weight in program.weights.items() if "norm" in name}
    wide = type(family).__name__ == "Gemma3"
    assert {weight.dtype for weight in norms.values()} == {torch.float32 if wide else dtype}
    assert {weight.read().dtype for weight in norms.values()} == {torch.float32 if wide else dtype}
    assert {weight.fixed for weight in norms.values()} == {wide}
    others = [weight for name, weight in program.weights.items() if name not in norms and weight.origin != "computed"]
    assert {(weight.dtype, weight.fixed) for weight in others} == {(dtype, False)}
    verify(program)


def tiny_module(compute):
    """A one-parameter definition whose forward is ``compute(x[L, H], weight)``."""

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(8, 4, device="meta"))

        def forward(self, token_ids, positions, logits_rows):
            x = nn.functional.embedding(token_ids, self.weight)
            return compute(x.index_select(0, logits_rows), self.weight)

    return Odd(), {"weight": Weight(shape=(8, 4), dtype=torch.float32, read=lambda: torch.zeros(8, 4))}


def any_config() -> ModelConfig:
    return FAMILIES[0].tiny_config()


def test_an_op_outside_the_allowed_set_is_named():
    module, weights = tiny_module(lambda x, weight: x.softmax(-1))
    with pytest.raises(InternalError, match=r"'softmax'.*aten\.softmax\.int"):
        export_module(module, any_config(), weights, torch.float32)


def test_weights_that_are_not_the_parameters_are_named():
    module, weights = tiny_module(lambda x, weight: x)
    with pytest.raises(InternalError, match="extra"):
        export_module(module, any_config(), {**weights, "extra": weights["weight"]}, torch.float32)


@pytest.mark.parametrize(("dtype", "wanted"), [
    (torch.float16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)])
def test_a_parameter_kept_in_float32_is_cast_to_nothing_narrower(dtype, wanted):
    module, weights = tiny_module(lambda x, weight: x)
    module.float32_parameters = ("weight",)
    program = export_module(module, any_config(), weights, dtype)
    assert program.weights["weight"].dtype == program.weights["weight"].read().dtype == wanted


def test_a_name_among_float32_parameters_that_is_none_is_an_error():
    module, weights = tiny_module(lambda x, weight: x)
    module.float32_parameters = ("wieght",)
    with pytest.raises(InternalError, match="wieght"):
        export_module(module, any_config(), weights, torch.bfloat16)


def test_a_parameter_the_forward_never_uses_is_named():
    module, weights = tiny_module(lambda x, weight: x)
    module.unused = nn.Parameter(torch.empty(3, device="meta"))
    with pytest.raises(InternalError, match=r"never uses \['unused'\]"):
        export_module(module, any_config(), {**weights, "unused": weights["weight"]}, torch.float32)
