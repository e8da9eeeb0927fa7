"""Several models in one process, threads, and memory that goes back."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import weakref

import psutil
from helpers import greedy, kept

from pycriticalkv import Llama


def test_two_models_with_different_budgets_in_two_threads(tiny, load, tokens):
    def run(llm, out):
        for seed in range(4):
            out.append((greedy(llm, tokens(300, seed=seed), 60), kept(llm)))

    results = {}
    for parallel in (False, True):
        models = [load(tiny, kv_budget=64, n_ctx=1024), load(tiny, kv_budget=100, kv_policy="snapkv", n_ctx=1024)]
        outs = [[], []]
        threads = [threading.Thread(target=run, args=pair) for pair in zip(models, outs, strict=True)]
        for thread in threads:
            thread.start()
            if not parallel:
                thread.join()
        for thread in threads:
            thread.join()
        results[parallel] = outs
    assert results[True] == results[False]
    assert results[True][0] != results[True][1]


def test_models_created_side_by_side_in_threads_get_their_own_budget(tiny):
    budgets, made = list(range(40, 52)), {}

    def make(budget):
        # verbose=False makes llama-cpp-python redirect the output of the process while it loads, which threads share
        made[budget] = Llama(tiny, kv_budget=budget, n_ctx=512, verbose=True)

    threads = [threading.Thread(target=make, args=(b,)) for b in budgets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for budget in budgets:
        assert made[budget].kv_stats().budget == budget
        made[budget].close()
    plain = Llama(tiny, verbose=False)
    assert plain._kv_budget is None


def test_a_model_is_freed_when_its_last_user_lets_go(tiny):
    gc.disable()
    try:
        llm = Llama(tiny, kv_budget=64, n_ctx=512, verbose=False)
        alive = weakref.ref(llm)
        del llm
        assert alive() is None
    finally:
        gc.enable()


def test_memory_goes_back(tiny, tokens):
    process, libc = psutil.Process(os.getpid()), ctypes.CDLL(None)

    def once():
        llm = Llama(tiny, kv_budget=64, n_ctx=2048, verbose=False, n_threads=1, n_threads_batch=1)
        greedy(llm, tokens(300), 4)
        llm.close()

    def resident():
        gc.collect()
        if hasattr(libc, "malloc_trim"):
            libc.malloc_trim(0)  # or what the allocator keeps for later would count
        return process.memory_info().rss

    for _ in range(10):
        once()
    before = resident()
    for _ in range(50):
        once()
    grown = resident() - before
    # one model's cache alone is 1.5 MB: a leak of one per round would be 75 MB
    assert grown < 4_000_000


def test_closing_after_an_eviction_in_small_batches_warns_of_nothing(tiny, tokens, capfd):
    llm = Llama(tiny, kv_budget=64, n_ctx=1024, n_batch=8, n_ubatch=8, verbose=True)
    llm.eval(tokens(600))
    assert llm.kv_stats().evictions == 1
    llm.close()
    assert "does not match expectation" not in capfd.readouterr().err
