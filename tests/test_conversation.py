"""Turns, prefix reuse, cutting back, and llama-cpp-python's own features on an evicted cache."""

from __future__ import annotations

import json

import llama_cpp
import numpy as np
import pytest
from helpers import entries, greedy, kept, last_logits, prefill_only

from pycriticalkv import KVPolicy


def document(n):
    return "the keeper of the lighthouse wrote down the weather. " * n


def test_a_later_turn_evaluates_only_its_new_tokens(tiny, load, evaluated):
    llm = load(tiny, kv_budget=100, n_ctx=4096)
    messages = [{"role": "user", "content": document(20)}]
    answer = llm.create_chat_completion(messages, max_tokens=20, temperature=0.0)
    messages += [answer["choices"][0]["message"], {"role": "user", "content": "where is the key?"}]
    seen = llm.n_tokens
    evaluated.clear()
    second = llm.create_chat_completion(messages, max_tokens=5, temperature=0.0)
    assert evaluated[0] == second["usage"]["prompt_tokens"] - seen < 60
    assert evaluated[1:] == [1] * 4
    assert llm.kv_stats().tokens_seen == llm.n_tokens


def test_editing_an_earlier_turn_evaluates_everything_again(tiny, load, evaluated):
    llm = load(tiny, kv_budget=100, n_ctx=4096)
    first = [{"role": "user", "content": document(20)}]
    llm.create_chat_completion(first, max_tokens=20, temperature=0.0)
    evaluated.clear()
    edited = [{"role": "user", "content": document(10) + "where? " + document(9)}]
    out = llm.create_chat_completion(edited, max_tokens=5, temperature=0.0)
    assert evaluated[0] == out["usage"]["prompt_tokens"]
    fresh = load(tiny, kv_budget=100, n_ctx=4096)
    again = fresh.create_chat_completion(edited, max_tokens=5, temperature=0.0)
    assert out["choices"][0]["message"] == again["choices"][0]["message"]
    assert kept(llm) == kept(fresh)


def test_the_same_prompt_again_gives_the_same_text_without_reading_it_again(tiny, load, tokens, evaluated):
    llm = load(tiny, kv_budget=64, n_ctx=1024)
    for seed in range(8):
        prompt = tokens(300, seed=seed)
        first = greedy(llm, prompt, 20), kept(llm)
        evaluated.clear()
        assert (greedy(llm, prompt, 20), kept(llm)) == first
        assert max(evaluated) == 1
        # after an eviction on the way the prompt has to be read again
        greedy(llm, prompt, 60)
        evaluated.clear()
        assert (greedy(llm, prompt, 20), kept(llm)) == first
        assert evaluated[0] == 300


@pytest.mark.parametrize("common", [0, 100, 284, 290, 299])
def test_a_prompt_that_shares_a_beginning_is_answered_as_by_a_fresh_object(tiny, load, tokens, common):
    used, fresh = (load(tiny, kv_budget=64, n_ctx=1024) for _ in range(2))
    greedy(used, tokens(300), 5)
    prompt = tokens(300)[:common] + tokens(320 - common, seed=7)
    for model in (used, fresh):
        model.answer = greedy(model, prompt, 20)
    assert used.answer == fresh.answer
    assert kept(used) == kept(fresh)


def test_cutting_back_is_exact_in_the_tail_and_refused_before_it(tiny, load, tokens):
    llm = load(tiny, kv_budget=64, n_ctx=1024)
    llm.eval(tokens(300))
    extra = tokens(10, seed=3)
    for token in extra:
        llm.eval([token])
    want_positions, want = kept(llm), last_logits(llm)
    llm.n_tokens = 305
    for token in extra[5:]:
        llm.eval([token])
    assert kept(llm) == want_positions
    assert np.array_equal(last_logits(llm), want)

    assert llm._ctx.kv_cache_seq_rm(-1, 284, -1)  # the first position of the window
    assert entries(llm) == 64 - 16
    assert not llm._ctx.kv_cache_seq_rm(-1, 283, -1)
    assert not llm._ctx.kv_cache_seq_rm(-1, 0, 100)
    assert entries(llm) == 64 - 16
    llm.n_tokens = 200
    with pytest.raises(RuntimeError, match="n_tokens=200"):
        llm.eval([5])


