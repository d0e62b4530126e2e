"""Dequantisation against the ``gguf`` package, bit for bit."""

import numpy as np
import pytest
import torch

from camshaft.frontend.gguf_blocks import BLOCK_TYPES, UNSUPPORTED_NAMES, unpack_rows

gguf = pytest.importorskip("gguf")
PACKED = {kind.name: (code, kind) for code, kind in BLOCK_TYPES.items() if kind.unpack is not None}


def random_rows(kind, num_rows, num_blocks, seed=0):
    """Random packed rows whose float16 scales are finite."""
    raw = np.random.default_rng(seed).integers(0, 256, (num_rows, num_blocks, kind.block_bytes), dtype=np.uint8)
    scale_at = {"Q6_K": (208,), "Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,)}.get(kind.name, (0, 2))
    for start in scale_at:
        raw[:, :, start + 1] &= 0x3F  # clears the top exponent bit: below 2.0
    return torch.from_numpy(raw.reshape(num_rows, -1))


@pytest.mark.parametrize("name", sorted(PACKED))
def test_equals_the_reference_bit_for_bit(name):
    code, kind = PACKED[name]
    raw = random_rows(kind, 5, 3)
    expected = gguf.quants.dequantize(raw.numpy(), gguf.GGMLQuantizationType(code))
    found = unpack_rows(raw, kind, 3 * kind.block_elements)
    assert found.shape == (5, 3 * kind.block_elements)
    assert np.isfinite(expected).all()
    assert np.unique(expected).size > 100
    np.testing.assert_array_equal(found.numpy(), expected)


@pytest.mark.parametrize("name", ["Q4_1", "Q6_K", "Q8_0"])
def test_rows_across_chunks_and_in_another_order(name):
    code, kind = PACKED[name]
    num_columns = 8 * 256
    raw = random_rows(kind, 41, num_columns // kind.block_elements, seed=1)
    expected = gguf.quants.dequantize(raw.numpy(), gguf.GGMLQuantizationType(code))
    np.testing.assert_array_equal(unpack_rows(raw, kind, num_columns).numpy(), expected)
    order = torch.randperm(41, generator=torch.Generator().manual_seed(2))
    np.testing.assert_array_equal(unpack_rows(raw, kind, num_columns, order).numpy(), expected[order.numpy()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_plain_types_are_views(dtype):
    kind = next(kind for kind in BLOCK_TYPES.values() if kind.unpack is None and kind.dtype == dtype)
    values = torch.arange(24).view(4, 6).to(dtype)
    raw = values.view(torch.uint8)
    found = unpack_rows(raw, kind, 6)
    assert torch.equal(found, values)
    assert found.data_ptr() == raw.data_ptr()
    assert torch.equal(unpack_rows(raw, kind, 6, torch.tensor([3, 1, 0, 2])), values[[3, 1, 0, 2]])


def test_table_agrees_with_ggml():
    for code, kind in BLOCK_TYPES.items():
        assert gguf.GGMLQuantizationType(code).name == kind.name
        assert gguf.constants.GGML_QUANT_SIZES[code] == (kind.block_elements, kind.block_bytes)
    for code, name in UNSUPPORTED_NAMES.items():
        if code in {kind.value for kind in gguf.GGMLQuantizationType}:
            assert gguf.GGMLQuantizationType(code).name == name
        assert code not in BLOCK_TYPES
