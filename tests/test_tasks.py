"""Test prompts: the same arguments make the same sample, and the answer is there as often as the sample says."""

from __future__ import annotations

import ast
import hashlib
import json
import sys
from dataclasses import asdict, replace
from itertools import combinations
from pathlib import Path

import pytest

from pycriticalkv.evaluation import tasks, words
from pycriticalkv.evaluation.tasks import OWN_TASK, TASKS, Sample, load_questions, make_sample, score

# Own prose, because the default differs between Python versions.
PROSE = """
The ferry leaves at dawn, when the water is flat and the gulls are still asleep on the roofs. Nobody on board says much.
An old man sorts his nets, a girl reads, and the engine hums as if it were thinking of something else.

On the other side, the path climbs between stone walls. It takes an hour to the ridge, e.g. for somebody who stops to
look back, and much less for the goats. From there one sees both coasts! The wind is strong enough to lean on; it smells
of thyme and of salt.

"Why do you come every week?" the shepherd asked. There was no good reply, so we shared the bread and watched the clouds
change the colour of the sea.
"""
LENGTHS = (300, 1500)  # whitespace-separated words
PROSE_TASKS = [name for name, task in TASKS.items() if task.haystack == "prose"]

# A digest of the sample of 300 words with seed 7, some of its context, its question, its answers.
GOLDEN = {
    "niah-single-1": (
        "7f68560ceebd5527",
        "The ticket number of frozen-shoulder is 9505453.",
        "What is the ticket number of frozen-shoulder in the text above? Answer:",
        ("9505453",),
    ),
    "niah-single-2": (
        "69625188deffc8fb",
        "The ticket number of cosmic-supper is 4872743.",
        "What is the ticket number of cosmic-supper in the text above? Answer:",
        ("4872743",),
    ),
    "niah-single-3": (
        "574522d2444a9c99",
        "The ticket code of graceful-camera is 8d665ed4-0135-4db5-911b-13f498649af5.",
        "What is the ticket code of graceful-camera in the text above? Answer:",
        ("8d665ed4-0135-4db5-911b-13f498649af5",),
    ),
    "niah-multikey-1": (
        "64594dd31c222ba7",
        "The ticket number of solar-needle is 7158982.",
        "What is the ticket number of solar-needle in the text above? Answer:",
        ("7158982",),
    ),
    "niah-multikey-2": (
        "9f245504f5c43eaa",
        "The ticket number of gifted-burger is 5835535.",
        "What is the ticket number of gifted-burger in the text above? Answer:",
        ("5835535",),
    ),
    "niah-multikey-3": (
        "a519a50c58e2b29a",
        "The ticket code of cf6fa629-0739-461d-aae9-f5ff103f29da is efe0998d-9c31-46c5-b43f-1bde28aa0943.",
        "What is the ticket code of cf6fa629-0739-461d-aae9-f5ff103f29da in the text above? Answer:",
        ("efe0998d-9c31-46c5-b43f-1bde28aa0943",),
    ),
    "niah-multivalue": (
        "90e391ac6058c616",
        "One ticket number of patient-sweater is 6724512.",
        "What are all 4 ticket numbers of patient-sweater in the text above? Answer:",
        ("6724512", "4441144", "9028158", "7083211"),
    ),
    "niah-multiquery": (
        "4eb4e26a424999d2",
        "From there one sees both coasts! The ticket number of urban-sausage is 3577627.",
        "What are the ticket numbers of urban-sausage, rough-donkey, ancient-crocus and clever-lotus in the text "
        "above? Answer:",
        ("3577627", "8427399", "6101698", "5747094"),
    ),
    "variable-tracking": (
        "5dffea1e6f577b4a",
        "Set FTSDB = 21096.",
        "Which 4 variables of the text above are 21096, because they were set to it or to a variable that is? "
        "Name them all. Answer:",
        ("FTSDB", "GTLLD", "NZKRK", "GSNLW"),
    ),
    "common-words": (
        "6d676ea095e88516",
        "banana, pistachio, teacher, teapot, mirror, camera, shadow, sandal, mosaic, canal, cherry,",
        "Which 8 words occur most often in the list above? Answer:",
        ("bench", "teacher", "spider", "teapot", "robin", "cupboard", "oasis", "banana"),
    ),
    "frequent-words": (
        "d1a1055311246522",
        "puroki dumitu lepape puroki puroki remibe puroki nofufu zolasi tikele puroki boropi nofufu",
        "Which 3 words occur most often in the invented text above? Answer:",
        ("puroki", "dagoki", "dumitu"),
    ),
    "facts": (
        "0b8e4b05dcee7648",
        "Leonard left the thermometer in the bookshop.",
        "Where did Leonard leave the thermometer? Answer:",
        ("bookshop",),
    ),
    "fact-qa": (
        "40ca1938b8e44ecd",
        "Fatima bought the camera from a cobbler.",
        "From whom did Fatima buy the camera? Answer:",
        ("cobbler",),
    ),
}


