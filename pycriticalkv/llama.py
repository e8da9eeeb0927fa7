"""``Llama``: llama-cpp-python's class with a KV budget."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import sys
from collections.abc import Generator, Iterator, Sequence
from typing import Any, NoReturn

import llama_cpp
import numpy as np
import numpy.typing as npt

from pycriticalkv import state as state_file
from pycriticalkv.arguments import check_arguments, check_chat_format, check_names
from pycriticalkv.policy import Budget, KVPolicy, resolve_policy
from pycriticalkv.prefill import (
    MOST_PEEKED,
    Prefill,
    Progress,
    Stream,
    check_prefill,
    check_progress,
    check_question,
    chunks,
    layer_progress,
    parse_memory,
)
from pycriticalkv.stats import KVStats
from pycriticalkv.store import Store, last_error, prepared

# tokens that a chat template may put after a message
TEMPLATE_TAIL = 8


class _Closed:
    """Stands for the parts of a closed model."""

    def __getattr__(self, name: str) -> NoReturn:
        raise RuntimeError("the model is closed")


CLOSED: Any = _Closed()


class Llama(llama_cpp.Llama):
    """``llama_cpp.Llama`` that keeps at most a budget of KV cache entries per attention head.

    Every argument and method of ``llama_cpp.Llama`` is there. Without ``kv_budget`` this is ``llama_cpp.Llama``.

    Args:
        model_path: A GGUF file.
        kv_budget: An int: entries to keep per KV head and layer, window and sinks included. A float in (0, 1): that
            share of each prompt. ``None``: keep everything.
        kv_policy: What to keep: the name of a preset (``pycriticalkv.PRESETS``) or a ``KVPolicy``; "critical-max" by
            default.
        prefill: How a prompt longer than the budget is read. ``"full"``: whole, and then evicted, so its whole cache is
            there once. ``"exact"``: layer by layer, each evicted before the next is read, so only one layer ever holds
            the whole prompt; entries kept, logits and text are those of ``"full"``. ``"stream"``: in chunks, evicted
            after each, so the cache never holds more than budget, slack and a chunk; what to keep is chosen with a look
            at the end of the prompt. ``"auto"``: exact, or full with a warning if the model cannot be read layer by
            layer.
        kv_memory_limit: Bytes, or a string such as "2GiB". A prompt for which exact (or full) prefill would need more
            than this, hidden states and all, is streamed. For ``prefill="auto"`` only.
        stream: How ``"stream"`` chooses, a ``Stream``. The attribute ``question`` names a text to look for in place of
            the end of the prompt.
        prefill_progress: Called as a prompt is read, with the tokens done and the tokens in all. What it raises stops
            the prompt.
        n_ctx: Limit of positions. With a budget the default is the model's own context, without one it is
            llama-cpp-python's 512.
        flash_attn: With a budget flash attention is on and cannot be turned off.
        **kwargs: Everything else that ``llama_cpp.Llama`` takes.

    Raises:
        TypeError: ``kv_budget`` or ``kv_policy`` has the wrong type.
        ValueError: A value is out of range, the model is missing or damaged, or it cannot be evicted.
    """

    # of llama_cpp.Llama
    input_ids: npt.NDArray[np.intc]
    scores: npt.NDArray[np.single]
    n_tokens: int
    _requires_eval: bool
    _seed: int

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        kv_budget: int | float | None = None,
        kv_policy: str | KVPolicy | None = None,
        prefill: str = "auto",
        kv_memory_limit: int | str | None = None,
        stream: Stream | None = None,
        prefill_progress: Progress | None = None,
        n_ctx: int | None = None,
        flash_attn: bool | None = None,
        **kwargs: Any,
    ) -> None:
        self._stack = contextlib.ExitStack()  # close() works on an object that was refused
        if not isinstance(model_path, str | os.PathLike):
            raise TypeError(f"model_path={model_path!r}: allowed is the path of a GGUF file")
        model_path = os.fspath(model_path)
        self._kv_budget: Budget | None = None
        self._kv_arguments = {
            "kv_budget": kv_budget,
            "kv_policy": kv_policy,
            "prefill": prefill,
            "kv_memory_limit": kv_memory_limit,
            "stream": stream,
            "prefill_progress": prefill_progress,
        }
        if stream is not None and not isinstance(stream, Stream):
            raise TypeError(f"stream={stream!r}: allowed is a pycriticalkv.Stream")
        self._kv_reporting = False  # prefill_progress is being called
        self._kv_prefill = Prefill(check_prefill(prefill), stream or Stream(), parse_memory(kv_memory_limit))
        self._kv_mode = self._kv_prefill.mode  # of the last prompt over the budget
        self._kv_asked = 0  # tokens at the end of the next prompt that a chat's last user message takes
        # question and tokens asked of the last prompt over the budget
        self._kv_looked: tuple[str | None, int] = (None, 0)
        self.question = None
        self.prefill_progress = prefill_progress
        self._kv_prompt_next: bool | None = None
        self._kv_prompt_logits: npt.NDArray[np.single] | None = None  # after the prompt that was evicted last
        check_names(kwargs, with_budget=kv_budget is not None)
        if kv_budget is None:
            if kv_policy is not None:
                raise ValueError(f"kv_policy={kv_policy!r} has no effect without kv_budget; give kv_budget too")
            given = {
                "prefill": prefill,
                "kv_memory_limit": kv_memory_limit,
                "stream": stream,
                "prefill_progress": prefill_progress,
            }
            for name, value in given.items():
                if value not in (None, "auto"):
                    raise ValueError(f"{name}={value!r} has no effect without kv_budget; give kv_budget too")
            stock = {"n_ctx": n_ctx, "flash_attn": flash_attn}
            super().__init__(model_path, **{k: v for k, v in stock.items() if v is not None}, **kwargs)
            self._check_adapter()
            return

        if stream is not None and prefill != "stream" and kv_memory_limit is None:
            raise ValueError(
                f"stream={stream!r} has no effect with prefill={prefill!r}; give prefill='stream' or kv_memory_limit"
            )
        self._kv_policy = resolve_policy(kv_policy)
        budget = Budget.parse(kv_budget, self._kv_policy)
        check_arguments(n_ctx, flash_attn, kwargs)
        kwargs.pop("swa_full", None)
        try:
            with prepared(self._kv_policy, budget):
                super().__init__(model_path, n_ctx=n_ctx or 0, flash_attn=True, swa_full=False, **kwargs)
        except ValueError as e:
            if "llama_context" in str(e) and last_error():
                raise ValueError(f"kv_budget={kv_budget!r} cannot be used with {model_path}: {last_error()}") from None
            raise
        self._check_adapter()
        try:
            check_chat_format(self)
        except ValueError:
            self.close()
            raise
        context = self._ctx  # not self: an object that refers to itself is not freed when its last user lets go
        self._kv_store = Store(lambda: context.ctx)
        try:
            self._kv_store.check_model()
        except ValueError as e:
            self.close()
            raise ValueError(f"kv_budget={kv_budget!r} cannot be used with {model_path}: {e}") from None
        try:
            self._kv_prefill = self._kv_prefill.check(self._kv_policy.window, self._kv_store.check_prefill)
            self._kv_mode = self._kv_prefill.mode
        except ValueError:
            self.close()
            raise
        if kwargs.get("draft_model") is not None and self._is_hybrid:
            self.close()
            raise ValueError(
                "draft_model: a model with recurrent layers cannot take back drafts that were not accepted; "
                "leave it out"
            )
        self._kv_budget = budget
        self._kv_entries = budget.for_prompt(0)
        self._kv_model = state_file.model_digest(model_path)
        # llama.cpp rounds n_ctx up, and what fits it is allowed
        self.input_ids = np.zeros(self._n_ctx, dtype=np.intc)
        if self._logits_all:
            self.scores = np.ndarray((self._n_ctx, self._n_vocab), dtype=np.single)

    @property
    def question(self) -> str | None:
        """The text that a stream looks for; None: the end of the prompt."""
        return self._kv_question

    @question.setter
    def question(self, question: str | None) -> None:
        self._kv_question = check_question(question)

    @property
    def prefill_progress(self) -> Progress | None:
        """What is called as a prompt is read, with the tokens done and the tokens in all."""
        return self._kv_progress

    @prefill_progress.setter
    def prefill_progress(self, progress: Progress | None) -> None:
        self._kv_progress = check_progress(progress)

    def _check_adapter(self) -> None:
        """Refuse an adapter that could not be loaded: llama_cpp takes its null pointer for one and crashes."""
        if self.lora_path and not self._lora_adapter:
            self.close()
            raise ValueError(f"lora_path={self.lora_path!r}: there is no LoRA adapter for this model")

    def close(self) -> None:
        """Free the model and the cache. Whatever needs them afterwards raises RuntimeError; llama_cpp.Llama crashes."""
        if vars(self).get("_kv_reporting"):
            self._refuse_while_reporting()
        super().close()
        model = vars(self).get("_model")
        if model is not None and model is not CLOSED:
            model.model = model.vocab = CLOSED  # tokenizers hold on to the model
        self._model = self._ctx = self._batch = self.tokenizer_ = CLOSED

    # ---- evaluation --------------------------------------------------------------------------------------------------

    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluate tokens after those already in the cache, and keep the cache within the budget.

        A prompt or a turn (several tokens in one call, or the first call of ``generate``) is evaluated whole and then
        evicted down to the budget: the first time when it is over the budget, later when it is over budget plus
        slack. Generated tokens evict before they would pass budget plus slack.

        If this raises, or is stopped by Ctrl-C, the tokens before are still there and these are not. Where even that
        cannot be had (a recurrent model, a sliding window that has moved on), everything is reset.

        Raises:
            ValueError: The tokens do not fit ``n_ctx``.
            MemoryError: There is no memory for their entries.
            RuntimeError: ``n_tokens`` was set to a place that the cache cannot go back to, or an eviction failed.
        """
        if self._kv_budget is None:
            super().eval(tokens)
            return
        self._refuse_while_reporting()
        bad = [token for token in tokens if not 0 <= token < self._n_vocab]
        if bad:
            raise ValueError(f"token {bad[0]}: allowed are 0 to {self._n_vocab - 1}, the model's vocabulary")
        is_prompt = len(tokens) > 1 if self._kv_prompt_next is None else self._kv_prompt_next
        if self._kv_prompt_next:
            self._kv_prompt_next = False
        if self.n_tokens < 0 or self.n_tokens + len(tokens) > self._n_ctx:
            raise ValueError(f"{len(tokens)} tokens after {self.n_tokens} exceed the context window of {self._n_ctx}")
        self._cut_back()
        before = self.n_tokens
        try:
            if is_prompt:
                self._eval_prompt(tokens)
            else:
                self._make_room(len(tokens))
                self._kv_store.reserve(int(self._kv_store.stats().n_entries) + len(tokens))
                super().eval(tokens)
        except BaseException:  # Ctrl-C too
            self._go_back(before, before + len(tokens))
            raise

    def generate(self, tokens: Sequence[int], *args: Any, **kwargs: Any) -> Generator[int, Sequence[int] | None, None]:
        """As ``llama_cpp.Llama.generate``: yields tokens that follow the prompt ``tokens``.

        Raises:
            ValueError: There is no token to go on from.
        """
        self._refuse_while_reporting()
        tokens = list(tokens)
        if not tokens and (kwargs.get("reset", True) or self.n_tokens == 0):
            raise ValueError("the prompt has no tokens (tokens=[]); allowed is at least one")
        if self._kv_budget is not None and kwargs.get("reset", True):
            self._reuse_only_what_is_exact(tokens)
        generated = super().generate(tokens, *args, **kwargs)
        is_prompt, more = True, None
        try:
            while True:
                self._kv_prompt_next = is_prompt
                try:
                    token = generated.send(more)
                except StopIteration:
                    return
                finally:  # between two tokens, eval() by hand is not part of this
                    self._kv_prompt_next = None
                is_prompt, more = False, (yield token)
        finally:
            generated.close()

    def create_chat_completion(self, messages: Any, *args: Any, **kwargs: Any) -> Any:
        """As ``llama_cpp.Llama.create_chat_completion``. A stream peeks at the last user message."""
        asked = self._tokens_asked(messages) if self._kv_budget is not None else 0
        self._kv_asked = asked
        try:
            answer = super().create_chat_completion(messages, *args, **kwargs)
        finally:
            self._kv_asked = 0
        return answer if isinstance(answer, dict) else self._read_when_started(asked, answer)

    def _read_when_started(self, asked: int, chunks: Iterator[Any]) -> Iterator[Any]:
        """The chunks of an answer; its prompt is read when the first is wanted."""
        self._kv_asked = asked
        try:
            for chunk in chunks:
                self._kv_asked = 0
                yield chunk
        finally:
            self._kv_asked = 0

    def _tokens_asked(self, messages: Any) -> int:
        """Tokens at the end of a chat's prompt that its last user message takes, about; of a long one, its end."""
        if isinstance(messages, str) or not isinstance(messages, Sequence):
            raise TypeError(f"messages={messages!r}: allowed is a list of dicts with role and content")
        asked = [m.get("content") for m in messages if isinstance(m, dict) and m.get("role") == "user"]
        if not asked or not isinstance(asked[-1], str):
            return 0
        return len(self.tokenize(asked[-1][-2000:].encode(), add_bos=False, special=False)) + TEMPLATE_TAIL

    def reset(self) -> None:
        """Forget the conversation."""
        self._refuse_while_reporting()
        super().reset()
        self._kv_prompt_logits = None
        if self._kv_budget is not None:
            self._ctx.kv_cache_seq_rm(-1, 0, -1)

    def _reuse_only_what_is_exact(self, prompt: list[int]) -> None:
        """Before a prompt: make the answer the one that a fresh object would give.

        What was evicted was chosen by the tokens before the eviction. A prompt that goes on after all of them finds the
        right cache. The very prompt of the last eviction again finds its cache and gets its logits back. Any other
        prompt is evaluated from the start. A stream's evictions depend on where it starts and on what it looks for.
        """
        stats = self._kv_store.stats()
        if self.n_tokens == 0:
            return
        if not stats.evicted:
            assert self._kv_budget is not None
            may_stream = self._kv_prefill.mode == "stream" or self._kv_prefill.memory_limit is not None
            if may_stream and len(prompt) > self._kv_budget.for_prompt(len(prompt)):
                self.reset()
            return
        common = _common_prefix(self._input_ids, prompt)
        same_look = self._kv_mode != "stream" or self._kv_looked == (self.question, self._kv_asked)
        if common == len(prompt) == int(stats.evicted_at) and same_look and self._restore_prompt(common):
            return
        reusable = common - 1 if common == len(prompt) else common
        if reusable < stats.evicted_at:
            self.reset()

    def _restore_prompt(self, n_prompt: int) -> bool:
        """Go back to the end of the prompt that was evicted last, logits included; False if that is not possible."""
        if self._kv_prompt_logits is None:
            return False
        row = llama_cpp.llama_get_logits_ith(self.ctx, -1)
        if not row or not self._ctx.kv_cache_seq_rm(-1, n_prompt, -1):
            return False
        ctypes.memmove(row, self._kv_prompt_logits.ctypes.data, self._kv_prompt_logits.nbytes)
        self.n_tokens = n_prompt
        self._requires_eval = False
        return True

    def _cut_back(self) -> None:
        """Remove what the cache holds beyond ``n_tokens``."""
        if not self._ctx.kv_cache_seq_rm(-1, self.n_tokens, -1):
            raise RuntimeError(
                f"n_tokens={self.n_tokens}: the cache cannot go back there: entries were evicted, have left a sliding "
                "window, or the model is recurrent in part. Call reset() and evaluate the prompt again."
            )
        held = int(self._kv_store.stats().n_tokens)
        if held != self.n_tokens:
            raise RuntimeError(
                f"n_tokens={self.n_tokens}: the cache holds {held} tokens. Call reset() and evaluate the prompt again."
            )

    def _eval_prompt(self, tokens: Sequence[int]) -> None:
        assert self._kv_budget is not None
        stats = self._kv_store.stats()
        budget = self._kv_budget.for_prompt(int(stats.n_tokens) + len(tokens))
        slack = self._kv_policy.slack_for(budget)
        limit = budget + slack if stats.evicted else budget
        evicts = stats.n_entries + len(tokens) > limit
        mode = self._mode_for(tokens, budget + slack, stats) if evicts else "full"
        looked = self.question, self._kv_asked  # a callback may change them for the next prompt
        if mode == "exact":
            self._read_layers(tokens, budget, slack)
        elif mode == "stream":
            self._read_stream(tokens, budget, slack)
        else:
            self._kv_store.reserve(int(stats.n_entries) + len(tokens))
            self._eval_batches(tokens, 0, len(tokens))
        self._kv_entries = budget
        if evicts:
            self._kv_mode, self._kv_looked = mode, looked
            self._kv_prompt_logits = None
            if mode != "stream":
                self._evict(budget)
            row = llama_cpp.llama_get_logits_ith(self.ctx, -1)
            self._kv_prompt_logits = np.ctypeslib.as_array(row, shape=(self._n_vocab,)).copy()
            self._kv_store.peek([], 0)

    def _mode_for(self, tokens: Sequence[int], kept: int, stats: Any) -> str:
        """How a prompt over the budget is read. One of no more than a ubatch or chunk is in memory at once anyway.

        `kept`: entries that there is room for after an eviction.
        """
        mode, limit = self._kv_prefill.mode, self._kv_prefill.memory_limit
        if limit is not None:
            per_entry, n_layer = int(stats.bytes_per_token), int(stats.n_layer)
            needed = (int(stats.n_entries) + len(tokens)) * per_entry
            if mode == "exact":  # one layer's prompt, what the others keep or have, hidden states
                others = max(kept, int(stats.n_entries)) * per_entry * (n_layer - 1)
                needed = (needed + others) // n_layer + 4 * len(tokens) * self.n_embd()
                needed += int(stats.n_entries) * per_entry  # the cache before, in case that this is stopped
            mode = "stream" if needed > limit else mode
        chunk = self._kv_prefill.stream.chunk if mode == "stream" else None
        n_ubatch: int = self.context_params.n_ubatch
        return "full" if len(tokens) <= min(n_ubatch, chunk or n_ubatch) else mode

    def _read_layers(self, tokens: Sequence[int], budget: int, slack: int) -> None:
        """All layers but the last; that one is left to the ordinary evaluation."""
        n_layer = llama_cpp.llama_model_n_layer(self.model)
        progress = None if self.prefill_progress is None else self._report
        self._kv_store.prefill(tokens, budget, slack, layer_progress(progress, n_layer, len(tokens)))
        self._eval_batches(tokens, len(tokens) * (n_layer - 1) // n_layer, len(tokens))

    def _read_stream(self, tokens: Sequence[int], budget: int, slack: int) -> None:
        """Chunk by chunk, evicted after each; the cache before is saved, in case that this is stopped or fails."""
        settings, store, question = self._kv_prefill.stream, self._kv_store, self.question
        asks = settings.observe != "window" and self._kv_policy.score == "window"  # no other score asks a query
        peeked = self._peeked(tokens) if asks else []
        chunk = settings.chunk or self.context_params.n_ubatch
        sizes = chunks(len(tokens), chunk, len(peeked))
        room = slack + chunk + len(peeked)
        before = self.save_state() if self.n_tokens > 0 else None
        first = self.n_tokens + len(tokens) - len(peeked)
        try:
            store.reserve(min(int(store.stats().n_entries) + len(tokens), budget + room + len(peeked)))
            if peeked and settings.observe == "peek":
                store.peek(peeked, first)
            done = 0
            for size in sizes:
                if store.stats().n_entries + size > budget + room:
                    if peeked and settings.observe == "re-peek":
                        store.peek(peeked, first)
                    store.evict(budget, room + len(peeked))  # the memory of this loop
                self._eval_batches(tokens[done : done + size], done, len(tokens))
                done += size
            if question and peeked and self.n_tokens + len(peeked) <= self._n_ctx:
                store.peek(peeked, self.n_tokens)  # the last eviction looks for it too
            else:
                store.peek([], 0)
            self._evict(budget)
        except BaseException:
            self.reset()
            if before is not None:
                self.load_state(before)
            raise

    def _peeked(self, tokens: Sequence[int]) -> list[int]:
        """The tokens that a stream peeks at: the question that was named, or the last ones of the prompt."""
        most = min(self._kv_policy.window + MOST_PEEKED, self.context_params.n_ubatch)
        if self.question is not None:
            named = self.tokenize(self.question.encode(), add_bos=False, special=False)
            if named:
                return list(named[-min(most, len(tokens)) :])
        return list(tokens[-min(most, max(self._kv_prefill.stream.tokens, self._kv_asked)) :])

    def _eval_batches(self, tokens: Sequence[int], n_done: int, n_all: int) -> None:
        """Evaluate tokens that come after `n_done` of `n_all`, or stand for all that is left of them."""
        end = n_done + len(tokens) if n_done + len(tokens) < n_all else n_all
        for i in range(0, len(tokens), self.n_batch):
            batch = tokens[i : i + self.n_batch]
            super().eval(batch)
            self._report(n_done + (i + len(batch)) * (end - n_done) // len(tokens), n_all)

    def _report(self, done: int, total: int) -> None:
        """Call prefill_progress, during which the cache is in the middle of a prompt."""
        if self.prefill_progress is None:
            return
        self._kv_reporting = True
        try:
            self.prefill_progress(done, total)
        finally:
            self._kv_reporting = False

    def _refuse_while_reporting(self) -> None:
        if self._kv_reporting:
            raise RuntimeError("prefill_progress was called in the middle of a prompt: it cannot use the model")

    def _go_back(self, n_tokens: int, end: int) -> None:
        """After a failure: the cache as it was at `n_tokens`, or, if that is gone, an empty one.

        If Ctrl-C came when all tokens up to `end` were there and evicted, that stays.
        """
        self._kv_store.cancel_prefill()
        self._kv_store.peek([], 0)
        stats = self._kv_store.stats()
        held, evicted = int(stats.n_tokens), int(stats.evicted_at) if stats.evicted else -1
        self._requires_eval = True  # the logits are those of what did not come to its end
        if held >= n_tokens and (held == n_tokens or self._ctx.kv_cache_seq_rm(-1, n_tokens, -1)):
            self.n_tokens = n_tokens
        elif not held == self.n_tokens == end == evicted:
            self.reset()

    def _make_room(self, n_new: int) -> None:
        stats = self._kv_store.stats()
        assert self._kv_budget is not None
        self._kv_entries = budget = max(self._kv_entries, self._kv_budget.for_prompt(int(stats.n_tokens)))
        slack = max(self._kv_policy.slack_for(budget), n_new)
        # without a query of the window (all were taken back) the next token has to come first
        if stats.n_entries + n_new > budget + slack and stats.n_queries > 0:
            self._evict(budget)

    def _evict(self, budget: int) -> None:
        before = self._kv_store.stats()
        self._kv_store.evict(budget, self._kv_policy.slack_for(budget))
        if self.verbose:
            seconds = self._kv_store.stats().seconds_total - before.seconds_total
            print(f"Llama.eval: evicted {before.n_entries} to {budget} entries in {seconds:.2f} s", file=sys.stderr)

    # ---- inspection --------------------------------------------------------------------------------------------------

    def kv_stats(self) -> KVStats:
        """What the cache holds, and what evictions took.

        Raises:
            RuntimeError: There is no ``kv_budget``.
        """
        if self._kv_budget is None:
            raise RuntimeError("kv_stats() needs a kv_budget")
        s = self._kv_store.stats()
        measured = [self._kv_store.change(il) for il in self._kv_store.layers()]
        if any(map(math.isnan, measured[0])):
            measured = []
        entries = [
            [self._kv_store.entries(il, head) for head in range(self._kv_store.layer(il).n_head_kv)]
            for il in self._kv_store.layers()
        ]
        return KVStats(
            budget=self._kv_entries,
            tokens_seen=int(s.n_tokens),
            entries=entries,
            entries_peak=int(s.n_entries_peak),
            bytes_now=int(s.bytes_entries),
            bytes_peak=int(s.bytes_entries_peak),
            bytes_full=int(s.bytes_per_token * s.n_tokens),
            bytes_allocated=int(s.bytes_allocated),
            bytes_allocated_peak=int(s.bytes_allocated_peak),
            bytes_hidden_peak=int(s.bytes_hidden_peak),
            bytes_other=int(s.bytes_other),
            bytes_store=int(s.bytes_store),
            prefill=self._kv_mode,
            memory_limit=self._kv_prefill.memory_limit,
            evictions=int(s.n_evictions),
            seconds_score=float(s.seconds_score),
            seconds_select=float(s.seconds_select),
            seconds_compact=float(s.seconds_compact),
            seconds_measure=float(s.seconds_measure),
            seconds_total=float(s.seconds_total),
            bound=tuple(bound for bound, _ in measured),
            change=tuple(change for _, change in measured),
        )

    def kv_positions(self, il: int) -> list[npt.NDArray[np.int32]]:
        """Original positions that layer ``il`` keeps, ascending, one array per KV head.

        Raises:
            ValueError: The layer has no cache.
            RuntimeError: There is no ``kv_budget``.
        """
        if self._kv_budget is None:
            raise RuntimeError("kv_positions() needs a kv_budget")
        layers = self._kv_store.layers()
        if isinstance(il, bool) or il not in layers:
            raise ValueError(f"il={il!r}: layers that are evicted are {', '.join(map(str, layers))}")
        return [self._kv_store.positions(il, head) for head in range(self._kv_store.layer(il).n_head_kv)]

    # ---- state -------------------------------------------------------------------------------------------------------

    def save_state(self) -> llama_cpp.LlamaState:
        """The whole state; with a budget its size follows the entries kept."""
        if self._kv_budget is None:
            return super().save_state()
        self._refuse_while_reporting()
        # without logits_all the rows of `scores` are never filled, but are up to n_batch * n_vocab floats
        self._cut_back()
        scores = self.scores
        try:
            if not self._logits_all:
                self.scores = scores[:0]
            state = super().save_state()
        finally:
            self.scores = scores
        return state_file.seal(state, self._kv_model)

    def load_state(self, state: llama_cpp.LlamaState) -> None:
        """Restore a state that ``save_state`` made.

        Raises:
            TypeError: ``state`` is not a LlamaState.
            ValueError: The state is damaged, or was saved by another model, policy or without a budget. Nothing has
                changed then, or, if llama.cpp itself refused its part, everything is reset. (llama-cpp-python's caches
                take it for a miss.)
        """
        if not isinstance(state, llama_cpp.LlamaState):
            raise TypeError(f"state={state!r:.100}: allowed is what save_state() returned")
        if self._kv_budget is None:
            state_file.refuse_sealed(state)
            super().load_state(state)
            return
        self._refuse_while_reporting()
        opened = state_file.unseal(state, self._kv_model, n_ctx=self._n_ctx, logits_all=self._logits_all)
        if not self._logits_all:
            opened.scores = self.scores[:0]
        input_ids = np.zeros_like(self.input_ids)
        input_ids[: opened.n_tokens] = opened.input_ids[: opened.n_tokens]
        opened.input_ids = input_ids
        before = (self.input_ids, self.n_tokens, self._requires_eval, self._seed)
        scores, self.scores = self.scores, self.scores if self._logits_all else self.scores[:0]
        try:
            super().load_state(opened)
        except RuntimeError as e:
            self.input_ids, self.n_tokens, self._requires_eval, self._seed = before
            reason = last_error() or f"the state cannot be loaded: {e}"
            if self._kv_store.stats().n_tokens != self.n_tokens:
                self.reset()  # llama.cpp had already emptied the cache
            raise state_file.StateError(reason) from None
        finally:
            self.scores = scores
        self._kv_prompt_logits = None
        self._kv_entries = self._kv_budget.for_prompt(self.n_tokens)

    def __getstate__(self) -> dict[str, Any]:
        """For pickle: the arguments, not the cache."""
        arguments = dict(super().__getstate__(), **self._kv_arguments)
        return {name: value for name, value in arguments.items() if value is not None}


def _common_prefix(cached: npt.NDArray[np.intc], prompt: list[int]) -> int:
    n = min(len(cached), len(prompt))
    different = np.flatnonzero(cached[:n] != np.asarray(prompt[:n], dtype=np.int64))
    return int(different[0]) if len(different) else n
