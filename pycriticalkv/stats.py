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
        entries_peak: The most that one head has held; with ``heads="adaptive"``, on average over a layer.
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
        seconds_measure: Time to measure ``bound`` and ``change``.
        seconds_total: Time of the evictions in all.
        bound: With ``KVPolicy(measure=True)``, per layer with a cache, of the last eviction: the worst case of
            CriticalKV's argument, ((1/sigma - 1) * sum of A*N over the entries kept + sum of A*N over those dropped),
            over the sum of A*N over all, with A the mean attention of the queries that were asked and N the norm of the
            value through W_O, all summed over KV heads. 0: nothing lost; about 2: everything. Empty before an eviction,
            after a state was loaded, and if not measured.
        change: Likewise the truth for these queries: |o' - o| / |o|, o the layer's attention output after W_O (without
            bias) over all entries, o' over those kept; the mean over the queries. It is relative to the output itself,
            in which terms cancel, and can be larger than ``bound``.
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
    seconds_measure: float
    seconds_total: float
    bound: tuple[float, ...]
    change: tuple[float, ...]
