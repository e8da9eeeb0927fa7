"""Tables of outcomes: accuracy with bootstrap intervals, and differences from the full cache in pairs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pycriticalkv.evaluation.runner import FULL, Outcome

RESAMPLES = 2000
LEVEL = 0.95


@dataclass(frozen=True)
class Cell:
    """Accuracy of one arm over the samples of a group, and how it differs from the full cache on the same samples.

    Intervals are 95 % percentile bootstrap intervals over samples; NaN for a single sample.
    """

    group: str  # task, or "all"
    n_tokens: int
    setting: str
    policy: str
    budget: int | float | None
    prefill: str
    entries: float  # per KV head, mean; a share of a short prompt may be more than the share
    n: int
    accuracy: float
    low: float
    high: float
    difference: float  # accuracy minus that of the full cache; nan without it
    difference_low: float
    difference_high: float
    kl: float  # KL(full || this arm) of the token after the first, mean over the samples, nats
    kl_low: float
    kl_high: float


def interval(values: npt.NDArray[np.float64], seed: int = 0) -> tuple[float, float]:
    """95 % bootstrap interval of the mean; the same values give the same interval. NaN for less than two values."""
    if len(values) < 2:
        return math.nan, math.nan
    random = np.random.Generator(np.random.PCG64(seed))
    means = values[random.integers(0, len(values), (RESAMPLES, len(values)))].mean(axis=1)
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def summarize(outcomes: Sequence[Outcome], *, by_task: bool = True) -> list[Cell]:
    """Cells in the order of the outcomes; with by_task=False all tasks are one group."""
    groups: dict[tuple[Any, ...], list[Outcome]] = {}
    full: dict[tuple[Any, ...], float] = {}
    for o in outcomes:
        group = o.task if by_task else "all"
        groups.setdefault((group, o.n_tokens, o.setting, o.arm), []).append(o)
        if o.policy == FULL:
            full[o.task, o.seed, o.n_tokens, o.setting] = o.score
    cells = []
    for (group, n_tokens, setting, arm), members in groups.items():
        scores = np.array([o.score for o in members])
        pairs = [full.get((o.task, o.seed, o.n_tokens, o.setting), math.nan) for o in members]
        differences = scores - np.array(pairs)
        low, high = interval(scores)
        kl = np.array([o.kl for o in members])
        known = not np.isnan(differences).any()
        difference_low, difference_high = interval(differences) if known else (math.nan, math.nan)
        cells.append(
            Cell(
                group,
                n_tokens,
                setting,
                arm.policy,
                arm.budget,
                arm.prefill,
                float(np.mean([o.entries for o in members])),
                len(scores),
                float(scores.mean()),
                low,
                high,
                float(differences.mean()),
                difference_low,
                difference_high,
                float(kl.mean()),
                *interval(kl),
            )
        )
    return cells


def budget_name(budget: int | float | None) -> str:
    """As it stands in tables."""
    if budget is None:
        return "all"
    return f"{budget:.0%}" if isinstance(budget, float) else str(budget)


def with_interval(value: float, low: float, high: float, form: str) -> str:
    """As it stands in tables: the value alone, if there is no interval."""
    return f"{value:{form}}" + ("" if math.isnan(low) else f" ({low:{form}} to {high:{form}})")


def table(cells: Sequence[Cell]) -> str:
    """A Markdown table: a row per group, setting, length and arm."""
    head = (
        "| group | tokens | setting | policy | budget | prefill | entries | n | accuracy (95 %) | minus full (95 %) "
        "| KL after the first token, nats (95 %) |"
    )
    rows = [head, "| --- " * 11 + "|"]
    for c in cells:
        accuracy = with_interval(c.accuracy, c.low, c.high, ".3f")
        difference = with_interval(c.difference, c.difference_low, c.difference_high, "+.3f")
        divergence = with_interval(c.kl, c.kl_low, c.kl_high, ".4f")
        beside_full = " | " if c.policy == FULL else f"{difference} | {divergence}"
        rows.append(
            f"| {c.group} | {c.n_tokens} | {c.setting} | {c.policy} | {budget_name(c.budget)} | {c.prefill} "
            f"| {c.entries:.0f} | {c.n} | {accuracy} | {beside_full} |"
        )
    return "\n".join(rows)


def to_pandas(records: Sequence[Any]) -> Any:
    """A pandas DataFrame of outcomes, cells, or whatever else was measured: a row each.

    Raises:
        ImportError: pandas is not installed.
    """
    try:
        import pandas  # noqa: PLC0415
    except ImportError:
        raise ImportError("to_pandas() needs pandas: pip install pandas") from None
    return pandas.DataFrame([asdict(record) for record in records])
