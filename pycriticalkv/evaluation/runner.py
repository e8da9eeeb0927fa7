"""Does it still answer right? Tasks with known answers, with the full cache and with evicted ones.

Prompts are read whole by default, and all arms of a sample share that: the prompt is read once, its cache is saved, and
every policy and budget starts from that state. So a budget of all entries differs from the full cache in nothing, and
arms are compared in pairs. The other ways to read a prompt ("exact", "stream") are arms too; those read every prompt
anew.

Two settings. *query-aware*: the question is part of the prompt that is evicted, as when it is asked once.
*context-only*: the context is evicted before the question is known, as when a second question is asked.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, get_args, get_type_hints

import llama_cpp
import numpy as np
import numpy.typing as npt

from pycriticalkv.arguments import check_int, check_several
from pycriticalkv.evaluation import prompts
from pycriticalkv.evaluation.divergence import divergence
from pycriticalkv.evaluation.tasks import OWN_TASK, TASKS, Sample, make_sample, score
from pycriticalkv.llama import Llama
from pycriticalkv.policy import LEAST_SHARE, PRESETS, Budget, KVPolicy, resolve_policy
from pycriticalkv.prefill import Prefill, Stream

SETTINGS = ("query-aware", "context-only")
FULL = "full"  # the arm that keeps everything
# How the prompt of an arm is read.
PREFILLS = {
    "full": Prefill("full"),
    "exact": Prefill("exact"),
    "stream": Prefill("stream"),
    "stream-peek": Prefill("stream", Stream("peek")),
    "stream-window": Prefill("stream", Stream("window")),
}
UNUSED_BUDGET = 2**30  # of a model that is evicted by hand
# The cache and the last logits after the first parts of one prompt, by window and number of parts.
States = dict[tuple[int, int], tuple[llama_cpp.LlamaState, npt.NDArray[np.single]]]

SPARE = 64  # positions beyond prompt and answer
OWN_ANSWER_TOKENS = 64  # of an answer to a user's own question
TEMPLATE_TOKENS = 48  # what a chat template may add to a sample


@dataclass(frozen=True)
class Arm:
    """A policy, a budget and how the prompt is read.

    The budget is entries per KV head (int), a share of what is evicted (float), or None: everything.
    """

    policy: str
    budget: int | float | None
    prefill: str = "full"  # of PREFILLS

    def entries(self, n: int, policy: KVPolicy) -> int:
        """Entries per KV head to keep of n."""
        if self.budget is None:
            return n
        if isinstance(self.budget, int):
            return self.budget
        return max(policy.least_budget, min(LEAST_SHARE, n), math.floor(Fraction(repr(self.budget)) * n))


@dataclass(frozen=True)
class Outcome:
    """What one arm answered to one sample."""

    task: str
    seed: int
    n_tokens: int  # asked for
    setting: str
    policy: str
    budget: int | float | None
    prefill: str
    prompt_tokens: int
    entries: int  # per KV head after the eviction
    score: float  # share of the answers that were found, 0 to 1
    kl: float  # KL(full || this arm) of the token after the full cache's first answer token, nats
    output: str

    @property
    def arm(self) -> Arm:
        """Policy, budget and prefill."""
        return Arm(self.policy, self.budget, self.prefill)

    @property
    def key(self) -> tuple[Any, ...]:
        """What makes an outcome the answer to one question of the grid."""
        return (self.task, self.seed, self.n_tokens, self.setting, self.arm)


@dataclass(frozen=True)
class Grid:
    """What is evaluated: every task at every length, seed and setting, by every policy, budget and prefill."""

    tasks: tuple[str, ...] = tuple(TASKS)
    n_tokens: tuple[int, ...] = (2048,)
    seeds: tuple[int, ...] = tuple(range(20))
    settings: tuple[str, ...] = SETTINGS
    policies: tuple[str, ...] = tuple(PRESETS)
    budgets: tuple[int | float, ...] = (0.1, 0.2, 512)
    window: int | None = None  # in place of the presets' common one
    prefills: tuple[str, ...] = ("full",)  # of PREFILLS

    def __post_init__(self) -> None:
        """Check every value; ValueError or TypeError names the first that is wrong."""
        for what in ("tasks", "n_tokens", "seeds", "settings", "policies", "budgets", "prefills"):
            check_several(what, getattr(self, what), empty=what == "tasks")
            object.__setattr__(self, what, tuple(getattr(self, what)))
        _check("task", self.tasks, TASKS)
        _check("setting", self.settings, SETTINGS)
        _check("policy", self.policies, PRESETS)
        _check("prefill", self.prefills, PREFILLS)
        object.__setattr__(self, "n_tokens", tuple(check_int("n_tokens", n, 1) for n in self.n_tokens))
        seeds = tuple(check_int("seeds", seed, -(2**63), 2**63 - 1) for seed in self.seeds)
        object.__setattr__(self, "seeds", seeds)
        least = max(self.policy(name).least_budget for name in self.policies)
        for budget in self.budgets:
            share = isinstance(budget, float) and 0 < budget <= 1
            if not share and (isinstance(budget, bool) or not isinstance(budget, int) or budget < least):
                raise ValueError(
                    f"budget={budget!r}: allowed are ints of at least window + sinks + 1 = {least} (entries) and "
                    "floats in (0, 1] (share)"
                )

    def policy(self, name: str) -> KVPolicy:
        """The policy of a name, with the grid's window unless it has one of its own (tova)."""
        policy = resolve_policy(name)
        its_own = policy.window != KVPolicy().window
        return policy if self.window is None or its_own else replace(policy, window=self.window)

    @property
    def arms(self) -> list[Arm]:
        """The full cache, then every policy at every budget, by every prefill."""
        compressed = itertools.product(self.budgets, self.policies, self.prefills)
        return [Arm(FULL, None), *(Arm(policy, budget, prefill) for budget, policy, prefill in compressed)]

    def asks(self, o: Outcome) -> bool:
        """Whether an outcome belongs to this grid; without tasks, whether it answers a user's own question."""
        if self.tasks:
            known = o.task in self.tasks and o.n_tokens in self.n_tokens and o.seed in self.seeds
        else:
            known = o.task == OWN_TASK
        return known and o.setting in self.settings and o.arm in self.arms

    @property
    def size(self) -> int:
        """Outcomes in all, a user's own questions not counted."""
        return len(self.tasks) * len(self.n_tokens) * len(self.seeds) * len(self.settings) * len(self.arms)


