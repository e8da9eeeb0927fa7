"""The tables of docs/results.md from files of ``pycriticalkv eval``.

    python benchmarks/results.py eval.jsonl ...
    python benchmarks/results.py --windows window-16.jsonl window-32.jsonl
    python benchmarks/results.py --together outcomes/stream-*.jsonl.gz      parts of one measurement

Accuracy with its 95 % bootstrap interval, the full cache beside every policy, differences between policies in pairs:
on the same sample, at the same length and budget. KL divergence from the full cache on text that follows, in nats.
With --windows: the same questions by two windows, the second minus the first.
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np

from pycriticalkv.evaluation.continuation import Continuation, ContinuationCell, summarize_continuations
from pycriticalkv.evaluation.runner import FULL, Outcome
from pycriticalkv.evaluation.summary import Cell, budget_name, interval, summarize
from pycriticalkv.policy import PRESETS

PAIRS = (("criticalkv", "snapkv"), ("critical-max", "snapkv"), ("critical-max", "criticalkv"))


Measured = tuple[dict[str, Any], list[Outcome], list[Continuation]]


def read(path: Path) -> Measured:
    """Model and settings, its answers to tasks, and how text went on. The file may be compressed (.gz)."""
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
        header, *lines = [json.loads(line) for line in file]
    outcomes = [Outcome(**line) for line in lines if "task" in line]
    return header, outcomes, [Continuation(**line) for line in lines if "passage" in line]


def together(parts: list[Measured]) -> Measured:
    """The parts as if they had been one file."""
    header = parts[0][0]
    if any(other != header for other, _, _ in parts):
        raise SystemExit("the files are of different models or settings: their first lines differ")
    outcomes = [outcome for _, some, _ in parts for outcome in some]
    if len({outcome.key for outcome in outcomes}) != len(outcomes):
        raise SystemExit("two files hold the same outcome")
    return header, outcomes, [measured for _, _, some in parts for measured in some]


def accuracy_table(cells: list[Cell]) -> str:
    """One row per task, length, setting, budget and prefill; one column per policy."""
    rows: dict[tuple[Any, ...], dict[str, Cell]] = {}
    full: dict[tuple[Any, ...], Cell] = {}
    for cell in cells:
        key = cell.group, cell.n_tokens, cell.setting
        if cell.policy == FULL:
            full[key] = cell
        else:
            rows.setdefault((*key, cell.budget, cell.prefill), {})[cell.policy] = cell
    policies = present(cells)
    lines = [
        f"| task | tokens | setting | budget | prefill | n | full | {' | '.join(policies)} |",
        "| --- |" + " --- |" * (6 + len(policies)),
    ]
    for (task, n_tokens, setting, budget, prefill), of in rows.items():
        whole = full[task, n_tokens, setting]
        shown = [whole, *(of[policy] for policy in policies)]
        accuracies = " | ".join(f"{cell.accuracy:.2f} ({cell.low:.2f}, {cell.high:.2f})" for cell in shown)
        lines.append(
            f"| {task} | {n_tokens} | {setting} | {budget_name(budget)} | {prefill} | {whole.n} | {accuracies} |"
        )
    return "\n".join(lines)


def present(cells: list[Any]) -> list[str]:
    """Policies that were measured, in the order of the presets."""
    return [policy for policy in PRESETS if any(cell.policy == policy for cell in cells)]


def prefill_table(outcomes: list[Outcome]) -> str:
    """How prompts were read, over all tasks and lengths: accuracy and KL after the answer's first token."""
    lines = [
        "| setting | policy | budget | prefill | n | accuracy | KL after the first token, nats |",
        "| --- |" + " --- |" * 6,
    ]
    groups: dict[tuple[Any, ...], list[Outcome]] = {}
    for o in outcomes:
        groups.setdefault((o.setting, o.policy, o.budget, o.prefill), []).append(o)
    for (setting, policy, budget, prefill), members in sorted(groups.items(), key=lambda item: str(item[0])):
        score, kl = np.array([o.score for o in members]), np.array([o.kl for o in members])
        cells = [f"{x.mean():.3f} ({low:.3f}, {high:.3f})" for x in (score, kl) for low, high in [interval(x)]]
        lines.append(
            f"| {setting} | {policy} | {budget_name(budget)} | {prefill} | {len(members)} | {' | '.join(cells)} |"
        )
    return "\n".join(lines)


def paired(differences: dict[tuple[Any, ...], list[float]]) -> tuple[float, float, float, str]:
    """Mean and interval of differences by sample, resampled by sample, and how many are better, equal and worse."""
    every = np.array([d for values in differences.values() for d in values])
    means = np.array([np.mean(values) for values in differences.values()])
    counts = f"{(every > 0).sum()}, {(every == 0).sum()}, {(every < 0).sum()}"
    return (float(means.mean()), *interval(means), counts)


