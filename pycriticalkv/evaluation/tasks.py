"""Long prompts with known answers, of the kinds of RULER (arXiv 2404.06654), and questions of the user's own.

Something is hidden in a long text and asked for afterwards. The texts and words are this package's own; prose to hide
things in comes with Python (``pydoc_data.topics``) or from the user, so that nothing has to be downloaded. Lengths are
in tokens of the model under test, counted by a function that the caller gives.
"""

from __future__ import annotations

import json
import math
import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from numbers import Integral
from pathlib import Path
from random import Random
from typing import Any

from pycriticalkv.evaluation.words import ADJECTIVES, NAMES, NOUNS, PLACES, SWAPS, THINGS, TRADES

OWN_TASK = "questions"  # Sample.task of what load_questions reads
ENOUGH = 0.98  # of n_tokens: the search for the size of a haystack stops here
LEAST_FILL = 0.9  # of n_tokens: less is too short
LONGEST_PIECE = 400  # characters; text without sentences is cut into pieces of at most this

# White space after a full stop (and a quote or parenthesis) unless a lower-case letter follows or it belongs to "e.g."
# or "i.e."; after an ideographic full stop nothing is needed.
SENTENCE_END = re.compile(
    "(?:(?<=[.!?\u2026])(?<!e\\.g\\.)(?<!i\\.e\\.)|(?<=[.!?\u2026][\"'\u2019\u201d)]))\\s+(?=[^\\sa-z])"
    "|(?<=[\u3002\uff01\uff1f])"
)

FILLER = (
    "The kettle is on and the cups are out. ",
    "Rain runs down the window. ",
    "The road goes up and the road goes down. ",
    "We walk a little and we rest a little. ",
    "Then it all begins again. ",
)


@dataclass(frozen=True)
class Sample:
    """One context, the question asked after it, and what has to be in the output."""

    task: str
    seed: int
    context: str
    question: str
    answers: tuple[str, ...]
    claimed: tuple[int, ...]  # how often each answer occurs in the context, in any case


@dataclass(frozen=True)
class _Draft:
    """A sample of some size; at the size `whole` its haystack would end with a whole sentence."""

    context: str
    question: str
    answers: tuple[str, ...]
    claimed: tuple[int, ...]
    whole: int


@dataclass(frozen=True)
class Task:
    """How a kind of sample is made.

    `build` makes a sample of a size: characters of haystack, or number of needles or words. It starts with the same
    random numbers at every size, so that length changes what surrounds the needles, and rarely the needles.
    """

    name: str
    description: str  # one line
    max_answer_tokens: int  # what a model may need to answer, a sentence around the answer included
    build: Callable[[Random, int, Sequence[str]], _Draft]
    haystack: str = "prose"  # or "filler" or "none"
    least: int = 0  # size
    most: int | None = None  # size
    per_token: float = 4.0  # size per token, a first guess


# ---- haystacks -------------------------------------------------------------------------------------------------------


def _sentences(paragraphs: Sequence[str]) -> tuple[str, ...]:
    """Sentences, each with the white space after it; a paragraph ends with two newlines."""
    pieces: list[str] = []
    for paragraph in paragraphs:
        for sentence in SENTENCE_END.split(" ".join(paragraph.split())):
            rest = sentence.strip()
            while len(rest) > LONGEST_PIECE:
                cut = rest.rfind(" ", 1, LONGEST_PIECE + 1)
                cut = LONGEST_PIECE if cut < 0 else cut
                pieces.append(rest[:cut] + " ")
                rest = rest[cut:].lstrip()
            if rest:
                pieces.append(rest + " ")
        if pieces:
            pieces[-1] = pieces[-1].rstrip() + "\n\n"
    return tuple(pieces)


