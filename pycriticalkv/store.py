"""The native store of one context: a thin, checked use of criticalkv.h."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pycriticalkv._native import ffi, lib
from pycriticalkv.policy import AGGREGATES, HEADS, LAYERS, NORMS, SCORES, VALUES, Budget, KVPolicy

ERROR_TYPES: dict[int, type[Exception]] = {
    lib.CRITICALKV_ERR_ARGUMENT: ValueError,
    lib.CRITICALKV_ERR_UNSUPPORTED: ValueError,
    lib.CRITICALKV_ERR_STATE: RuntimeError,
    lib.CRITICALKV_ERR_COMPUTE: RuntimeError,
    lib.CRITICALKV_ERR_MEMORY: MemoryError,
    lib.CRITICALKV_ERR_ABORTED: RuntimeError,
}


def last_error() -> str:
    """The sentence of the last failure on this thread, or an empty string."""
    return str(ffi.string(lib.criticalkv_last_error()).decode())


def check(status: int) -> None:
    """Raise the exception of a criticalkv_status."""
    if status != lib.CRITICALKV_OK:
        raise ERROR_TYPES[status](last_error())


def make_params(policy: KVPolicy, budget: int, slack: int) -> Any:
    """struct criticalkv_params for a policy; ``budget`` 0 leaves the budget to each eviction."""
    params = ffi.new("struct criticalkv_params *")
    params.budget = budget
    params.slack = slack
    params.window = policy.window
    params.sinks = policy.sinks
    params.pool = policy.pool
    params.score = SCORES[policy.score]
    params.aggregate = AGGREGATES[policy.aggregate]
    params.value = VALUES[policy.value]
    params.norm = NORMS[policy.norm]
    params.heads = HEADS[policy.heads]
    params.layers = LAYERS[policy.layers]
    params.alpha = policy.alpha
    params.eps = policy.eps
    params.seed = policy.seed
    params.head_floor = policy.head_floor
    params.measure = policy.measure
    return params


def select_entries(
    policy: KVPolicy,
    budget: int,
    positions: npt.ArrayLike,
    *,
    attn: npt.ArrayLike | None = None,
    norm: npt.ArrayLike | None = None,
    il: int = 0,
    head: int = 0,
) -> npt.NDArray[np.int32]:
    """The native selection by itself: indices of the entries of one KV head to keep, ascending.

    Args:
        policy: What to keep.
        budget: Entries to keep, window and sinks included.
        positions: [n] original positions, ascending.
        attn: [n - window] scores: attention for ``score="window"``, of the keys for ``"key-norm"`` and ``"keydiff"``.
        norm: [n - window] what values weigh, for every ``value`` but ``"none"``.
        il: Layer, which ``score="random"`` depends on.
        head: KV head, likewise.

    Raises:
        ValueError: The budget cannot hold window, sinks and one more, or an array is missing or too short.
    """
    pos = np.ascontiguousarray(positions, dtype=np.int32)
    arrays = {"attn": attn, "norm": norm}
    pointers = {}
    for name, values in arrays.items():
        pointers[name] = ffi.NULL
        if values is not None:
            arrays[name] = row = np.ascontiguousarray(values, dtype=np.float32)
            if row.ndim != 1 or len(row) < len(pos) - policy.window:
                raise ValueError(f"{name} has shape {row.shape}, needed is ({len(pos) - policy.window},) or more")
            pointers[name] = ffi.from_buffer("float[]", row)
    out = np.empty(max(len(pos), 1), dtype=np.int32)
    params = make_params(policy, 0, policy.slack_for(budget))
    n = lib.criticalkv_select(
        params, budget, il, head, len(pos), ffi.from_buffer("int32_t[]", pos), pointers["attn"], pointers["norm"],
        ffi.from_buffer("int32_t[]", out),
    )  # fmt: skip
    if n < 0:
        raise ValueError(last_error())
    return out[:n]


def share_budget(
    policy: KVPolicy,
    budget: int,
    positions: Sequence[npt.ArrayLike],
    *,
    attn: Sequence[npt.ArrayLike] | None = None,
) -> npt.NDArray[np.int32]:
    """How the KV heads of one layer share a budget: entries of each, ``budget`` on average.

    Args:
        policy: What to keep.
        budget: Entries per head, window and sinks included.
        positions: [n] original positions of each head, ascending.
        attn: [n - window] scores of each head, where ``select_entries`` needs them.

    Raises:
        ValueError: The budget cannot hold window, sinks and one more, or a row of ``attn`` has another length.
    """
    lengths = np.array([len(np.asarray(each)) for each in positions], dtype=np.int32)
    needed = np.maximum(lengths - policy.window, 0).tolist()
    if attn is not None and [len(np.asarray(each)) for each in attn] != needed:
        raise ValueError(f"attn has rows of {[len(np.asarray(each)) for each in attn]}, needed are {needed}")
    pos = np.concatenate([np.asarray(each, dtype=np.int32) for each in positions])
    scores = ffi.NULL
    if attn is not None:
        row = np.concatenate([np.asarray(each, dtype=np.float32) for each in attn])
        scores = ffi.from_buffer("float[]", row) if len(row) else ffi.new("float[1]")
    out = np.empty(len(lengths), dtype=np.int32)
    check(
        lib.criticalkv_share(
            make_params(policy, 0, policy.slack_for(budget)), budget, 0, len(lengths),
            ffi.from_buffer("int32_t[]", lengths), ffi.from_buffer("int32_t[]", pos), scores,
            ffi.from_buffer("int32_t[]", out),
        )
    )  # fmt: skip
    return out


def share_over_layers(policy: KVPolicy, budget: int, lengths: Sequence[int]) -> list[int]:
    """How layers that hold ``lengths`` entries per KV head share a budget: entries per head of each, where they follow
    from the lengths alone (``layers="uniform"`` and ``"pyramid"``).
    """
    params = make_params(policy, 0, policy.slack_for(budget))
    out = ffi.new("int32_t[]", len(lengths))
    check(lib.criticalkv_share_layers(params, budget, len(lengths), ffi.new("int32_t[]", list(lengths)), out))
    return list(out)


@contextlib.contextmanager
def prepared(policy: KVPolicy, budget: Budget) -> Iterator[None]:
    """The next context that this thread creates inside the block gets a store."""
    entries = budget.entries or 0
    check(lib.criticalkv_prepare(make_params(policy, entries, policy.slack_for(entries))))
    try:
        yield
    finally:
        lib.criticalkv_prepare(ffi.NULL)


class _Progress:
    """What a prefill calls, and the exception that stopped it."""

    def __init__(self, call: Callable[[int, int], None] | None) -> None:
        self.call = call
        self.error: BaseException | None = None


def _stop(_kind: Any, error: BaseException, traceback: Any) -> bool:
    ffi.from_handle(traceback.tb_frame.f_locals["user"]).error = error
    return False


# Python handles Ctrl-C when it runs, so it is called even when nobody wants to know the progress.
@ffi.def_extern(name="pycriticalkv_progress", onerror=_stop)
def _report(il: int, done: int, user: Any) -> bool:
    call = ffi.from_handle(user).call
    if call is not None:
        call(il, done)
    return True


class Store:
    """The store of a live context.

    Args:
        context: Returns the address of the llama_context, or None once it is freed.
    """

    def __init__(self, context: Callable[[], Any]) -> None:
        self._context = context

    @property
    def _ctx(self) -> Any:
        address = self._context()
        if isinstance(address, ctypes.c_void_p):
            address = address.value
        if not address:
            raise RuntimeError("the model is closed")
        return ffi.cast("struct llama_context *", address)

    def check_model(self) -> None:
        """Raise ValueError when a layer of the model cannot be evicted."""
        check(lib.criticalkv_check(self._ctx))

    def evict(self, budget: int, slack: int = 0) -> None:
        """Evict down to ``budget`` entries per head and leave room for ``slack`` more (0: as in the policy).

        The cache is unchanged if this raises.
        """
        check(lib.criticalkv_evict(self._ctx, budget, slack))

    def check_prefill(self) -> None:
        """Raise ValueError when the model cannot be read layer by layer."""
        check(lib.criticalkv_prefill_check(self._ctx))

    def prefill(
        self,
        tokens: Sequence[int],
        budget: int,
        slack: int = 0,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Exact prefill: read tokens through all layers but the last, and evict each as ``evict`` would.

        The same tokens have to be evaluated next, which takes them through the last layer; then ``evict`` with the same
        arguments ends it. Until then ``cancel_prefill`` brings back the cache as it was; it is that, too, if this
        raises. ``progress`` is called with the layer and its tokens done; what it raises stops the prefill.
        """
        report = _Progress(progress)
        handle = ffi.new_handle(report)
        ids = ffi.new("int32_t[]", [int(token) for token in tokens])
        status = lib.criticalkv_prefill(self._ctx, ids, len(tokens), budget, slack, lib.pycriticalkv_progress, handle)
        if report.error is not None:
            raise report.error
        check(status)

    def cancel_prefill(self) -> None:
        """Give up a prefill that is not ended."""
        check(lib.criticalkv_prefill_cancel(self._ctx))

    def peek(self, tokens: Sequence[int], pos: int) -> None:
        """Let evictions ask what these tokens, at positions ``pos`` and up, attend to; none: the window again.

        They are run over the cache as it is, which does not change.
        """
        ids = ffi.new("int32_t[]", [int(token) for token in tokens])
        check(lib.criticalkv_peek(self._ctx, ids, len(tokens), pos))

    def reserve(self, n: int) -> None:
        """Make room for ``n`` entries per head; MemoryError if there is none, and the cache is then as it was."""
        check(lib.criticalkv_reserve(self._ctx, n))

    def stats(self) -> Any:
        """struct criticalkv_stats."""
        stats = ffi.new("struct criticalkv_stats *")
        check(lib.criticalkv_get_stats(self._ctx, stats))
        return stats

    def layers(self) -> list[int]:
        """Layers of the model that have a cache."""
        out = ffi.new("int32_t[]", self.stats().n_layer)
        check(lib.criticalkv_get_layers(self._ctx, out, len(out)))
        return list(out)

    def layer(self, il: int) -> Any:
        """struct criticalkv_layer_info of a layer."""
        info = ffi.new("struct criticalkv_layer_info *")
        check(lib.criticalkv_get_layer(self._ctx, il, info))
        return info

    def change(self, il: int) -> tuple[float, float]:
        """The bound and the change of a layer at the last eviction; NaN if nothing was measured."""
        bound, change = ffi.new("double *"), ffi.new("double *")
        check(lib.criticalkv_get_change(self._ctx, il, bound, change))
        return float(bound[0]), float(change[0])

    def positions(self, il: int, head: int) -> npt.NDArray[np.int32]:
        """Original positions that a KV head holds, ascending."""
        n = self.entries(il, head)
        out = np.empty(n, dtype=np.int32)
        status = lib.criticalkv_positions(self._ctx, il, head, ffi.from_buffer("int32_t[]", out), n)
        if status < 0:
            check(-status)
        return out

    def entries(self, il: int, head: int) -> int:
        """Number of entries that a KV head holds, also while a prompt is read."""
        n = int(lib.criticalkv_entries(self._ctx, il, head))
        if n < 0:
            check(-n)
        return n

    def scores(self, il: int, window: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Attention scores and value norms, [n_head_kv, n - window] each, without evicting.

        Where heads may hold different numbers of entries, all rows follow one another in one array.
        """
        lengths = [max(self.entries(il, head) - window, 0) for head in range(self.layer(il).n_head_kv)]
        shape = (sum(lengths),) if self.stats().ragged else (len(lengths), lengths[0])
        attn = np.empty(shape, dtype=np.float32)
        norm = np.empty(shape, dtype=np.float32)
        check(
            lib.criticalkv_scores(
                self._ctx, il, ffi.from_buffer("float[]", attn), ffi.from_buffer("float[]", norm), attn.size
            )
        )
        return attn, norm

    def read(self, which: str, il: int) -> npt.NDArray[np.float32]:
        """Keys ``"k"``, values ``"v"`` or saved queries ``"q"`` of a layer: [n, heads, head size].

        Where heads may hold different numbers of entries, keys and values come head by head, as [n of all, 1, head
        size]; ``read_heads`` splits them.
        """
        kind = {"k": lib.CRITICALKV_TENSOR_K, "v": lib.CRITICALKV_TENSOR_V, "q": lib.CRITICALKV_TENSOR_Q}[which]
        size = lib.criticalkv_read(self._ctx, kind, il, ffi.NULL, 0)
        out = np.empty(size, dtype=np.float32)
        lib.criticalkv_read(self._ctx, kind, il, ffi.from_buffer("float[]", out), size)
        info = self.layer(il)
        of_cache = 1 if self.stats().ragged else info.n_head_kv
        heads = info.n_head if which == "q" else of_cache
        return out.reshape(-1, heads, info.n_embd_v if which == "v" else info.n_embd_k)

    def read_heads(self, which: str, il: int) -> list[npt.NDArray[np.float32]]:
        """Keys ``"k"`` or values ``"v"`` of every KV head of a layer: [n of the head, head size]."""
        rows, n_head_kv = self.read(which, il), self.layer(il).n_head_kv
        if not self.stats().ragged:
            return [rows[:, head] for head in range(n_head_kv)]
        lengths = [self.entries(il, head) for head in range(n_head_kv)]
        return np.split(rows.reshape(-1, rows.shape[-1]), np.cumsum(lengths)[:-1])
