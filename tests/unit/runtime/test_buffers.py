"""KV memory is sized within its budget, and what was chosen is said."""

import dataclasses

import pytest
import torch

from camshaft.config.runtime import KvCacheConfig
from camshaft.core.errors import UserError
from camshaft.runtime.buffers import allocate_pools, describe_kv, free_bytes, kv_pages_for
from tests.unit.runtime import attention_model as model

CPU = torch.device("cpu")
PAGE_BYTES = model.LIFE_CYCLE.page_bytes


@pytest.fixture(scope="module")
def engine():
    return model.engine()


@pytest.mark.parametrize(("max_bytes", "pages"), [(2 * PAGE_BYTES, 2), (10 * PAGE_BYTES - 1, 9), (10 * PAGE_BYTES, 10)])
def test_max_bytes_is_an_absolute_cap(engine, max_bytes, pages):
    chosen = kv_pages_for(engine, KvCacheConfig(max_bytes=max_bytes), CPU)
    assert chosen == (pages,)
    pools = allocate_pools(engine.manifest.life_cycles, chosen, CPU)
    assert sum(pool.nbytes for pool in pools) == pages * PAGE_BYTES <= max_bytes
    assert pools[0].shape == model.LIFE_CYCLE.pool_shape(pages)
    assert not pools[0].any()


def test_a_cap_beyond_the_free_memory_is_refused_with_the_numbers(engine, monkeypatch):
    monkeypatch.setattr("camshaft.runtime.buffers.free_bytes", lambda device: 5 * PAGE_BYTES)
    refused = rf"kv_cache.max_bytes={6 * PAGE_BYTES}: expected at most the {5 * PAGE_BYTES} bytes"
    with pytest.raises(UserError, match=refused):
        kv_pages_for(engine, KvCacheConfig(max_bytes=6 * PAGE_BYTES), CPU)


def test_less_than_one_usable_page_is_refused_with_the_numbers(engine):
    with pytest.raises(UserError, match=f"{2 * PAGE_BYTES}") as caught:
        kv_pages_for(engine, KvCacheConfig(max_bytes=2 * PAGE_BYTES - 1), CPU)
    assert caught.value.field == "kv_cache.max_bytes"


def test_the_share_is_of_what_is_free_after_weights_and_activations(engine, monkeypatch, tmp_path):
    saved = model.engine(tmp_path / "engine")
    peak = engine.manifest.activation_peak_bytes
    weight_bytes = sum(tensor.nbytes for tensor in engine.tensors().values())
    monkeypatch.setattr("camshaft.runtime.buffers.free_bytes", lambda device: peak + 1000 * PAGE_BYTES)
    assert kv_pages_for(engine, KvCacheConfig(memory_fraction=0.5), CPU) == (500,)
    mapped = kv_pages_for(saved, KvCacheConfig(memory_fraction=0.5), CPU)
    assert mapped == ((1000 * PAGE_BYTES - weight_bytes) // 2 // PAGE_BYTES,)
    monkeypatch.setattr("camshaft.runtime.buffers.free_bytes", lambda device: peak)
    with pytest.raises(UserError, match=r"kv_cache\.memory_fraction"):
        kv_pages_for(engine, KvCacheConfig(), CPU)


def test_several_life_cycles_share_the_budget(engine):
    spec = model.LIFE_CYCLE
    wide = dataclasses.replace(spec, num_kv_heads=4)
    manifest = dataclasses.replace(engine.manifest, life_cycles=(spec, wide))
    two = type(engine)(manifest=manifest, graph_text="", folder=None, tensors={}, tokenizer_files={}, native=None)
    assert kv_pages_for(two, KvCacheConfig(max_bytes=30 * PAGE_BYTES), CPU) == (10, 10)


def test_the_choice_is_described_with_its_shortfall(engine):
    assert describe_kv(engine, (7,)) == "KV cache: 0 MiB, 96 tokens in pages of 16"
    assert describe_kv(engine, (6,)).endswith("80 tokens in pages of 16; fewer than the engine's longest request (96)")


@pytest.mark.parametrize("version", [1, 2])
def test_a_control_group_limit_counts(tmp_path, version):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:  8000 kB\n", encoding="ascii")
    assert free_bytes(CPU, root=tmp_path) == 8000 * 1024
    folder = tmp_path / "sys/fs/cgroup" / ("memory" if version == 1 else "")
    folder.mkdir(parents=True)
    names = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
             2: ("memory.max", "memory.current", "inactive_file")}[version]
    (folder / names[0]).write_text("5000000\n", encoding="ascii")
    (folder / names[1]).write_text("3000000\n", encoding="ascii")
    (folder / "memory.stat").write_text(f"anon 2000000\n{names[2]} 700000\n", encoding="ascii")
    assert free_bytes(CPU, root=tmp_path) == 5000000 - 3000000 + 700000
    (folder / names[0]).write_text("max\n", encoding="ascii")
    assert free_bytes(CPU, root=tmp_path) == 8000 * 1024


