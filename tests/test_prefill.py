"""Exact prefill: a prompt read layer by layer leaves what an ordinary prefill that is evicted at its end leaves."""

from __future__ import annotations

import ctypes
import signal

import numpy as np
import pytest
from helpers import fail_allocations, greedy, kept, last_logits, stop_at
from test_families import FAMILIES

from pycriticalkv import PRESETS, KVPolicy, llama_cpp
from pycriticalkv.store import last_error

UBATCH = 32
BUDGET = 80
COMMON = {"kv_budget": BUDGET, "n_ctx": 2048, "n_batch": 2 * UBATCH, "n_ubatch": UBATCH}


@pytest.fixture
def both(load):
    """The same model twice, read in both ways."""

    def make(path, **arguments):
        return [load(path, prefill=prefill, **{**COMMON, **arguments}) for prefill in ("exact", "full")]

    return make


@pytest.fixture
def model(make_tiny):
    def make(arch):
        return make_tiny(arch=arch, n_layer=4, n_head=4, head_dim=64, wo_type="F32", weight_type="F32")

    return make


def assert_same(exact, full):
    assert exact.n_tokens == full.n_tokens
    assert kept(exact) == kept(full)
    assert np.array_equal(last_logits(exact), last_logits(full))
    for il in full._kv_store.layers():
        for which in "kv":
            assert np.array_equal(exact._kv_store.read(which, il), full._kv_store.read(which, il))


def read_and_go_on(llms, tokens):
    """A prompt, some tokens, a long and a short turn; the same after each."""
    steps = [tokens(300), *([token] for token in tokens(40, seed=2)), tokens(200, seed=3), tokens(9, seed=4), [5]]
    for step in steps:
        for llm in llms:
            llm.eval(step)
        assert_same(*llms)


@pytest.mark.parametrize("kind", [1, 8, 2])  # f16, q8_0, q4_0
@pytest.mark.parametrize("arch", FAMILIES)
def test_exact_equals_full(model, both, tokens, arch, kind):
    llms = both(model(arch), type_k=kind, type_v=kind)
    read_and_go_on(llms, tokens)
    exact, full = (llm.kv_stats() for llm in llms)
    assert exact.evictions == full.evictions >= 2
    assert exact.bytes_peak < full.bytes_peak
    assert exact.bytes_allocated_peak < full.bytes_allocated_peak
    assert full.bytes_hidden_peak == 0
    assert exact.bytes_hidden_peak >= 300 * llms[0].n_embd() * 4
    assert (exact.prefill, full.prefill) == ("exact", "full")


@pytest.mark.parametrize("policy", [*PRESETS, KVPolicy(norm="l2", window=32)])
def test_every_policy(tiny, both, tokens, policy):
    read_and_go_on(both(tiny, kv_policy=policy), tokens)


@pytest.mark.parametrize("n", [BUDGET + 1, 97, 128, 129, 1000])
def test_every_length(tiny, both, tokens, n):
    llms = both(tiny, kv_budget=BUDGET)
    for llm in llms:
        llm.eval(tokens(n))
    assert_same(*llms)


def test_a_share(tiny, both, tokens):
    read_and_go_on(both(tiny, kv_budget=0.3), tokens)


def test_text_of_generate(tiny, both, tokens):
    exact, full = both(tiny)
    for prompt in (tokens(300), tokens(300) + tokens(100, seed=2), tokens(400, seed=3)):
        assert greedy(exact, prompt, 20) == greedy(full, prompt, 20)
        assert_same(exact, full)


def test_all_logits(tiny, both, tokens):
    exact, full = both(tiny, logits_all=True)
    for llm in (exact, full):
        llm.eval(tokens(300))
    assert np.array_equal(exact.scores[:300], full.scores[:300])


def test_states_go_from_one_to_the_other(tiny, both, tokens):
    exact, full = both(tiny)
    exact.eval(tokens(300))
    full.load_state(exact.save_state())
    for llm in (exact, full):
        llm.eval(tokens(150, seed=2))
    assert_same(exact, full)


def test_smollm2(smollm2, both):
    exact, full = both(smollm2, n_batch=512, n_ubatch=128, n_threads_batch=2)
    text = ("The miller kept the key of the tower under the third stone. " * 40).encode()
    prompt = exact.tokenize(text)
    assert greedy(exact, prompt, 64) == greedy(full, prompt, 64)
    assert_same(exact, full)


def test_auto_is_exact(tiny, load, tokens):
    llm = load(tiny, **COMMON)
    llm.eval(tokens(300))
    assert llm.kv_stats().prefill == "exact"
    assert llm.kv_stats().bytes_hidden_peak > 0