def count(text: str) -> int:
    return len(text.split())


def sample_of(name: str, n_tokens: int = 300, seed: int = 7, text: str | None = PROSE) -> Sample:
    return make_sample(name, n_tokens=n_tokens, seed=seed, count_tokens=count, text=text)


def digest(sample: Sample) -> str:
    return hashlib.sha256(json.dumps(asdict(sample)).encode()).hexdigest()[:16]


def length(sample: Sample) -> int:
    return count(sample.context) + count(sample.question)


# ---- samples ---------------------------------------------------------------------------------------------------------


def test_the_tasks():
    assert list(TASKS) == list(GOLDEN)
    for name, task in TASKS.items():
        assert task.name == name
        assert task.description and "\n" not in task.description
        assert task.max_answer_tokens > 0


@pytest.mark.parametrize("name", TASKS)
def test_golden(name):
    sample = sample_of(name)
    expected, excerpt, question, answers = GOLDEN[name]
    assert excerpt in sample.context
    assert (sample.task, sample.seed, sample.question, sample.answers) == (name, 7, question, answers)
    assert digest(sample) == expected


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("text", [PROSE, None], ids=["own", "public"])
def test_samples_are_what_they_claim(name, text):
    samples = []
    for n_tokens in LENGTHS:
        for seed in range(20):
            sample = sample_of(name, n_tokens, seed, text)
            samples.append(sample)
            context, question = sample.context.casefold(), sample.question.casefold()
            assert 0.9 * n_tokens <= length(sample) <= n_tokens
            assert len(sample.answers) == len(sample.claimed) == len(set(sample.answers)) > 0
            for answer, claimed in zip(sample.answers, sample.claimed, strict=True):
                assert context.count(answer.casefold()) == claimed > 0
                assert answer.casefold() not in question
            for one, other in combinations(sample.answers, 2):
                assert one.casefold() not in other.casefold() and other.casefold() not in one.casefold()
            assert sample.question.endswith("Answer:")
            assert sample.context == sample.context.strip()
            assert score(sample, f"It is {', '.join(sample.answers).upper()}.") == 1
            assert score(sample, sample.question) == 0
    short, long = samples[:20], samples[20:]
    assert len({sample.context for sample in samples}) == 40
    if not name.endswith("-words"):  # where all that can be asked is which words
        assert len({sample.question for sample in short}) == len({sample.question for sample in long}) == 20
    if TASKS[name].haystack != "none" and name not in ("facts", "fact-qa"):  # these avoid words of the haystack
        assert [sample.question for sample in short] == [sample.question for sample in long]


@pytest.mark.parametrize("name", TASKS)
def test_the_same_arguments_make_the_same_sample(name):
    assert sample_of(name) == sample_of(name)
    assert sample_of(name) != sample_of(name, seed=8)
    assert sample_of(name, text=None) == sample_of(name, text=None)


@pytest.mark.parametrize("name", TASKS)
def test_few_calls_of_count_tokens(name):
    for n_tokens, per_token in ((200, 1), (5000, 1), (5000, 8)):
        calls = []

        def coarse(text: str, per_token: int = per_token, calls: list[str] = calls) -> int:
            calls.append(text)
            return len(text.split()) * per_token

        make_sample(name, n_tokens=n_tokens, seed=1, count_tokens=coarse, text=PROSE)
        assert len(calls) <= 24  # 2 for each size tried: context and question


@pytest.mark.parametrize("name", TASKS)
def test_the_least_length_that_the_message_names_is_possible(name):
    with pytest.raises(ValueError, match=f"n_tokens=3 is too small for task '{name}' with seed 7; allowed is") as error:
        sample_of(name, 3)
    least = int(str(error.value).split()[-1])
    assert length(sample_of(name, least)) == least
    with pytest.raises(ValueError, match=f"n_tokens={least - 1} is too small .* allowed is at least {least}"):
        sample_of(name, least - 1)


