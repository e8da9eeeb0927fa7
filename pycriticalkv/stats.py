"""What ``Llama.kv_stats()`` returns."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KVStats:
    """State of the KV cache.

    Counts are entries per KV head (an entry is one key and its value), bytes are of K and V over all layers and heads,
    times are seconds. Evictions and times count since the cache was last empty.

    Attributes:
        budget: Entries per KV head and layer in force; a share follows the tokens seen.
        tokens_seen: Positions of the conversation so far, evicted ones included.
        entries: Entries now, one list per layer with one number per KV head.
        entries_peak: The most that one head has held.
        bytes_now: Bytes of the entries held now.
        bytes_peak: Bytes of the most entries held at one time.
        bytes_full: Bytes that a cache without eviction would hold after ``tokens_seen``.
        bytes_allocated: Bytes of the buffers that hold the entries: they grow with the prompt, and an eviction leaves
            room for the budget and the slack.
        bytes_allocated_peak: The most of them, old and new buffers of an eviction together.
        bytes_hidden_peak: Bytes of the hidden states that prefill="exact" kept between two layers, freed since.
        bytes_other: Bytes of what is not evicted: sliding-window layers, recurrent states.
        bytes_store: Bytes that eviction itself needs beside the cache (saved queries, Gram matrices).
        prefill: How the last prompt over the budget was read, or the next will be.
        memory_limit: ``kv_memory_limit`` in bytes.
        evictions: How many times entries were evicted.
        seconds_score: Time to score entries.
        seconds_select: Time to choose.
        seconds_compact: Time to move the kept rows.
        seconds_total: Time of the evictions in all.
    """

    budget: int
    tokens_seen: int
    entries: list[list[int]]
    entries_peak: int
    bytes_now: int
    bytes_peak: int
    bytes_full: int
    bytes_allocated: int
    bytes_allocated_peak: int
    bytes_hidden_peak: int
    bytes_other: int
    bytes_store: int
    prefill: str
    memory_limit: int | None
    evictions: int
    seconds_score: float
    seconds_select: float
    seconds_compact: float
    seconds_total: float