def difference_table(outcomes: list[Outcome]) -> str:
    """Differences between policies in pairs, over all tasks, lengths and budgets; resampled by sample."""
    lines = ["| setting | difference | mean | 95 % | better, equal, worse |", "| --- | --- | --- | --- | --- |"]
    scores = {(o.setting, o.policy, o.task, o.seed, o.n_tokens, o.budget, o.prefill): o.score for o in outcomes}
    policies = present(outcomes)
    pairs = [(one, other) for one, other in PAIRS if one in policies and other in policies]
    for setting in dict.fromkeys(o.setting for o in outcomes):
        for one, other in pairs:
            by_sample: dict[tuple[Any, ...], list[float]] = {}
            for (its, policy, *sample, budget, prefill), value in scores.items():
                if its == setting and policy == one:
                    difference = value - scores[(setting, other, *sample, budget, prefill)]
                    by_sample.setdefault(tuple(sample), []).append(difference)
            mean, low, high, counts = paired(by_sample)
            lines.append(f"| {setting} | {one} - {other} | {mean:+.3f} | {low:+.3f}, {high:+.3f} | {counts} |")
    return "\n".join(lines)


def window_table(first: list[Outcome], second: list[Outcome]) -> str:
    """One row per setting, task and policy: accuracies by two windows at every budget, and the paired difference."""
    score = {o.key: o.score for o in second}
    if {o.key for o in first} != score.keys():
        raise SystemExit("the files do not hold outcomes of the same questions, policies and budgets")
    groups: dict[tuple[str, ...], list[Outcome]] = {}
    for o in first:
        if o.policy != FULL:
            groups.setdefault((o.setting, o.task, o.policy), []).append(o)
    budgets = list(dict.fromkeys(o.budget for o in first if o.policy != FULL))
    names = " | ".join(budget_name(budget) for budget in budgets)
    lines = [
        f"| setting | task | policy | {names} | difference | better, equal, worse |",
        "| --- |" + " --- |" * (4 + len(budgets)),
    ]
    for group, members in groups.items():
        shown = []
        for budget in budgets:
            of = [o for o in members if o.budget == budget]
            shown.append(f"{np.mean([o.score for o in of]):.2f}, {np.mean([score[o.key] for o in of]):.2f}")
        by_sample: dict[tuple[Any, ...], list[float]] = {}
        for o in members:
            by_sample.setdefault((o.seed, o.n_tokens), []).append(score[o.key] - o.score)
        mean, low, high, counts = paired(by_sample)
        lines.append(f"| {' | '.join((*group, *shown))} | {mean:+.3f} ({low:+.3f}, {high:+.3f}) | {counts} |")
    return "\n".join(lines)


def divergence_table(measured: list[Continuation]) -> str:
    """One row per length and budget; one column per policy."""
    rows: dict[tuple[Any, ...], dict[str, ContinuationCell]] = {}
    for cell in summarize_continuations(measured):
        if cell.policy != FULL:
            rows.setdefault((cell.n_tokens, cell.budget, cell.prefill), {})[cell.policy] = cell
    policies = present(measured)
    lines = [f"| tokens | budget | prefill | {' | '.join(policies)} |", "| --- |" + " --- |" * (2 + len(policies))]
    for (n_tokens, budget, prefill), of in rows.items():
        cells = " | ".join(f"{of[p].kl:.3f} ({of[p].kl_low:.3f}, {of[p].kl_high:.3f})" for p in policies)
        lines.append(f"| {n_tokens} | {budget_name(budget)} | {prefill} | {cells} |")
    return "\n".join(lines)


def main() -> None:
    """Run as a program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--windows", action="store_true", help="two files that differ in the window")
    parser.add_argument("--together", action="store_true", help="the files are parts of one measurement")
    args = parser.parse_args()
    if args.windows:
        if len(args.files) != 2:
            parser.error("--windows: allowed are two files")
        print(window_table(*(read(path)[1] for path in args.files)))
        return
    parts = [read(path) for path in args.files]
    if args.together:
        parts = [together(parts)]
    for header, outcomes, measured in parts:
        print(f"\n### {header['model']}\n\n{accuracy_table(summarize(outcomes))}\n\n{difference_table(outcomes)}")
        if any(o.prefill != "full" for o in outcomes):
            print(f"\n{prefill_table(outcomes)}")
        if measured:
            print(f"\nKL divergence from the full cache:\n\n{divergence_table(measured)}")


if __name__ == "__main__":
    main()
