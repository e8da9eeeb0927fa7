"""Speed and memory against the full cache, over the length of the prompt and the budget.

All sides are open at once and take turns token run by token run, so that what else the machine does hits all of them:
ratios are taken within a turn. The full cache runs with flash attention on and off where both are possible, and counts
with the faster one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pycriticalkv.arguments import check_int, check_several
from pycriticalkv.evaluation.summary import budget_name
from pycriticalkv.evaluation.tasks import prose
from pycriticalkv.llama import Llama
from pycriticalkv.policy import KVPolicy

PLAIN_TYPES = (0, 1, 30)  # f32, f16, bf16: without flash attention the values cannot be quantized
WARM_UP = 1  # turns that do not count


@dataclass(frozen=True)
class Speed:
    """One side at one length."""

    n_tokens: int  # of the prompt
    budget: int | float | None  # None: the full cache
    flash_attn: bool
    prefill_seconds: float  # with the eviction
    eviction_seconds: float  # of the prompt's eviction alone
    decode_seconds: tuple[float, ...]  # per generated token, turn by turn, evictions included
    cache_bytes: int  # K and V after the prompt: allocated with a budget; what its tokens take in the full cache


@dataclass(frozen=True)
class SpeedRow:
    """One budget at one length beside the full cache; the full cache stands beside itself."""

    n_tokens: int
    budget: int | float | None
    flash_attn: bool
    prefill_seconds: float
    eviction_seconds: float
    decode_rate: float  # tokens per second, median over turns
    decode_ratio: float  # over the full cache: median over turns, and the least and the most
    decode_ratio_low: float
    decode_ratio_high: float
    cache_bytes: int
    cache_share: float  # of the full cache


class _Side:
    """One open model and what it is measured as."""

    def __init__(self, model_path: str | Path, budget: int | float | None, flash_attn: bool, **arguments: Any) -> None:
        self.budget, self.flash_attn = budget, flash_attn
        if budget is None:
            arguments.pop("kv_policy")
            self.llm = Llama(str(model_path), flash_attn=flash_attn, verbose=False, **arguments)
        else:
            self.llm = Llama(str(model_path), kv_budget=budget, verbose=False, **arguments)

    def prefill(self, tokens: list[int]) -> float:
        """Seconds, the eviction included."""
        self.llm.reset()
        start = time.perf_counter()
        self.llm.eval(tokens)
        self.next_token()  # waits for the graph
        return time.perf_counter() - start

    def next_token(self) -> int:
        return int(self.llm.sample(temp=0.0))

    def decode(self, n: int) -> float:
        """Seconds per token of n greedy tokens."""
        token = self.next_token()
        start = time.perf_counter()
        for _ in range(n):
            self.llm.eval([token])
            token = self.next_token()
        return (time.perf_counter() - start) / n


def measure_speed(
    model_path: str | Path,
    n_tokens: Sequence[int],
    budgets: Sequence[int | float],
    *,
    policy: str | KVPolicy | None = None,
    turns: int = 5,
    tokens_per_turn: int = 24,
    text: str | None = None,
    skip_longer: bool = False,
    **arguments: Any,
) -> Iterator[Speed]:
    """Measure every length: the full cache and every budget.

    Args:
        model_path: A GGUF file.
        n_tokens: Lengths of prompts.
        budgets: As ``kv_budget``.
        policy: As ``kv_policy``.
        turns: Turns of every side that count.
        tokens_per_turn: Tokens generated in a turn.
        text: What to read, repeated if it is short; None: public text.
        skip_longer: Leave out lengths that do not fit the model's context.
        **arguments: More arguments of ``Llama`` (n_threads, type_k, ...).

    Raises:
        TypeError: A value has the wrong type.
        ValueError: A value is out of range, or a length does not fit the model's context.
    """
    check_several("n_tokens", n_tokens)
    check_several("budgets", budgets)
    for name, values in {"n_tokens": n_tokens, "turns": [turns], "tokens_per_turn": [tokens_per_turn]}.items():
        for value in values:
            check_int(name, value, 1)
    if text is not None and not isinstance(text, str):
        raise TypeError(f"text={text!r}: allowed are None and a str")
    spare = (turns + WARM_UP) * tokens_per_turn
    common = {"n_ctx": max(n_tokens) + spare, "kv_policy": policy, **arguments}
    plain = all(common.get(name, 1) in PLAIN_TYPES for name in ("type_k", "type_v"))
    sides: list[_Side] = []
    try:
        sides.append(_Side(model_path, budgets[0], True, **common))
        lengths = _lengths(sides[0].llm, n_tokens, spare, skip_longer)
        for budget in budgets[1:]:
            sides.append(_Side(model_path, budget, True, **common))
        for flash_attn in (True, False) if plain else (True,):
            sides.append(_Side(model_path, None, flash_attn, **common))
        source = _read(sides[0].llm, "".join(prose(text)), max(lengths))
        # The first eviction of a model makes its Gram matrices, and the first prefill reads its weights from the disk.
        warm_up = max(min(lengths), *(b + 64 for b in budgets if isinstance(b, int)), 0)
        for side in sides:
            side.prefill(source[: min(warm_up, max(lengths))])
        for n in lengths:
            yield from _measure(sides, source[:n], turns, tokens_per_turn)
            sides.reverse()  # the next length's prefills run in the other order
    finally:
        for side in sides:
            side.llm.close()


def _lengths(llm: Llama, n_tokens: Sequence[int], spare: int, skip_longer: bool) -> list[int]:
    """Lengths that the model's context has room for, with what is generated after them."""
    longest = llm._model.n_ctx_train()
    fitting = [n for n in n_tokens if n + spare <= longest]
    if not fitting or (len(fitting) < len(n_tokens) and not skip_longer):
        raise ValueError(f"n_tokens={max(n_tokens)} and {spare} generated: the model's context is {longest}")
    return fitting