@cache
def _public_prose() -> tuple[str, ...]:
    """Paragraphs of the language reference that are prose: no code, no lists, no headings."""
    try:
        from pydoc_data.topics import topics  # noqa: PLC0415  (not part of every system's minimal Python)
    except ImportError:
        raise ValueError("text=None: this Python has no pydoc_data.topics to take prose from; give a text") from None
    paragraphs: dict[str, None] = {}  # the topics repeat each other
    for name in sorted(topics):
        for block in re.split(r"\n\s*\n", topics[name]):
            if re.search(r"\n\s|\n[*=~^-]{3}|[<>={}\[\]|\\%`@]|https?:", block):
                continue
            plain = " ".join(block.replace("-\n", "-").replace("*", "").split())
            if len(plain) >= 120 and plain[0].isupper() and plain.endswith("."):
                paragraphs.setdefault(plain)
    return _sentences(list(paragraphs))


@lru_cache(maxsize=1)
def _own_prose(text: str) -> tuple[str, ...]:
    return _sentences(re.split(r"\n\s*\n", text))


def prose(text: str | None) -> tuple[str, ...]:
    """Sentences of a text, or of public text when there is none."""
    return _public_prose() if text is None else _own_prose(text)


@dataclass(frozen=True)
class _Haystack:
    """Whole sentences, and the beginning of one more."""

    whole: list[str]
    tail: str

    @property
    def size(self) -> int:
        """Characters of the whole sentences."""
        return sum(map(len, self.whole))

    def folded(self) -> str:
        return "".join([*self.whole, self.tail]).casefold()

    def hide(self, needles: Sequence[tuple[float, str]]) -> str:
        """The text with needles between its sentences, by depth from 0 to 1; equal depths keep their order."""
        slots: list[list[str]] = [[] for _ in range(len(self.whole) + 1)]
        for depth, needle in sorted(needles, key=lambda pair: pair[0]):
            slots[int(depth * len(slots))].append(needle + " ")
        parts = list(slots[0])
        for sentence, hidden in zip(self.whole, slots[1:], strict=True):
            parts += [sentence, *hidden]
        return "".join([*parts, self.tail]).strip()


def _haystack(rng: Random, size: int, pieces: Sequence[str]) -> _Haystack:
    """The first `size` characters from a seeded paragraph on, without the part of a word at the end."""
    starts = [0, *(i + 1 for i, piece in enumerate(pieces[:-1]) if piece.endswith("\n\n"))]
    at = starts[int(rng.random() * len(starts))]
    whole: list[str] = []
    left = size
    while len(piece := pieces[at % len(pieces)]) <= left:
        whole.append(piece)
        left -= len(piece)
        at += 1
    words = piece.rstrip()
    tail = words[:left] if " " not in words else piece[: left + 1].rpartition(" ")[0]
    return _Haystack(whole, tail)


# ---- needles ---------------------------------------------------------------------------------------------------------


def _draw(rng: Random, n: int, make: Callable[[Random], str], text: str) -> list[str]:
    """`n` different draws that do not occur in the (case-folded) text."""
    drawn: dict[str, None] = {}
    while len(drawn) < n:
        one = make(rng)
        if one.casefold() not in text:
            drawn.setdefault(one)
    return list(drawn)


def _key(rng: Random) -> str:
    return f"{ADJECTIVES[int(rng.random() * len(ADJECTIVES))]}-{NOUNS[int(rng.random() * len(NOUNS))]}"


def _number(rng: Random) -> str:
    return str(10**6 + int(rng.random() * 9 * 10**6))


