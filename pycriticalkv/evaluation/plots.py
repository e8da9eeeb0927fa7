"""Pictures of results, as PNG files, by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pycriticalkv.evaluation.runner import FULL
from pycriticalkv.evaluation.summary import Cell, budget_name


def _pyplot() -> Any:
    try:
        import matplotlib  # noqa: PLC0415
    except ImportError:
        raise ImportError("a picture needs matplotlib: pip install 'pycriticalkv[eval]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    return pyplot


def plot_accuracy(cells: Sequence[Cell], path: Path, title: str) -> None:
    """Accuracy over budget: a panel per length and setting, a line per policy, the full cache as a dashed line.

    Cells of one group only (``summarize(..., by_task=False)``).
    """
    pyplot = _pyplot()
    panels = sorted({(c.n_tokens, c.setting) for c in cells})
    policies = list(dict.fromkeys(c.policy for c in cells if c.policy != FULL))
    budgets = list(dict.fromkeys(c.budget for c in cells if c.policy != FULL))
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(1.5 + 4 * len(panels), 4.2), sharey=True, squeeze=False, layout="constrained"
    )
    for axis, (n_tokens, setting) in zip(axes[0], panels, strict=True):
        here = [c for c in cells if (c.n_tokens, c.setting) == (n_tokens, setting)]
        for c in here:
            if c.policy == FULL:
                axis.axhline(c.accuracy, color="0.4", linestyle="--", label="full cache")
        for i, policy in enumerate(policies):
            line = [c for budget in budgets for c in here if c.policy == policy and c.budget == budget]
            # a little apart, so that the intervals can be told from each other
            x = [budgets.index(c.budget) + (i - (len(policies) - 1) / 2) * 0.08 for c in line]
            errors = [[c.accuracy - c.low for c in line], [c.high - c.accuracy for c in line]]
            axis.errorbar(x, [c.accuracy for c in line], errors, marker="o", capsize=3, label=policy)
        axis.set_xticks(range(len(budgets)), [budget_name(budget) for budget in budgets])
        axis.set_xlabel("budget (share, or entries per KV head)")
        axis.set_title(f"{n_tokens} tokens, {setting}")
        axis.set_ylim(-0.03, 1.03)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("accuracy (95 % interval)")
    handles, labels = axes[0][-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", fontsize="small")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