def _read(llm: Llama, text: str, n: int) -> list[int]:
    """At least n tokens of a text, repeated if it is short."""
    tokens = llm.tokenize(text.encode())
    if len(tokens) < 2:  # the model's first token alone
        raise ValueError("text: it has no tokens")
    return list(tokens) * -(-n // len(tokens))


def _measure(sides: Sequence[_Side], tokens: list[int], turns: int, tokens_per_turn: int) -> Iterator[Speed]:
    prefills = [side.prefill(tokens) for side in sides]
    stats = [None if side.budget is None else side.llm.kv_stats() for side in sides]
    full_bytes = next(s.bytes_full + s.bytes_other for s in stats if s is not None)
    seconds: list[list[float]] = [[] for _ in sides]
    for turn in range(turns + WARM_UP):
        order = range(len(sides))
        for i in order if turn % 2 else reversed(order):
            measured = sides[i].decode(tokens_per_turn)
            if turn >= WARM_UP:
                seconds[i].append(measured)
    for side, prefill, s, decode in zip(sides, prefills, stats, seconds, strict=True):
        yield Speed(
            len(tokens), side.budget, side.flash_attn, prefill, 0.0 if s is None else s.seconds_total, tuple(decode),
            full_bytes if s is None else s.bytes_allocated + s.bytes_other,
        )  # fmt: skip


def speed_rows(measured: Sequence[Speed]) -> list[SpeedRow]:
    """What was measured, length by length, the faster full cache first."""
    budgets = list(dict.fromkeys(s.budget for s in measured))
    rows = []
    for n_tokens in dict.fromkeys(s.n_tokens for s in measured):
        here = [s for s in measured if s.n_tokens == n_tokens]
        full = min((s for s in here if s.budget is None), key=lambda s: statistics.median(s.decode_seconds))
        here.sort(key=lambda s: budgets.index(s.budget))
        for s in [full, *(s for s in here if s.budget is not None)]:
            ratios = [a / b for a, b in zip(full.decode_seconds, s.decode_seconds, strict=True)]
            rows.append(
                SpeedRow(
                    n_tokens,
                    s.budget,
                    s.flash_attn,
                    s.prefill_seconds,
                    s.eviction_seconds,
                    1 / statistics.median(s.decode_seconds),
                    statistics.median(ratios),
                    min(ratios),
                    max(ratios),
                    s.cache_bytes,
                    s.cache_bytes / full.cache_bytes,
                )
            )
    return rows


def speed_table(rows: Sequence[SpeedRow]) -> str:
    """A Markdown table."""
    head = "| prompt | budget | prefill, s | eviction, s | tokens/s | over full (least to most) | cache, MB | of full |"
    lines = [head, "| --- " * 8 + "|"]
    for r in rows:
        ratio = f"{r.decode_ratio:.2f} ({r.decode_ratio_low:.2f} to {r.decode_ratio_high:.2f})"
        full = r.budget is None
        name = f"full, flash attention {'on' if r.flash_attn else 'off'}" if full else budget_name(r.budget)
        lines.append(
            f"| {r.n_tokens} | {name} | {r.prefill_seconds:.2f} | {'' if full else f'{r.eviction_seconds:.2f}'} "
            f"| {r.decode_rate:.1f} | {'' if full else ratio} | {r.cache_bytes / 1e6:.1f} "
            f"| {'' if full else f'{r.cache_share:.2f}'} |"
        )
    return "\n".join(lines)
