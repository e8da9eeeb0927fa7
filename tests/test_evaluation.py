"""The evaluation: arms share a prefill, files can be taken up again, tables add up, the commands work."""

from __future__ import annotations

import ctypes
import json
import math
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers import last_logits

from pycriticalkv import __version__, cli
from pycriticalkv.evaluation import prompts
from pycriticalkv.evaluation.runner import (
    FULL,
    PREFILLS,
    Arm,
    Evaluator,
    Grid,
    Outcome,
    Source,
    append_outcome,
    open_outcomes,
)
from pycriticalkv.evaluation.summary import interval, summarize, table
from pycriticalkv.evaluation.tasks import OWN_TASK, Sample
from pycriticalkv.policy import KVPolicy
from pycriticalkv.store import Store

GRID = Grid(
    tasks=("niah-single-1", "facts"), n_tokens=(600,), seeds=(0, 1), policies=("critical-max", "snapkv"),
    budgets=(1.0, 64),
)  # fmt: skip


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    from tiny import write_tiny  # noqa: PLC0415

    path = tmp_path_factory.mktemp("evaluation") / "tiny.gguf"
    write_tiny(path, wo_type="F32", weight_type="F32")
    with Evaluator(path, GRID, n_threads=1, n_threads_batch=1) as evaluator:
        first = list(evaluator.run())
        again = list(evaluator.run())
    return path, first, again


def test_every_cell_of_the_grid_once_and_the_same_twice(outcomes):
    _, first, again = outcomes
    assert len({o.key for o in first}) == len(first) == GRID.size == 2 * 2 * 2 * 5
    assert first == again


def test_a_budget_of_everything_answers_as_the_full_cache(outcomes):
    full = {(o.task, o.seed, o.setting): o for o in outcomes[1] if o.policy == FULL}
    evicted_differ = 0
    for o in outcomes[1]:
        same = o.output == full[o.task, o.seed, o.setting].output
        if o.budget == 1.0 or o.policy == FULL:
            assert same and o.kl == 0
        evicted_differ += o.budget == 64 and not same and o.kl > 0
    assert evicted_differ > 0
    for setting in GRID.settings:  # what was evicted shows, also where the question was evicted with the rest
        kl = [o.kl for o in outcomes[1] if (o.policy, o.budget, o.setting) == ("snapkv", 64, setting)]
        assert kl and min(kl) > 1e-4
    for cell in summarize(outcomes[1]):
        if cell.budget == 1.0:
            assert (cell.difference, cell.difference_low, cell.difference_high) == (0.0, 0.0, 0.0)


def test_prompts_can_be_read_in_other_ways(outcomes, load):
    """Each arm as a model that was opened for it: bit for bit."""
    grid = replace(GRID, policies=("critical-max",), prefills=tuple(PREFILLS))
    common = {"n_threads": 1, "n_threads_batch": 1, "n_batch": 128, "n_ubatch": 128}
    with Evaluator(outcomes[0], grid, **common) as evaluator:
        read = list(evaluator.run())
        sample = evaluator.sample("facts", 600, 0)
        prompt = prompts.build(evaluator._reader, sample.context, sample.question)
        for arm in grid.arms[1:]:
            if arm.prefill != "full":
                _, entries, logits = evaluator.evicted(arm, [prompt.context, prompt.question], {})
                # "exact" against "full": they are the same
                mode = PREFILLS[arm.prefill] if arm.prefill != "exact" else PREFILLS["full"]
                stream = mode.stream if mode.mode == "stream" else None
                llm = load(outcomes[0], kv_budget=entries, kv_policy=arm.policy, prefill=mode.mode, stream=stream,
                           n_ctx=1024, **common)  # fmt: skip
                llm.eval(prompt.tokens)
                assert np.array_equal(logits, last_logits(llm))
    assert len(read) == grid.size
    kl = {(o.task, o.seed, o.setting, o.prefill): o.kl for o in read if o.budget == 64}
    # "full" reads a prompt with its question in two pieces, which rounds differently; a context is one piece
    for (*sample_of, prefill), value in kl.items():
        if "context-only" in sample_of:
            assert (value == kl[(*sample_of, "full")]) == (prefill in ("full", "exact"))