def test_free_memory_of_this_machine_is_sane(tmp_path):
    assert 0 < free_bytes(CPU) < 2**50
    assert free_bytes(CPU, root=tmp_path) > 0


def with_cycles(engine, *life_cycles, **build):
    manifest = dataclasses.replace(engine.manifest, life_cycles=life_cycles,
                                   build=dataclasses.replace(engine.manifest.build, **build))
    return type(engine)(manifest=manifest, graph_text="", folder=None, tensors={}, tokenizer_files={}, native=None)


FULL = dataclasses.replace(model.LIFE_CYCLE, page_size=16)
WINDOW = dataclasses.replace(FULL, kind="window", window=64, sinks=4, layers=(0, 1, 2, 3))


def test_life_cycles_get_pages_in_proportion_to_what_a_sequence_of_four_windows_holds(engine):
    both = with_cycles(engine, FULL, WINDOW, max_seq_len=1024, max_num_tokens=64, max_batch_size=4)
    num_bytes = 500 * (FULL.page_bytes + WINDOW.page_bytes)
    full, window = kv_pages_for(both, KvCacheConfig(max_bytes=num_bytes), CPU)
    assert (full - 1) * FULL.page_bytes + (window - 1) * WINDOW.page_bytes <= num_bytes
    assert (full + 1) * FULL.page_bytes + (window + 1) * WINDOW.page_bytes > num_bytes
    held = (FULL.worst_pages(256, 1), WINDOW.worst_pages(256, 1))
    assert held == (16, 6)
    assert abs((full - 1) / (window - 1) - held[0] / held[1]) < 0.02


@pytest.mark.parametrize("spare", [0, 40])
def test_the_longest_request_fits_before_life_cycles_are_balanced(engine, spare):
    both = with_cycles(engine, FULL, WINDOW, max_seq_len=1024, max_num_tokens=128, max_batch_size=4)
    needs = (64, WINDOW.worst_pages(1024, 128))
    assert needs[1] == 14
    num_bytes = 65 * FULL.page_bytes + 15 * WINDOW.page_bytes + spare * FULL.page_bytes
    chosen = kv_pages_for(both, KvCacheConfig(max_bytes=num_bytes), CPU)
    assert chosen[0] >= 65
    assert chosen[1] >= 15
    assert chosen[0] * FULL.page_bytes + chosen[1] * WINDOW.page_bytes <= num_bytes
    assert "fewer than" not in describe_kv(both, chosen)


def test_a_budget_too_small_for_the_longest_request_serves_the_longest_that_fits(engine):
    both = with_cycles(engine, FULL, WINDOW, max_seq_len=1024, max_num_tokens=128, max_batch_size=4)
    num_bytes = 30 * FULL.page_bytes + 15 * WINDOW.page_bytes
    full, window = kv_pages_for(both, KvCacheConfig(max_bytes=num_bytes), CPU)
    assert full * FULL.page_bytes + window * WINDOW.page_bytes <= num_bytes
    assert (full, window) == (30, 15)
    assert describe_kv(both, (full, window)) == (
        f"KV cache: {num_bytes / 2**20:.0f} MiB, 464 tokens and 224 tokens in windows of 64 in pages of 16; "
        "fewer than the engine's longest request (1024)")


def test_windows_alone_take_the_whole_budget(engine):
    lone = with_cycles(engine, WINDOW, max_seq_len=1024, max_num_tokens=128, max_batch_size=4)
    assert kv_pages_for(lone, KvCacheConfig(max_bytes=50 * WINDOW.page_bytes), CPU) == (50,)
    assert describe_kv(lone, (50,)).endswith("784 tokens in windows of 64 in pages of 16")
