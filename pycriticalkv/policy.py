"""Which entries stay: the choices that make a policy, the named presets, and budgets."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from fractions import Fraction
from numbers import Integral, Real
from typing import Any

SCORES = {"window": 0, "recency": 1, "random": 2, "key-norm": 3, "keydiff": 4}
AGGREGATES = {"mean": 0, "max": 1}
VALUES = {"none": 0, "critical": 1, "vatp": 2, "caote": 3}
NORMS = {"gram": 0, "l2": 1, "l1": 2}
HEADS = {"uniform": 0, "shared": 1, "adaptive": 2}
LAYERS = {"uniform": 0, "pyramid": 1, "adaptive": 2}


def _one_of(name: str, value: Any, known: dict[str, int]) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{name}={value!r}: allowed are {', '.join(known)}")
    if value not in known:
        raise ValueError(f"{name}={value!r} is not known; known are {', '.join(known)}")


def _integer(name: str, value: Any, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name}={value!r}: allowed is an int from {least} to {most}")
    if not least <= int(value) <= most:
        raise ValueError(f"{name}={value!r}: allowed is an int from {least} to {most}")


def _number(name: str, value: Any, least: float, most: float) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}={value!r}: allowed is a number from {least} to {most}")
    if not (least <= float(value) <= most and math.isfinite(value)):
        raise ValueError(f"{name}={value!r}: allowed is a finite number from {least} to {most}")


@dataclass(frozen=True)
class KVPolicy:
    """One eviction policy: independent choices, each with its settings.

    Attributes:
        score: What ranks an entry: ``"window"``, the attention of the last ``window`` queries (SnapKV, arXiv
            2404.14469); ``"recency"``, its position (StreamingLLM, arXiv 2309.17453); ``"random"``, a seeded hash;
            ``"key-norm"``, minus the length of its key (arXiv 2406.11430); ``"keydiff"``, minus the cosine of its key
            and the mean direction of all keys (KeyDiff, arXiv 2504.15364). The last four ask no query.
        aggregate: How the window's queries and the query heads of one KV head are combined: ``"mean"``, or ``"max"``
            with the mean over all entries as floor (DefensiveKV, arXiv 2510.13334).
        value: ``"critical"``: two stages, the second by attention times projected value norm (CriticalKV, arXiv
            2502.03805); ``"vatp"``: attention times the L1 norm of the value (VATP, arXiv 2406.12335); ``"caote"``:
            A / (1 - A) times the distance of the value from the head's output, the mean attention of the window's
            queries over all values (CAOTE, arXiv 2504.14051; the mean is ours); ``"none"``: the score alone. All but
            ``"none"`` need ``score="window"`` and cannot share entries between heads.
        heads: ``"uniform"``: each KV head of a layer keeps as many entries as the others, of its own choice;
            ``"shared"``: all of them keep the same ones, by the mean of their scores (TOVA, arXiv 2401.06104);
            ``"adaptive"``: the budget is their mean, and a head gets as many as the best entries of the layer, by the
            score alone, are in it (Ada-KV, arXiv 2407.11550).
        layers: ``"uniform"``: each layer has the same budget; ``"pyramid"``: it falls in equal steps from nearly twice
            the budget in the first layer to little more than what is always kept in the last (PyramidKV, arXiv
            2406.02069; of what is free, from 39/20 to 1/20 of the mean; what a layer cannot use goes to the next);
            ``"adaptive"``: as ``heads="adaptive"``, which it needs, but among the heads of all layers. The budget is
            their mean. Adaptive layers are chosen together, so ``prefill="exact"`` is not possible.
        norm: The norm of a value projected by W_O: ``"gram"`` (L2, one matrix per KV head), ``"l2"`` (per query
            head), ``"l1"`` (the paper's, slower: it unpacks W_O at every eviction).
        window: The last entries, always kept, whose queries observe; 1 to 256.
        sinks: The first positions, always kept; 0 to 4096.
        pool: Odd width of the average pool over entries; 1 to 63.
        alpha: Share of the free budget that stage 1 of ``"critical"`` takes; 0 to 1.
        eps: Added to the attention in stage 2 with ``aggregate="mean"``; at least 0.
        slack: Entries over the budget that generation may add before it evicts again; at least 1. ``None``: an eighth
            of the budget, but 32 to 256.
        seed: Seed of ``score="random"``.
        head_floor: Share of the mean free budget that each head gets at least with ``heads="adaptive"``; 0 to 1.
        measure: Whether each eviction measures what it changes (``KVStats.bound`` and ``change``), which takes about
            twice as long as scoring. It does not change what is kept, and policies that differ in it alone are equal.

    Raises:
        ValueError: A value is out of range or unknown.
        TypeError: A value has the wrong type.
    """

    score: str = "window"
    aggregate: str = "max"
    value: str = "critical"
    norm: str = "gram"
    window: int = 16
    sinks: int = 4
    pool: int = 5
    alpha: float = 0.5
    eps: float = 1e-4
    slack: int | None = None
    seed: int = 0
    heads: str = "uniform"
    layers: str = "uniform"
    head_floor: float = 0.2
    measure: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        """Check every setting."""
        _one_of("score", self.score, SCORES)
        _one_of("aggregate", self.aggregate, AGGREGATES)
        _one_of("value", self.value, VALUES)
        _one_of("norm", self.norm, NORMS)
        _one_of("heads", self.heads, HEADS)
        _one_of("layers", self.layers, LAYERS)
        _integer("window", self.window, 1, 256)
        _integer("sinks", self.sinks, 0, 4096)
        _integer("pool", self.pool, 1, 63)
        if self.pool % 2 == 0:
            raise ValueError(f"pool={self.pool}: allowed is an odd number from 1 to 63")
        _number("alpha", self.alpha, 0.0, 1.0)
        _number("eps", self.eps, 0.0, math.inf)
        _number("head_floor", self.head_floor, 0.0, 1.0)
        if self.slack is not None:
            _integer("slack", self.slack, 1, 2**30)
        _integer("seed", self.seed, 0, 2**64 - 1)
        if not isinstance(self.measure, bool):
            raise TypeError(f"measure={self.measure!r}: allowed are True and False")
        if self.value != "none" and self.score != "window":
            raise ValueError(f'value={self.value!r} needs score="window", not score={self.score!r}')
        if self.heads == "shared" and self.score == "random":
            raise ValueError('heads="shared" does not go with score="random", which draws for each head')
        if self.layers == "adaptive" and self.heads != "adaptive":
            raise ValueError(f'layers="adaptive" needs heads="adaptive", not heads={self.heads!r}')
        if self.value != "none" and self.heads == "shared":
            raise ValueError(f'value={self.value!r} does not go with heads="shared"')

    @property
    def least_budget(self) -> int:
        """Fewest entries per head that leave one to choose."""
        return self.window + self.sinks + 1

    def slack_for(self, budget: int) -> int:
        """Entries over ``budget`` that are allowed before the next eviction."""
        return self.slack if self.slack is not None else min(max(budget // 8, 32), 256)


PRESETS: dict[str, KVPolicy] = {
    "critical-max": KVPolicy(),
    "criticalkv": KVPolicy(aggregate="mean"),
    "snapkv": KVPolicy(aggregate="mean", value="none"),
    "ada-criticalkv": KVPolicy(aggregate="mean", heads="adaptive"),
    "ada-snapkv": KVPolicy(aggregate="mean", value="none", heads="adaptive"),
    "pyramidkv": KVPolicy(aggregate="mean", value="none", layers="pyramid"),
    "streamingllm": KVPolicy(score="recency", value="none"),
    "random": KVPolicy(score="random", value="none"),
    "vatp": KVPolicy(aggregate="mean", value="vatp"),
    "caote": KVPolicy(aggregate="mean", value="caote"),
    "tova": KVPolicy(aggregate="mean", value="none", heads="shared", window=1, pool=1),
    "knorm": KVPolicy(score="key-norm", value="none"),
    "keydiff": KVPolicy(score="keydiff", value="none"),
}
DEFAULT_PRESET = "critical-max"
LEAST_SHARE = 64  # entries: a share of a short prompt is never less


def resolve_policy(kv_policy: str | KVPolicy | None) -> KVPolicy:
    """The policy that the argument ``kv_policy`` of ``Llama`` means; ``None`` is the default preset."""
    if kv_policy is None:
        kv_policy = DEFAULT_PRESET
    if isinstance(kv_policy, KVPolicy):
        return replace(kv_policy)
    if not isinstance(kv_policy, str):
        raise TypeError(f"kv_policy={kv_policy!r}: allowed are a KVPolicy or one of {', '.join(PRESETS)}")
    if kv_policy not in PRESETS:
        raise ValueError(f"kv_policy={kv_policy!r} is not known; known are {', '.join(PRESETS)}")
    return PRESETS[kv_policy]


@dataclass(frozen=True)
class Budget:
    """``kv_budget`` of ``Llama``: a number of entries, or a share of each prompt."""

    entries: int | None
    share: Fraction | None
    least: int

    @classmethod
    def parse(cls, kv_budget: Any, policy: KVPolicy) -> Budget:
        """Check the argument.

        Raises:
            TypeError: It is neither an int nor a float.
            ValueError: An int below window + sinks + 1, or a float outside (0, 1).
        """
        least = policy.least_budget
        allowed = (
            f"allowed are an int of at least window + sinks + 1 = {least} (entries) and below 2**31, "
            "or a float in (0, 1) (share)"
        )
        if isinstance(kv_budget, bool) or not isinstance(kv_budget, Real):
            raise TypeError(f"kv_budget={kv_budget!r}: {allowed}")
        if isinstance(kv_budget, Integral):
            if not least <= int(kv_budget) < 2**31:
                raise ValueError(f"kv_budget={kv_budget!r}: {allowed}")
            return cls(int(kv_budget), None, least)
        share = float(kv_budget)
        if not 0.0 < share < 1.0:
            raise ValueError(f"kv_budget={kv_budget!r}: {allowed}")
        # the decimal that the user wrote: 0.29 of 100 is 29, though 0.29 * 100 in binary is less
        return cls(None, Fraction(repr(share)), least)

    def for_prompt(self, n_tokens: int) -> int:
        """Entries per head for ``n_tokens`` tokens so far."""
        if self.entries is not None:
            return self.entries
        assert self.share is not None
        return max(self.least, LEAST_SHARE, math.floor(self.share * n_tokens))