def test_depths_differ():
    """The needle is at the beginning, in the middle and at the end of some sample."""
    depths = []
    for seed in range(40):
        sample = sample_of("niah-single-2", 1500, seed)
        depths.append(sample.context.index(sample.answers[0]) / len(sample.context))
    assert min(depths) < 0.1 and max(depths) > 0.9
    assert all(any(low <= depth < low + 0.25 for depth in depths) for low in (0, 0.25, 0.5, 0.75))


@pytest.mark.parametrize("name", ["niah-multikey-2", "niah-multikey-3"])
def test_needles_are_the_haystack(name):
    body = sample_of(name).context.partition("\n\n")[2]
    needles = body.split(". ")
    assert all(needle.startswith("The ticket ") for needle in needles)
    assert len({needle.split(" is ")[0] for needle in needles}) == len(needles) > 20


def test_a_chain_can_be_followed():
    for seed in range(20):
        sample = sample_of("variable-tracking", 1500, seed)
        value = next(word for word in sample.question.replace(",", "").split() if word.isdigit() and len(word) == 5)
        known: dict[str, str] = {}
        for line in sample.context.split("Set ")[1:]:
            name, _, source = line.split(".")[0].partition(" = ")
            known[name] = known.get(source, source)  # a variable is used only after it was set
        assert len(known) == 8 and set(known.values()) - {value}
        assert [name for name in known if known[name] == value] == list(sample.answers)


