"""How far the next-token distributions of an evicted cache are from those of the full cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

CHUNK = 64  # rows at a time: a vocabulary of 150,000 in float64 is large


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
