"""What eviction does to the next-token distribution of the text that follows a prompt.

A passage of text is read and evicted by each policy; the tokens that follow are then given one after another
(teacher-forced), and the distributions before each are compared with those of the full cache: KL(full || evicted) in
nats, and the perplexity of the text itself. All arms of a passage share one prefill.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import llama_cpp
import numpy as np
import numpy.typing as npt

from pycriticalkv.evaluation.runner import FULL, Arm, Evaluator, States
from pycriticalkv.evaluation.summary import budget_name, interval
from pycriticalkv.evaluation.tasks import prose
from pycriticalkv.llama import Llama

CHUNK = 64  # rows at a time: a vocabulary of 150,000 in float64 is large


@dataclass(frozen=True)
class Continuation:
    """What one arm expected of the text after one passage."""

    passage: int
    n_tokens: int  # of the passage
    forced: int  # tokens that follow
    policy: str
    budget: int | float | None
    entries: int  # per KV head after the eviction
    kl: float  # KL(full || this arm), mean over the forced tokens, nats
    same_first: float  # share of tokens before which the most likely token is that of the full cache
    nll: float  # mean negative log-likelihood of the forced tokens, nats

    @property
    def arm(self) -> Arm:
        """Policy and budget."""
        return Arm(self.policy, self.budget)

    @property
    def key(self) -> tuple[object, ...]:
        """What makes it the answer to one question."""
        return (self.passage, self.n_tokens, self.forced, self.policy, self.budget)


@dataclass(frozen=True)
class ContinuationCell:
    """One arm over all passages of a length; the interval is a 95 % bootstrap interval over passages."""

    n_tokens: int
    policy: str
    budget: int | float | None
    entries: float
    n: int  # passages
    forced: int
    kl: float
    kl_low: float
    kl_high: float
    same_first: float
    perplexity: float


def decode(llm: Llama, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
    """Evaluate tokens after those in the cache, without evictions; the logits after each, [len(tokens), n_vocab]."""
    rows = []
    for start in range(0, len(tokens), llm.n_batch):
        batch = list(tokens[start : start + llm.n_batch])
        llm._batch.set_batch(batch=batch, n_past=llm.n_tokens, logits_all=True)
        llm._ctx.decode(llm._batch)
        llm.input_ids[llm.n_tokens : llm.n_tokens + len(batch)] = batch
        llm.n_tokens += len(batch)
        pointer = llama_cpp.llama_get_logits(llm.ctx)
        rows.append(np.ctypeslib.as_array(pointer, shape=(len(batch), llm.n_vocab())).copy())
    return np.concatenate(rows)


def log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """Row by row, in float64."""
    x = logits.astype(np.float64)
    x -= x.max(axis=1, keepdims=True)
    return np.asarray(x - np.log(np.exp(x).sum(axis=1, keepdims=True)))


def divergence(full: npt.NDArray[np.float32], evicted: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """KL(full || evicted) of each row of logits, in nats."""
    rows = []
    for i in range(0, len(full), CHUNK):
        p, q = log_softmax(full[i : i + CHUNK]), log_softmax(evicted[i : i + CHUNK])
        rows.append((np.exp(p) * (p - q)).sum(axis=1))
    return np.concatenate(rows)


def likelihoods(logits: npt.NDArray[np.float32], tokens: Sequence[int]) -> npt.NDArray[np.float64]:
    """Log-likelihood of each token under its row of logits, in nats."""
    rows = []
    for i in range(0, len(tokens), CHUNK):
        chosen = np.asarray(tokens[i : i + CHUNK])
        rows.append(log_softmax(logits[i : i + CHUNK])[np.arange(len(chosen)), chosen])
    return np.concatenate(rows)


def _passage(evaluator: Evaluator, passage: int, n: int, text: str | None) -> list[int]:
    """n tokens; passages follow each other in the text and do not overlap."""
    tokens = evaluator.tokenize("".join(prose(text)))
    first = passage * n
    if first + n > len(tokens):
        raise ValueError(
            f"passage {passage} of {n} tokens: the text has {len(tokens)} tokens, {(passage + 1) * n} are needed; give "
            "a longer text, or ask for fewer passages or shorter ones"
        )
    return tokens[first : first + n]


def continuations(
    evaluator: Evaluator,
    passages: int,
    forced: int,
    *,
    done: Sequence[Continuation] = (),
    text: str | None = None,
) -> Iterator[Continuation]:
    """Measure every passage at every length of the evaluator's grid by all its arms, but for those done.

    Raises:
        ValueError: The text is too short, or passage and forced tokens do not fit the model's context.
    """
    known = {c.key for c in done}
    for n_tokens in evaluator.grid.n_tokens:
        for passage in range(passages):
            arms = [a for a in evaluator.grid.arms if (passage, n_tokens, forced, a.policy, a.budget) not in known]
            if arms:
                tokens = _passage(evaluator, passage, n_tokens + forced, text)
                yield from _measure(evaluator, passage, tokens, n_tokens, arms)


def _measure(
    evaluator: Evaluator, passage: int, tokens: list[int], n_tokens: int, arms: Sequence[Arm]
) -> Iterator[Continuation]:
    prompt, forced = tokens[:n_tokens], tokens[n_tokens:]
    states: States = {}
    full = None
    for arm in [Arm(FULL, None), *(arm for arm in arms if arm.policy != FULL)]:
        llm, entries, last = evaluator.evicted(arm, [prompt], states)
        # the first row foretells forced[0]
        logits = np.concatenate([last[None], decode(llm, forced)[:-1]])
        full = logits if full is None else full
        if arm in arms:
            yield Continuation(
                passage, n_tokens, len(forced), arm.policy, arm.budget, entries,
                float(divergence(full, logits).mean()),
                float(np.mean(full.argmax(axis=1) == logits.argmax(axis=1))),
                -float(likelihoods(logits, forced).mean()),
            )  # fmt: skip


def summarize_continuations(measured: Sequence[Continuation]) -> list[ContinuationCell]:
    """Cells in the order of what was measured."""
    groups: dict[tuple[object, ...], list[Continuation]] = {}
    for c in measured:
        groups.setdefault((c.n_tokens, c.policy, c.budget, c.forced), []).append(c)
    cells = []
    for members in groups.values():
        first = members[0]
        kl = np.array([c.kl for c in members])
        low, high = interval(kl)
        cells.append(
            ContinuationCell(
                first.n_tokens,
                first.policy,
                first.budget,
                float(np.mean([c.entries for c in members])),
                len(members),
                first.forced,
                float(kl.mean()),
                low,
                high,
                float(np.mean([c.same_first for c in members])),
                math.exp(float(np.mean([c.nll for c in members]))),
            )
        )
    return cells


def continuation_table(cells: Sequence[ContinuationCell]) -> str:
    """A Markdown table: a row per length and arm."""
    head = "| tokens | policy | budget | entries | passages | KL, nats (95 %) | same first token | perplexity |"
    rows = [head, "| --- " * 8 + "|"]
    for c in cells:
        kl = "" if c.policy == FULL else f"{c.kl:.4f} ({c.kl_low:.4f} to {c.kl_high:.4f})"
        same = "" if c.policy == FULL else f"{c.same_first:.3f}"
        rows.append(
            f"| {c.n_tokens} | {c.policy} | {budget_name(c.budget)} | {c.entries:.0f} | {c.n} x {c.forced} | {kl} "
            f"| {same} | {c.perplexity:.3f} |"
        )
    return "\n".join(rows)
