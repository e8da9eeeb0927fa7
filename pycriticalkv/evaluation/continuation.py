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

from pycriticalkv.arguments import check_int
from pycriticalkv.evaluation.divergence import divergence, likelihoods
from pycriticalkv.evaluation.runner import FULL, Arm, Evaluator, States
from pycriticalkv.evaluation.summary import budget_name, with_interval
from pycriticalkv.evaluation.tasks import prose
from pycriticalkv.llama import Llama

# 97.5 % quantiles of Student's t distribution with 1, 2, ... 10 degrees of freedom; the last is used for more
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


@dataclass(frozen=True)
class Continuation:
    """What one arm expected of the text after one passage."""

    passage: int
    n_tokens: int  # of the passage
    forced: int  # tokens that follow
    policy: str
    budget: int | float | None
    prefill: str
    entries: int  # per KV head after the eviction
    kl: float  # KL(full || this arm), mean over the forced tokens but the first, nats
    same_first: float  # share of these tokens before which the most likely token is that of the full cache
    nll: float  # mean negative log-likelihood of the forced tokens, nats

    @property
    def arm(self) -> Arm:
        """Policy, budget and prefill."""
        return Arm(self.policy, self.budget, self.prefill)

    @property
    def key(self) -> tuple[object, ...]:
        """What makes it the answer to one question."""
        return (self.passage, self.n_tokens, self.forced, self.arm)


@dataclass(frozen=True)
class ContinuationCell:
    """One arm over all passages of a length.

    The interval is Student's 95 % interval over passages: they are too few for a bootstrap. NaN for a single passage.
    """

    n_tokens: int
    policy: str
    budget: int | float | None
    prefill: str
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


def passages_that_fit(evaluator: Evaluator, forced: int, *, most: int, text: str | None = None) -> int:
    """How many passages of the longest length, with what follows, the text has, if the model can hold them."""
    n = max(evaluator.grid.n_tokens) + forced
    if n > evaluator.context:
        return 0
    return min(most, len(evaluator.tokenize("".join(prose(text)))) // n)


def _check(evaluator: Evaluator, passages: int, forced: int, tokens: Sequence[int]) -> None:
    for n_tokens in evaluator.grid.n_tokens:
        if n_tokens + forced > evaluator.context:
            raise ValueError(f"n_tokens={n_tokens}, forced={forced}: the context is {evaluator.context} tokens")
        if passages * (n_tokens + forced) > len(tokens):
            raise ValueError(
                f"passages={passages} of n_tokens={n_tokens} and forced={forced}: the text has {len(tokens)} tokens, "
                f"{passages * (n_tokens + forced)} are needed; give a longer text, or ask for fewer or shorter passages"
            )


def continuations(
    evaluator: Evaluator,
    passages: int,
    forced: int,
    *,
    done: Sequence[Continuation] = (),
    text: str | None = None,
) -> Iterator[Continuation]:
    """Measure every passage at every length of the evaluator's grid by all its arms, but for those done.

    Passages follow each other in the text and do not overlap; each begins with the model's first token, if it has one.

    Raises:
        TypeError: `passages` or `forced` is no int.
        ValueError: `passages` or `forced` is too small, the text is too short, or passage and forced tokens do not fit
            the context; nothing is measured.
    """
    passages, forced = check_int("passages", passages, 0), check_int("forced", forced, 2)
    if passages == 0:
        return
    known = {c.key for c in done}
    tokens = evaluator.tokenize("".join(prose(text)))
    _check(evaluator, passages, forced, tokens)
    for n_tokens in evaluator.grid.n_tokens:
        for passage in range(passages):
            arms = [arm for arm in evaluator.grid.arms if (passage, n_tokens, forced, arm) not in known]
            n = n_tokens + forced
            if arms:
                read = (evaluator.first_tokens + tokens[passage * n : (passage + 1) * n])[:n]
                yield from _measure(evaluator, passage, read, n_tokens, arms)


def _measure(
    evaluator: Evaluator, passage: int, tokens: list[int], n_tokens: int, arms: Sequence[Arm]
) -> Iterator[Continuation]:
    prompt, forced = tokens[:n_tokens], tokens[n_tokens:]
    states: States = {}
    full = None
    for arm in [Arm(FULL, None), *(arm for arm in arms if arm.policy != FULL)]:
        llm, entries, last = evaluator.evicted(arm, [prompt], states)
        logits = decode(llm, forced)[:-1]  # what foretells forced[1:]; forced[0] was foretold before the eviction
        full = logits if full is None else full
        if arm in arms:
            yield Continuation(
                passage,
                n_tokens,
                len(forced),
                arm.policy,
                arm.budget,
                arm.prefill,
                entries,
                float(divergence(full, logits).mean()),
                float(np.mean(full.argmax(axis=1) == logits.argmax(axis=1))),
                -float(likelihoods(np.concatenate([last[None], logits]), forced).mean()),
            )


def t_interval(values: npt.NDArray[np.float64]) -> tuple[float, float]:
    """Student's 95 % interval of the mean of values that are not negative; NaN for less than two."""
    n = len(values)
    if n < 2:
        return math.nan, math.nan
    half = T_975[min(n - 2, len(T_975) - 1)] * float(values.std(ddof=1)) / n**0.5
    return max(0.0, float(values.mean()) - half), float(values.mean()) + half


def summarize_continuations(measured: Sequence[Continuation]) -> list[ContinuationCell]:
    """Cells in the order of what was measured."""
    groups: dict[tuple[object, ...], list[Continuation]] = {}
    for c in measured:
        groups.setdefault((c.n_tokens, c.arm, c.forced), []).append(c)
    cells = []
    for members in groups.values():
        first = members[0]
        kl = np.array([c.kl for c in members])
        low, high = t_interval(kl)
        cells.append(
            ContinuationCell(
                first.n_tokens,
                first.policy,
                first.budget,
                first.prefill,
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
    head = (
        "| tokens | policy | budget | prefill | entries | passages | KL, nats (95 %) | same first token | perplexity |"
    )
    rows = [head, "| --- " * 9 + "|"]
    for c in cells:
        kl = "" if c.policy == FULL else with_interval(c.kl, c.kl_low, c.kl_high, ".4f")
        same = "" if c.policy == FULL else f"{c.same_first:.3f}"
        rows.append(
            f"| {c.n_tokens} | {c.policy} | {budget_name(c.budget)} | {c.prefill} | {c.entries:.0f} "
            f"| {c.n} x {c.forced} | {kl} | {same} | {c.perplexity:.3f} |"
        )
    return "\n".join(rows)
