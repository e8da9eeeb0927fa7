"""Elastic memory: the cache grows with the prompt, shrinks after an eviction, and fails without harm."""

from __future__ import annotations

import pickle
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import entries, kept, last_logits, prefill_only

from pycriticalkv import KVPolicy, Llama

TYPES = {"f32": 0, "f16": 1, "bf16": 30, "q8_0": 8, "q5_1": 7, "q5_0": 6, "q4_1": 3, "q4_0": 2}


def allocated_entries(llm: Llama) -> float:
    """Entries per head that the allocated memory would hold."""
    stats = llm.kv_stats()
    return stats.bytes_allocated / (stats.bytes_now / entries(llm))


def test_memory_follows_the_prompt_and_not_the_context(tiny, load, tokens):
    llm = load(tiny, kv_budget=1000, n_ctx=8192)
    per_entry = llm._kv_store.stats().bytes_per_token
    assert llm.kv_stats().bytes_allocated == 256 * per_entry
    for n, rows in ((100, 256), (600, 768), (900, 1024)):
        llm.reset()
        llm.eval(tokens(n))
        assert llm.kv_stats().bytes_allocated == rows * per_entry
    llm.reset()
    llm.eval(tokens(100))
    assert llm.kv_stats().bytes_allocated == 256 * per_entry


@pytest.mark.parametrize("budget,slack", [(64, None), (200, 56), (500, None), (1000, 24)])
def test_after_an_eviction_there_is_room_for_budget_and_slack(tiny, load, tokens, budget, slack):
    policy = KVPolicy(slack=slack)
    llm = load(tiny, kv_budget=budget, kv_policy=policy, n_ctx=8192)
    llm.eval(tokens(1500))
    room = budget + policy.slack_for(budget)
    assert room <= allocated_entries(llm) <= max(1.1 * room, room + 63)
    layers, stats = 3, llm.kv_stats()
    per_row = stats.bytes_full // (1500 * layers)
    # layer by layer: what each keeps, and one with the whole prompt
    assert stats.bytes_allocated_peak <= per_row * (layers * max(room + 63, 256) + 1536)
    for token in tokens(300, seed=2):
        llm.eval([token])
        assert allocated_entries(llm) <= max(1.1 * room, room + 63)
    llm.eval(tokens(700, seed=3))
    assert allocated_entries(llm) <= max(1.1 * room, room + 63)


def test_a_share_leaves_room_for_its_slack(tiny, load, tokens):
    llm = load(tiny, kv_budget=0.5, n_ctx=8192)
    llm.eval(tokens(2000))
    room = 1000 + KVPolicy().slack_for(1000)
    assert room <= allocated_entries(llm) <= room + 63


def test_generation_without_an_eviction_grows_in_small_steps(tiny, load, tokens):
    llm = load(tiny, kv_budget=2000, n_ctx=4096)
    llm.eval(tokens(700))
    for token in tokens(400, seed=2):
        llm.eval([token])
        assert allocated_entries(llm) <= entries(llm) + 255


def test_growing_in_a_decode_changes_no_number(tiny, load, tokens):
    reserved, grown = (load(tiny, kv_budget=3000, n_ctx=4096) for _ in range(2))
    text = tokens(2500)
    reserved.eval(text)
    for i in range(0, len(text), 100):
        prefill_only(grown, text[i : i + 100])
    assert allocated_entries(grown) > allocated_entries(reserved) == 2560
    for which in "kv":
        got, want = (llm._kv_store.read(which, 0) for llm in (grown, reserved))
        assert np.array_equal(got, want)
        # deeper layers saw another split of the prompt into batches, which rounds differently
        for il in (1, 2):
            got, want = (llm._kv_store.read(which, il) for llm in (grown, reserved))
            assert np.abs(got - want).max() < 0.02 * np.abs(want).max()
    once = load(tiny, kv_budget=3000, n_ctx=4096)
    prefill_only(once, text)
    assert np.array_equal(last_logits(once), last_logits(reserved))