def test_a_prompt_of_one_ubatch_is_read_whole(tiny, load, tokens):
    llm = load(tiny, prefill="exact", kv_budget=24, n_ctx=2048, n_ubatch=512)
    llm.eval(tokens(300))
    assert llm.kv_stats().bytes_hidden_peak == 0


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefill", ["layerwise", "", "Exact"])
def test_an_unknown_mode(tiny, load, prefill):
    with pytest.raises(ValueError, match="prefill=.*allowed is one of auto, exact, full"):
        load(tiny, kv_budget=64, prefill=prefill)


def test_a_mode_of_the_wrong_type(tiny, load):
    with pytest.raises(TypeError, match="prefill=None"):
        load(tiny, kv_budget=64, prefill=None)
    with pytest.raises(TypeError, match="prefill_progress=3"):
        load(tiny, kv_budget=64, prefill_progress=3)


def test_a_mode_without_a_budget(tiny, load):
    with pytest.raises(ValueError, match="prefill='exact' has no effect without kv_budget"):
        load(tiny, prefill="exact")


def test_the_store_refuses_what_it_cannot_read(tiny, load, tokens):
    llm = load(tiny, **COMMON)
    store = llm._kv_store
    with pytest.raises(ValueError, match="budget is 3"):
        store.prefill(tokens(300), 3)
    with pytest.raises(ValueError, match="fits the budget"):
        store.prefill(tokens(30), BUDGET)
    with pytest.raises(ValueError, match="n is 3000"):
        store.prefill(tokens(3000), BUDGET)
    with pytest.raises(ValueError, match="token 299 is 10000000, which is not in the vocabulary"):
        store.prefill([*tokens(299), 10_000_000], BUDGET)
    llm.eval(tokens(300))
    assert llm.n_tokens == 300


def test_between_the_parts_of_a_prompt_nothing_else_goes(tiny, load, tokens):
    llm = load(tiny, **COMMON)
    other = load(tiny, **COMMON)
    other.eval(tokens(250, seed=9))
    store = llm._kv_store
    store.prefill(tokens(300), BUDGET)
    refused = [
        lambda: store.evict(BUDGET),
        lambda: store.scores(0, 16),
        lambda: store.reserve(500),
        lambda: store.prefill(tokens(300), BUDGET, progress=lambda il, done: llm.kv_positions(0)),
    ]
    for call in refused:
        with pytest.raises(RuntimeError):
            call()
    store.prefill(tokens(300), BUDGET)
    size = llama_cpp.llama_state_get_size(other.ctx)
    blob = (ctypes.c_uint8 * size)()
    assert llama_cpp.llama_state_get_data(other.ctx, blob, size) == size
    assert llama_cpp.llama_state_set_data(llm.ctx, blob, size) == 0
    assert "a prompt is being read" in last_error()
    store.cancel_prefill()
    fresh = load(tiny, **{**COMMON, "prefill": "full"})
    for each in (llm, fresh):
        each.eval(tokens(200, seed=2))
    assert_same(llm, fresh)


# ---- interruptions ---------------------------------------------------------------------------------------------------


def conversations(path, load, **arguments):
    """An empty cache, and one with an evicted conversation, with another of the same content for comparison."""
    for n in (0, 200):
        pair = [load(path, **{**COMMON, **arguments}) for _ in range(2)]
        for llm in pair:
            if n > 0:
                llm.eval(np.random.default_rng(7).integers(10, 440, n).tolist())
                llm.eval([7])
        yield pair


@pytest.mark.parametrize("prefill", ["exact", "full"])
@pytest.mark.parametrize("arch", ["llama", "gemma3", "lfm2"])
def test_interrupted_at_every_tenth_report(model, load, tokens, arch, prefill):
    for llm, other in conversations(model(arch), load, prefill=prefill):
        short = tokens(12, seed=5)
        state = other.save_state()
        for each in (llm, other):  # a state has its own slots for sliding windows, and sums go in the order of slots
            if state.n_tokens:
                each.load_state(state)
        stopped = 0
        for stop in range(1, 400, 10):
            interrupt = stop_at(stop)

            def report(done, total, interrupt=interrupt):
                assert 0 <= done <= total == 300
                interrupt(done, total)

            llm.prefill_progress = report
            before = llm.n_tokens
            try:
                llm.eval(tokens(300, seed=stop))
            except KeyboardInterrupt:
                stopped += 1
            else:
                break
            assert llm.n_tokens in ((before,) if arch == "llama" or prefill == "exact" else (before, 0))
            llm.prefill_progress = None
            if llm.n_tokens == 0:
                other.reset()
            elif prefill == "exact":
                assert kept(llm) == kept(other)
            for each in (llm, other):
                each.eval(short)
            if arch == "gemma3" and prefill == "full":  # taken back, so the slots differ
                assert np.allclose(last_logits(llm), last_logits(other), rtol=1e-3, atol=1e-3)
            else:
                assert np.array_equal(last_logits(llm), last_logits(other))
            for each in (llm, other):
                each.reset()
                if state.n_tokens:
                    each.load_state(state)
        assert stopped >= (3 if prefill == "exact" else 1)


