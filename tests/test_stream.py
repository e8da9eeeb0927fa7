"""Streaming prefill: the cache never holds the whole prompt, and what stays is chosen with a look at the question."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from expected import AGGREGATES, NORMS, as_cached, output_projection, relative_error
from helpers import entries, fail_allocations, greedy, kept, last_logits, prefill_only, stop_at
from reference import scores as reference

from pycriticalkv import KVPolicy, Stream
from pycriticalkv.prefill import Prefill, chunks, parse_memory
from pycriticalkv.store import Store

UBATCH, BUDGET = 32, 80
SMALL = {"n_layer": 4, "n_head": 4, "head_dim": 64}
COMMON = {"kv_budget": BUDGET, "n_ctx": 4096, "n_batch": 2 * UBATCH, "n_ubatch": UBATCH}
SETTINGS = [Stream(), Stream("peek"), Stream("window"), Stream(tokens=7, chunk=50)]
IDS = ["re-peek", "peek", "window", "chunk"]


@pytest.fixture
def peeks(monkeypatch):
    """Numbers of tokens and positions of all peeks."""
    seen = []
    plain = Store.peek

    def peek(self, tokens, pos):
        if len(tokens) > 0:
            seen.append((list(tokens), pos))
        plain(self, tokens, pos)

    monkeypatch.setattr(Store, "peek", peek)
    return seen


# ---- a peek ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize("n", [1, 16, 48])
def test_scores_of_a_peek(tiny, load, tokens, n, aggregate):
    """Against float64, with the queries that the same tokens have when they are evaluated."""
    policy = KVPolicy(aggregate=aggregate, window=16)
    llm = load(tiny, kv_budget=64, kv_policy=policy, n_ctx=1024)
    wide = load(tiny, kv_budget=64, kv_policy=KVPolicy(window=n), n_ctx=1024)  # knows the queries of n tokens
    prefix, question = tokens(300), tokens(n, seed=2)
    prefill_only(llm, prefix)
    llm._kv_store.peek(question, 300)
    prefill_only(wide, prefix)
    prefill_only(wide, question)
    for il in llm._kv_store.layers():
        attn, norm = llm._kv_store.scores(il, 16)
        q = wide._kv_store.read("q", il).astype(np.float64)
        k, v = (llm._kv_store.read(which, il).astype(np.float64) for which in "kv")
        assert len(q) == n
        attention = reference.window_attention(
            as_cached(q, "f16"), k, np.arange(300, 300 + n), np.arange(300), llm._kv_store.layer(il).scale
        )
        want = AGGREGATES[aggregate](attention, 16, policy.pool, n_head_kv=llm._kv_store.layer(il).n_head_kv)
        assert relative_error(attn, want) < 1e-5
        assert relative_error(norm, NORMS[policy.norm](v[:-16], output_projection(tiny, il))) < 1e-5


@pytest.mark.parametrize("n", [1, 32, 48])
@pytest.mark.parametrize("arch", ["llama", "gemma2", "gemma3", "gpt-oss", "lfm2", "granitehybrid"])
def test_a_peek_changes_nothing_but_scores(make_tiny, load, tokens, arch, n):
    """Also where the window has slid over many ubatches, so that the peek takes slots of what slid out."""
    path = make_tiny(arch=arch, **SMALL)
    llm, other = (load(path, kv_budget=64, n_ctx=1024, n_ubatch=48) for _ in range(2))
    for each in (llm, other):
        each.eval(tokens(700))
        each.eval([5])
    store = llm._kv_store
    il = store.layers()[0]
    before = store.scores(il, 16)[0]
    store.peek(tokens(n, seed=2), 900)
    assert not np.array_equal(store.scores(il, 16)[0], before)
    store.peek([], 0)
    assert np.array_equal(store.scores(il, 16)[0], before)
    assert kept(llm) == kept(other)
    for il in store.layers():
        for which in "kvq":
            assert np.array_equal(store.read(which, il), other._kv_store.read(which, il))
    for each in (llm, other):
        each.eval([6])
        each.eval(tokens(300, seed=3))
    assert kept(llm) == kept(other)
    assert np.array_equal(last_logits(llm), last_logits(other))


@pytest.mark.parametrize("back,gone", [(540, True), (600, False)])
def test_going_back_over_slots_that_a_peek_took(make_tiny, load, tokens, back, gone):
    """What slid out of the window and was overwritten cannot come back; without the peek it could."""
    path = make_tiny(arch="gemma3", **SMALL)
    llm, other = (load(path, kv_budget=900, n_ctx=1024, n_ubatch=48) for _ in range(2))
    for each in (llm, other):
        each.eval(tokens(700))
    llm._kv_store.peek(tokens(48), 900)
    other.n_tokens = llm.n_tokens = back
    other.eval(tokens(5, seed=2))
    if gone:
        with pytest.raises(RuntimeError, match="n_tokens=540: the cache cannot go back there"):
            llm.eval(tokens(5, seed=2))
    else:
        llm.eval(tokens(5, seed=2))
        assert np.array_equal(last_logits(llm), last_logits(other))


def test_a_peek_is_forgotten_with_the_cache(tiny, load, tokens):
    llm, other = (load(tiny, kv_budget=64, n_ctx=1024) for _ in range(2))
    llm.eval(tokens(20))
    llm._kv_store.peek(tokens(20, seed=2), 500)
    llm.reset()
    for each in (llm, other):
        each.eval(tokens(300))
    assert kept(llm) == kept(other)


def test_a_peek_that_cannot_be(tiny, load, tokens):
    llm = load(tiny, kv_budget=64, n_ctx=1024)
    llm.eval(tokens(50))
    for bad, pos, message in (
        (tokens(49), 100, "n is 49, allowed: 0 to window . 32, in one ubatch: 48"),
        (tokens(10), 49, "pos is 49, allowed: from the end of the cache, 50"),
        (tokens(10), 1020, "pos is 1020"),
        (tokens(48), 977, "pos is 977"),
        ([5, 10_000_000], 100, "token 1 is 10000000, which is not in the vocabulary"),
    ):
        with pytest.raises(ValueError, match=message):
            llm._kv_store.peek(bad, pos)
    assert llm._kv_store.stats().n_tokens == 50
    llm = load(tiny, kv_budget=64, n_ctx=1024, n_ubatch=20)
    with pytest.raises(ValueError, match="n is 21, allowed: 0 to window . 32, in one ubatch: 20"):
        llm._kv_store.peek(tokens(21), 100)


# ---- a stream --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "n,size,tail", [(100, 32, 8), (100, 32, 40), (64, 32, 1), (32, 32, 32), (33, 32, 1), (5, 9, 5)]
)
def test_chunks(n, size, tail):
    sizes = chunks(n, size, tail)
    assert sum(sizes) == n
    assert all(s == size for s in sizes[:-1])
    assert tail <= sizes[-1] < size + tail or sizes == [size]


@pytest.mark.parametrize("settings", SETTINGS, ids=IDS)
def test_the_cache_stays_small(tiny, load, tokens, settings):
    llm = load(tiny, prefill="stream", stream=settings, **COMMON)
    chunk = settings.chunk or UBATCH
    bound = BUDGET + llm._kv_policy.slack_for(BUDGET) + chunk + 2 * 32
    per_entry = llm._kv_store.stats().bytes_per_token
    for n in (3000, 500):  # also after an evicted conversation
        llm.eval(tokens(n, seed=n))
        assert entries(llm) == BUDGET
        stats = llm.kv_stats()
        assert stats.entries_peak <= bound
        assert stats.bytes_peak <= bound * per_entry
        assert stats.bytes_allocated_peak <= 2 * max(256, bound + 63) * per_entry
        assert stats.prefill == "stream"
    assert llm.n_tokens == 3500


@pytest.mark.parametrize("settings", SETTINGS, ids=IDS)
def test_twice_the_same(tiny, load, tokens, settings):
    one, two = (load(tiny, prefill="stream", stream=settings, **COMMON) for _ in range(2))
    two.eval(tokens(400, seed=9))
    two.reset()
    for llm in (one, two):
        assert len(greedy(llm, tokens(700), 10)) == 10
        llm.eval(tokens(200, seed=2))
    assert kept(one) == kept(two)
    assert np.array_equal(last_logits(one), last_logits(two))


def test_the_window_alone_is_chunks_evicted_one_by_one(tiny, load, tokens):
    stream = load(tiny, prefill="stream", stream=Stream("window"), **COMMON)
    by_hand = load(tiny, **COMMON)
    prompt, slack = tokens(300), by_hand._kv_policy.slack_for(BUDGET)
    stream.eval(prompt)
    for i in range(0, 300, UBATCH):
        if entries(by_hand) + UBATCH > BUDGET + slack + UBATCH:
            by_hand._kv_store.evict(BUDGET, slack + UBATCH)
        prefill_only(by_hand, prompt[i : i + UBATCH])
    by_hand._kv_store.evict(BUDGET, slack)
    assert kept(stream) == kept(by_hand)
    assert np.array_equal(last_logits(stream), last_logits(by_hand))


def test_a_re_peek_is_a_peek_before_every_eviction(tiny, load, tokens, peeks):
    llm = load(tiny, prefill="stream", stream=Stream(tokens=20), **COMMON)
    prompt = tokens(300)
    llm.eval(prompt)
    assert len(peeks) == llm.kv_stats().evictions - 1
    assert all(peek == (prompt[-20:], 280) for peek in peeks)
    peeks.clear()
    once = load(tiny, prefill="stream", stream=Stream("peek", tokens=20), **COMMON)
    once.eval(prompt)
    assert peeks == [(prompt[-20:], 280)]
    assert kept(once) != kept(llm)


def test_a_named_question(tiny, load, tokens, peeks):
    llm = load(tiny, prefill="stream", **COMMON)
    llm.question = "abc"
    named = llm.tokenize(b"abc", add_bos=False, special=False)
    llm.eval(tokens(300))
    assert peeks
    assert all(peek == (named, 300 - len(named)) for peek in peeks[:-1])
    llm.question = "abcdefgh " * 50  # its end, as far as there is room
    peeks.clear()
    llm.eval(tokens(300, seed=2))
    assert {len(peek[0]) for peek in peeks} == {UBATCH}  # less than window + 32
    with pytest.raises(TypeError, match="question=5: allowed are a str and None"):
        llm.question = 5
    with pytest.raises(TypeError, match="prefill_progress=5: allowed is a function"):
        llm.prefill_progress = 5
    assert llm.question == "abcdefgh " * 50 and llm.prefill_progress is None


def test_another_question_is_another_prompt(tiny, load, tokens):
    llm, fresh = (load(tiny, prefill="stream", **COMMON) for _ in range(2))
    llm.question = "abcdefgh"
    first = greedy(llm, tokens(400), 5), kept(llm)
    fresh.question = llm.question = "zyxw vuts"
    assert (greedy(llm, tokens(400), 5), kept(llm)) == (greedy(fresh, tokens(400), 5), kept(fresh))
    assert kept(llm) != first[1]
    llm.question = "abcdefgh"
    assert (greedy(llm, tokens(400), 5), kept(llm)) == first


def test_a_stream_does_not_go_on_from_a_short_prompt(tiny, load, tokens):
    llm, fresh = (load(tiny, prefill="stream", **COMMON) for _ in range(2))
    greedy(llm, tokens(50), 1)
    assert (greedy(llm, tokens(400), 5), kept(llm)) == (greedy(fresh, tokens(400), 5), kept(fresh))


def test_the_last_eviction_looks_for_a_named_question(tiny, load, tokens, peeks):
    llm = load(tiny, prefill="stream", **COMMON)
    llm.question = "abcdefgh"
    llm.eval(tokens(300))
    named = llm.tokenize(b"abcdefgh", add_bos=False, special=False)
    assert peeks[-1] == (named, 300)
    assert len(peeks) == llm.kv_stats().evictions
    before = llm._kv_store.scores(0, 16)[0]
    llm._kv_store.peek([], 0)  # has been forgotten already
    assert np.array_equal(llm._kv_store.scores(0, 16)[0], before)


def test_chunks_smaller_than_a_ubatch(tiny, load, tokens):
    llm = load(tiny, kv_budget=24, n_ctx=1024, prefill="stream", stream=Stream(tokens=8, chunk=16))
    llm.eval(tokens(300))
    assert llm.kv_stats().prefill == "stream"
    assert llm.kv_stats().entries_peak < 120


def test_a_chat_peeks_at_the_last_user_message(tiny, load, peeks):
    llm = load(tiny, prefill="stream", stream=Stream(tokens=4), chat_format="chatml", **COMMON)
    ask = "how many legs has a spider?"
    messages = [{"role": "system", "content": "word " * 60}, {"role": "user", "content": ask}]
    llm.create_chat_completion(messages=messages, max_tokens=2)
    asked = len(llm.tokenize(ask.encode(), add_bos=False, special=False))
    assert {len(tokens) for tokens, _ in peeks} == {min(asked + 8, UBATCH)}


def test_a_chat_that_nobody_reads_leaves_nothing_to_peek_at(tiny, load, tokens, peeks):
    llm = load(tiny, prefill="stream", stream=Stream(tokens=4), chat_format="chatml", **COMMON)
    messages = [{"role": "user", "content": "how many legs has a spider?"}]
    started, dropped = (llm.create_chat_completion(messages, max_tokens=3, stream=True) for _ in range(2))
    del dropped
    llm.eval(tokens(300))
    assert {len(tokens) for tokens, _ in peeks} == {4}
    peeks.clear()
    messages[0]["content"] = "word " * 60 + messages[0]["content"]
    started = llm.create_chat_completion(messages, max_tokens=3, stream=True)
    next(started)
    assert {len(tokens) for tokens, _ in peeks} == {UBATCH}
    llm.reset()
    peeks.clear()
    llm.eval(tokens(300))
    assert {len(tokens) for tokens, _ in peeks} == {4}


@pytest.mark.parametrize("messages", [None, 5, "hello"])
def test_chats_that_are_none(tiny, load, messages):
    llm = load(tiny, prefill="stream", chat_format="chatml", **COMMON)
    with pytest.raises(TypeError, match=f"messages={messages!r}: allowed is a list"):
        llm.create_chat_completion(messages)


def test_a_prompt_of_one_ubatch_is_read_whole(tiny, load, tokens, peeks):
    stream = load(tiny, kv_budget=24, n_ctx=1024, prefill="stream")
    full = load(tiny, kv_budget=24, n_ctx=1024, prefill="full")
    for llm in (stream, full):
        llm.eval(tokens(300))
    assert not peeks
    assert kept(stream) == kept(full)


def test_smollm2_finds_what_it_is_asked_for(smollm2, load):
    """A small budget: with the question in view the sentence stays, whatever comes after it."""
    filler = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
    ask = "The password of the blue safe is"
    text = filler * 20 + ask + " elephant. " + filler * 60 + "\n" + ask
    for observe, found in (("re-peek", True), ("window", False)):
        llm = load(smollm2, kv_budget=200, n_ctx=4096, n_ubatch=256, prefill="stream", stream=Stream(observe))
        prompt = llm.tokenize(text.encode())
        answer = llm.detokenize(greedy(llm, prompt, 8)).decode()
        assert ("elephant" in answer) == found
        assert llm.kv_stats().entries_peak < 600 < len(prompt) / 2


# ---- which models, and how much memory -------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", SETTINGS, ids=IDS)
@pytest.mark.parametrize("arch", ["gemma3", "gpt-oss", "lfm2", "granitehybrid"])
def test_models_with_other_memories(make_tiny, load, tokens, capfd, arch, settings):
    path = make_tiny(arch=arch, **SMALL)
    one, two = (load(path, prefill="stream", stream=settings, **COMMON) for _ in range(2))
    two.eval(tokens(100, seed=4))
    two.reset()
    for llm in (one, two):
        llm.eval(tokens(300))
        assert entries(llm) == BUDGET
        assert llm.kv_stats().entries_peak < 250
        greedy(llm, [*tokens(300), *tokens(100, seed=2)], 5)
    assert kept(one) == kept(two)
    assert np.array_equal(last_logits(one), last_logits(two))
    assert "position" not in capfd.readouterr().err  # no warning of tokens that leave a gap


def test_auto_streams_what_would_not_fit(tiny, load, tokens):
    llm = load(tiny, kv_memory_limit=300_000, **COMMON)
    per_entry = int(llm._kv_store.stats().bytes_per_token) // 3  # of each layer
    kept = 2 * per_entry * (BUDGET + llm._kv_policy.slack_for(BUDGET))
    most = (300_000 - kept) // (per_entry + 4 * llm.n_embd())
    for n, mode in ((most, "exact"), (most + 1, "stream")):
        llm.reset()
        llm.eval(tokens(n))
        assert llm.kv_stats().prefill == mode
        assert llm.kv_stats().memory_limit == 300_000
    for more, mode in ((0, "exact"), (1, "stream")):  # a later turn also holds a copy of what was there
        llm.reset()
        llm.eval(tokens(200))
        held = int(llm._kv_store.stats().n_entries)
        most = (300_000 - kept - (1 + 3) * held * per_entry) // (per_entry + 4 * llm.n_embd())
        llm.eval(tokens(most + more, seed=2))
        assert llm.kv_stats().prefill == mode


@pytest.mark.parametrize(
    "limit,bytes_", [(5, 5), ("2GiB", 2 << 30), ("500MB", 500 * 10**6), (" 1.5 kib ", 1536), ("77", 77), (None, None)]
)
def test_memory_limits(limit, bytes_):
    assert parse_memory(limit) == bytes_


LONG = [
    pytest.param(10**5000, id="int of 5001 digits"),
    pytest.param(-(10**5000), id="minus that"),
    pytest.param("9" * 5000, id="5000 digits"),
]


@pytest.mark.parametrize("limit", [0, -1, "", "GiB", "2 TiB", "1e9", "-5MB", "0", 10**400, "9" * 400 + "GiB", *LONG])
def test_limits_that_are_none(tiny, load, limit):
    with pytest.raises(ValueError, match="kv_memory_limit="):
        load(tiny, kv_budget=64, kv_memory_limit=limit)


@pytest.mark.parametrize("limit", [True, 1.5, b"2GiB"])
def test_limits_of_the_wrong_type(tiny, load, limit):
    with pytest.raises(TypeError, match="kv_memory_limit="):
        load(tiny, kv_budget=64, kv_memory_limit=limit)


@pytest.mark.parametrize("mode", ["exact", "full", "auto"])
def test_settings_of_a_stream_that_is_none(tiny, load, mode):
    with pytest.raises(ValueError, match=f"stream=.* has no effect with prefill='{mode}'"):
        load(tiny, kv_budget=64, prefill=mode, stream=Stream())


@pytest.mark.parametrize("mode", ["exact", "full", "stream"])
def test_a_limit_is_for_auto(tiny, load, mode):
    with pytest.raises(ValueError, match=f"kv_memory_limit has no effect with prefill='{mode}'"):
        load(tiny, kv_budget=64, prefill=mode, kv_memory_limit="1GiB")


def test_settings_without_a_budget(tiny, load):
    for name, value in (("kv_memory_limit", "1GiB"), ("stream", Stream()), ("prefill_progress", print)):
        with pytest.raises(ValueError, match=f"{name}=.* has no effect without kv_budget"):
            load(tiny, **{name: value})


@pytest.mark.parametrize(
    "settings",
    [{"observe": "all"}, {"tokens": 0}, {"tokens": True}, {"tokens": 1.5}, {"chunk": 0}, {"chunk": 2**31}],
)
def test_settings_out_of_range(settings):
    with pytest.raises(ValueError, match=f"{next(iter(settings))}=.*allowed is"):
        Stream(**settings)


def test_more_tokens_than_can_be_peeked_at(tiny, load):
    with pytest.raises(ValueError, match="tokens=49: Stream can peek at no more than the policy's window"):
        load(tiny, kv_budget=64, prefill="stream", stream=Stream(tokens=49))
    with pytest.raises(TypeError, match="stream='peek'"):
        load(tiny, kv_budget=64, prefill="stream", stream="peek")


def refuses():
    raise ValueError("its layers have no ends [odd]")


def test_a_model_that_cannot_be_read_layer_by_layer():
    with pytest.warns(UserWarning, match="prefill='full'.*its layers have no ends"):
        assert Prefill("auto").check(16, refuses).mode == "full"
    with pytest.raises(ValueError, match="prefill='exact': this model cannot be read layer by layer: its layers"):
        Prefill("exact").check(16, refuses)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Prefill("full").check(16, refuses).mode == "full"
        assert Prefill("stream").check(16, refuses).mode == "stream"


# ---- interruptions ---------------------------------------------------------------------------------------------------


@pytest.fixture(params=[0, 200], ids=["empty", "conversation"])
def pair(request, tiny, load, tokens):
    """Two of the same; nothing, or an evicted conversation, in their caches."""
    both = [load(tiny, prefill="stream", **COMMON) for _ in range(2)]
    for llm in both:
        if request.param:
            llm.eval(tokens(request.param, seed=7))
            llm.eval([7])
    return both


def assert_same_after(pair, short):
    llm, other = pair
    assert llm.n_tokens == other.n_tokens
    assert kept(llm) == kept(other)
    for each in pair:
        each.eval(short)
    assert np.array_equal(last_logits(llm), last_logits(other))


def test_interrupted_at_every_report(pair, tokens):
    llm, stopped = pair[0], 0
    for stop in range(1, 30):
        llm.prefill_progress = stop_at(stop)
        try:
            llm.eval(tokens(300, seed=stop))
        except KeyboardInterrupt:
            stopped += 1
        else:
            break
        llm.prefill_progress = None
        assert_same_after(pair, tokens(5, seed=stop))
    assert stopped == 9


def test_the_kth_allocation_fails(tiny, load, tokens):
    llm, other = (load(tiny, prefill="stream", **COMMON) for _ in range(2))
    for conversation in ([], tokens(200, seed=7)):
        assert fail_allocations(llm, other, tokens(300, seed=2), conversation) >= 2
