"""How a prompt longer than the budget is read."""

from __future__ import annotations

import warnings
from collections.abc import Callable

# "exact": layer by layer, each layer evicted before the next is read. "full": whole, then evicted. Both keep the same
# entries. "auto": exact where the model can be read so, else full.
PREFILLS = ("auto", "exact", "full")

# Called with the tokens read so far and the tokens of the prompt.
Progress = Callable[[int, int], None]


def check_prefill(prefill: str) -> str:
    """The mode itself; ValueError names what is allowed."""
    if not isinstance(prefill, str):
        raise TypeError(f"prefill={prefill!r}: allowed is one of {', '.join(PREFILLS)}")
    if prefill not in PREFILLS:
        raise ValueError(f"prefill={prefill!r}: allowed is one of {', '.join(PREFILLS)}")
    return prefill


def check_progress(progress: Progress | None) -> Progress | None:
    """The callback itself, if it can be called."""
    if progress is not None and not callable(progress):
        raise TypeError(f"prefill_progress={progress!r}: allowed is a function of tokens done and tokens in all")
    return progress


def choose_mode(prefill: str, check_model: Callable[[], None]) -> str:
    """What "auto" means for a model: `check_model` raises ValueError if it cannot be read layer by layer.

    Raises:
        ValueError: ``"exact"`` was asked for and cannot be had.
    """
    if prefill == "full":
        return prefill
    try:
        check_model()
    except ValueError as e:
        if prefill == "exact":
            raise ValueError(f"prefill='exact': this model cannot be read layer by layer: {e}") from None
        warnings.warn(f"prompts are read with prefill='full', which needs memory for all of them: {e}", stacklevel=3)
        return "full"
    return "exact"


def layer_progress(progress: Progress | None, n_layer: int, n_tokens: int) -> Progress | None:
    """For a prefill that goes layer by layer: of what it is called with, layer and tokens done, to tokens."""
    if progress is None:
        return None
    return lambda il, done: progress((il * n_tokens + done) // n_layer, n_tokens)