def _check(what: str, values: Sequence[str], known: Any) -> None:
    for value in values:
        if not isinstance(value, str) or value not in known:
            raise ValueError(f"{what}={value!r} is not known; known are {', '.join(known)}")


class Evaluator:
    """One model, opened once per policy; the system shares the weights between them.

    Args:
        model_path: A GGUF file.
        grid: What to evaluate.
        forced: Tokens that will follow a passage (``continuation.continuations``).
        **arguments: More arguments of ``Llama`` (n_threads, type_k, ...).
    """

    def __init__(self, model_path: str | Path, grid: Grid, *, forced: int = 0, **arguments: Any) -> None:
        given = {"verbose": False, **arguments}
        if grid.tasks:  # a user's own questions may take the model's whole context
            longest = max(TASKS[task].max_answer_tokens for task in grid.tasks)
            given.setdefault("n_ctx", max(grid.n_tokens) + max(TEMPLATE_TOKENS + longest + SPARE, forced))
        self.grid = grid
        self._models: dict[str, Llama] = {}
        try:
            for name in grid.policies:
                self._models[name] = Llama(
                    str(model_path), kv_budget=UNUSED_BUDGET, kv_policy=grid.policy(name), prefill="full", **given
                )
                _check_model(self._models[name], grid)
        except ValueError as e:
            self.close()
            raise ValueError(str(e).replace(f"kv_budget={UNUSED_BUDGET}", "a KV budget")) from None
        self._reader = self._models[grid.policies[0]]

    def close(self) -> None:
        """Free the models."""
        for llm in self._models.values():
            llm.close()

    def __enter__(self) -> Evaluator:
        """The evaluator itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Free the models."""
        self.close()

    def sample(self, task: str, n_tokens: int, seed: int, text: str | None = None) -> Sample:
        """The sample of a task, in tokens of this model."""

        def count(piece: str) -> int:
            return len(self._reader.tokenize(piece.encode(), add_bos=False, special=False))

        return make_sample(task, n_tokens=n_tokens, seed=seed, count_tokens=count, text=text)

    def run(self, *, done: Sequence[Outcome] = (), text: str | None = None) -> Iterator[Outcome]:
        """Evaluate what is not done yet, sample by sample; `text` is the haystack in place of public text."""
        known = {outcome.key for outcome in done}
        for n_tokens in self.grid.n_tokens:
            for task in self.grid.tasks:
                for seed in self.grid.seeds:
                    states: States = {}
                    for setting in self.grid.settings:
                        arms = self._missing(task, seed, n_tokens, setting, known)
                        if arms:
                            sample = self.sample(task, n_tokens, seed, text)
                            yield from self.evaluate(sample, setting, arms, n_tokens, states)

    def ask(self, questions: Sequence[Sample], *, done: Sequence[Outcome] = ()) -> Iterator[Outcome]:
        """Evaluate a user's own questions (``tasks.load_questions``); their length stands as 0 tokens asked for.

        Raises:
            ValueError: A question and its answer are longer than the context; nothing is evaluated.
        """
        for sample in questions:
            n = len(prompts.build(self._reader, sample.context, sample.question).tokens)
            if n + OWN_ANSWER_TOKENS > self.context:
                raise ValueError(
                    f"question {sample.seed}: {n} tokens and an answer of {OWN_ANSWER_TOKENS}: the context is "
                    f"{self.context} tokens"
                )
        known = {outcome.key for outcome in done}
        for sample in questions:
            states: States = {}
            for setting in self.grid.settings:
                arms = self._missing(sample.task, sample.seed, 0, setting, known)
                if arms:
                    yield from self.evaluate(sample, setting, arms, 0, states)

    def _missing(self, task: str, seed: int, n_tokens: int, setting: str, known: set[tuple[Any, ...]]) -> list[Arm]:
        return [arm for arm in self.grid.arms if (task, seed, n_tokens, setting, arm) not in known]

    def evaluate(
        self, sample: Sample, setting: str, arms: Sequence[Arm], n_tokens: int, states: States | None = None
    ) -> Iterator[Outcome]:
        """Outcomes of all arms for one sample, from one prefill per window and one for each arm that is not read whole.

        `states` holds what has been read of this sample before, and is added to.
        """
        states = {} if states is None else states
        prompt = prompts.build(self._reader, sample.context, sample.question)
        # context and question are read one after the other in both settings, so that they share the context's cache
        parts = [prompt.context, prompt.question] if setting == "query-aware" else [prompt.context]
        rest = [] if setting == "query-aware" else prompt.question
        limit = OWN_ANSWER_TOKENS if sample.task == OWN_TASK else TASKS[sample.task].max_answer_tokens
        first, full = None, None
        for arm in [Arm(FULL, None), *(arm for arm in arms if arm.policy != FULL)]:
            llm, entries, logits = self.evicted(arm, parts, states)
            if rest:
                llm.eval(rest)
                logits = last_logits(llm)
            # The prompt's last logits were computed before the eviction, if the question is part of it. Those after
            # one more token, the same in all arms, were not.
            first = int(np.argmax(logits)) if first is None else first
            evicted = llm.save_state()
            llm.eval([first])
            second = last_logits(llm)
            full = second if full is None else full
            if arm in arms:
                kl = float(divergence(full[None], second[None])[0])
                llm.load_state(evicted)
                output = _answer(llm, logits, limit)
                yield Outcome(
                    sample.task, sample.seed, n_tokens, setting, arm.policy, arm.budget, arm.prefill,
                    len(prompt.tokens), entries, score(sample, output), kl, output,
                )  # fmt: skip

    def evicted(
        self, arm: Arm, parts: Sequence[list[int]], states: States
    ) -> tuple[Llama, int, npt.NDArray[np.single]]:
        """The model with a prompt evicted as the arm says, its entries per KV head, and the last token's logits.

        With prefill "full" the parts of the prompt are read one after the other, or taken from `states`.
        """
        llm = self._reader if arm.policy == FULL else self._models[arm.policy]
        tokens = list(itertools.chain(*parts))
        entries = min(arm.entries(len(tokens), llm._kv_policy), len(tokens))
        if arm.prefill != "full":
            return llm, entries, _read_by(llm, arm.prefill, tokens, entries)
        state, logits = _read(llm, parts, states)
        llm.load_state(state)
        if arm.policy != FULL:
            llm._kv_store.evict(max(entries, llm._kv_policy.least_budget))
        return llm, entries, logits

    def tokenize(self, text: str) -> list[int]:
        """Tokens of a text alone."""
        return list(self._reader.tokenize(text.encode(), add_bos=False, special=False))

    @property
    def first_tokens(self) -> list[int]:
        """What the model wants in front of every text."""
        return list(self._reader.tokenize(b"", add_bos=True))

    @property
    def context(self) -> int:
        """Positions that the model was trained for and that the evaluator has room for."""
        return int(min(self._reader.n_ctx(), self._reader._model.n_ctx_train()))