@pytest.mark.parametrize("name,separator", [("common-words", ", "), ("frequent-words", " ")])
def test_the_answers_are_the_most_frequent_words(name, separator):
    for n_tokens in (110, 400, 3000, 20_000):
        sample = sample_of(name, n_tokens)
        listed = sample.context.partition("\n\n")[2].split(separator)
        frequency = sorted(((listed.count(word), word) for word in set(listed)), reverse=True)
        n = len(sample.answers)
        assert {word for _, word in frequency[:n]} == set(sample.answers)
        if name == "common-words":
            assert n == min(10, len(listed) // 30)
            assert frequency[n - 1][0] >= 10 * frequency[n][0]
        else:
            assert n == 3
            assert len({times for times, _ in frequency[:4]}) == 4


def test_facts_are_about_different_people_and_things():
    told = {"left": 0, "bought": 0, "swapped": 0}
    for seed in range(20):
        sample = sample_of("fact-qa", 1500, seed)
        names = [word for word in sample.context.replace("\n", " ").split(" ") if word in words.NAMES]
        assert len(names) == len(set(names)) == 8
        for verb in told:
            told[verb] += sample.context.count(f" {verb} the ")
        assert sum(name in sample.question for name in names) == 1
    assert sum(told.values()) == 160 and min(told.values()) > 40


def test_answers_avoid_the_words_of_the_text():
    text = "They met in the " + ", the ".join(words.PLACES[:-1]) + ". Then they went home. "
    for seed in range(5):
        assert sample_of("facts", 400, seed, text).answers == words.PLACES[-1:]


def test_words_are_not_inside_each_other():
    facts = (*words.NAMES, *words.THINGS, *words.PLACES, *words.TRADES, *words.SWAPS)
    assert len(facts) == len(set(facts))
    for answer in (*words.PLACES, *words.TRADES, *words.SWAPS):
        assert [word for word in facts if answer.casefold() in word.casefold()] == [answer]
    for known in (words.ADJECTIVES, words.NOUNS):
        for word in known:
            assert [other for other in known if word in other] == [word]
    assert not [word for word in words.TRADES + words.SWAPS if word[0] in "aeiou"]  # the article is a


# ---- texts to hide things in -----------------------------------------------------------------------------------------


def test_the_public_text_is_prose():
    pieces = tasks._public_prose()
    text = "".join(pieces)
    assert len(text) > 50_000
    assert not any(mark in text for mark in ("::=", ">>>", "===", "***", "\n\n\n", "  ", "\t", "\r"))
    assert all(paragraph.endswith(".") for paragraph in text.strip().split("\n\n"))


def test_a_short_text_is_repeated_and_a_long_one_is_not():
    sample = sample_of("facts", 1000, text="It rained. The end was near.")
    assert sample.context.count("It rained.") > 100
    long = " ".join(f"This is sentence {i} of many." for i in range(2000))
    context = sample_of("facts", 1000, text=long).context
    assert context.count("This is sentence 5 of many.") <= 1


@pytest.mark.parametrize("name", PROSE_TASKS)
@pytest.mark.parametrize(
    "text",
    ["word " * 3000, "x" * 5000, "\u6771\u4eac\u306f\u96e8\u3067\u3059\u3002" * 300, "I\u0307stanbul\r\n\r\n\r\n a.b"],
    ids=["no sentences", "no spaces", "no latin", "strange"],
)
def test_any_text_will_do(name, text):
    def characters(text: str) -> int:
        return len(text) // 4

    sample = make_sample(name, n_tokens=700, seed=0, count_tokens=characters, text=text)
    assert 0.9 * 700 <= characters(sample.context) + characters(sample.question) <= 700
    assert all(sample.context.count(answer) == 1 for answer in sample.answers)


def test_sentences_stay_whole_around_needles():
    sentences = set(tasks._sentences([" ".join(part.split()) for part in PROSE.split("\n\n")]))
    assert "It takes an hour to the ridge, e.g. for somebody who stops to look back, and much less for the goats. " in (
        sentences
    )
    assert '"Why do you come every week?" the shepherd asked. ' in sentences
    assert tasks._sentences(['A key (e.g. "b") or (i.e. C.) so. (D.) E "f." G.']) == (
        'A key (e.g. "b") or (i.e. C.) so. ', "(D.) ", 'E "f." ', "G.\n\n",
    )  # fmt: skip
    sample = sample_of("niah-multikey-1", 1500)
    body = sample.context.partition("\n\n")[2]
    for needle in body.split("The ticket number of ")[1:]:
        body = body.replace("The ticket number of " + needle.split(".")[0] + ".", "")
    left = " ".join(body.split())
    assert all(left.count(sentence.strip()) >= 1 for sentence in sentences)
    for sentence in sorted(sentences, key=len, reverse=True):
        left = left.replace(sentence.strip(), "")
    assert not left.strip()


def test_no_import_of_anything_heavy():
    """Prompts can be made, and looked at, without a model."""
    for module in (tasks, words):
        assert module.__file__
        for node in ast.walk(ast.parse(Path(module.__file__).read_text(encoding="utf-8"))):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert all(
                name.split(".")[0] in sys.stdlib_module_names or name == "pycriticalkv.evaluation.words"
                for name in names
            )


# ---- errors and scores -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong,message",
    [
        ({"task": "niah"}, r"task='niah' is not known; known are niah-single-1, .*, facts, fact-qa$"),
        ({"task": None}, "task=None is not known"),
        ({"task": []}, r"task=\[\] is not known"),
        ({"n_tokens": 0}, "n_tokens=0: allowed are positive ints"),
        ({"n_tokens": -5}, "n_tokens=-5: allowed are positive ints"),
        ({"n_tokens": 300.0}, "n_tokens=300.0: allowed are positive ints"),
        ({"n_tokens": True}, "n_tokens=True: allowed are positive ints"),
        ({"n_tokens": 10}, "n_tokens=10 is too small for task 'facts' with seed 7; allowed is at least"),
        ({"seed": 1.5}, "seed=1.5: allowed are ints"),
        ({"seed": False}, "seed=False: allowed are ints"),
        ({"seed": "1"}, "seed='1': allowed are ints"),
        ({"count_tokens": 4}, "count_tokens=4: allowed is a function"),
        ({"count_tokens": lambda text: 2.5}, r"count_tokens returned 2.5; allowed are ints"),
        ({"count_tokens": lambda text: -1}, r"count_tokens returned -1; allowed are ints"),
        ({"count_tokens": lambda text: None}, r"count_tokens returned None; allowed are ints"),
        ({"count_tokens": lambda text: 7}, r"count_tokens returned 14 in all for a text of .* grows with the text"),
        ({"text": ""}, "text='': allowed are None and Unicode text that is not blank"),
        ({"text": " \n"}, r"text=' \\n': allowed are None"),
        ({"text": b"bytes"}, "text=b'bytes': allowed are None"),
        ({"text": "half \ud83d"}, r"text='half .ud83d': allowed are None"),
        ({"text": " ".join(words.PLACES)}, "text has all but 0 of the words attic, bakery, bathroom, ... that task 'f"),
    ],
)
def test_errors(wrong, message):
    right = {"task": "facts", "n_tokens": 300, "seed": 7, "count_tokens": count, "text": PROSE}
    make_sample(**right)
    with pytest.raises(ValueError, match=message):
        make_sample(**(right | wrong))


