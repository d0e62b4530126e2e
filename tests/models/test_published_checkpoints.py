"""Weight maps against the names, shapes and types of real checkpoints: headers only, no weights."""

import json
import math
from pathlib import Path

import pytest
import torch

from camshaft.frontend.export import export_program
from camshaft.frontend.safetensors_files import DTYPES
from camshaft.frontend.weights import bind_weights, settle_head
from camshaft.ir.program import PURE_INPUTS
from camshaft.ir.weight import Weight
from camshaft.models.registry import family_of

FIXTURES = sorted((Path(__file__).parent / "fixtures").glob("*.json"))


def unread():
    raise AssertionError("a header-only checkpoint has no bytes to read")


def header_weights(fixture):
    """The checkpoint's tensors; ``{layer}`` in a fixture's name stands for every layer."""
    found = {}
    for pattern, (dtype, shape) in fixture["tensors"].items():
        layers = range(fixture["config"]["num_hidden_layers"]) if "{layer}" in pattern else (0,)
        for layer in layers:
            name = pattern.format(layer=layer)
            found[name] = Weight(shape=tuple(shape), dtype=DTYPES[dtype], read=unread, origin=name)
    return found


@pytest.fixture(params=FIXTURES, ids=lambda path: path.stem)
def fixture(request):
    return json.loads(request.param.read_text(encoding="utf-8"))


def test_weights_bind_exactly_and_export(fixture):
    family = family_of(fixture["config"]["architectures"][0])
    config, tensors = settle_head(family, family.config_from_hf(fixture["config"]), header_weights(fixture))
    bound = bind_weights(family, config, tensors)

    assert {weight.origin for weight in bound.values()} == tensors.keys()
    assert sum(math.prod(weight.shape) for weight in bound.values()) == fixture["num_parameters"]
    assert config.tie_word_embeddings == fixture["config"]["tie_word_embeddings"]

    program = export_program(config, bound, torch.bfloat16)
    nodes = list(program.graph.nodes)
    assert tuple(node.target for node in nodes if node.op == "placeholder") == PURE_INPUTS
    assert {node.target for node in nodes if node.op == "get_attr"} == program.weights.keys()
    assert sum("attention" in str(node.target) for node in nodes if node.op == "call_function") == config.num_layers
    logits = nodes[-1].meta["val"]
    assert logits.dtype == torch.bfloat16
    assert logits.shape[1] == config.vocab_size


def test_the_four_published_models_are_covered():
    assert [path.stem for path in FIXTURES] == ["llama-3.1-8b", "llama-3.2-1b", "mistral-7b-v0.3",
                                                "smollm2-135m-instruct"]