def _check_model(llm: Llama, grid: Grid) -> None:
    for name in grid.prefills:
        PREFILLS[name].check(llm._kv_policy.window, llm._kv_store.check_prefill)
    longest = llm._model.n_ctx_train()
    template = len(prompts.build(llm, "", "").tokens)
    answer = template + max((TASKS[task].max_answer_tokens for task in grid.tasks), default=0)
    if grid.tasks and max(grid.n_tokens) + answer > longest:
        raise ValueError(
            f"n_tokens={max(grid.n_tokens)}: allowed is at most {longest - answer}, since the model's context is "
            f"{longest} and chat template and answer may take {answer}"
        )


def last_logits(llm: Llama) -> npt.NDArray[np.single]:
    """Logits of the token evaluated last, [n_vocab]."""
    row = llama_cpp.llama_get_logits_ith(llm.ctx, -1)
    return np.array(np.ctypeslib.as_array(row, shape=(llm.n_vocab(),)))


def _read(
    llm: Llama, parts: Sequence[list[int]], states: States
) -> tuple[llama_cpp.LlamaState, npt.NDArray[np.single]]:
    """The cache after all parts, nothing evicted, and the last token's logits."""
    key = llm._kv_policy.window, len(parts)
    if key not in states:
        if len(parts) == 1:
            llm.reset()
        else:
            llm.load_state(_read(llm, parts[:-1], states)[0])
        llm.eval(parts[-1])
        states[key] = llm.save_state(), last_logits(llm)
    return states[key]


