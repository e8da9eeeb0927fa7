"""Random sequences of everything a cache can be asked to do.

For a llama, against a plain model of what the cache must hold: the tokens, the positions each KV head keeps, how far
the cache can be cut back, and what every token could see when it was evaluated. At the end of a sequence the logits of
one more token are compared with a float64 forward pass in which exactly that was visible.

For models with sliding windows or recurrent layers, against another cache that is given only
what must have an effect: what was evaluated since the last reset, and no loading, saving, growing or refused step.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import numpy as np
import pytest
from helpers import entries, kept, last_logits, stop_at
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from reference.forward import TinyLlama
from reference.select import select
from tiny import write_tiny

from pycriticalkv import KVPolicy, Llama
from pycriticalkv.state import StateError

N_LAYER, N_HEAD_KV, N_CTX = 2, 2, 512
BUDGET, SLACK, WINDOW, SINKS = 48, 16, 16, 4
RING = WINDOW + 32
POLICIES = {
    "critical-max": KVPolicy(slack=SLACK),
    "streamingllm": KVPolicy(score="recency", value="none", slack=SLACK),
}
HEADS = [(il, head) for il in range(N_LAYER) for head in range(N_HEAD_KV)]


@dataclass
class Expected:
    """What the cache must hold."""

    tokens: list[int] = field(default_factory=list)
    kept: dict[tuple[int, int], list[int]] = field(default_factory=lambda: {head: [] for head in HEADS})
    seen: list[dict[tuple[int, int], list[int]]] = field(default_factory=list)  # per token, with the token itself
    queries: dict[int, int] = field(default_factory=dict)  # row of the ring -> position
    evicted_at: int = 0
    tail_start: int = 0
    evictions: int = 0

    @property
    def n_entries(self) -> int:
        return len(self.kept[0, 0])

    @property
    def n_queries(self) -> int:
        """Known queries of the window."""
        n, end = 0, len(self.tokens)
        while n < min(WINDOW, end) and self.queries.get((end - 1 - n) % RING) == end - 1 - n:
            n += 1
        return n

    def append(self, tokens: list[int]) -> None:
        """Evaluate tokens in one go."""
        for token in tokens:
            position = len(self.tokens)
            self.tokens.append(token)
            for head in HEADS:
                self.kept[head] = [*self.kept[head], position]
            self.seen.append(dict(self.kept))
            self.queries[position % RING] = position

    def can_cut(self, n: int) -> bool:
        """Whether the cache can go back to its first n tokens."""
        return n in (0, len(self.tokens)) or not self.evictions or n >= self.tail_start

    def cut(self, n: int) -> None:
        """Go back to the first n tokens."""
        if n == 0:
            self.__init__()  # type: ignore[misc]
            return
        self.tokens, self.seen = self.tokens[:n], self.seen[:n]
        self.kept = {head: [p for p in positions if p < n] for head, positions in self.kept.items()}
        self.queries = {row: p for row, p in self.queries.items() if p < n}

    def evict(self, kept_now: dict[tuple[int, int], list[int]]) -> None:
        """An eviction left these positions."""
        self.tail_start = max(self.tail_start, len(self.tokens) - WINDOW)
        self.evicted_at = len(self.tokens)
        self.evictions += 1
        self.kept = kept_now


class CacheMachine(RuleBasedStateMachine):
    """One policy's cache; the model file and the Llama are shared by all sequences."""

    policy: str
    path: str
    llm: Llama

    def __init__(self) -> None:
        super().__init__()
        self.expected = Expected()
        self.saved: list[tuple[object, Expected]] = []
        self.seed = 0

    @initialize()
    def start(self) -> None:
        self.llm.reset()

    def new_tokens(self, n: int) -> list[int]:
        self.seed += 1
        return np.random.default_rng(self.seed).integers(10, 440, n).tolist()

    def fits(self, n: int) -> bool:
        return len(self.expected.tokens) + n < N_CTX - 1

    # ---- what an eviction must leave ---------------------------------------------------------------------------------

    def check_eviction(self, before: Expected, budget: int) -> None:
        """Take over what the cache says that it kept, after checking all that can be known without the scores."""
        n = before.n_entries
        now = dict(zip(HEADS, (head for heads in kept(self.llm) for head in heads), strict=True))
        for head, positions in now.items():
            had = before.kept[head]
            protected = [p for p in had if p < SINKS] + had[-WINDOW:]
            assert len(positions) == budget < n
            assert positions == sorted(set(positions))
            assert set(protected) <= set(positions) <= set(had)
            if self.policy == "streamingllm":
                chosen = select("streamingllm", n, budget, WINDOW, SINKS, attn=[0.0] * n, positions=had)
                assert positions == [had[i] for i in chosen]
        before.evict(now)

    def expect_prompt(self, tokens: list[int]) -> None:
        """A prompt or a turn was evaluated, and evicted if it went over the limit."""
        expected = self.expected
        expected.append(tokens)
        if expected.n_entries > (BUDGET + SLACK if expected.evictions else BUDGET):
            self.check_eviction(expected, BUDGET)

    def evaluate_one(self, token: int) -> None:
        """Evaluate a generated token, before which the cache may have to make room."""
        expected = self.expected
        if expected.n_entries + 1 > BUDGET + SLACK and expected.n_queries:
            # what was kept is seen only after the token was added
            before = copy.deepcopy(expected)
            self.llm.eval([token])
            last = len(before.tokens)
            now = dict(zip(HEADS, (head for heads in kept(self.llm) for head in heads), strict=True))
            assert all(positions[-1] == last for positions in now.values())
            before.evict({head: positions[:-1] for head, positions in now.items()})
            assert all(len(positions) == BUDGET for positions in before.kept.values())
            self.expected = before
            before.append([token])
        else:
            self.llm.eval([token])
            expected.append([token])

    # ---- rules -------------------------------------------------------------------------------------------------------

    @rule(n=st.integers(2, 90))
    def append(self, n: int) -> None:
        if self.fits(n):
            tokens = self.new_tokens(n)
            self.llm.eval(tokens)
            self.expect_prompt(tokens)

    @rule(n=st.integers(1, 20))
    def single_tokens(self, n: int) -> None:
        if self.fits(n) and self.expected.tokens:
            for token in self.new_tokens(n):
                self.evaluate_one(token)

    @rule(n_new=st.integers(1, 70), n_out=st.integers(1, 8), share=st.floats(0.0, 1.0))
    def generate(self, n_new: int, n_out: int, share: float) -> None:
        """A prompt that goes on after all tokens (share 1), or shares only a beginning with them."""
        if not self.fits(n_new + n_out):
            return
        expected = self.expected
        common = len(expected.tokens) if share > 0.5 else int(share * len(expected.tokens))
        new = self.new_tokens(n_new)
        if common < len(expected.tokens) and new[0] == expected.tokens[common]:
            return
        prompt = expected.tokens[:common] + new
        generator = self.llm.generate(prompt, temp=0.0)
        token = next(generator)
        if common < expected.evicted_at or common == 0:
            expected.cut(0)
            self.expect_prompt(prompt)
        else:
            assert expected.can_cut(common)
            expected.cut(common)
            self.expect_prompt(new)
        generator.close()
        for _ in range(n_out - 1):
            self.evaluate_one(int(token))
            token = int(np.argmax(last_logits(self.llm)))

    @rule(back=st.integers(1, 120))
    def cut_back(self, back: int) -> None:
        expected = self.expected
        n = max(len(expected.tokens) - back, 0)
        possible = expected.can_cut(n)
        assert self.llm._ctx.kv_cache_seq_rm(-1, n, -1) == possible
        if possible:
            self.llm.n_tokens = n
            expected.cut(n)

    @rule(n=st.integers(0, 300))
    def set_tokens_back_where_it_cannot_go(self, n: int) -> None:
        expected = self.expected
        if n < len(expected.tokens) and not expected.can_cut(n):
            self.llm.n_tokens = n
            with pytest.raises(RuntimeError, match=f"n_tokens={n}"):
                self.llm.eval([5])
            self.llm.n_tokens = len(expected.tokens)

    @rule()
    def reset(self) -> None:
        self.llm.reset()
        self.expected.cut(0)

    @precondition(lambda self: self.expected.tokens)
    @rule()
    def save(self) -> None:
        self.saved.append((self.llm.save_state(), copy.deepcopy(self.expected)))

    @precondition(lambda self: self.saved)
    @rule(which=st.integers(0, 100))
    def load(self, which: int) -> None:
        state, expected = self.saved[which % len(self.saved)]
        self.llm.load_state(state)
        self.expected = copy.deepcopy(expected)
        self.expected.evictions = min(expected.evictions, 1)  # the counter is not saved, whether there was one is

    @precondition(lambda self: self.saved)
    @rule(where=st.floats(0.0, 0.999))
    def load_a_damaged_state(self, where: float) -> None:
        state = copy.copy(self.saved[-1][0])
        blob = bytearray(state.llama_state)
        blob[int(where * len(blob))] ^= 1
        state.llama_state = bytes(blob)
        with pytest.raises(StateError, match="cannot be loaded"):
            self.llm.load_state(state)

    @rule(budget=st.integers(WINDOW + SINKS + 1, 100))
    def evict(self, budget: int) -> None:
        expected = self.expected
        if expected.n_entries > budget and not expected.n_queries and self.policy != "streamingllm":
            with pytest.raises(RuntimeError, match="queries of the last positions are not known"):
                self.llm._kv_store.evict(budget)
        elif expected.n_entries > budget:
            chosen = self.chosen(budget)
            self.llm._kv_store.evict(budget)
            self.check_eviction(expected, budget)
            assert chosen in (None, expected.kept)
        else:
            self.llm._kv_store.evict(budget)

    def chosen(self, budget: int) -> dict[tuple[int, int], list[int]] | None:
        """What the brute-force selection keeps, given the native scores; None for a policy without scores."""
        if self.policy == "streamingllm":
            return None
        out, n = {}, self.expected.n_entries
        for il in range(N_LAYER):
            attn, norm = self.llm._kv_store.scores(il, WINDOW)
            for head in range(N_HEAD_KV):
                had = self.expected.kept[il, head]
                rows = {"attn": attn[head].tolist(), "norm": norm[head].tolist(), "positions": had}
                out[il, head] = [had[i] for i in select("critical-max", n, budget, WINDOW, SINKS, **rows)]
        return out

    @rule(n=st.integers(0, N_CTX))
    def grow(self, n: int) -> None:
        self.llm._kv_store.reserve(n)

    @rule()
    def append_too_much(self) -> None:
        with pytest.raises(ValueError, match="exceed the context window"):
            self.llm.eval(self.new_tokens(N_CTX + 1 - len(self.expected.tokens)))

    # ---- always ------------------------------------------------------------------------------------------------------

    @invariant()
    def the_cache_holds_what_it_must(self) -> None:
        expected, stats = self.expected, self.llm._kv_store.stats()
        assert self.llm.n_tokens == stats.n_tokens == len(expected.tokens)
        assert self.llm.input_ids[: self.llm.n_tokens].tolist() == expected.tokens
        assert entries(self.llm) == expected.n_entries
        assert kept(self.llm) == [[expected.kept[il, head] for head in range(N_HEAD_KV)] for il in range(N_LAYER)]
        assert stats.evicted == bool(expected.evictions)
        assert stats.n_queries == expected.n_queries
        assert stats.bytes_entries <= stats.bytes_allocated <= stats.bytes_allocated_peak

    def teardown(self) -> None:
        if not self.expected.tokens:
            return
        self.evaluate_one(7)
        tokens, seen = self.expected.tokens, self.expected.seen
        visible = np.zeros((N_LAYER, N_HEAD_KV, len(tokens), len(tokens)), dtype=bool)
        for query, heads in enumerate(seen):
            for (il, head), positions in heads.items():
                visible[il, head, query, positions] = True
        want = TinyLlama(self.path).forward(tokens, visible=visible)[-1]
        got, columns = last_logits(self.llm), np.argsort(want)[-100:]
        spread = want[columns].std()
        # measured: at most 2e-3; an entry more or less in one head is ten times that and more
        assert np.sqrt(np.mean((got[columns] - want[columns]) ** 2)) < 5e-3 * spread


