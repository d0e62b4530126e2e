"""The native build: where it succeeds, where it does without, and what its kernels promise beyond parity."""

import concurrent.futures
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from camshaft.core.errors import EngineCorruptError, EngineVersionError
from camshaft.kernels import native
from camshaft.kernels.dispatch import bind
from camshaft.kernels.op import OPS, load_families

load_families("cpu")
needs_compiler = pytest.mark.skipif(native.find_compiler() is None, reason="needs a C compiler")


@pytest.fixture
def small_source(tmp_path_factory, monkeypatch):
    """Stands in for the real kernels: one file that compiles in no time."""
    home = tmp_path_factory.mktemp("sources")
    source = home / "tiny" / "cpu.c"
    source.parent.mkdir()
    source.write_text("int camshaft_answer(void) { return 42; }\n")
    monkeypatch.setattr(native, "_FOLDER", home)
    return source


@pytest.fixture
def compiled(library):
    """The real kernels; the test is skipped where there is no compiler."""
    if library is None:
        pytest.skip("needs a C compiler")
    return library


def _script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_every_family_with_c_code_is_compiled():
    families = [path.parent.name for path in native.source_files()]
    assert families == sorted(families)
    assert {"act", "gemm", "norm", "rope"} <= set(families)


@needs_compiler
def test_a_library_is_compiled_once_and_reused(small_source, tmp_path, monkeypatch):
    path = native.compile_library(tmp_path / "made")
    assert native.load_library(path).camshaft_answer() == 42
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    monkeypatch.setattr(native, "_compile", lambda *args: pytest.fail("compiled again"))
    assert native.compile_library(tmp_path / "made") == path


@needs_compiler
def test_changed_sources_get_another_name(small_source, tmp_path):
    first = native.compile_library(tmp_path)
    small_source.write_text("int camshaft_answer(void) { return 43; }\n")
    second = native.compile_library(tmp_path)
    assert first != second
    assert native.load_library(second).camshaft_answer() == 43


@needs_compiler
def test_a_library_of_other_sources_is_refused(small_source, tmp_path):
    path = native.compile_library(tmp_path)
    small_source.write_text("int camshaft_answer(int more) { return more; }\n")
    with pytest.raises(EngineVersionError, match="Build the engine again"):
        native.load_library(path)


@needs_compiler
def test_many_at_once_share_one_folder(small_source, tmp_path):
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(native.compile_library, [tmp_path] * 4))
    assert len(set(paths)) == 1
    assert [entry.name for entry in tmp_path.iterdir()] == [paths[0].name]


def test_cc_none_does_without(monkeypatch, tmp_path):
    monkeypatch.setenv("CAMSHAFT_CC", "none")
    assert native.find_compiler() is None
    assert native.compile_library(tmp_path / "untouched") is None
    assert not (tmp_path / "untouched").exists()


def test_no_compiler_on_the_path(monkeypatch, tmp_path):
    monkeypatch.delenv("CAMSHAFT_CC", raising=False)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert native.find_compiler() is None


