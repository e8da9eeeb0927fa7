"""Perplexity and KL divergence of the text that follows a prompt."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pycriticalkv.evaluation import Evaluator, Grid, continuations, summarize_continuations
from pycriticalkv.evaluation.continuation import Continuation, passages_that_fit
from pycriticalkv.evaluation.divergence import divergence, likelihoods
from pycriticalkv.evaluation.runner import FULL
from pycriticalkv.evaluation.tasks import prose

GRID = Grid(tasks=("facts",), n_tokens=(300,), policies=("critical-max", "streamingllm"), budgets=(1.0, 64))


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    from tiny import write_tiny  # noqa: PLC0415

    path = write_tiny(tmp_path_factory.mktemp("continuation") / "tiny.gguf", wo_type="F32", weight_type="F32")
    with Evaluator(path, GRID, forced=40, n_threads=1, n_threads_batch=1) as evaluator:
        first = list(continuations(evaluator, 2, 40))
        again = list(continuations(evaluator, 2, 40, done=first[1:]))
        for forced, why in ((1, "forced=1"), (9000, "n_tokens=300, forced=9000: the context is")):
            with pytest.raises(ValueError, match=why):
                list(continuations(evaluator, 1, forced))
        for passages, forced, name in (("1", 40, "passages='1'"), (-1, 40, "passages=-1"), (1, 2.5, "forced=2.5")):
            with pytest.raises((ValueError, TypeError), match=name):
                list(continuations(evaluator, passages, forced))
        assert passages_that_fit(evaluator, 40, most=4) == 4
        assert passages_that_fit(evaluator, 40, most=4, text="The keeper lit the lamp. " * 40) == 1
        assert passages_that_fit(evaluator, 9000, most=4) == 0
        with pytest.raises(ValueError, match=r"n_tokens=300 and forced=40: the text has \d+ tokens, 1020 are needed"):
            list(continuations(evaluator, 3, 40, done=first, text="The keeper lit the lamp. " * 40))
    return str(path), first, again


def test_divergence_is_that_of_the_distributions():
    random = np.random.default_rng(0)
    full, other = (random.normal(0, 4, (130, 50)).astype(np.float32) for _ in range(2))
    p, q = (np.exp(x.astype(np.float64)) / np.exp(x.astype(np.float64)).sum(axis=1, keepdims=True)
            for x in (full, other))  # fmt: skip
    want = (p * np.log(p / q)).sum(axis=1)
    assert np.allclose(divergence(full, other), want, rtol=1e-9)
    assert np.array_equal(divergence(full, full), np.zeros(130))
    tokens = random.integers(0, 50, 130).tolist()
    assert np.allclose(likelihoods(full, tokens), np.log(p[np.arange(130), tokens]), rtol=1e-9)


def test_every_arm_once_and_the_same_twice(measured):
    _, first, again = measured
    assert [c.policy for c in first].count(FULL) == 2
    assert len({c.key for c in first}) == len(first) == 2 * 5
    assert again == first[:1]


def test_a_budget_of_everything_changes_nothing(measured):
    full = {c.passage: c for c in measured[1] if c.policy == FULL}
    for c in measured[1]:
        if c.policy == FULL or c.budget == 1.0:
            assert c.kl == 0.0 and c.same_first == 1.0 and c.nll == full[c.passage].nll and c.entries == 300
        else:
            assert c.kl > 1e-3 and c.entries == 64


def test_perplexity_is_that_of_the_plain_model(measured, load):
    path, first, _ = measured
    llm = load(path, n_ctx=512, flash_attn=True, logits_all=True)
    for c in first:
        if c.policy == FULL:
            text = llm.tokenize("".join(prose(None)).encode(), add_bos=False)
            tokens = [llm.token_bos(), *text[c.passage * 340 :][:339]]
            llm.reset()
            llm.eval(tokens)
            logits = llm.scores[299:339].astype(np.float64)
            probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
            want = -np.log(probabilities[np.arange(40), tokens[300:]]).mean()
            assert c.nll == pytest.approx(want, rel=1e-3)  # flash attention adds up in f16


def test_summary():
    def one(passage, kl, nll):
        return Continuation(passage, 300, 40, "snapkv", 64, "full", 64, kl, 0.5 + passage / 10, nll)

    (cell,) = summarize_continuations([one(0, 0.25, 1.0), one(1, 0.75, 2.0)])
    assert (cell.n, cell.kl, cell.forced) == (2, 0.5, 40)
    # Student's t with one degree of freedom, standard error 0.25; not below zero
    assert (
        cell.kl_low == 0
        and cell.kl_high == pytest.approx(0.5 + 12.706 * 0.25)
        and cell.same_first == pytest.approx(0.55)
    )
    assert cell.perplexity == pytest.approx(math.exp(1.5))