def test_evicting_after_a_cut_back_uses_the_queries_that_are_known(tiny, load, tokens):
    llm = load(tiny, kv_budget=400, n_ctx=1024)
    text = tokens(300)
    prefill_only(llm, text)
    llm.n_tokens = 270
    llm.eval([text[270]])
    assert llm._kv_store.stats().n_queries == 16  # from the rows to spare
    llm.n_tokens = 258
    llm.eval([text[258]])
    known = llm._kv_store.stats().n_queries
    assert 1 <= known < 16
    q = llm._kv_store.read("q", 0)
    assert len(q) == known
    llm._kv_store.evict(40)
    assert all(heads[-16:] == list(range(243, 259)) for lists in kept(llm) for heads in lists)
    assert not llm._ctx.kv_cache_seq_rm(-1, 242, -1)
    assert llm._ctx.kv_cache_seq_rm(-1, 243, -1)


def test_without_a_known_query_an_eviction_is_refused_and_generation_goes_on(tiny, load, tokens):
    llm = load(tiny, kv_budget=64, n_ctx=1024)
    prefill_only(llm, tokens(600))
    llm.n_tokens = 400
    llm._cut_back()
    before = kept(llm)
    with pytest.raises(RuntimeError, match="queries of the last positions are not known"):
        llm._kv_store.evict(30)
    assert kept(llm) == before
    llm.eval([5])
    llm.eval([6])
    assert entries(llm) == 65


def test_n_ctx_is_the_limit_of_positions(tiny, load, tokens):
    llm = load(tiny, kv_budget=64, n_ctx=256)
    with pytest.raises(ValueError, match="exceed the context window of 256"):
        greedy(llm, tokens(200), 200)
    assert llm.n_tokens == 256
    with pytest.raises(ValueError, match="100 tokens after 256 exceed the context window of 256"):
        llm.eval(tokens(100))
    assert llm.n_tokens == llm.kv_stats().tokens_seen == 256


def test_a_decode_without_free_cells_evicts(tiny, load, tokens):
    llm = load(tiny, kv_budget=64, n_ctx=256)
    prefill_only(llm, tokens(250))
    llm._batch.set_batch(batch=tokens(20, seed=2), n_past=250, logits_all=False)
    llm._ctx.decode(llm._batch)
    stats = llm.kv_stats()
    assert (stats.tokens_seen, stats.entries[0][0], stats.evictions) == (270, 84, 1)
    assert stats.seconds_total > 0
    assert np.isfinite(last_logits(llm)).all()


def test_other_sequences_are_not_there(tiny, load, tokens):
    llm = load(tiny, kv_budget=64, n_ctx=1024)
    llm.eval(tokens(300))
    before = kept(llm)
    assert llm._ctx.kv_cache_seq_rm(3, 0, -1)
    assert kept(llm) == before
    assert not llm._ctx.kv_cache_seq_rm(0, 250, -1)


def test_reset_forgets_everything(tiny, load, tokens):
    llm = load(tiny, kv_budget=64, n_ctx=1024)
    fresh = greedy(llm, tokens(300), 20)
    llm.reset()
    stats = llm.kv_stats()
    assert (stats.tokens_seen, stats.entries[0][0], stats.evictions, stats.bytes_now) == (0, 0, 0, 0)
    assert [len(p) for p in llm.kv_positions(0)] == [0, 0]
    greedy(llm, tokens(250, seed=9), 5)
    llm.reset()
    assert greedy(llm, tokens(300), 20) == fresh


def test_streaming_gives_the_text_of_a_completion(tiny, load):
    llm = load(tiny, kv_budget=64, n_ctx=1024)
    whole = llm(document(10), max_tokens=40, temperature=0.0)["choices"][0]["text"]
    llm.reset()
    parts = [c["choices"][0]["text"] for c in llm(document(10), max_tokens=40, temperature=0.0, stream=True)]
    assert "".join(parts) == whole