def test_an_unknown_cc_is_named(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("CAMSHAFT_CC", "no-such-compiler -m64")
    with caplog.at_level(logging.WARNING, "camshaft"):
        assert native.compile_library(tmp_path) is None
    assert "no-such-compiler" in caplog.text


@needs_compiler
def test_cc_may_carry_flags(small_source, monkeypatch, tmp_path):
    monkeypatch.setenv("CAMSHAFT_CC", f"{native.find_compiler()} -g0")
    assert native.compile_library(tmp_path) is not None


def test_a_failing_compiler_leaves_nothing_and_its_words_are_logged(small_source, monkeypatch, tmp_path, caplog):
    folder = tmp_path / "cache"
    broken = _script(tmp_path / "bad-cc", '[ "$1" = --version ] && exit 0\necho no luck >&2; exit 3')
    monkeypatch.setenv("CAMSHAFT_CC", broken)
    with caplog.at_level(logging.WARNING, "camshaft"):
        assert native.compile_library(folder) is None
    assert "exited with 3: no luck" in caplog.text
    assert list(folder.iterdir()) == []


@needs_compiler
def test_a_source_that_does_not_compile_is_reported(small_source, tmp_path, caplog):
    small_source.write_text("int camshaft_answer(void) { return; }}\n")
    with caplog.at_level(logging.WARNING, "camshaft"):
        assert native.compile_library(tmp_path) is None
    assert "cpu.c" in caplog.text


@needs_compiler
def test_a_folder_that_cannot_be_made_falls_back(small_source, tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.WARNING, "camshaft"):
        assert native.compile_library(tmp_path / "file" / "cache") is None
    assert "fall back to torch" in caplog.text


@needs_compiler
def test_a_full_disk_falls_back(small_source, tmp_path, monkeypatch, caplog):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(native.tempfile, "TemporaryDirectory", full)
    with caplog.at_level(logging.WARNING, "camshaft"):
        assert native.compile_library(tmp_path) is None
    assert "No space left" in caplog.text


@needs_compiler
def test_a_damaged_library_is_refused(small_source, tmp_path, caplog):
    path = native.compile_library(tmp_path)
    damaged = tmp_path / "damaged.so"
    damaged.write_bytes(path.read_bytes()[:100])
    with pytest.raises(EngineCorruptError, match="Build the engine again"):
        native.load_library(damaged)
    with pytest.raises(EngineCorruptError, match="native library"):
        native.load_library(tmp_path / "missing.so")


def test_the_kernels_bring_no_second_openmp_runtime(compiled):
    code = Path(compiled._name).read_bytes()
    assert b"pthread_create" in code, "their threads are their own"
    for name in (b"libgomp", b"libomp", b"libiomp", b"GOMP_", b"kmpc_"):
        assert name not in code


def test_kernels_use_no_more_threads_than_torch_is_given(compiled):
    code = ("import sys, threading, os, torch; from pathlib import Path\n"
            "from camshaft.kernels import native; from camshaft.kernels.dispatch import bind\n"
            "from camshaft.kernels.op import OPS, load_families\n"
            "load_families('cpu'); torch.set_num_threads(1)\n"
            "linear = bind(OPS.get('linear'), 'native', native.load_library(Path(sys.argv[1])))\n"
            "before = len(os.listdir('/proc/self/task'))\n"
            "linear(torch.randn(64, 512), torch.randn(512, 512), None)\n"
            "assert len(os.listdir('/proc/self/task')) == before\n")
    if not sys.platform.startswith("linux"):
        pytest.skip("reads /proc")
    subprocess.run([sys.executable, "-c", code, compiled._name], check=True, timeout=120,
                   env={**os.environ, "OMP_NUM_THREADS": "4"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(37, 100), (130, 576), (9, 33), (35, 769), (66, 1537)])
def test_a_row_of_linear_does_not_depend_on_its_batch(compiled, dtype, shape):
    rows, depth = shape
    linear = bind(OPS.get("linear"), "native", compiled)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(140, depth, generator=generator).to(dtype)
    weight, bias = torch.randn(rows, depth, generator=generator).to(dtype), torch.randn(rows).to(dtype)
    alone = torch.cat([linear(x[i:i + 1], weight, bias) for i in range(len(x))])
    for tokens in (*range(2, 20), 33, 140):
        assert torch.equal(linear(x[:tokens], weight, bias), alone[:tokens]), tokens
        assert torch.equal(linear(x[-tokens:], weight, bias), alone[-tokens:]), tokens


def _int8_product(rows, depth):
    generator = torch.Generator().manual_seed(3)
    weight = torch.randint(-127, 128, (rows, depth), generator=generator).to(torch.int8)
    return weight, torch.rand(rows, generator=generator) / 127, torch.randn(rows, generator=generator)


@pytest.mark.parametrize("name", ["linear_w8a16", "linear_w8a8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(37, 100), (130, 576), (9, 33), (35, 769), (66, 1537)])
def test_a_row_of_an_int8_product_does_not_depend_on_its_batch(compiled, name, dtype, shape):
    weight, scale, bias = _int8_product(*shape)
    product, bias = bind(OPS.get(name), "native", compiled), bias.to(dtype)
    x = torch.randn(140, shape[1], generator=torch.Generator().manual_seed(6)).to(dtype)
    x[70] *= 1000
    alone = torch.cat([product(x[i:i + 1], weight, scale, bias) for i in range(len(x))])
    for tokens in (*range(2, 20), 33, 140):
        assert torch.equal(product(x[:tokens], weight, scale, bias), alone[:tokens]), tokens
        assert torch.equal(product(x[-tokens:], weight, scale, bias), alone[-tokens:]), tokens


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
def test_a_narrow_weight_gives_the_bits_of_the_same_weight_in_fp32(compiled, narrow):
    generator = torch.Generator().manual_seed(7)
    weight, x = torch.randn(70, 100, generator=generator).to(narrow), torch.randn(40, 100, generator=generator)
    linear = bind(OPS.get("linear"), "native", compiled)
    for tokens in (1, 3, 4, 5, 40):
        assert torch.equal(linear(x[:tokens], weight, None), linear(x[:tokens], weight.float(), None)), tokens


def test_results_do_not_depend_on_the_number_of_threads(compiled):
    generator = torch.Generator().manual_seed(4)
    x, weight = torch.randn(50, 96, generator=generator), torch.randn(333, 96, generator=generator)
    linear = bind(OPS.get("linear"), "native", compiled)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        single = linear(x, weight, None)
        torch.set_num_threads(3)
        assert torch.equal(linear(x, weight, None), single)
    finally:
        torch.set_num_threads(threads)


def test_linear_without_depth_is_its_bias(compiled):
    linear = bind(OPS.get("linear"), "native", compiled)
    bias = torch.tensor([1.0, -2.0, 3.0])
    assert torch.equal(linear(torch.empty(2, 0), torch.empty(3, 0), bias), bias.expand(2, 3))
    assert linear(torch.ones(2, 4), torch.empty(0, 4), None).shape == (2, 0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_values_stay_visible(compiled, bad):
    x = torch.ones(2, 40)
    x[1, 35] = bad
    int8 = (x, torch.ones(8, 40, dtype=torch.int8), torch.ones(8), None)
    for name, args in (("linear", (x, torch.ones(8, 40), None)), ("linear_w8a16", int8), ("linear_w8a8", int8),
                       ("rms_norm", (x, torch.ones(40), 1e-5)),
                       ("layer_norm", (x, torch.ones(40), None, 1e-5)), ("silu_mul", (x,)),
                       ("gelu_mul", (x, "none")), ("gelu_mul", (x, "tanh"))):
        found = bind(OPS.get(name), "native", compiled)(*args)
        assert found[0].isfinite().all(), name
        assert not found[1].isfinite().all(), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_16_bit_value_survives_widening_and_rounding(compiled, dtype):
    bits = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16)
    values = bits.view(dtype)
    finite = values.isfinite()
    linear = bind(OPS.get("linear"), "native", compiled)
    found = linear(torch.ones(1, 1, dtype=dtype), values[:, None].contiguous(), None)[0]
    assert torch.equal(found[finite].abs(), values[finite].abs())
    assert torch.equal(found[values.isinf()], values[values.isinf()])
    assert found[values.isnan()].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounding_to_16_bits_is_to_nearest_even_as_in_torch(compiled, dtype):
    generator = torch.Generator().manual_seed(5)
    coarse = torch.randn(4096, generator=generator) * 10.0 ** torch.randint(-7, 5, (4096,), generator=generator)
    gate_up = torch.stack((coarse, torch.randn(4096, generator=generator)), dim=1).to(dtype)
    add_rms_norm = bind(OPS.get("add_rms_norm"), "native", compiled)
    total = add_rms_norm(gate_up, gate_up.flip(1), torch.ones(2, dtype=dtype), 1.0)[1]
    assert torch.equal(total, (gate_up.float() + gate_up.flip(1).float()).to(dtype))


@pytest.mark.parametrize("impl", ["ref", "native"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_float32_weight_beside_16_bit_values_is_not_rounded_before_their_product(impl, dtype, compiled):
    generator = torch.Generator().manual_seed(6)
    x, residual = (torch.randn(50, 577, generator=generator).to(dtype) for _ in range(2))
    weight = 1 + torch.randn(577, generator=generator) / 8
    once = torch.finfo(dtype).eps / 2 * 1.001
    normed, total = bind(OPS.get("add_rms_norm"), impl, compiled)(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, bind(OPS.get("rms_norm"), impl, compiled)(total, weight, 1e-5))
    assert normed.dtype == dtype

    def error(found):
        wanted = OPS.get("rms_norm").spec.reference(total.double(), weight.double(), 1e-5)
        known = wanted.abs() > torch.finfo(dtype).tiny * 4
        return float(((found.double() - wanted) / wanted)[known].abs().max())

    assert error(normed) <= once
    assert error(bind(OPS.get("rms_norm"), impl, compiled)(total, weight.to(dtype), 1e-5)) > 2 * once


def test_kernels_run_from_any_thread(compiled):
    linear = bind(OPS.get("linear"), "native", compiled)
    x, weight = torch.randn(3, 64), torch.randn(4096, 64)
    wanted, found = linear(x, weight, None), []
    thread = threading.Thread(target=lambda: found.append(linear(x, weight, None)))
    thread.start()
    thread.join()
    assert torch.equal(found[0], wanted)


def test_rope_table_is_the_one_transformers_makes(compiled):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(hidden_size=64, num_attention_heads=1, head_dim=64, max_position_embeddings=131072)
    rotary = LlamaRotaryEmbedding(config)
    positions = torch.tensor([0, 1, 2, 511, 8191, 131071])
    cos, sin = rotary(torch.empty(1, dtype=torch.float32), positions[None])
    wanted = torch.cat((cos[0, :, :32], sin[0, :, :32]), dim=-1)
    args = (positions, rotary.inv_freq, float(rotary.attention_scaling))
    assert torch.equal(OPS.get("rope_cos_sin").spec.reference(*args), wanted)
    found = bind(OPS.get("rope_cos_sin"), "native", compiled)(*args)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1.2e-7)