def test_a_question_shorter_than_the_least_budget(tiny):
    grid = replace(GRID, tasks=(), prefills=("full", "stream"))
    short = Sample(OWN_TASK, 0, "ab", "c?", ("d",), 0)
    with Evaluator(tiny, grid, n_ctx=256, n_threads=1, n_threads_batch=1) as evaluator:
        answers = list(evaluator.ask([short]))
    assert len(answers) == 2 * len(grid.arms)
    assert {o.entries == o.prompt_tokens for o in answers if o.setting == "query-aware"} == {True}


def test_questions_longer_than_the_context_are_told_before_any_work(tiny):
    short = Sample(OWN_TASK, 1, "ab", "c?", ("d",), 0)
    long = Sample(OWN_TASK, 7, "the keeper " * 100, "c?", ("d",), 0)
    with (
        Evaluator(tiny, replace(GRID, tasks=()), n_ctx=256, n_threads=1, n_threads_batch=1) as evaluator,
        pytest.raises(ValueError, match=r"question 7: \d+ tokens and an answer of 64: the context is 256 tokens"),
    ):
        next(evaluator.ask([short, long]))


def test_a_prefill_that_the_model_cannot_do_is_refused(tiny, monkeypatch):
    def refuse(_):
        raise ValueError("layers are shared")

    monkeypatch.setattr(Store, "check_prefill", refuse)
    with pytest.raises(ValueError, match="prefill='exact': this model cannot be read layer by layer: layers are sha"):
        Evaluator(tiny, replace(GRID, prefills=("exact",)), n_threads=1)


def test_entries_and_prompts_fit(outcomes):
    for o in outcomes[1]:
        assert o.entries == (64 if o.budget == 64 else o.entries)
        assert 0.85 * 600 < o.prompt_tokens < 700
        assert 0 <= o.score <= 1


SOURCE = Source(model="tiny.gguf", model_digest="0", cache_type="f16", window=None, text=None, questions=None)


def test_what_is_done_is_not_done_again(outcomes, tmp_path):
    path, first, _ = outcomes
    file = tmp_path / "out.jsonl"
    assert open_outcomes(file, SOURCE) == []
    for outcome in first[:7]:
        append_outcome(file, outcome)
    whole = file.read_bytes()
    with file.open("a") as f:
        f.write('{"task": "niah-si')  # stopped in the middle
    done = open_outcomes(file, SOURCE)
    assert done == first[:7]
    assert file.read_bytes() == whole
    with Evaluator(path, GRID, n_threads=1, n_threads_batch=1) as evaluator:
        rest = list(evaluator.run(done=done))
    assert done + rest == first


@pytest.mark.parametrize("text", ["some prose", "some prose\n", "nonsense\n{}\n", "[1]\n", '{"task": 1}\n'])
def test_files_that_are_something_else_are_left_alone(tmp_path, text):
    file = tmp_path / "out.jsonl"
    file.write_text(text)
    with pytest.raises(ValueError, match="give another file"):
        open_outcomes(file, SOURCE)
    assert file.read_text() == text


@pytest.mark.parametrize("field", ["model", "model_digest", "cache_type", "window", "text", "questions"])
def test_outcomes_of_another_source_are_refused(tmp_path, field):
    file = tmp_path / "out.jsonl"
    open_outcomes(file, SOURCE)
    with pytest.raises(ValueError, match=f"its {field} is"):
        open_outcomes(file, replace(SOURCE, **{field: 5}))


@pytest.mark.parametrize(
    "arguments",
    [
        ("eval", "MODEL", "--out", "MODEL"),
        ("eval", "MODEL", "--text", "text", "--out", "./text"),
        ("eval", "MODEL", "--out", "a.png", "--plot", "a.png"),
        ("bench", "MODEL", "--out", "MODEL"),
        ("bench", "MODEL", "--text", "text", "--out", "text"),
        ("inspect", "MODEL", "hello", "--out", "MODEL"),
        ("inspect", "MODEL", "@text", "--json", "text"),
        ("inspect", "MODEL", "hello", "--out", "x", "--json", "x"),
    ],
)
def test_commands_do_not_write_over_what_they_read(tiny, tmp_path, monkeypatch, capsys, arguments):
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "model.gguf"
    model.write_bytes(Path(tiny).read_bytes())
    Path("text").write_text("some text")
    assert cli.main([str(model) if a == "MODEL" else a for a in arguments]) == 1
    assert "are the same file" in capsys.readouterr().err
    assert model.read_bytes() == Path(tiny).read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.gguf", "text"]


