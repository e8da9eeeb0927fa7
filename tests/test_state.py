"""Saved states: round trips, and what is refused."""

from __future__ import annotations

import ctypes
import pickle
import subprocess
import sys
from copy import deepcopy
from pathlib import Path

import llama_cpp
import numpy as np
import pytest
from helpers import greedy, kept, last_logits

from pycriticalkv import KVPolicy


def state_of(llm):
    return kept(llm), llm.n_tokens, llm.input_ids[: llm.n_tokens].tolist()


def test_round_trip(tiny, load, tokens):
    llm = load(tiny, kv_budget=64, n_ctx=1024)
    prompt = tokens(300)
    greedy(llm, prompt, 10)
    saved, before = llm.save_state(), state_of(llm)
    more = tokens(60, seed=5)
    want = []
    for token in more:  # evicts again on the way, with queries from before the save
        llm.eval([token])
        want.append(last_logits(llm))
    want_positions = kept(llm)
    other = load(tiny, kv_budget=64, n_ctx=1024)
    for target in (llm, other):
        target.load_state(saved)
        assert state_of(target) == before
        for token, logits in zip(more, want, strict=True):
            target.eval([token])
            assert np.array_equal(last_logits(target), logits)
        assert kept(target) == want_positions


def test_size_follows_the_kept_entries(tiny, load, tokens):
    sizes = {}
    for budget in (64, 128):
        llm = load(tiny, kv_budget=budget, n_ctx=2048)
        for n in (300, 1500):
            llm.reset()
            llm.eval(tokens(n))
            sizes[budget, n] = len(pickle.dumps(llm.save_state()))
    per_entry = 3 * 2 * 2 * 32 * 2
    assert sizes[64, 1500] - sizes[64, 300] < 5 * 1200  # only the tokens themselves
    assert 0.9 < (sizes[128, 300] - sizes[64, 300]) / (64 * per_entry) < 1.2


SCRIPT = """
import pickle, sys
from pycriticalkv import Llama
llm = Llama(sys.argv[1], kv_budget=64, n_ctx=1024, verbose=False, n_threads=1, n_threads_batch=2)
llm.load_state(pickle.load(open(sys.argv[2], "rb")))
out = []
for token in llm.generate(eval(sys.argv[3]), temp=0.0):
    out.append(int(token))
    if len(out) == 20:
        break
print(out)
"""


def test_a_saved_document_is_asked_in_a_fresh_process(tiny, load, tokens, tmp_path):
    llm = load(tiny, kv_budget=64, n_ctx=1024)
    llm.eval(tokens(300))
    path = tmp_path / "state"
    path.write_bytes(pickle.dumps(llm.save_state()))
    question = tokens(300) + tokens(12, seed=8)
    want = greedy(llm, question, 20)
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, tiny, str(path), str(question)],
        capture_output=True, text=True, check=True, cwd=tmp_path,
    )  # fmt: skip
    assert run.stdout.strip().splitlines()[-1] == str(want)