def test_logprobs_and_logits_of_all_tokens(tiny, load, tokens):
    llm = load(tiny, kv_budget=64, n_ctx=1024, logits_all=True)
    out = llm(document(8), max_tokens=10, temperature=0.0, logprobs=3)
    assert len(out["choices"][0]["logprobs"]["token_logprobs"]) == 10
    plain = load(tiny, n_ctx=1024, flash_attn=True, logits_all=True)
    for model in (llm, plain):
        model.reset()
        model.eval(tokens(200))
    assert np.array_equal(llm.scores[:200], plain.scores[:200])


def test_grammar(smollm2, load):
    llm = load(smollm2, kv_budget=64, n_ctx=1024)
    grammar = llama_cpp.LlamaGrammar.from_string('root ::= "{\\"answer\\": " ("true" | "false") "}"', verbose=False)
    out = llm("The sea is wet. " * 40 + "Is the sea wet?", max_tokens=20, grammar=grammar)
    assert set(json.loads(out["choices"][0]["text"])) == {"answer"}
    assert llm.kv_stats().evictions == 1


def test_speculative_decoding_cuts_back_only_what_it_may(tiny, load, tokens):
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding  # noqa: PLC0415

    prompt = tokens(40) * 8
    draft = LlamaPromptLookupDecoding(num_pred_tokens=10)
    llm = load(tiny, kv_budget=64, n_ctx=1024, draft_model=draft)
    got = greedy(llm, prompt, 120)
    assert len(got) == 120
    assert llm.kv_stats().tokens_seen == llm.n_tokens
    assert entries(llm) <= 64 + 32
    most, narrow = 0, load(tiny, kv_budget=64, kv_policy=KVPolicy(slack=1), n_ctx=1024, draft_model=draft)
    for i, _ in enumerate(narrow.generate(prompt, temp=0.0)):
        most = max(most, entries(narrow))
        if i == 100:
            break
    assert most <= 64 + 11  # slack is at least the tokens of one draft


def test_a_failed_decode_leaves_an_object_that_can_go_on(tiny, load, tokens, monkeypatch):
    llm = load(tiny, kv_budget=64, n_ctx=1024)
    want = greedy(load(tiny, kv_budget=64, n_ctx=1024), tokens(300), 10)
    plain, calls = llm._ctx.decode, []

    def failing(batch):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        plain(batch)

    monkeypatch.setattr(llm._ctx, "decode", failing)
    with pytest.raises(KeyboardInterrupt):
        llm.eval(tokens(700))
    llm.reset()
    assert greedy(llm, tokens(300), 10) == want


def test_an_aborted_eviction_leaves_the_cache_as_it_was(tiny, load, tokens):
    llm = load(tiny, kv_budget=64, n_ctx=1024, n_threads_batch=1)
    prefill_only(llm, tokens(300))
    before = kept(llm), [llm._kv_store.read(which, il) for which in "kvq" for il in range(3)]
    left = 0

    def abort(_):
        nonlocal left
        left -= 1
        return left < 0

    callback = llama_cpp.ggml_abort_callback(abort)
    aborted = 0
    for allowed in range(0, 100_000, 7):
        left = allowed
        llama_cpp.llama_set_abort_callback(llm.ctx, callback, None)
        try:
            llm._kv_store.evict(64)
        except RuntimeError as e:
            aborted += 1
            assert "aborted" in str(e)
            assert kept(llm) == before[0]
            now = [llm._kv_store.read(which, il) for which in "kvq" for il in range(3)]
            assert all(np.array_equal(a, b) for a, b in zip(before[1], now, strict=True))
        else:
            break
        finally:
            llama_cpp.llama_set_abort_callback(llm.ctx, llama_cpp.ggml_abort_callback(), None)
    assert aborted > 10
    fresh = load(tiny, kv_budget=64, n_ctx=1024)
    fresh.eval(tokens(300))
    assert kept(llm) == kept(fresh)
    for model in (llm, fresh):
        model.eval([5])
    assert np.array_equal(last_logits(llm), last_logits(fresh))