def test_a_python_without_topics(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    tasks._public_prose.cache_clear()
    with pytest.raises(ValueError, match="text=None: this Python has no pydoc_data.topics .* give a text"):
        sample_of("facts", text=None)
    assert sample_of("niah-single-1", text=None)  # needs no prose


def test_score():
    sample = replace(sample_of("niah-multiquery"), answers=("Ab1", "cd2", "ef3", "gh4"))
    assert score(sample, "") == 0
    assert score(sample, "AB1 and xcD2x") == 0.5
    assert score(sample, "ab1, ab1, cd2, ef3") == 0.75
    assert score(sample, "gh4 ef3 cd2 ab1 something else") == 1


# ---- questions of the user's own -------------------------------------------------------------------------------------


def write(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return path


GOOD = {"context": "Ice melts. ICE floats.", "question": "What floats?", "answers": ["ice"]}


def test_questions_are_read(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("\ufeffLine\u2028one\n\nline two", encoding="utf-8")
    separated = {"context": "a\u2028b", "question": "Q?\u2028", "answers": ["b", "zz"]}
    path = write(
        tmp_path / "q.jsonl",
        "\ufeff" + json.dumps(GOOD),
        "",
        {"context_file": "texts/a.txt", "question": "How many lines?", "answers": ["two"]},
        json.dumps(separated, ensure_ascii=False) + "\r",
        "",
    )
    assert load_questions(path) == load_questions(str(path)) == [
        Sample(OWN_TASK, 1, "Ice melts. ICE floats.", "What floats?", ("ice",), (2,)),
        Sample(OWN_TASK, 3, "Line\u2028one\n\nline two", "How many lines?", ("two",), (1,)),
        Sample(OWN_TASK, 4, "a\u2028b", "Q?\u2028", ("b", "zz"), (1, 0)),
    ]  # fmt: skip
    assert score(load_questions(path)[0], "Ice.") == 1


@pytest.mark.parametrize(
    "line,message",
    [
        ("{", "not JSON; allowed is an object with the fields context, context_file, question, answers"),
        ("[" * 100_000, "not JSON"),
        ("[1]", r"\[1\]; allowed is an object"),
        (GOOD | {"answer": "ice"}, "field 'answer' is not known; known are context, context_file, question, answers"),
        (GOOD | {"context_file": "a"}, "fields context and context_file: both given; allowed is one of them"),
        ({"question": "a", "answers": ["b"]}, "fields context and context_file: neither given"),
        ({"context": "a", "answers": ["b"]}, "field question is missing"),
        ({"context": "a", "question": "b"}, "field answers is missing"),
        (GOOD | {"context": 5}, "field context: 5; allowed is text that is not blank"),
        (GOOD | {"context": "half \ud83d"}, "field context: 'half .ud83d'; allowed is text"),
        (GOOD | {"question": " "}, "field question: ' '; allowed is text that is not blank"),
        (GOOD | {"answers": []}, r"field answers: \[\]; allowed is a list of texts, at least one"),
        (GOOD | {"answers": "ice"}, "field answers: 'ice'; allowed is a list of texts"),
        (GOOD | {"answers": ["ice", ""]}, r"field answers\[1\]: ''; allowed is text"),
        (GOOD | {"answers": ["ice", None]}, r"field answers\[1\]: None; allowed is text"),
        ({"context_file": "none.txt", "question": "a", "answers": ["b"]}, r"context_file: .*none.txt: No such file"),
        ({"context_file": ".", "question": "a", "answers": ["b"]}, r"context_file: .*: Is a directory; allowed is a"),
        ({"context_file": "a\0b", "question": "a", "answers": ["b"]}, r"context_file: .*; allowed is a readable"),
        ({"context_file": "latin.txt", "question": "a", "answers": ["b"]}, r"latin.txt: not UTF-8; allowed is a"),
        ({"context_file": "blank.txt", "question": "a", "answers": ["b"]}, r"context_file \(.*blank.txt\): ' '; allow"),
    ],
)
def test_errors_in_questions(tmp_path, line, message):
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "blank.txt").write_text(" ")
    path = write(tmp_path / "q.jsonl", GOOD, "", line)
    with pytest.raises(ValueError, match=rf"q\.jsonl, line 3: .*{message}"):
        load_questions(path)


def test_errors_of_a_questions_file(tmp_path):
    with pytest.raises(ValueError, match=r"q\.jsonl: no questions; allowed is a JSON object per line, at least one"):
        load_questions(write(tmp_path / "q.jsonl", "", " "))
    (tmp_path / "latin.jsonl").write_bytes(b'{"context": "caf\xe9"}')
    with pytest.raises(ValueError, match=r"latin\.jsonl: not UTF-8 \(byte 16\)"):
        load_questions(tmp_path / "latin.jsonl")
    with pytest.raises(FileNotFoundError):
        load_questions(tmp_path / "none.jsonl")
