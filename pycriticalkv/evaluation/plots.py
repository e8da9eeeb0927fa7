"""Pictures of results, as PNG files, by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pycriticalkv.evaluation.continuation import ContinuationCell
from pycriticalkv.evaluation.runner import FULL
from pycriticalkv.evaluation.speed import Speed, speed_rows
from pycriticalkv.evaluation.summary import Cell, budget_name


def _pyplot() -> Any:
    try:
        import matplotlib  # noqa: PLC0415
    except ImportError:
        raise ImportError("a picture needs matplotlib: pip install 'pycriticalkv[eval]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    return pyplot


def check_picture(path: Path) -> None:
    """Before any work: ImportError without matplotlib, ValueError if `path` is not that of a PNG file."""
    if path.suffix.lower() != ".png":
        raise ValueError(f"--plot {path}: allowed are names that end in .png")
    _pyplot()


def _over_budgets(
    axis: Any, cells: Sequence[Any], arms: tuple[list[tuple[str, str]], list[Any]], names: Sequence[str]
) -> None:
    """A line per policy and prefill with intervals; `names` are the fields of the value and of its interval's ends."""
    kinds, budgets = arms
    value, low, high = names
    for i, (policy, prefill) in enumerate(kinds):
        line = [c for b in budgets for c in cells if (c.policy, c.prefill, c.budget) == (policy, prefill, b)]
        # a little apart, so that the intervals can be told from each other
        x = [budgets.index(c.budget) + (i - (len(kinds) - 1) / 2) * 0.08 for c in line]
        y = [getattr(c, value) for c in line]
        errors = [[v - getattr(c, low) for v, c in zip(y, line, strict=True)],
                  [getattr(c, high) - v for v, c in zip(y, line, strict=True)]]  # fmt: skip
        name = policy if prefill == "full" else f"{policy}, {prefill}"
        axis.errorbar(x, y, errors, marker="o", capsize=3, label=name)
    axis.set_xticks(range(len(budgets)), [budget_name(budget) for budget in budgets])
    axis.set_xlabel("budget (share, or entries per KV head)")
    axis.grid(alpha=0.3)


def plot_evaluation(cells: Sequence[Cell], continuations: Sequence[ContinuationCell], path: Path, title: str) -> None:
    """Over budget: accuracy, a panel per length and setting, and KL divergence, a panel per length.

    A line per policy and prefill; the full cache's accuracy is a dashed line, its divergence is 0. Cells of one group
    only (``summarize(..., by_task=False)``); either kind may be missing.
    """
    pyplot = _pyplot()
    panels = sorted({(c.n_tokens, c.setting) for c in cells})
    lengths = sorted({c.n_tokens for c in continuations})
    every: list[Any] = [*cells, *continuations]
    kinds = list(dict.fromkeys((c.policy, c.prefill) for c in every if c.policy != FULL))
    budgets = list(dict.fromkeys(c.budget for c in every if c.policy != FULL))
    n_rows, n_columns = bool(panels) + bool(lengths), max(len(panels), len(lengths))
    figure, axes = pyplot.subplots(
        n_rows, n_columns, figsize=(1.8 + 4 * n_columns, 0.4 + 3.8 * n_rows), squeeze=False, layout="constrained"
    )
    for axis in axes.flat:
        axis.set_visible(False)
    for axis, (n_tokens, setting) in zip(axes[0], panels, strict=False):
        here = [c for c in cells if (c.n_tokens, c.setting) == (n_tokens, setting)]
        axis.set_visible(True)
        for c in here:
            if c.policy == FULL:
                axis.axhline(c.accuracy, color="0.4", linestyle="--", label="full cache")
        _over_budgets(axis, here, (kinds, budgets), ("accuracy", "low", "high"))
        axis.set_title(f"{n_tokens} tokens, {setting}" if n_tokens else setting)
        axis.set_ylim(-0.03, 1.03)
    for axis, n_tokens in zip(axes[-1], lengths, strict=False):
        axis.set_visible(True)
        here_too = [c for c in continuations if c.n_tokens == n_tokens]
        _over_budgets(axis, here_too, (kinds, budgets), ("kl", "kl_low", "kl_high"))
        axis.set_title(f"{n_tokens} tokens, text that follows")
        axis.set_ylim(bottom=0)
    if panels:
        axes[0][0].set_ylabel("accuracy (95 % interval)")
    if lengths:
        axes[-1][0].set_ylabel("KL from the full cache, nats")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", fontsize="small")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def plot_speed(measured: Sequence[Speed], path: Path, title: str) -> None:
    """Over the length of the prompt: tokens per second and bytes of the cache, a line per budget."""
    pyplot = _pyplot()
    rows = speed_rows(measured)
    figure, axes = pyplot.subplots(1, 3, figsize=(13, 4), layout="constrained")
    for budget in dict.fromkeys(row.budget for row in rows):
        line = [row for row in rows if row.budget == budget]
        name = "full cache" if budget is None else f"budget {budget_name(budget)}"
        style = {"color": "0.4", "linestyle": "--"} if budget is None else {}
        x = [row.n_tokens for row in line]
        axes[0].plot(x, [row.decode_rate for row in line], marker="o", label=name, **style)
        axes[1].plot(x, [row.n_tokens / row.prefill_seconds for row in line], marker="o", **style)
        axes[2].plot(x, [row.cache_bytes / 1e6 for row in line], marker="o", **style)
    for axis, label in zip(
        axes, ("generated tokens/s", "prompt tokens/s, eviction included", "cache, MB"), strict=True
    ):
        axis.set_xlabel("prompt, tokens")
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", fontsize="small")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
