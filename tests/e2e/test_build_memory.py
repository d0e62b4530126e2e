"""A build reads, converts and joins one tensor at a time: memory does not grow with the model."""

from pathlib import Path

import pytest

from camshaft.builder.build import build
from camshaft.config.build import BuildConfig
from camshaft.engine import storage
from camshaft.testing.tiny import write_tiny_llama

MID_SIZE = {"vocab_size": 2000, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8,
            "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}


def own_bytes():
    """Memory of this process that is no file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


@pytest.mark.parametrize(("stored", "num_shards", "dtype", "quantization"), [
    ("bfloat16", 3, "float32", "none"), ("float16", 1, "bfloat16", "none"), ("float32", 1, "float32", "none"),
    ("bfloat16", 1, "float32", "w8a8")])
def test_a_build_holds_a_few_tensors_whatever_the_model(tmp_path, monkeypatch, stored, num_shards, dtype, quantization):
    monkeypatch.setenv("CAMSHAFT_CC", "none")
    model = write_tiny_llama(tmp_path / "model", num_shards=num_shards, torch_dtype=stored, tokenizer=False, **MID_SIZE)
    seen, real = [own_bytes()], storage.read_weight

    def watched(name, weight):
        if len(seen) == 1:
            seen[0] = own_bytes()
        tensor = real(name, weight)
        seen.append(own_bytes())
        return tensor

    monkeypatch.setattr(storage, "read_weight", watched)
    narrow = "auto" if quantization == "none" else "bfloat16"
    engine = build(model, BuildConfig(dtype=dtype, weight_dtype=narrow, device="cpu", quantization=quantization),
                   output=tmp_path / "engine")
    # what is rounded to 8 bits is widened to float32 for it
    width = None if quantization == "none" else 4
    sizes = sorted((tensor.numel() * (width or tensor.itemsize) for tensor in engine.tensors().values()), reverse=True)
    assert sum(sizes) > 10 * sizes[0]
    assert max(seen) - seen[0] < sum(sizes[:5])