def damaged(saved, how):
    bad = deepcopy(saved)
    if how == "truncated":
        bad.llama_state = bad.llama_state[:-100]
    elif how == "flipped":
        blob = bytearray(bad.llama_state)
        blob[len(blob) // 2] ^= 1
        bad.llama_state = bytes(blob)
    elif how == "other tokens":
        bad.input_ids[5] += 1
    elif how == "fewer tokens":
        bad.n_tokens -= 1
    elif how == "negative":
        bad.n_tokens = -1
    elif how == "other seed":
        bad.seed += 1
    elif how == "empty":
        bad.llama_state = b""
    bad.llama_state_size = len(bad.llama_state)
    return bad


@pytest.mark.parametrize(
    "how", ["truncated", "flipped", "other tokens", "other seed", "fewer tokens", "negative", "empty"]
)
def test_a_damaged_state_is_refused_and_changes_nothing(tiny, load, tokens, how):
    llm = load(tiny, kv_budget=64, n_ctx=1024)
    llm.eval(tokens(300))
    saved = llm.save_state()
    llm.eval([5])
    before, logits = state_of(llm), last_logits(llm)
    with pytest.raises(ValueError, match="state cannot be loaded"):
        llm.load_state(damaged(saved, how))
    assert state_of(llm) == before
    assert np.array_equal(last_logits(llm), logits)


def test_a_state_knows_whether_heads_share_their_entries(tiny, load, tokens):
    alone, shared = (KVPolicy(aggregate="mean", value="none", heads=heads) for heads in ("uniform", "shared"))
    for saving, loading in ((alone, shared), (shared, alone)):
        llm, other = (load(tiny, kv_budget=64, kv_policy=policy, n_ctx=1024) for policy in (saving, loading))
        llm.eval(tokens(300))
        with pytest.raises(ValueError, match="another policy"):
            other.load_state(llm.save_state())


@pytest.mark.parametrize(
    "arguments,why",
    [
        ({"kv_policy": "snapkv"}, "another policy"),
        ({"seed": 9}, "another model"),
        ({"n_head_kv": 1}, "another model"),
        ({"n_ctx": 256}, "holds 300 tokens"),
        ({"type_k": 0}, "another cache type"),
        ({"type_v": 0, "type_k": 0}, "another cache type"),
        ({"logits_all": True}, "logits_all=True"),
    ],
)
def test_a_foreign_state_is_refused(make_tiny, load, tokens, arguments, why):
    llm = load(make_tiny(), kv_budget=64, n_ctx=1024)
    llm.eval(tokens(300))
    saved = llm.save_state()
    model = {k: v for k, v in arguments.items() if k in ("seed", "n_head_kv")}
    rest = {"kv_budget": 64, "n_ctx": 1024, **{k: v for k, v in arguments.items() if k not in model}}
    other = load(make_tiny(**model), **rest)
    other.eval(tokens(100, seed=3))
    before = state_of(other)
    with pytest.raises(ValueError, match=why):
        other.load_state(saved)
    assert state_of(other) == before


def test_a_model_with_other_weights_of_the_same_shape_is_another_model(make_tiny, load, tokens, tmp_path):
    path = make_tiny()
    other = tmp_path / "other.gguf"
    data = bytearray(Path(path).read_bytes())
    data[-40_000] ^= 1  # one bit of one weight
    other.write_bytes(data)
    llm = load(path, kv_budget=64, n_ctx=1024)
    llm.eval(tokens(300))
    with pytest.raises(ValueError, match="another model"):
        load(str(other), kv_budget=64, n_ctx=1024).load_state(llm.save_state())


def native_load(llm, blob):
    raw = (ctypes.c_uint8 * len(blob)).from_buffer_copy(blob)
    return llama_cpp.llama_state_set_data(llm.ctx, raw, len(blob))


@pytest.mark.parametrize("heads", ["uniform", "adaptive"])
def test_native_blobs_are_checked_before_anything_changes(tiny, load, tokens, heads):
    llm = load(tiny, kv_budget=64, kv_policy=KVPolicy(heads=heads), n_ctx=1024)
    llm.eval(tokens(300))
    size = llama_cpp.llama_state_get_size(llm.ctx)
    raw = (ctypes.c_uint8 * size)()
    assert llama_cpp.llama_state_get_data(llm.ctx, raw, size) == size
    blob = bytes(raw)
    start = blob.index(b"CKV1")
    before = kept(llm), last_logits(llm)
    # every word of the header and of the first kept positions, set to something that it cannot be
    refused = 0
    for at in range(start, start + 700, 4):
        for value in (-7, 2**31 - 1):
            bad = blob[:at] + value.to_bytes(4, "little", signed=True) + blob[at + 4 :]
            if native_load(llm, bad) == 0:
                refused += 1
                assert (kept(llm), True) == (before[0], np.array_equal(last_logits(llm), before[1]))
            else:  # budget, slack and padding may be anything
                assert native_load(llm, blob) == len(blob)
    assert refused > 300
    for n in (start + 10, start + 100, start + 2000):
        assert native_load(llm, blob[:n]) == 0
        assert kept(llm) == before[0]
    assert native_load(llm, blob) == len(blob)
    assert kept(llm) == before[0]


def test_states_with_and_without_a_budget_do_not_mix(tiny, load, tokens):
    plain, llm = load(tiny, n_ctx=1024, flash_attn=True), load(tiny, kv_budget=64, n_ctx=1024)
    for model in (plain, llm):
        model.eval(tokens(300))
    with pytest.raises(ValueError, match="it was not saved by a pycriticalkv.Llama with kv_budget"):
        llm.load_state(plain.save_state())
    with pytest.raises(ValueError, match="saved with kv_budget"):
        plain.load_state(llm.save_state())
    assert plain.n_tokens == llm.n_tokens == 300


def test_raw_blobs_from_a_cache_without_a_store_are_refused_before_anything_changes(tiny, load, tokens):
    plain, llm = load(tiny, n_ctx=1024, flash_attn=True), load(tiny, kv_budget=64, n_ctx=1024)
    for model in (plain, llm):
        model.eval(tokens(300))
    before = kept(llm)
    blob = plain.save_state().llama_state
    assert native_load(llm, blob) == 0
    assert kept(llm) == before


@pytest.mark.parametrize("kind", ["LlamaRAMCache", "LlamaDiskCache"])
def test_caches_of_llama_cpp_python(tiny, load, evaluated, tmp_path, kind):
    where = {"cache_dir": str(tmp_path)} if kind == "LlamaDiskCache" else {}
    cache = getattr(llama_cpp, kind)(capacity_bytes=1 << 24, **where)
    first, second = (load(tiny, kv_budget=64, n_ctx=1024) for _ in range(2))
    first.set_cache(cache)
    second.set_cache(cache)
    prompt = "the keeper of the lighthouse " * 20
    answer = first(prompt, max_tokens=10, temperature=0.0)["choices"][0]["text"]
    evaluated.clear()
    again = second(prompt + answer, max_tokens=10, temperature=0.0)
    assert evaluated[0] == again["usage"]["prompt_tokens"] - first.n_tokens
    assert second.kv_stats().tokens_seen == second.n_tokens


def test_a_cached_state_of_another_policy_is_a_miss(tiny, load):
    cache = llama_cpp.LlamaRAMCache(capacity_bytes=1 << 24)
    prompt, texts = "the keeper of the lighthouse " * 20, []
    for policy in ("critical-max", "snapkv"):
        llm = load(tiny, kv_budget=64, kv_policy=policy, n_ctx=1024)
        llm.set_cache(cache)
        texts.append(llm(prompt, max_tokens=10, temperature=0.0)["choices"][0]["text"])
    fresh = load(tiny, kv_budget=64, kv_policy="snapkv", n_ctx=1024)
    assert texts[1] == fresh(prompt, max_tokens=10, temperature=0.0)["choices"][0]["text"]


def test_a_context_that_is_no_multiple_of_256(tiny, load):
    llm = load(tiny, kv_budget=64, n_ctx=300)
    llm("the keeper of the lighthouse " * 10, max_tokens=-1, temperature=0.0)
    before = state_of(llm)
    llm.load_state(llm.save_state())
    assert state_of(llm) == before
    assert llm.n_tokens > 300


def test_pickle_keeps_the_arguments(tiny, load):
    llm = load(tiny, kv_budget=64, kv_policy="snapkv", n_ctx=1024)
    other = pickle.loads(pickle.dumps(llm))
    assert other._kv_policy == llm._kv_policy
    assert other._kv_budget == llm._kv_budget
    other.close()


def test_before_anything_is_evicted_another_policy_with_the_same_window_may_load(tiny, load, tokens):
    llm = load(tiny, kv_budget=400, n_ctx=1024)
    llm.eval(tokens(300))
    saved = llm.save_state()
    other = load(tiny, kv_budget=64, kv_policy="snapkv", n_ctx=1024)
    other.load_state(saved)
    other._kv_store.evict(64)
    fresh = load(tiny, kv_budget=64, kv_policy="snapkv", n_ctx=1024)
    fresh.eval(tokens(300))
    assert kept(other) == kept(fresh)
    narrow = load(tiny, kv_budget=64, kv_policy=KVPolicy(window=8), n_ctx=1024)
    with pytest.raises(ValueError, match="another policy"):
        narrow.load_state(saved)
