"""How Gemma 3's tensors reach its definition: names of every layout, norms as 1 + w, the vision part left out."""

import pytest
import torch
from safetensors.torch import load_file

from camshaft.core.errors import CheckpointError
from camshaft.frontend.checkpoint import open_checkpoint
from camshaft.frontend.load import program_from_checkpoint
from camshaft.ir.weight import constant
from camshaft.models.registry import family_of
from camshaft.testing.tiny import tiny_config, write_tensors, write_tiny

VISION = {"vision_tower.vision_model.post_layernorm.bias": torch.ones(3),
          "multi_modal_projector.mm_soft_emb_norm.weight": torch.ones(3)}
LAYOUTS = {
    "text": lambda name: name,
    "before_4_52": lambda name: f"language_model.{name}",
    "since_4_52": lambda name: name.replace("model.", "model.language_model.", 1),
}


def write_multimodal(folder, rename, vision_prefix="", **changes):
    """A tiny Gemma 3 as a multimodal checkpoint names its tensors."""
    import json

    write_tiny(folder, "gemma3", tokenizer=False, **changes)
    tensors = {rename(name): tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    write_tensors(folder, {**tensors, **{vision_prefix + name: tensor for name, tensor in VISION.items()}})
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": tiny_config("gemma3", **changes)}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.mark.parametrize(("layout", "vision_prefix"), [("before_4_52", ""), ("since_4_52", "model.")])
def test_the_text_part_of_a_multimodal_checkpoint_is_the_text_model(layout, vision_prefix, tmp_path, run_program):
    text = program_from_checkpoint(open_checkpoint(write_tiny(tmp_path / "text", "gemma3")), torch.float32)
    folder = write_multimodal(tmp_path / "both", LAYOUTS[layout], vision_prefix)
    part = program_from_checkpoint(open_checkpoint(folder), torch.float32)
    ids = torch.arange(40)
    assert torch.equal(run_program(part, ids), run_program(text, ids))


def test_an_untied_head_of_a_multimodal_checkpoint_is_found(tmp_path, run_program):
    untied = {"tie_word_embeddings": False}
    folder = write_multimodal(tmp_path, LAYOUTS["before_4_52"], **untied)
    program = program_from_checkpoint(open_checkpoint(folder), torch.float32)
    assert "lm_head.weight" in program.weights
    assert run_program(program, torch.arange(5)).isfinite().all()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_other_families_take_vision_tensors_for_what_they_are_unknown(family, tmp_path):
    folder = write_tiny(tmp_path, family, tokenizer=False)
    write_tensors(folder, {**load_file(folder / "model.safetensors"), **VISION})
    with pytest.raises(CheckpointError, match="multi_modal_projector"):
        program_from_checkpoint(open_checkpoint(folder), torch.float32)


def adapted(**tensors):
    weights = {name.replace("__", "."): constant(tensor, name) for name, tensor in tensors.items()}
    return family_of("Gemma3ForCausalLM").adapt_weights(weights)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_norms_gain_one_in_float32_and_nothing_else_does(dtype):
    small = torch.tensor([2.0 ** -10, -1.0, 3.0]).to(dtype)
    found = adapted(model__norm__weight=small, model__layers__0__self_attn__q_norm__weight=small,
                    model__embed_tokens__weight=small)
    for name in ("model.norm.weight", "model.layers.0.self_attn.q_norm.weight"):
        assert found[name].dtype == found[name].read().dtype == torch.float32
        assert found[name].read().tolist() == [1 + 2.0 ** -10, 0.0, 4.0]
        assert found[name].span is None
    assert torch.equal(found["model.embed_tokens.weight"].read(), small)


def test_a_norm_of_another_type_is_refused_and_not_folded(tmp_path):
    folder = write_tiny(tmp_path, "gemma3", tokenizer=False)
    tensors = load_file(folder / "model.safetensors")
    write_tensors(folder, {**tensors, "model.norm.weight": tensors["model.norm.weight"].to(torch.int8)})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight.*int8"):
        program_from_checkpoint(open_checkpoint(folder), torch.float32)


def test_two_tensors_for_one_parameter_are_refused():
    with pytest.raises(CheckpointError, match=r"one tensor for model\.norm\.weight"):
        adapted(model__norm__weight=torch.ones(2), language_model__model__norm__weight=torch.ones(2))
