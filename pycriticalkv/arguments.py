"""Arguments of ``Llama`` that can be told to be wrong before, or right after, the model is loaded."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Sequence
from numbers import Integral
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp import llama_chat_format

# cache types that can be evicted
GGML_TYPES = {0: "f32", 1: "f16", 2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 8: "q8_0", 30: "bf16"}

MOST_THREADS = 512  # ggml's limit

OURS = ("kv_budget", "kv_policy", "kv_memory_limit", "prefill", "stream", "prefill_progress")


def check_int(name: str, value: Any, least: int, most: int = 2**31 - 1) -> int:
    """The value as an int; an error names argument, value and what is allowed if it is none from least to most."""
    allowed = f"allowed is an int from {least} to {most}"
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name}={value!r}: {allowed}")
    if not least <= int(value) <= most:
        raise ValueError(f"{name}={value!r}: {allowed}")
    return int(value)


def check_several(name: str, values: Any, *, empty: bool = False) -> None:
    """Refuse what is not a list, a tuple or a range, has a value twice or, unless that is allowed, none."""
    if not isinstance(values, list | tuple | range):
        raise TypeError(f"{name}={values!r}: allowed is a list, a tuple or a range")
    if not values and not empty:
        raise ValueError(f"{name}={values!r}: allowed is at least one")
    seen = []
    for value in [] if _all_differ(values) else values:
        if value in seen:
            raise ValueError(f"{name}={values!r}: {value!r} is there more than once, allowed is each once")
        seen.append(value)


def _all_differ(values: Sequence[Any]) -> bool:
    """False also where that cannot be told at once."""
    try:
        return len(set(values)) == len(values)
    except TypeError:  # lists and the like
        return False


def check_names(kwargs: dict[str, Any], *, with_budget: bool) -> None:
    """Refuse unknown arguments, which llama_cpp.Llama ignores; without a budget only those that look like ours."""
    known = [*inspect.signature(llama_cpp.Llama.__init__).parameters, *OURS]
    for name, value in kwargs.items():
        if name not in known and (with_budget or name.startswith("kv_")):
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else f"; ours are {', '.join(OURS)}"
            raise TypeError(f"{name}={value!r} is not an argument of Llama{hint}")


def check_chat_format(llm: llama_cpp.Llama) -> None:
    """Refuse a chat format that neither llama-cpp-python nor the loaded model's file has."""
    if llm.chat_handler is None and llm.chat_format is not None and llm.chat_format not in llm._chat_handlers:
        try:
            llama_chat_format.get_chat_completion_handler(llm.chat_format)
        except llama_chat_format.LlamaChatCompletionHandlerNotFoundException as e:
            raise ValueError(f"chat_format={llm.chat_format!r}: {e}") from None


def check_arguments(n_ctx: int | None, flash_attn: bool | None, kwargs: dict[str, Any]) -> None:
    """Refuse arguments of llama_cpp.Llama that an evicting cache cannot serve."""
    if n_ctx is not None and (isinstance(n_ctx, bool) or not isinstance(n_ctx, Integral)):
        raise TypeError(f"n_ctx={n_ctx!r}: allowed is an int, 0 for the model's own context")
    if n_ctx is not None and not 0 <= int(n_ctx) < 2**31:
        raise ValueError(f"n_ctx={n_ctx!r}: allowed is an int from 0 (the model's own context) to 2**31 - 1")
    if flash_attn is not None and not isinstance(flash_attn, bool | np.bool_):
        raise TypeError(f"flash_attn={flash_attn!r}: allowed are True and None")
    if flash_attn is not None and not flash_attn:
        raise ValueError(f"flash_attn={flash_attn!r}: kv_budget needs flash attention; leave it out or give True")
    for name in ("n_batch", "n_ubatch"):
        check_int(name, kwargs.get(name, 1), 1)
    for name in ("n_threads", "n_threads_batch"):
        value = kwargs.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, Integral)):
            raise TypeError(f"{name}={value!r}: allowed is an int, or None for the machine's own")
        if value is not None and not 0 <= int(value) <= MOST_THREADS:
            raise ValueError(f"{name}={value!r}: allowed is an int from 1 to {MOST_THREADS}, 0 for the machine's own")
    if kwargs.get("swa_full"):
        raise ValueError("swa_full=True: with kv_budget, sliding-window layers hold their window; leave it out")
    if kwargs.get("embedding"):
        raise ValueError("embedding=True: embeddings use several sequences, kv_budget works with one; leave one out")
    if kwargs.get("vocab_only"):
        raise ValueError("vocab_only=True: without weights there is no cache for kv_budget; leave one out")
    draft = kwargs.get("draft_model")
    if draft is not None and not callable(draft):
        raise TypeError(f"draft_model={draft!r}: allowed is a llama_cpp.llama_speculative.LlamaDraftModel")
    if not isinstance(kwargs.get("chat_format"), str | None):
        raise TypeError(f"chat_format={kwargs['chat_format']!r}: allowed is a str")
    for name in ("type_k", "type_v"):
        kind = kwargs.get(name)
        if kind is not None and kind not in GGML_TYPES:
            known = ", ".join(f"{number} ({text})" for number, text in GGML_TYPES.items())
            raise ValueError(f"{name}={kind!r}: with kv_budget the cache type can be one of {known}")
