"""Scores of cached entries in float64, written to be checked by eye against the papers' formulas.

Sources: SnapKV (arXiv 2404.14469) for the observed attention and its pooling, CriticalKV (arXiv 2502.03805) for the
projected value norm, DefensiveKV (arXiv 2510.13334) for the maximum in place of the mean. This module imports nothing
of the package, so that the two can disagree.

Shapes: n cached entries, m queries, H_q query heads, H_kv KV heads, g = H_q / H_kv, head size d, model width D.
Query head h reads KV head h // g.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


def _f64(values: ArrayLike) -> Array:
    return np.asarray(values, dtype=np.float64)


def _heads_per_group(n_head: int, n_head_kv: int) -> int:
    if n_head % n_head_kv:
        raise ValueError(f"{n_head} query heads cannot share {n_head_kv} KV heads evenly")
    return n_head // n_head_kv


def window_attention(
    q: ArrayLike,
    k: ArrayLike,
    q_pos: ArrayLike,
    k_pos: ArrayLike,
    scale: float,
    *,
    softcap: float = 0.0,
    sinks: ArrayLike | None = None,
) -> Array:
    """Causal softmax of the window's queries over all cached keys -> P [H_q, m, n].

    q [m, H_q, d] and k [n, H_kv, d] both after RoPE; q_pos [m] and k_pos [n] are original positions. A softcap c > 0
    maps each logit x to c * tanh(x / c). sinks [H_q] is one more logit per query head that takes its share of the
    denominator and has no column of its own. Every query must see at least one key.
    """
    q, k = _f64(q), _f64(k)
    k = np.repeat(k, _heads_per_group(q.shape[1], k.shape[1]), axis=1)
    logits = scale * np.einsum("mhd,nhd->hmn", q, k)
    if softcap > 0:
        logits = softcap * np.tanh(logits / softcap)
    future = np.asarray(k_pos)[None, :] > np.asarray(q_pos)[:, None]
    logits = np.where(future, -np.inf, logits)
    sink = np.full(q.shape[1], -np.inf) if sinks is None else _f64(sinks)
    top = np.maximum(logits.max(axis=-1), sink[:, None])
    weights = np.exp(logits - top[..., None])
    denominator = weights.sum(axis=-1) + np.exp(sink[:, None] - top)
    return _f64(weights / denominator[..., None])


def average_pool(rows: ArrayLike, kernel: int) -> Array:
    """Average over `kernel` neighbours along the last axis, stride 1, length kept.

    Neighbours outside the row count as zeros in the divisor too, as in SnapKV: the divisor is always `kernel`.
    """
    if kernel < 1 or kernel % 2 == 0:
        raise ValueError(f"the pooling kernel must be odd and positive, not {kernel}")
    rows = _f64(rows)
    half = kernel // 2
    padded = np.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(half, half)])
    windows = [padded[..., i : i + rows.shape[-1]] for i in range(kernel)]
    return _f64(np.sum(windows, axis=0) / kernel)


def _before_window(attention: ArrayLike, n_window: int) -> Array:
    """Cut P [H_q, m, n] to the n - n_window columns before the window.

    The cut comes before the pooling: the window's own large weights must not leak into its neighbours.
    """
    attention = _f64(attention)
    return attention[..., : attention.shape[-1] - n_window]


def _grouped(per_head: Array, n_head_kv: int) -> Array:
    """[H_q, ...] -> [H_kv, g, ...]."""
    group = _heads_per_group(per_head.shape[0], n_head_kv)
    return per_head.reshape(n_head_kv, group, *per_head.shape[1:])


def aggregate_mean(attention: ArrayLike, n_window: int, pool: int = 5, *, n_head_kv: int = 1) -> Array:
    """SnapKV: mean over the queries, average pool, mean over the group -> A [H_kv, n - n_window].

    attention P [H_q, m, n] holds all heads of a layer (then give n_head_kv), or the query heads of one KV head.
    """
    pooled = average_pool(_before_window(attention, n_window).mean(axis=1), pool)
    return _f64(_grouped(pooled, n_head_kv).mean(axis=1))


def aggregate_max(attention: ArrayLike, n_window: int, pool: int = 5, *, n_head_kv: int = 1) -> Array:
    """DefensiveKV: average pool each query's row, maximum over group and queries -> R [H_kv, n - n_window].

    attention P as for aggregate_mean. The floor (no entry below the mean of R) belongs to the selection and is not
    applied here.
    """
    pooled = average_pool(_before_window(attention, n_window), pool)
    return _f64(_grouped(pooled, n_head_kv).max(axis=(1, 2)))


def key_norm(k: ArrayLike) -> Array:
    """Minus the Euclidean norm of each key (arXiv 2406.11430) -> [H_kv, n]. k [n, H_kv, d] as cached, after RoPE."""
    return _f64(-np.linalg.norm(_f64(k), axis=-1).T)


def keydiff(k: ArrayLike) -> Array:
    """KeyDiff (arXiv 2504.15364): minus the cosine of each key and the mean of all normalised keys -> [H_kv, n]."""
    k = _f64(k)
    directions = k / np.linalg.norm(k, axis=-1, keepdims=True)
    anchor = directions.mean(axis=0)
    return _f64(-np.einsum("nkd,kd->kn", directions, anchor / np.linalg.norm(anchor, axis=-1, keepdims=True)))


def value_l1(v: ArrayLike) -> Array:
    """VATP (arXiv 2406.12335): the L1 norm of each value -> [H_kv, n]. v [n, H_kv, d]."""
    return _f64(np.abs(_f64(v)).sum(axis=-1).T)


def output_distance(attention: ArrayLike, v: ArrayLike) -> Array:
    """CAOTE (arXiv 2504.14051): the Euclidean distance of each value from the head's output -> [H_kv, n].

    attention P [H_q, m, n] of all n entries. The output is the mean over the m queries and the query heads of a KV
    head: the paper has one query, the last; the mean is ours.
    """
    v = _f64(v)
    weights = _grouped(_f64(attention).mean(axis=1), v.shape[1]).mean(axis=1)  # [H_kv, n]
    output = np.einsum("kn,nkd->kd", weights, v)
    return _f64(np.linalg.norm(v - output, axis=-1).T)


def _projected(v: ArrayLike, wo: ArrayLike) -> Array:
    """Each value through the output projection of each query head that reads it -> [H_kv, g, n, D].

    v [n, H_kv, d]; wo [D, H_q * d], rows are output features as GGUF stores them. Query head h owns the columns
    h * d to (h + 1) * d.
    """
    v, wo = _f64(v), _f64(wo)
    _, n_head_kv, d = v.shape
    blocks = _grouped(wo.T.reshape(-1, d, wo.shape[0]), n_head_kv)
    return _f64(np.einsum("nkd,kgdo->kgno", v, blocks))


def norm_l1(v: ArrayLike, wo: ArrayLike) -> Array:
    """CriticalKV's projected norm: mean over the group of the L1 norm of v W_O -> N [H_kv, n]."""
    return _f64(np.abs(_projected(v, wo)).sum(axis=-1).mean(axis=1))


def norm_l2(v: ArrayLike, wo: ArrayLike) -> Array:
    """Mean over the group of the Euclidean norm of v W_O -> N [H_kv, n]."""
    return _f64(np.sqrt(np.square(_projected(v, wo)).sum(axis=-1)).mean(axis=1))


def norm_gram(v: ArrayLike, wo: ArrayLike) -> Array:
    """Root of the mean over the group of the squared Euclidean norm of v W_O -> N [H_kv, n].

    Equals sqrt(v G v / g) with G = sum over the group of W_O W_O^T, one d x d Gram matrix per KV head; computed here
    through the projections themselves, so that it can check an implementation by Gram matrices.
    """
    return _f64(np.sqrt(np.square(_projected(v, wo)).sum(axis=-1).mean(axis=1)))
