"""Weight maps against the names, shapes and types of real checkpoints: headers only, no weights."""

import json
import math
from pathlib import Path

import pytest
import torch

from camshaft.config.model import RopeConfig
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
    """The checkpoint's tensors; ``{layer}`` in a fixture's name stands for every layer, as ``{vision_layer}`` does."""
    config, found = fixture["config"], {}
    counts = {"{layer}": config.get("text_config", config)["num_hidden_layers"],
              "{vision_layer}": config.get("vision_config", config).get("num_hidden_layers")}
    for pattern, (dtype, shape) in fixture["tensors"].items():
        places = [place for place in counts if place in pattern]
        for layer in range(counts[places[0]]) if places else (0,):
            name = pattern.format(layer=layer, vision_layer=layer)
            found[name] = Weight(shape=tuple(shape), dtype=DTYPES[dtype], read=unread, origin=name)
    return found


def num_parameters(weights):
    return sum(math.prod(weight.shape) for weight in weights)


@pytest.fixture(params=FIXTURES, ids=lambda path: path.stem)
def fixture(request):
    return json.loads(request.param.read_text(encoding="utf-8"))


def test_weights_bind_exactly_and_export(fixture):
    family = family_of(fixture["config"]["architectures"][0])
    held = header_weights(fixture)
    config, tensors = settle_head(family, family.config_from_hf(fixture["config"]), family.adapt_weights(held))
    bound = bind_weights(family, config, tensors)

    used = {weight.origin for weight in bound.values()}
    left_out = held.keys() - used
    assert all(name.startswith(("vision_tower.", "multi_modal_projector.")) for name in left_out)
    assert num_parameters(held[name] for name in used | left_out) == fixture["num_parameters"]
    assert num_parameters(bound.values()) == num_parameters(held[name] for name in used)
    # Gemma 3 leaves the key out: its default is tied
    assert config.tie_word_embeddings == fixture["config"].get("tie_word_embeddings", True)

    program = export_program(config, bound, torch.bfloat16)
    nodes = list(program.graph.nodes)
    assert tuple(node.target for node in nodes if node.op == "placeholder") == PURE_INPUTS
    assert {node.target for node in nodes if node.op == "get_attr"} == program.weights.keys()
    assert sum("attention" in str(node.target) for node in nodes if node.op == "call_function") == config.num_layers
    logits = nodes[-1].meta["val"]
    assert logits.dtype == torch.bfloat16
    assert logits.shape[1] == config.vocab_size


def test_the_published_models_are_covered():
    assert [path.stem for path in FIXTURES] == ["gemma-3-4b", "llama-3.1-8b", "llama-3.2-1b", "mistral-7b-v0.3",
                                                "qwen2.5-7b", "qwen3-8b", "smollm2-135m-instruct"]


def read_fixture(name):
    return json.loads((FIXTURES[0].parent / f"{name}.json").read_text(encoding="utf-8"))


def test_gemma_3_4b_reads_as_published():
    """The report's shape: five layers of six see 1024 tokens, and only the sixth is stretched to 128k."""
    fixture = read_fixture("gemma-3-4b")
    config = family_of("Gemma3ForConditionalGeneration").config_from_hf(fixture["config"])
    assert config.windows == ((1024,) * 5 + (None,)) * 5 + (1024,) * 4
    assert config.rope == RopeConfig(theta=1e6, kind="linear", factor=8.0)
    assert config.local_rope == RopeConfig(theta=1e4)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.max_position) == (8, 4, 256, 131072)
    assert config.attention_scale == 1 / 16
    text = family_of("Gemma3ForConditionalGeneration").adapt_weights(header_weights(fixture))
    assert num_parameters(text.values()) == 3880263168


def test_the_vision_part_is_left_out_with_a_line_in_the_log(caplog):
    with caplog.at_level("INFO", logger="camshaft"):
        family_of("Gemma3ForConditionalGeneration").adapt_weights(header_weights(read_fixture("gemma-3-4b")))
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "439 tensors of the vision tower" in caplog.text


@pytest.mark.parametrize("name", ["qwen2.5-7b", "qwen3-8b"])
def test_published_qwen_models_have_no_window(name):
    fixture = read_fixture(name)
    assert family_of(fixture["config"]["architectures"][0]).config_from_hf(fixture["config"]).windows == ()