@pytest.mark.parametrize("policy", POLICIES)
def test_random_sequences(tmp_path_factory, policy):
    path = tmp_path_factory.mktemp("stateful") / "tiny.gguf"
    write_tiny(path, n_layer=N_LAYER, n_head=4, n_head_kv=N_HEAD_KV, n_embd=64, wo_type="F32", weight_type="F32")
    llm = Llama(
        str(path), kv_budget=BUDGET, kv_policy=POLICIES[policy], n_ctx=N_CTX, verbose=False,
        n_threads=1, n_threads_batch=1, n_ubatch=32,
    )  # fmt: skip
    machine = type("Machine", (CacheMachine,), {"policy": policy, "path": str(path), "llm": llm})
    case = machine.TestCase
    # 200 sequences of each policy
    case.settings = settings(
        max_examples=200, stateful_step_count=15, deadline=None, derandomize=True,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    case().runTest()
    llm.close()


# ---- other families --------------------------------------------------------------------------------------------------

OTHER_FAMILIES = ("gemma3", "gpt-oss", "lfm2", "granitehybrid")
SLIDING = ("gemma3", "gpt-oss")
Step = tuple[str, object]  # what was done, with which argument


def perform(llm: Llama, step: Step) -> None:
    """Do what must have an effect."""
    what, argument = step
    if what == "eval":
        llm.eval(argument)
    elif what == "generate":
        generator = llm.generate(argument, temp=0.0)
        next(generator)
        generator.close()
    elif what == "evict":
        llm._kv_store.evict(argument)
    elif what == "cut":
        assert llm._ctx.kv_cache_seq_rm(-1, argument, -1)
        llm.n_tokens = argument
    else:
        llm.load_state(argument)


def contents(llm: Llama) -> tuple[int, list[int], list[list[list[int]]]]:
    return llm.n_tokens, llm.input_ids[: llm.n_tokens].tolist(), kept(llm)


class FamilyMachine(RuleBasedStateMachine):
    """One model; `llm` does everything, `replay` what must have an effect."""

    arch: str
    llm: Llama
    replay: Llama

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.saved: list[tuple[object, list[Step], object]] = []
        self.seed = 0

    @initialize()
    def start(self) -> None:
        self.llm.reset()

    def new_tokens(self, n: int) -> list[int]:
        self.seed += 1
        return np.random.default_rng(self.seed).integers(10, 440, n).tolist()

    def do(self, what: str, argument: object) -> None:
        self.steps.append((what, argument))
        perform(self.llm, self.steps[-1])

    def fits(self, n: int) -> bool:
        return self.llm.n_tokens + n < N_CTX - 1

    @rule(n=st.integers(2, 90))
    def append(self, n: int) -> None:
        if self.fits(n):
            self.do("eval", self.new_tokens(n))

    @rule(n=st.integers(1, 20))
    def single_tokens(self, n: int) -> None:
        if self.fits(n) and self.llm.n_tokens:
            for token in self.new_tokens(n):
                self.do("eval", [token])

    @rule(n=st.integers(1, 70))
    def go_on_with_a_prompt(self, n: int) -> None:
        if self.fits(n):
            self.do("generate", self.llm.input_ids[: self.llm.n_tokens].tolist() + self.new_tokens(n))

    @rule(n=st.integers(1, 70), share=st.floats(0.0, 0.99))
    def change_the_prompt(self, n: int, share: float) -> None:
        common = int(share * self.llm.n_tokens)
        if common + n < N_CTX - 1:
            self.do("generate", self.llm.input_ids[:common].tolist() + self.new_tokens(n))

    @rule(back=st.integers(1, 12) | st.integers(1, 120))
    def cut_back(self, back: int) -> None:
        before, n = contents(self.llm), max(self.llm.n_tokens - back, 0)
        if self.llm._ctx.kv_cache_seq_rm(-1, n, -1):
            self.llm.n_tokens = n
            self.steps = [] if n == 0 else [*self.steps, ("cut", n)]
        else:
            assert contents(self.llm) == before

    @rule()
    def reset(self) -> None:
        self.llm.reset()
        self.steps = []

    @precondition(lambda self: self.steps)
    @rule()
    def save(self) -> None:
        self.saved.append((self.llm.save_state(), list(self.steps), contents(self.llm)))

    @precondition(lambda self: self.saved)
    @rule(which=st.integers(0, 100))
    def load(self, which: int) -> None:
        state, steps, held = self.saved[which % len(self.saved)]
        self.llm.load_state(state)
        assert contents(self.llm) == held
        # llama.cpp restores a sliding window to other slots, which rounds differently
        self.steps = [("load", state)] if self.arch in SLIDING else list(steps)

    @precondition(lambda self: self.saved)
    @rule(where=st.floats(0.0, 0.999))
    def load_a_damaged_state(self, where: float) -> None:
        state = copy.copy(self.saved[-1][0])
        blob = bytearray(state.llama_state)
        blob[int(where * len(blob))] ^= 1
        state.llama_state = bytes(blob)
        with pytest.raises(StateError, match="cannot be loaded"):
            self.llm.load_state(state)

    @rule(budget=st.integers(WINDOW + SINKS + 1, 100))
    def evict(self, budget: int) -> None:
        stats = self.llm._kv_store.stats()
        if stats.n_entries > budget and not stats.n_queries:
            with pytest.raises(RuntimeError, match="queries of the last positions are not known"):
                self.llm._kv_store.evict(budget)
        else:
            self.do("evict", budget)

    @rule(n=st.integers(0, N_CTX))
    def grow(self, n: int) -> None:
        self.llm._kv_store.reserve(n)

    @rule(n=st.integers(40, 200), report=st.integers(1, 20))
    def stop_a_prompt(self, n: int, report: int) -> None:
        if not self.fits(n):
            return
        before = self.llm.save_state() if self.steps else None
        held = contents(self.llm)
        self.llm.prefill_progress = stop_at(report)
        prompt = self.new_tokens(n)
        try:
            self.llm.eval(prompt)
        except KeyboardInterrupt:
            assert contents(self.llm) == held or (self.arch != "llama" and self.llm.n_tokens == 0)
            if self.llm.n_tokens == 0:
                self.steps = []
            elif self.arch in SLIDING:  # see load
                self.llm.load_state(before)
                self.steps = [("load", before)]
        else:
            self.steps.append(("eval", prompt))
        finally:
            self.llm.prefill_progress = None

    @rule()
    def append_too_much(self) -> None:
        with pytest.raises(ValueError, match="exceed the context window"):
            self.llm.eval(self.new_tokens(N_CTX + 1 - self.llm.n_tokens))

    @invariant()
    def the_counts_agree(self) -> None:
        stats = self.llm._kv_store.stats()
        assert self.llm.n_tokens == stats.n_tokens
        assert all(len(head) == stats.n_entries for heads in kept(self.llm) for head in heads)
        assert all(head == sorted(set(head)) for heads in kept(self.llm) for head in heads)
        assert stats.bytes_entries <= stats.bytes_allocated <= stats.bytes_allocated_peak

    def teardown(self) -> None:
        if not self.steps:
            return
        self.do("eval", [7])
        self.replay.reset()
        for step in self.steps:
            perform(self.replay, step)
        assert contents(self.llm) == contents(self.replay)
        assert np.array_equal(last_logits(self.llm), last_logits(self.replay))


@pytest.mark.parametrize(
    "arch,modes", [*((arch, ("exact", "full")) for arch in OTHER_FAMILIES), ("llama", ("stream", "stream"))]
)
def test_random_sequences_of_other_families(make_tiny, arch, modes):
    path = make_tiny(arch=arch, n_layer=4, n_head=4, head_dim=64)
    llm, replay = (
        Llama(path, kv_budget=BUDGET, kv_policy=POLICIES["critical-max"], n_ctx=N_CTX, verbose=False,
              n_threads=1, n_threads_batch=1, n_ubatch=32, prefill=prefill)
        for prefill in modes
    )  # fmt: skip
    case = type("Machine", (FamilyMachine,), {"arch": arch, "llm": llm, "replay": replay}).TestCase
    case.settings = settings(
        max_examples=150, stateful_step_count=25, deadline=None, derandomize=True,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    case().runTest()
    llm.close()
    replay.close()
