"""What an eviction changes in the attention output of a layer, in float64: the truth, and the argument's worst case.

Shapes and names as in scores.py; keep [H_kv, n] says which entries stay. Attention P [H_q, m, n] is over all entries;
where its rows add up to less than 1, the rest went to a sink logit, which stays.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


def kept_attention(attention: ArrayLike, keep: ArrayLike) -> Array:
    """Softmax over the kept entries alone -> P' like P."""
    attention = np.asarray(attention, dtype=np.float64)
    keep = np.asarray(keep, dtype=bool)
    of_head = np.repeat(keep, len(attention) // len(keep), axis=0)[:, None, :]
    kept = np.where(of_head, attention, 0.0)
    sink = 1.0 - attention.sum(axis=-1, keepdims=True)
    return np.asarray(kept / (kept.sum(axis=-1, keepdims=True) + sink))


def output(attention: ArrayLike, v: ArrayLike, wo: ArrayLike) -> Array:
    """The layer's attention output of each query, the sum over query heads of P v W -> [m, D]."""
    attention, v, wo = (np.asarray(x, dtype=np.float64) for x in (attention, v, wo))
    per_head = np.repeat(v, len(attention) // v.shape[1], axis=1)  # [n, H_q, d]
    heads = np.einsum("hmn,nhd->mhd", attention, per_head)
    return np.asarray(heads.reshape(len(heads), -1) @ wo.T)


def change(attention: ArrayLike, v: ArrayLike, wo: ArrayLike, keep: ArrayLike) -> float:
    """Mean over the queries of |o' - o|_2 / |o|_2."""
    before = output(attention, v, wo)
    after = output(kept_attention(attention, keep), v, wo)
    return float(np.mean(np.linalg.norm(after - before, axis=-1) / np.linalg.norm(before, axis=-1)))


def mean_attention(attention: ArrayLike, n_head_kv: int) -> Array:
    """Mean over the queries and the query heads of a KV head -> A [H_kv, n]."""
    attention = np.asarray(attention, dtype=np.float64)
    return np.asarray(attention.reshape(n_head_kv, -1, attention.shape[-1]).mean(axis=1))


def bound(weights: ArrayLike, norms: ArrayLike, keep: ArrayLike) -> tuple[float, float]:
    """C - (2 - 1 / sigma) sum_S A N, and C; both summed over KV heads. weights A, norms N [H_kv, n].

    sigma is what the kept entries hold together with a sink logit.
    """
    weights, norms = (np.asarray(x, dtype=np.float64) for x in (weights, norms))
    keep = np.asarray(keep, dtype=bool)
    all_of, sigma = (weights * norms).sum(axis=-1), 1.0 - np.where(keep, 0.0, weights).sum(axis=-1)
    kept = np.where(keep, weights * norms, 0.0).sum(axis=-1)
    return float((all_of - (2.0 - 1.0 / sigma) * kept).sum()), float(all_of.sum())


def mean_change(weights: ArrayLike, v: ArrayLike, wo: ArrayLike, keep: ArrayLike, order: int) -> float:
    """The change of the output, in the norm of that order, if every query head of a group attends with A; over g.

    g is the size of the group. This is what `bound` bounds: with order 1 for L1 norms, 2 for the others.
    """
    weights, wo = (np.asarray(x, dtype=np.float64) for x in (weights, wo))
    n_head_kv, d = np.shape(v)[1:]
    group = wo.shape[1] // d // n_head_kv
    attention = np.repeat(weights, group, axis=0)[:, None, :]
    moved = kept_attention(attention, keep) - attention
    return float(np.linalg.norm(output(moved, v, wo)[0], ord=order)) / group