def test_lines_that_are_no_outcomes(tmp_path):
    file = tmp_path / "out.jsonl"
    open_outcomes(file, SOURCE)
    with file.open("a") as f:
        f.write('{"task": 1}\n')
    with pytest.raises(ValueError, match="line 2: not an outcome"):
        open_outcomes(file, SOURCE)


@pytest.mark.parametrize(
    "field,value", [("score", "1"), ("seed", 1.5), ("entries", True), ("budget", "10%"), ("kl", None)]
)
def test_outcomes_with_damaged_values(outcomes, tmp_path, field, value):
    file = tmp_path / "out.jsonl"
    open_outcomes(file, SOURCE)
    append_outcome(file, outcomes[1][0])
    assert open_outcomes(file, SOURCE) == outcomes[1][:1]
    append_outcome(file, replace(outcomes[1][1], **{field: value}))
    with pytest.raises(ValueError, match=f"line 3: {field} is {value!r}; give another file"):
        open_outcomes(file, SOURCE)


def test_a_grid_knows_its_outcomes(outcomes):
    assert all(GRID.asks(o) for o in outcomes[1])
    assert not any(replace(GRID, n_tokens=(500,)).asks(o) for o in outcomes[1])
    assert sum(replace(GRID, tasks=("facts",)).asks(o) for o in outcomes[1]) == GRID.size // 2


@pytest.mark.parametrize(
    "arguments,why",
    [
        ({"tasks": ("niah",)}, "task='niah' is not known; known are niah-single-1"),
        ({"settings": ("aware",)}, "setting='aware' is not known"),
        ({"policies": ("h2o",)}, "policy='h2o' is not known"),
        ({"budgets": (0,)}, "budget=0"),
        ({"budgets": (20,)}, "budget=20.*at least window"),
        ({"budgets": (64, 64)}, "budgets=.* 64 is there more than once"),
        ({"tasks": ("facts", "facts")}, "'facts' is there more than once"),
        ({"budgets": (1.5,)}, "budget=1.5"),
        ({"budgets": (True,)}, "budget=True"),
        ({"n_tokens": (0,)}, "n_tokens=0"),
        ({"prefills": ("auto",)}, "prefill='auto' is not known; known are full, exact, stream"),
        ({"prefills": ("full", "full")}, "'full' is there more than once"),
        ({"n_tokens": ()}, r"n_tokens=\(\): allowed is at least one"),
        ({"policies": ()}, r"policies=\(\): allowed is at least one"),
        ({"tasks": (None,)}, "task=None is not known"),
        ({"policies": (["snapkv"],)}, "policy=.'snapkv'. is not known"),
        ({"tasks": "facts"}, "tasks='facts': allowed is a list, a tuple or a range"),
        ({"seeds": 20}, "seeds=20: allowed is a list, a tuple or a range"),
        ({"n_tokens": ("2048",)}, "n_tokens='2048': allowed is an int"),
        ({"seeds": (0.5,)}, "seeds=0.5: allowed is an int"),
        ({"budgets": None}, "budgets=None: allowed is a list, a tuple or a range"),
        ({"window": 0}, "window=0"),
        ({"window": "16"}, "window='16'"),
    ],
)
def test_grids_are_checked(arguments, why):
    with pytest.raises((ValueError, TypeError), match=why):
        Grid(**arguments)


def test_shares_are_of_the_number_that_was_written():
    assert Arm("snapkv", 0.29).entries(400, KVPolicy()) == 116  # 0.29 * 400 is 115.99... in binary
    grid = Grid(budgets=[0.29], seeds=range(3), n_tokens=(np.int64(600),))
    assert (grid.budgets, grid.seeds) == ((0.29,), (0, 1, 2))
    assert type(grid.n_tokens[0]) is int  # what outcomes are written with
    assert len(Grid(seeds=range(100_000)).seeds) == 100_000  # in no time