def test_reserving_is_checked(tiny, load):
    llm = load(tiny, kv_budget=64, n_ctx=512)
    for n in (-1, 513):
        with pytest.raises(ValueError, match=f"n is {n}, allowed: 0 to 512"):
            llm._kv_store.reserve(n)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("head_dim", [32, 64, 96])
def test_kept_rows_are_moved_unchanged(make_tiny, load, tokens, kind, head_dim):
    path = make_tiny(head_dim=head_dim, n_head=4, n_layer=2)
    llm = load(path, kv_budget=64, n_ctx=512, type_k=TYPES[kind], type_v=TYPES[kind])
    prefill_only(llm, tokens(300))
    before = {(which, il): llm._kv_store.read(which, il) for which in "kv" for il in range(2)}
    llm._kv_store.evict(64)
    assert any(heads[0] != heads[1] for heads in kept(llm))
    for (which, il), rows in before.items():
        after = llm._kv_store.read(which, il)
        for head, positions in enumerate(kept(llm)[il]):
            assert np.array_equal(after[:, head], rows[positions, head])


# ---- when memory runs out --------------------------------------------------------------------------------------------


def short_of_memory(path: str, what: str, out: Path) -> dict[str, Any]:
    """What short_of_memory.py saw, in a process of its own with a limit on its memory."""
    program = Path(__file__).with_name("short_of_memory.py")
    subprocess.run([sys.executable, str(program), what, path, str(out)], check=True, timeout=300)
    result: dict[str, Any] = pickle.loads(out.read_bytes())
    return result


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """24 KiB of K and V per token."""
    from tiny import write_tiny  # noqa: PLC0415

    return str(write_tiny(tmp_path_factory.mktemp("wide") / "wide.gguf", n_head=8, n_head_kv=8, head_dim=256))


def skip_with_sanitizers() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    if pages * resource.getpagesize() > 1 << 40:
        pytest.skip("the address sanitizer reserves more address space than a limit could leave")


def test_growing_without_memory_raises_and_changes_nothing(wide, load, tokens, tmp_path):
    skip_with_sanitizers()
    got = short_of_memory(wide, "grow", tmp_path / "out")
    assert "asked for" in got["error"] and "bytes" in got["error"]
    assert got["same"] and got["allocated"][0] == got["allocated"][1]
    assert "llama_decode" in got["decode"]
    fresh = load(wide, kv_budget=3000, n_ctx=8192, n_threads_batch=1)
    fresh.eval(tokens(200))
    fresh.eval(tokens(10, seed=3))
    assert np.array_equal(got["logits"], last_logits(fresh))


def test_evicting_needs_no_memory(wide, load, tokens, tmp_path):
    """Entries move within their buffers. What cannot shrink stays large."""
    skip_with_sanitizers()
    got = short_of_memory(wide, "evict", tmp_path / "out")
    fresh = load(wide, kv_budget=3000, n_ctx=8192, n_threads_batch=1)
    prefill_only(fresh, tokens(4000))
    fresh._kv_store.evict(3000)
    assert got["allocated"] > fresh.kv_stats().bytes_allocated
    prefill_only(fresh, tokens(10, seed=3))
    assert got["kept"] == kept(fresh)
    assert np.array_equal(got["logits"], last_logits(fresh))


def test_after_a_failed_decode_a_recurrent_model_gives_nothing_until_it_is_reset(make_tiny, load, tokens, tmp_path):
    skip_with_sanitizers()
    path = make_tiny(arch="lfm2", n_layer=4, n_head=8, n_head_kv=8, head_dim=256)
    got = short_of_memory(path, "recurrent", tmp_path / "out")
    assert "llama_decode" in got["decode"]
    assert set(got["errors"]) == {"eval", "save_state", "scores", "evict"}
    fresh = load(path, kv_budget=3000, n_ctx=8192, n_threads_batch=1)
    fresh.eval(tokens(200, seed=3))
    fresh._kv_store.evict(64)
    prefill_only(fresh, [5])
    assert got["kept"] == kept(fresh)
    assert np.array_equal(got["logits"], last_logits(fresh))
