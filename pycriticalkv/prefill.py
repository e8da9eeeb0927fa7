"""How a prompt longer than the budget is read."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from numbers import Integral

# "full": whole, then evicted. "exact": layer by layer, each layer evicted before the next is read; keeps the same
# entries. "stream": in chunks, evicted after each. "auto": exact where the model can be read so, else full; stream
# where that would need more than kv_memory_limit.
PREFILLS = ("auto", "exact", "full", "stream")

OBSERVERS = ("re-peek", "peek", "window")
MOST_PEEKED = 32  # beyond the policy's window: what the store has room for

# Called with the tokens read so far and the tokens of the prompt.
Progress = Callable[[int, int], None]

UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


@dataclass(frozen=True)
class Stream:
    """How ``prefill="stream"`` chooses what to keep before it has seen the end of the prompt.

    Args:
        observe: Whose attention ranks the entries. ``"re-peek"``: the prompt's last tokens, run over what is in the
            cache at that eviction. ``"peek"``: the same tokens, but run once, before the prompt. ``"window"``: the last
            tokens of what has been read, which do not know the question.
        tokens: How many of the prompt's last tokens are peeked at; in a chat, at least as many as the last user message
            has. At most the policy's window + 32, and at most one ubatch of them.
        chunk: Tokens that are read between two evictions; ``None``: one ubatch.

    Raises:
        ValueError: A value is not one of these.
    """

    observe: str = "re-peek"
    tokens: int = 32
    chunk: int | None = None

    def __post_init__(self) -> None:
        """Check every value."""
        if self.observe not in OBSERVERS:
            raise ValueError(f"observe={self.observe!r}: allowed is one of {', '.join(OBSERVERS)}")
        for name in ("tokens", "chunk"):
            value = getattr(self, name)
            if name == "chunk" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, Integral) or not 1 <= int(value) < 2**31:
                raise ValueError(f"{name}={value!r}: allowed is an int from 1 to 2**31 - 1")


def check_prefill(prefill: str) -> str:
    """The mode itself; ValueError names what is allowed."""
    if not isinstance(prefill, str):
        raise TypeError(f"prefill={prefill!r}: allowed is one of {', '.join(PREFILLS)}")
    if prefill not in PREFILLS:
        raise ValueError(f"prefill={prefill!r}: allowed is one of {', '.join(PREFILLS)}")
    return prefill


def check_question(question: str | None) -> str | None:
    """The text to look for itself."""
    if question is not None and not isinstance(question, str):
        raise TypeError(f"question={question!r}: allowed are a str and None")
    return question


def check_progress(progress: Progress | None) -> Progress | None:
    """The callback itself, if it can be called."""
    if progress is not None and not callable(progress):
        raise TypeError(f"prefill_progress={progress!r}: allowed is a function of tokens done and tokens in all")
    return progress


def parse_memory(limit: int | str | None) -> int | None:
    """Bytes of ``kv_memory_limit``: an int, or a number with a unit such as "2GiB" or "500 MB"."""
    if limit is None:
        return None
    if isinstance(limit, bool) or not isinstance(limit, int | str):
        raise TypeError(f'kv_memory_limit={limit!r}: allowed are bytes (int) and strings such as "2GiB" or "500MB"')
    if isinstance(limit, int) and abs(limit) >= 2**63:
        sign = "-" if limit < 0 else ""
        raise ValueError(f"kv_memory_limit={sign}2**{limit.bit_length() - 1}: allowed are positive bytes below 2**63")
    # 4300 digits are more than Python turns into a number
    number = re.fullmatch(r"\s*(\d{1,1000}(?:\.\d{1,1000})?)\s*([kmg]i?b|)\s*", str(limit).lower())
    bytes_ = int(Fraction(number[1]) * UNITS[number[2]]) if number else 0
    if not 1 <= bytes_ < 2**63:
        raise ValueError(
            f'kv_memory_limit={limit!r}: allowed are positive bytes below 2**63, and strings such as "2GiB" or "500MB"'
        )
    return bytes_


@dataclass(frozen=True)
class Prefill:
    """What a model was opened with: how its prompts are read."""

    mode: str = "auto"
    stream: Stream = Stream()
    memory_limit: int | None = None  # bytes

    def check(self, window: int, check_exact: Callable[[], None]) -> Prefill:
        """What it comes to for a model and a policy's window: mode "auto" becomes exact or full.

        The function raises ValueError if the model cannot be read layer by layer.

        Raises:
            ValueError: What was asked for cannot be had.
        """
        if self.memory_limit is not None and self.mode != "auto":
            raise ValueError(f"kv_memory_limit has no effect with prefill={self.mode!r}; it lets prefill='auto' choose")
        if self.stream.tokens > window + MOST_PEEKED:
            raise ValueError(
                f"tokens={self.stream.tokens}: Stream can peek at no more than the policy's window + {MOST_PEEKED} = "
                f"{window + MOST_PEEKED}"
            )
        if self.mode in ("full", "stream"):
            return self
        try:
            check_exact()
        except ValueError as e:
            if self.mode == "exact":
                raise ValueError(f"prefill='exact': this model cannot be read layer by layer: {e}") from None
            warnings.warn(
                f"prompts are read with prefill='full', which needs memory for all of them: {e}", stacklevel=3
            )
            return Prefill("full", self.stream, self.memory_limit)
        return Prefill("exact", self.stream, self.memory_limit)


def chunks(n_tokens: int, size: int, tail: int) -> list[int]:
    """Tokens of the chunks of a stream: each of `size`, and a last one that holds the `tail` peeked at whole."""
    whole = max(0, n_tokens - tail) // size
    rest = n_tokens - whole * size
    return [size] * whole + ([rest] if rest else [])


def layer_progress(progress: Progress | None, n_layer: int, n_tokens: int) -> Progress | None:
    """For a prefill that goes layer by layer: of what it is called with, layer and tokens done, to tokens."""
    if progress is None:
        return None
    return lambda il, done: progress((il * n_tokens + done) // n_layer, n_tokens)