def _uuid(rng: Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def _name(rng: Random) -> str:
    """Of a variable: consonants, to be no word."""
    return "".join("BCDFGHJKLMNPQRSTVWXZ"[int(rng.random() * 20)] for _ in range(5))


def _listed(items: Sequence[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def _niah(
    rng: Random, size: int, pieces: Sequence[str], *,
    keys: int = 1, values: int = 1, asked: int = 1, key: Callable[[Random], str] = _key, uuids: bool = False,
) -> _Draft:  # fmt: skip
    """Needles in a haystack; without pieces, `size` needles are the haystack."""
    what = "ticket code" if uuids else "ticket number"
    hay = _haystack(rng, size, pieces) if pieces else _Haystack([], "")
    n = keys if pieces else size
    depths = [rng.random() for _ in range(n * values)] if pieces else [0.0] * n
    index = 0 if pieces else int(rng.random() * n)  # of the first key asked; depths are random, so 0 is as good as any
    text = hay.folded()
    names = _draw(rng, n, key, text)
    numbers = _draw(rng, n * values, _uuid if uuids else _number, text)
    article = "The" if values == 1 else "One"
    needles = [f"{article} {what} of {names[i // values]} is {number}." for i, number in enumerate(numbers)]
    names, answers = names[index : index + asked], numbers[index * values : (index + asked) * values]
    if len(answers) == 1:
        question = f"What is the {what} of {names[0]} in the text above?"
    elif len(names) == 1:
        question = f"What are all {len(answers)} {what}s of {names[0]} in the text above?"
    else:
        question = f"What are the {what}s of {_listed(names)} in the text above?"
    intro = f"Some {what}s are hidden in this text. Remember them, they will be asked for.\n\n"
    body = hay.hide(list(zip(depths, needles, strict=True)))
    return _Draft(
        intro + body, f"{question} Answer:", tuple(answers), (1,) * len(answers), hay.size if pieces else size
    )


def _variables(rng: Random, size: int, pieces: Sequence[str], *, chains: int = 2, names: int = 4) -> _Draft:
    """Chains of assignments, each in its order; the variables of the first chain are asked for."""
    hay = _haystack(rng, size, pieces)
    depths = [sorted(rng.random() for _ in range(names)) for _ in range(chains)]
    values = _draw(rng, chains, lambda rng: str(10**4 + int(rng.random() * 9 * 10**4)), hay.folded())
    variables = _draw(rng, chains * names, _name, hay.folded())
    needles = []
    for chain, value in enumerate(values):
        own = variables[chain * names : (chain + 1) * names]
        sources = [value, *own]
        needles += [
            (depth, f"Set {name} = {source}.") for depth, name, source in zip(depths[chain], own, sources, strict=False)
        ]
    intro = "Some variables are set in this text, to a number or to what another variable is. Keep track of them.\n\n"
    question = (
        f"Which {names} variables of the text above are {values[0]}, because they were set to it "
        "or to a variable that is? Name them all. Answer:"
    )
    claimed = (2,) * (names - 1) + (1,)
    return _Draft(intro + hay.hide(needles), question, tuple(variables[:names]), claimed, hay.size)


# ---- words -----------------------------------------------------------------------------------------------------------

COMMON = 10  # words asked for in a list of `size` words; one for every 30 words if it is shorter than 300
ZIPF = 0.3828  # 1 / zeta(1.5): the share of the most frequent word when the k-th has a share in proportion to k ** -1.5


def _common_words(rng: Random, size: int, _: Sequence[str]) -> _Draft:
    """A list in which some words occur ten times as often as the others."""
    intro = "Some words of this list occur more often than the others. Remember them, they will be asked for.\n\n"
    n = min(COMMON, size // 30)
    which, occur = ("word", "occurs") if n == 1 else (f"{n} words", "occur")
    question = f"Which {which} {occur} most often in the list above? Answer:"
    known = [noun for noun in NOUNS if noun not in (intro + question).casefold()]
    rng.shuffle(known)
    answers, others = known[:n], known[n:]
    times = 1  # of the others
    while size - 10 * n * times > len(others) * times:
        times += 1
    rest = size - 10 * n * times
    words = answers * (10 * times) + [others[i // times] for i in range(rest)]
    rng.shuffle(words)
    return _Draft(intro + ", ".join(words), question, tuple(answers), (10 * times,) * n, size)


def _invented(rng: Random) -> str:
    """A word of three syllables; all have six letters, so that none is inside another."""
    return "".join("bdfgklmnprstvz"[int(rng.random() * 14)] + "aeiou"[int(rng.random() * 5)] for _ in range(3))


def _frequent_words(rng: Random, size: int, _: Sequence[str]) -> _Draft:
    """Invented words by a Zipf law of exponent 1.5, with exactly the frequencies it says, so that there is no tie."""
    intro = "This text is in an invented language. Some of its words are frequent; they will be asked for.\n\n"
    question = "Which 3 words occur most often in the invented text above? Answer:"
    counts: list[int] = []
    while (count := int(size * ZIPF / ((k := len(counts) + 1) * math.sqrt(k)))) > 0:
        counts.append(count)
    counts += [1] * (size - sum(counts))
    known = _draw(rng, len(counts), _invented, (intro + question).casefold())
    words = [word for word, count in zip(known, counts, strict=True) for _ in range(count)]
    rng.shuffle(words)
    return _Draft(intro + " ".join(words), question, tuple(known[:3]), tuple(counts[:3]), size)


# ---- facts -----------------------------------------------------------------------------------------------------------

# What is told, what is asked, and the answers there can be.
FACTS = (
    ("{name} left the {thing} in the {answer}.", "Where did {name} leave the {thing}?", PLACES),
    ("{name} bought the {thing} from a {answer}.", "From whom did {name} buy the {thing}?", TRADES),
    ("{name} swapped the {thing} for a {answer}.", "For what did {name} swap the {thing}?", SWAPS),
)


def _facts(rng: Random, size: int, pieces: Sequence[str], *, task: str, n: int, kinds: int) -> _Draft:
    """`n` facts about different people and things with different answers; one is asked."""
    hay = _haystack(rng, size, pieces)
    depths = [rng.random() for _ in range(n)]
    first = int(rng.random() * kinds)
    chosen = [FACTS[(first + i) % kinds] for i in range(n)]
    text = hay.folded()

    def free(words: Sequence[str], n: int) -> list[str]:
        """`n` of the words, that the text does not have."""
        there = [word for word in _shuffled(rng, words) if word.casefold() not in text]
        if len(there) < n:
            raise ValueError(
                f"text has all but {len(there)} of the words {', '.join(words[:3])}, ... that task {task!r} hides; "
                f"allowed is a text that lacks at least {n} of these {len(words)}"
            )
        return there[:n]

    names, things = free(NAMES, n), free(THINGS, n)
    answers = {told: iter(free(pool, sum(fact[0] == told for fact in chosen))) for told, _, pool in FACTS[:kinds]}
    needles = []
    asked = ("", "")
    for name, thing, (told, question, _), depth in zip(names, things, chosen, depths, strict=True):
        answer = next(answers[told])
        needles.append((depth, told.format(name=name, thing=thing, answer=answer)))
        asked = asked if asked[0] else (question.format(name=name, thing=thing), answer)
    intro = "Read this text carefully. A question about a detail of it will follow.\n\n"
    return _Draft(intro + hay.hide(needles), f"{asked[0]} Answer:", (asked[1],), (1,), hay.size)


def _shuffled(rng: Random, words: Sequence[str]) -> list[str]:
    return rng.sample(words, len(words))


# ---- tasks -----------------------------------------------------------------------------------------------------------

_ONLY_NEEDLES: dict[str, Any] = {"haystack": "none", "least": 1}
_ALL = (
    Task("niah-single-1", "a number in repeated sentences", 40, _niah, "filler"),
    Task("niah-single-2", "a number in prose", 40, _niah),
    Task("niah-single-3", "a UUID in prose", 80, partial(_niah, uuids=True)),
    Task("niah-multikey-1", "4 numbers in prose, one asked", 40, partial(_niah, keys=4)),
    Task("niah-multikey-2", "nothing but numbers, one asked", 40, _niah, **_ONLY_NEEDLES, per_token=0.05,
         most=len(ADJECTIVES) * len(NOUNS) // 4),
    Task("niah-multikey-3", "nothing but UUIDs, found by UUIDs, one asked", 120,
         partial(_niah, key=_uuid, uuids=True), **_ONLY_NEEDLES, per_token=0.02),
    Task("niah-multivalue", "4 numbers of one key in prose, all asked", 100, partial(_niah, values=4)),
    Task("niah-multiquery", "4 numbers in prose, all asked", 140, partial(_niah, keys=4, asked=4)),
    Task("variable-tracking", "which variables have a value, 2 chains of 4 assignments in repeated sentences", 80,
         _variables, "filler"),
    Task("common-words", "the 10 most frequent words of a list, fewer if it has less than 300", 100, _common_words,
         "none", least=30, per_token=0.4),
    Task("frequent-words", "the 3 most frequent of invented words under a Zipf law", 60, _frequent_words,
         "none", least=50, most=100_000, per_token=0.25),
    Task("facts", "where somebody left something, told in one sentence among prose", 40,
         partial(_facts, task="facts", n=1, kinds=1)),
    Task("fact-qa", "8 plain facts among prose, one asked", 40, partial(_facts, task="fact-qa", n=8, kinds=3)),
)  # fmt: skip
TASKS: dict[str, Task] = {task.name: task for task in _ALL}


def make_sample(
    task: str, *, n_tokens: int, seed: int, count_tokens: Callable[[str], int], text: str | None = None
) -> Sample:
    """A sample of a task; the same arguments make the same sample.

    Context and question together have at most `n_tokens` tokens, each counted by itself, and at least 90 % of that.
    Less is possible where the haystack consists of needles only and one more would be too much (niah-multikey-2 below
    some 250 tokens, niah-multikey-3 below some 1,000), where there are no more different keys (niah-multikey-2 above
    some 300,000 tokens) and above 100,000 words of frequent-words.

    Args:
        task: A name of ``TASKS``.
        n_tokens: Length asked for, in tokens. What a chat template adds is not counted.
        seed: Any int.
        count_tokens: Number of tokens of a text, without special tokens.
        text: Prose to hide things in, repeated if it is too short; it has no effect on tasks without prose. By default
            it is the language reference of the running Python, which differs between Python versions.

    Raises:
        ValueError: An argument is not allowed, or `n_tokens` is too small for the needles and the question alone; the
            message says what is allowed.
    """
    if not isinstance(task, str) or task not in TASKS:
        raise ValueError(f"task={task!r} is not known; known are {', '.join(TASKS)}")
    if isinstance(n_tokens, bool) or not isinstance(n_tokens, Integral) or n_tokens < 1:
        raise ValueError(f"n_tokens={n_tokens!r}: allowed are positive ints")
    if isinstance(seed, bool) or not isinstance(seed, Integral):
        raise ValueError(f"seed={seed!r}: allowed are ints")
    if not callable(count_tokens):
        raise ValueError(f"count_tokens={count_tokens!r}: allowed is a function of a text that returns its tokens")
    if text is not None and not (isinstance(text, str) and text.strip() and _is_unicode(text)):
        raise ValueError(f"text={_brief(text)}: allowed are None and Unicode text that is not blank")
    spec = TASKS[task]
    pieces: Sequence[str] = ()
    if spec.haystack == "filler":
        pieces = FILLER
    elif spec.haystack == "prose":
        pieces = prose(text)
    draft = _fit(spec, int(n_tokens), int(seed), count_tokens, pieces)
    return Sample(task, int(seed), draft.context, draft.question, draft.answers, draft.claimed)


def _fit(spec: Task, n_tokens: int, seed: int, count_tokens: Callable[[str], int], pieces: Sequence[str]) -> _Draft:
    """The largest draft with at most `n_tokens`, or one with nearly as many, by interpolation and bisection."""

    def attempt(size: int) -> tuple[_Draft, int]:
        draft = spec.build(Random(f"{spec.name}/{seed}"), size, pieces)
        counts = [count_tokens(draft.context), count_tokens(draft.question)]
        for count in counts:
            if isinstance(count, bool) or not isinstance(count, Integral) or count < 0:
                raise ValueError(f"count_tokens returned {count!r}; allowed are ints from 0")
        return draft, int(sum(counts))

    low, high = spec.least, (spec.most or spec.least + 64 * n_tokens) + 1
    draft, used = attempt(low)
    if used > n_tokens:
        raise ValueError(
            f"n_tokens={n_tokens} is too small for task {spec.name!r} with seed {seed}; allowed is at least {used}"
        )
    aim = n_tokens * (1 + ENOUGH) / 2
    slope = spec.per_token
    tries = 0
    while used < ENOUGH * n_tokens and high - low > 1:
        size = low + int((aim - used) * slope) if tries % 4 < 3 else (low + high) // 2
        size = min(max(size, low + 1), high - 1)
        trial, count = attempt(size)
        slope = (size - low) / (count - used) if count > used else 2 * slope
        if count <= n_tokens:
            draft, used, low = trial, count, size
        else:
            high = size
        tries += 1
    if used < LEAST_FILL * n_tokens and spec.most is None and high > spec.least + 64 * n_tokens:
        raise ValueError(
            f"count_tokens returned {used} in all for a text of {len(draft.context)} characters and its question; "
            "allowed is a count that grows with the text"
        )
    if draft.whole < low:  # end with a whole sentence, if that is long enough
        trial, count = attempt(draft.whole)
        if LEAST_FILL * n_tokens <= count <= n_tokens:
            return trial
    return draft


def score(sample: Sample, output: str) -> float:
    """Share of the answers that are in the output, in any case, 0 to 1 (RULER's string_match_all)."""
    folded = output.casefold()
    return sum(answer.casefold() in folded for answer in sample.answers) / len(sample.answers)


# ---- questions of the user's own -------------------------------------------------------------------------------------

_FIELDS = ("context", "context_file", "question", "answers")


def load_questions(path: str | Path) -> list[Sample]:
    """Samples from a JSON lines file: one object per line, empty lines are skipped.

    Fields are ``context`` (text) or ``context_file`` (a UTF-8 file, relative to the folder of `path`), ``question``
    (asked after the context) and ``answers`` (a list of texts that all have to be in the output). `task` of the samples
    is "questions" (``OWN_TASK``) and `seed` the line.

    Raises:
        ValueError: The file has no question or a line is not as described; the message names file, line and field.
        OSError: `path` cannot be read.
    """
    path = Path(path)
    try:
        lines = path.read_bytes().decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 (byte {error.start}); allowed are JSON lines in UTF-8") from None
    samples = [_question(path, number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not samples:
        raise ValueError(f"{path}: no questions; allowed is a JSON object per line, at least one")
    return samples


def _question(path: Path, number: int, line: str) -> Sample:
    where = f"{path}, line {number}"
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError(f"{where}: not JSON; allowed is an object with the fields {', '.join(_FIELDS)}") from None
    if not isinstance(record, dict):
        raise ValueError(f"{where}: {_brief(record)}; allowed is an object with the fields {', '.join(_FIELDS)}")
    for field in record:
        if field not in _FIELDS:
            raise ValueError(f"{where}: field {field!r} is not known; known are {', '.join(_FIELDS)}")
    if ("context" in record) == ("context_file" in record):
        both = "both" if "context" in record else "neither"
        raise ValueError(f"{where}: fields context and context_file: {both} given; allowed is one of them")

    def text_of(field: str, value: Any) -> str:
        if not isinstance(value, str) or not value.strip() or not _is_unicode(value):
            raise ValueError(f"{where}: field {field}: {_brief(value)}; allowed is text that is not blank")
        return value

    for field in ("question", "answers"):
        if field not in record:
            raise ValueError(f"{where}: field {field} is missing")
    answers = record["answers"]
    if not isinstance(answers, list) or not answers:
        raise ValueError(f"{where}: field answers: {_brief(answers)}; allowed is a list of texts, at least one")
    answers = [text_of(f"answers[{i}]", answer) for i, answer in enumerate(answers)]
    question = text_of("question", record["question"])
    if "context" in record:
        context = text_of("context", record["context"])
    else:
        file = path.parent / text_of("context_file", record["context_file"])
        try:
            context = file.read_bytes().decode("utf-8-sig")
        except (OSError, ValueError) as error:
            if isinstance(error, UnicodeDecodeError):
                reason = "not UTF-8"
            else:  # ValueError: a name that no file can have
                reason = getattr(error, "strerror", None) or str(error)
            raise ValueError(
                f"{where}: field context_file: {file}: {reason}; allowed is a readable UTF-8 file"
            ) from None
        context = text_of(f"context_file ({file})", context)
    claimed = tuple(context.casefold().count(answer.casefold()) for answer in answers)
    return Sample(OWN_TASK, number, context, question, tuple(answers), claimed)


def _is_unicode(text: str) -> bool:
    """No half of a surrogate pair, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _brief(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."