def outcome(seed, policy, budget, score):
    return Outcome("facts", seed, 600, "query-aware", policy, budget, "full", 600, 60, score, 0.25 * seed, "")


def test_summary():
    scores = [0.0, 1.0, 1.0, 0.5]
    full = [outcome(i, FULL, None, 1.0) for i in range(4)]
    evicted = [outcome(i, "snapkv", 0.1, score) for i, score in enumerate(scores)]
    cells = summarize(full + evicted)
    assert [c.policy for c in cells] == [FULL, "snapkv"]
    cell = cells[1]
    assert cell.accuracy == 0.625 and cell.difference == -0.375
    assert cell.low <= cell.accuracy <= cell.high
    assert cell.difference_low == pytest.approx(cell.low - 1.0)
    assert (cell.kl, cell.kl_low >= 0, cell.kl_high <= 0.75) == (0.375, True, True)
    assert "| facts | 600 | query-aware | snapkv | 10% | full | 60 | 4 | 0.625" in table(cells)
    assert math.isnan(summarize(evicted)[0].difference)
    single = summarize([full[1], evicted[1]])[1]
    assert math.isnan(single.low) and math.isnan(single.kl_high)
    assert "| 1 | 1.000 | +0.000 | 0.2500 |" in table([single])


def test_the_bootstrap_interval_is_that_of_the_mean():
    values = np.random.default_rng(1).normal(3.0, 2.0, 400)
    low, high = interval(values)
    half = 1.96 * values.std() / 20
    assert low == pytest.approx(values.mean() - half, abs=0.06)
    assert high == pytest.approx(values.mean() + half, abs=0.06)


def test_prompts_follow_the_models_template(tiny, load, make_tiny):
    llm = load(tiny, n_ctx=512)
    prompt = prompts.build(llm, "the keeper", "where?")
    text = llm.detokenize(prompt.tokens, special=True).decode()
    assert text == "<s><|user|>the keeper\n\nwhere?<|turn|><|assistant|>"
    plain = load(make_tiny(chat_template=None), n_ctx=512)
    prompt = prompts.build(plain, "the keeper", "where?")
    assert plain.detokenize(prompt.tokens, special=True).decode() == "<s>the keeper\n\nwhere?"


def test_eval_command(outcomes, tmp_path, capsys):
    pytest.importorskip("tqdm")
    pytest.importorskip("matplotlib")
    path = outcomes[0]
    out, picture = tmp_path / "eval.jsonl", tmp_path / "eval.png"
    command = [
        "eval", str(path), "--tasks", "facts", "--tokens", "400", "--samples", "2", "--budgets", "64", "50%",
        "--policies", "snapkv", "--passages", "2", "--forced", "16", "--threads", "1", "--out", str(out),
        "--plot", str(picture), "--prefill", "full", "stream",
    ]  # fmt: skip
    assert cli.main(command) == 0
    printed = capsys.readouterr().out
    assert "| facts | 400 | context-only | snapkv | 50% | full |" in printed
    assert "| all | 400 |" not in printed  # which would be the same again
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    lines = out.read_text().splitlines()
    assert len(lines) == 1 + 2 * 5 + 2 * 2 * 5
    assert "| 400 | snapkv | 64 | full | 64 | 2 x 16 |" in printed
    assert cli.main(command) == 0
    assert out.read_text().splitlines() == lines
    assert capsys.readouterr().out == printed