@pytest.mark.parametrize("prefill", ["exact", "full", "stream"])
@pytest.mark.parametrize("n_cached", [12, 200])  # nothing evicted, and evicted
def test_what_was_cached_is_answered_after_a_longer_prompt_was_stopped(tiny, load, tokens, prefill, n_cached):
    one, fresh = (load(tiny, prefill=prefill, **COMMON) for _ in range(2))
    prompt = tokens(n_cached)
    answer = greedy(one, prompt, 1)
    with pytest.raises(KeyboardInterrupt):
        one.prefill_progress = stop_at(2)
        next(one.generate([*prompt, *answer, *tokens(300, seed=9)], temp=0.0))
    one.prefill_progress = None
    assert greedy(one, prompt, 12) == greedy(fresh, prompt, 12)


@pytest.mark.parametrize("arch", ["gemma3", "lfm2"])
def test_a_prompt_stopped_before_its_eviction_is_not_there(model, load, tokens, arch):
    llm = load(model(arch), prefill="full", **COMMON)
    llm.eval(tokens(50))

    def stop(done, total):
        if done == total:
            raise KeyboardInterrupt

    llm.prefill_progress = stop
    with pytest.raises(KeyboardInterrupt):
        llm.eval(tokens(700, seed=2))
    assert llm.n_tokens == 0 == llm.kv_stats().entries[0][0]


def test_between_tokens_of_a_generator_a_prompt_is_a_prompt(tiny, load, tokens):
    llm = load(tiny, **COMMON)
    suspended = llm.generate(tokens(20), temp=0.0)
    next(suspended)
    llm.reset()
    llm.eval(tokens(300))
    assert (llm.kv_stats().evictions, llm.kv_stats().entries[0][0]) == (1, BUDGET)


@pytest.mark.parametrize("prefill", ["exact", "full", "stream"])
@pytest.mark.parametrize("what", ["eval", "reset", "save_state", "load_state", "close", "generate"])
def test_the_callback_cannot_use_the_model(tiny, load, tokens, prefill, what):
    llm = load(tiny, prefill=prefill, **COMMON)
    llm.eval(tokens(20))
    state = llm.save_state()
    calls = {
        "eval": lambda: llm.eval([5]),
        "reset": llm.reset,
        "save_state": llm.save_state,
        "load_state": lambda: llm.load_state(state),
        "close": llm.close,
        "generate": lambda: next(llm.generate([5, 6])),
    }
    llm.prefill_progress = lambda *_: calls[what]() and None
    with pytest.raises(RuntimeError, match="prefill_progress was called in the middle of a prompt"):
        llm.eval(tokens(300))
    llm.prefill_progress = None
    assert llm.n_tokens == 20
    llm.eval(tokens(300))
    assert llm.n_tokens == 320


def test_tokens_that_are_none(tiny, load):
    llm = load(tiny, **COMMON)
    for token in (-1, 10**9):
        with pytest.raises(ValueError, match=f"token {token}: allowed are 0 to"):
            llm.eval([5, token])
    assert llm.n_tokens == 0


@pytest.mark.parametrize("prefill", ["exact", "full"])
def test_progress_goes_up_to_the_end(tiny, load, tokens, prefill):
    seen = []
    llm = load(tiny, **COMMON, prefill=prefill, prefill_progress=lambda *progress: seen.append(progress))
    llm.eval(tokens(300))
    assert seen == sorted(seen)
    assert seen[-1] == (300, 300)
    assert len(seen) > 4


def test_the_kth_allocation_fails(tiny, load, tokens):
    """Of rows, hidden states, or scratch."""
    llm, other = (load(tiny, prefill="exact", **COMMON) for _ in range(2))
    for conversation in ([], tokens(200, seed=7)):
        assert fail_allocations(llm, other, tokens(300, seed=2), conversation) >= 5


def test_a_signal_stops_a_prompt(smollm2, load):
    """Ctrl-C arrives while the graphs run."""
    llm = load(smollm2, kv_budget=200, n_ctx=8192, n_threads_batch=2)
    prompt = llm.tokenize(("The miller kept the key of the tower. " * 500).encode())
    before = signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(KeyboardInterrupt):
            llm.eval(prompt)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert llm.n_tokens == 0
    fresh = load(smollm2, kv_budget=200, n_ctx=8192, n_threads_batch=2)
    for each in (llm, fresh):
        each.eval(prompt[:300])
    assert np.array_equal(last_logits(llm), last_logits(fresh))
