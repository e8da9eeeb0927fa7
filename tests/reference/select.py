"""Brute-force selection for one KV head of one layer: plain Python, exact and slow.

The methods are SnapKV (arXiv 2404.14469), CriticalKV (arXiv 2502.03805), its variant on maximum scores with a floor
(after DefensiveKV, arXiv 2510.13334), VATP (arXiv 2406.12335), CAOTE (arXiv 2504.14051), StreamingLLM, and methods that
rank by a score alone.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

SCORED = ("keydiff", "knorm", "random", "snapkv", "tova")  # by the numbers in attn alone
METHODS = (*SCORED, "caote", "critical-max", "criticalkv", "streamingllm", "vatp")

Score = Callable[[int], float]


def select(
    method: str,
    n: int,
    budget: int,
    window: int,
    sinks: int,
    *,
    attn: Sequence[float],
    norm: Sequence[float] | None = None,
    alpha: float = 0.5,
    eps: float = 1e-4,
    positions: Sequence[int] | None = None,
) -> list[int]:
    """Return the sorted indices of the entries to keep, of n entries in position order.

    attn: score of each entry, and norm: projected value norm of each entry; at least n - window numbers each (nobody
    looks at the window's own). They are rounded to float32 first, as the product hands them over; all arithmetic and
    every comparison is float64. positions[i]: original position of entry i, ascending, default i. Protected entries
    (position < sinks, and the last `window` entries) are kept whatever the scores say, even where they exceed the
    budget. Wherever scores tie, the lower index wins.

    For `random` the caller passes the random numbers in attn, since the generator belongs to the product.
    """
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}; known: {', '.join(METHODS)}")
    if budget >= n:
        return list(range(n))
    positions = range(n) if positions is None else positions
    protected = {i for i in range(n) if positions[i] < sinks or i >= n - window}
    candidates = [i for i in range(n) if i not in protected]
    room = max(0, budget - len(protected))
    chosen = _choose(method, candidates, room, Scores.of(attn, norm, max(0, n - window)), alpha=alpha, eps=eps)
    return sorted(protected.union(chosen))


def share(
    positions: Sequence[Sequence[int]],
    attn: Sequence[Sequence[float]],
    budget: int,
    window: int,
    sinks: int,
    head_floor: float,
    *,
    floored: bool,
) -> list[int]:
    """Budgets of the KV heads of one layer, `budget` on average (Ada-KV, arXiv 2407.11550, algorithm 1).

    positions[h], attn[h]: entries of a head, and the scores of those before the window. Every head first gets its
    protected entries and its own best, head_floor of the mean rest but at least one; then the best entries of all
    heads, one by one: higher score, then lower position, then lower head.
    """
    left = budget * len(positions)
    if left >= sum(len(p) for p in positions):
        return [len(p) for p in positions]
    own = max(1, math.floor(head_floor * (budget - window - sinks)))
    budgets, pool = [], []
    for head, (at, scores) in enumerate(zip(positions, attn, strict=True)):
        rank = [_f32(a) for a in scores]
        rank = _floored(rank) if floored else rank
        free = [i for i in range(len(at) - window) if at[i] >= sinks]
        best = _top(free, own, lambda i, rank=rank: rank[i])
        pool += [(-rank[i], at[i], head) for i in free if i not in set(best)]
        budgets.append(len(at) - len(free) + len(best))
    for _, _, head in sorted(pool)[: left - sum(budgets)]:
        budgets[head] += 1
    return budgets


def layer_budgets(layers: str, budget: int, protected: int, n: Sequence[int]) -> list[int]:
    """Budgets of layers that hold n entries per head, `budget` on average (PyramidKV, arXiv 2406.02069, beta 20)."""
    free, last = budget - protected, len(n) - 1
    least = max(1, free // 20)
    want = [Fraction(free)] * len(n)
    if layers == "pyramid" and last > 0:
        want = [2 * free - least - Fraction(2 * (free - least) * i, last) for i in range(len(n))]
    edges = [math.ceil(sum(want[:i])) for i in range(len(n) + 1)]
    budgets = [protected + b - a for a, b in itertools.pairwise(edges)]
    left = 0
    for i in [*range(len(n)), *range(len(n))]:
        wanted = budgets[i] + left
        budgets[i] = min(wanted, n[i])
        left = wanted - budgets[i]
    return budgets


@dataclass(frozen=True)
class Scores:
    """Score and norm of the entries before the window, as the float64 values of the float32 numbers."""

    attn: list[float]
    norm: list[float] | None

    @classmethod
    def of(cls, attn: Sequence[float], norm: Sequence[float] | None, n_before: int) -> Scores:
        norms = None if norm is None else [_f32(norm[i]) for i in range(n_before)]
        return cls([_f32(attn[i]) for i in range(n_before)], norms)


def _choose(method: str, candidates: list[int], room: int, scores: Scores, *, alpha: float, eps: float) -> list[int]:
    if method == "streamingllm":
        return _top(candidates, room, float)
    attn, norm = scores.attn, scores.norm
    if method in SCORED:
        return _top(candidates, room, lambda i: attn[i])
    if norm is None:
        raise ValueError(f"{method} needs norm")
    if method == "vatp":
        return _top(candidates, room, lambda i: attn[i] * norm[i])
    if method == "caote":
        return _top(candidates, room, lambda i: attn[i] / max(1.0 - attn[i], 2.0**-24) * norm[i])
    if method == "critical-max":
        attn, eps = _floored(attn), 0.0
    n_first = math.floor(alpha * room)
    return _two_stages(candidates, n_first, room, attn, [(a + eps) * b for a, b in zip(attn, norm, strict=True)])


def _two_stages(candidates: list[int], n_first: int, room: int, first: list[float], second: list[float]) -> list[int]:
    """CriticalKV: the n_first entries with the largest `first`, then by `second` among the rest until room is full."""
    kept = _top(candidates, n_first, lambda i: first[i])
    rest = [i for i in candidates if i not in set(kept)]
    return kept + _top(rest, room - len(kept), lambda i: second[i])


def _floored(scores: list[float]) -> list[float]:
    """Raise every score to the mean of all entries before the window, sinks included.

    A loop, not math.fsum: the last bit of the mean decides ties, so the order of the additions is part of the rule.
    """
    total = 0.0
    for score in scores:
        total += score
    mean = total / len(scores) if scores else 0.0
    return [max(score, mean) for score in scores]


def _top(candidates: Iterable[int], count: int, score: Score) -> list[int]:
    return sorted(candidates, key=lambda i: (-score(i), i))[:count]


def _f32(value: float) -> float:
    """Round to float32 and come back, so that ties are those of the stored numbers."""
    return float(struct.unpack("f", struct.pack("f", value))[0])
