"""Sides of a comparison: worker processes that take turns."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

WORKER = Path(__file__).resolve().with_name("worker.py")


class Side:
    """A worker process with one model."""

    def __init__(self, name: str, python: str = sys.executable, **arguments: Any) -> None:
        self.name = name
        command = [python, str(WORKER)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._send(arguments)

    def _send(self, what: Any) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"side {self.name!r} ended with status {self._process.wait()}")
        result: dict[str, Any] = json.loads(answer)
        return result

    def prefill(self, text: str, n: int) -> dict[str, Any]:
        """Seconds of prefill and of eviction."""
        return self._send(["prefill", text, n])

    def decode(self, n: int) -> dict[str, Any]:
        """Seconds per generated token, and the tokens."""
        return self._send(["decode", n])

    def stats(self) -> dict[str, int]:
        """Entries and bytes of the cache."""
        return self._send(["stats"])

    def logits(self) -> str:
        """Digest of the last token's logits."""
        return str(self._send(["logits"])["logits"])

    def close(self) -> None:
        """End the process."""
        self._process.stdin.close()  # type: ignore[union-attr]
        self._process.wait()


def decode_in_turn(sides: list[Side], rounds: int, n: int) -> dict[str, list[float]]:
    """Seconds per token of each side, round by round, one warm-up round not counted."""
    seconds: dict[str, list[float]] = {side.name: [] for side in sides}
    for turn in range(rounds + 1):
        for side in sides if turn % 2 else sides[::-1]:
            measured = side.decode(n)["decode"]
            if turn:
                seconds[side.name].append(measured)
    return seconds


def ratio(seconds: dict[str, list[float]], slow: str, fast: str) -> str:
    """How many times faster `fast` is: median, least and most over the rounds."""
    ratios = [a / b for a, b in zip(seconds[slow], seconds[fast], strict=True)]
    return f"{statistics.median(ratios):.2f} (rounds: {min(ratios):.2f} to {max(ratios):.2f})"


def rate(values: list[float]) -> str:
    """Tokens per second, median."""
    return f"{1 / statistics.median(values):.1f}"