def _read_by(llm: Llama, prefill: str, tokens: list[int], entries: int) -> npt.NDArray[np.single]:
    """Read a prompt into an empty cache in another way than whole, keep so many entries; the last token's logits."""
    unused, mode = llm._kv_budget, llm._kv_prefill
    llm.reset()
    try:
        budget = max(entries, llm._kv_policy.least_budget)  # a prompt may be shorter than that
        llm._kv_budget, llm._kv_prefill = Budget.parse(budget, llm._kv_policy), PREFILLS[prefill]
        llm.eval(tokens)
    finally:
        llm._kv_budget, llm._kv_prefill = unused, mode
    return last_logits(llm)


def _answer(llm: Llama, logits: npt.NDArray[np.single], limit: int) -> str:
    """Greedy answer of at most `limit` tokens; the first token follows from `logits`."""
    out: list[int] = []
    for _ in range(limit):
        token = int(np.argmax(logits))
        if llama_cpp.llama_vocab_is_eog(llm._model.vocab, token):
            break
        out.append(token)
        llm.eval([token])
        logits = last_logits(llm)
    return str(llm.detokenize(out).decode("utf-8", errors="replace"))


# ---- results ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """Where the outcomes of one file come from: its first line. Files of another source are not added to."""

    model: str  # file name
    model_digest: str
    cache_type: str
    window: int | None
    text: str | None  # sha256 of the haystack, None: public text
    questions: str | None  # sha256 of the file, None: the tasks
    format: int = 4


def open_outcomes(path: Path, source: Source, kinds: Sequence[type[Any]] = (Outcome,)) -> list[Any]:
    """Outcomes, or records of other `kinds`, that a file holds already; a file that is not there is begun.

    A last line that was cut off, because the program was stopped while it wrote, is removed.

    Raises:
        ValueError: The file holds something else, or outcomes of another model, cache type, window, text or questions.
            Nothing has been written then.
    """
    if not path.exists() or path.stat().st_size == 0:
        _write(path, "w", json.dumps(asdict(source)))
        return []
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    records = [_record(line, number, path) for number, line in enumerate(whole.splitlines(), start=1)]
    if not records or set(records[0]) != {field.name for field in fields(Source)}:
        raise ValueError(f"{path}: not a file of outcomes; give another file")
    for name, value in asdict(source).items():
        if records[0][name] != value:
            raise ValueError(f"{path}: its {name} is {records[0][name]!r}, here it is {value!r}; give another file")
    by_names = {frozenset(field.name for field in fields(kind)): kind for kind in kinds}
    outcomes = []
    for number, record in enumerate(records[1:], start=2):
        if frozenset(record) not in by_names:
            wanted = " or ".join(", ".join(sorted(names)) for names in by_names)
            raise ValueError(f"{path}, line {number}: not an outcome; needed are the fields {wanted}")
        kind = by_names[frozenset(record)]
        for name, hint in get_type_hints(kind).items():
            if not _is_of(record[name], hint):
                raise ValueError(f"{path}, line {number}: {name} is {record[name]!r}; give another file")
        outcomes.append(kind(**record))
    if whole != data:
        path.write_bytes(whole)
    return outcomes


def _record(line: bytes, number: int, path: Path) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError:
        raise ValueError(f"{path}, line {number}: not JSON; give another file") from None
    if not isinstance(record, dict):
        raise ValueError(f"{path}, line {number}: not an object; give another file")
    return record


def _is_of(value: Any, hint: Any) -> bool:
    kinds = get_args(hint) or (hint,)
    return not isinstance(value, bool) and (isinstance(value, kinds) or (float in kinds and isinstance(value, int)))


def append_outcome(path: Path, outcome: Any) -> None:
    """One JSON line more."""
    _write(path, "a", json.dumps(asdict(outcome), ensure_ascii=False))


def _write(path: Path, mode: str, line: str) -> None:
    try:
        with path.open(mode, encoding="utf-8") as file:
            file.write(line + "\n")
    except OSError as e:  # of a full disk it does not name the file
        raise OSError(e.errno, e.strerror, str(path)) from None