def test_bench_command(outcomes, tmp_path, capsys):
    pytest.importorskip("tqdm")
    pytest.importorskip("matplotlib")
    out, picture = tmp_path / "bench.jsonl", tmp_path / "bench.png"
    command = ["bench", str(outcomes[0]), "--tokens", "150", "300", "--budgets", "64", "50%", "--turns", "1",
               "--tokens-per-turn", "2", "--threads", "1", "--out", str(out), "--plot", str(picture)]  # fmt: skip
    assert cli.main(command) == 0
    printed = capsys.readouterr().out
    assert "| 300 | 64 |" in printed and "| 150 | full, flash attention o" in printed
    assert len(out.read_text().splitlines()) == 2 * 4
    assert cli.main(["bench", str(outcomes[0]), "--turns", "0", "--out", str(out)]) == 1
    assert len(out.read_text().splitlines()) == 2 * 4
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_inspect_command(outcomes, tmp_path, capsys):
    html, data = tmp_path / "report.html", tmp_path / "report.json"
    command = ["inspect", str(outcomes[0]), "the keeper of the lighthouse " * 30, "--budget", "64", "--threads", "1"]
    assert cli.main([*command, "--out", str(html), "--json", str(data)]) == 0
    assert "the keeper of the lighthouse" in html.read_text() or html.stat().st_size > 1000
    assert json.loads(data.read_text())["budget"] == 64
    capsys.readouterr()


@pytest.mark.parametrize(
    "command,why",
    [
        (["eval", "missing.gguf", "--samples", "1", "--tasks", "facts"], "missing.gguf"),
        (["eval", "MODEL", "--samples", "0"], "--samples 0"),
        (["eval", "MODEL", "--passages", "-1"], "--passages -1"),
        (["eval", "MODEL", "--forced", "1"], "--forced 1"),
        (["eval", "MODEL", "--passages", "500"], "passages=500"),
        (["eval", "MODEL", "--samples", "10000000000"], "--samples 10000000000: allowed is 1 to 100000"),
        (["eval", "MODEL", "--tokens", "10"], "n_tokens=10 is too small for task"),
        (["eval", "MODEL", "--tokens", "8192"], "n_tokens=8192: allowed is at most"),
        (["bench", "missing.gguf"], "missing.gguf"),
        (["bench", "MODEL", "--turns", "0"], "turns=0"),
        (["bench", "MODEL", "--budgets", "64", "64"], "each once"),
        (["bench", "MODEL", "--tokens", "9000"], "the model's context is 8192"),
        (["bench", "MODEL", "--plot", "/nowhere/a.png"], "--plot /nowhere/a.png"),
        (["inspect", "MODEL", "@missing.txt"], "missing.txt"),
        (["eval", "MODEL", "--text", "/proc"], "--text /proc: Is a directory; allowed is a text file"),
        (["inspect", "MODEL", ""], "empty"),
        (["eval", "MODEL", "--threads", "0"], "--threads 0"),
        (["eval", "MODEL", "--plot", "/nowhere/a.png"], "--plot /nowhere/a.png"),
        (["eval", "MODEL", "--plot", "a.pdf"], "--plot a.pdf: allowed are names that end in .png"),
        (["eval", "MODEL", "--budgets", "10%", "0.1"], "0.1 is there more than once"),
        (["eval", "MODEL", "--tokens", "100000"], "the model's context is 8192"),
        (["inspect", "MODEL", "text", "--budget", "3"], "kv_budget=3"),
    ],
)
def test_commands_say_what_is_wrong(outcomes, capsys, command, why, tmp_path):
    pytest.importorskip("tqdm")
    command = [str(outcomes[0]) if word == "MODEL" else word for word in command]
    assert cli.main([*command, "--out", str(tmp_path / "out")]) == 1
    assert why in capsys.readouterr().err


def test_version_and_help(capsys):
    for option, shown in (("--version", f"pycriticalkv {__version__}\n"), ("--help", "does it still answer right?")):
        with pytest.raises(SystemExit) as ended:
            cli.main([option])
        assert ended.value.code == 0
        assert shown in capsys.readouterr().out


def test_a_full_disk_is_named():
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        append_outcome(Path("/dev/full"), SOURCE)


def test_ctrl_c_in_a_callback_is_not_lost(monkeypatch):
    @ctypes.CFUNCTYPE(None)
    def callback():
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "unraisablehook", cli.deliver_again)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            callback()
            for _ in range(100):
                time.sleep(0.1)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_grid_may_have_another_window():
    assert replace(GRID, window=32).policy("snapkv").window == 32
