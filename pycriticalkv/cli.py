"""The command line: ``pycriticalkv eval``, ``pycriticalkv bench`` and ``pycriticalkv inspect``."""

from __future__ import annotations

import _thread
import argparse
import hashlib
import json
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pycriticalkv import __version__
from pycriticalkv.arguments import GGML_TYPES, MOST_THREADS

DEFAULT_PASSAGES = 4
DEFAULT_LENGTHS = (1024, 2048, 4096)
CACHE_TYPES = {name: number for number, name in GGML_TYPES.items()}


def budget(text: str) -> int | float:
    """An int is entries, a number with a point or a percent sign is a share."""
    try:
        if text.endswith("%"):
            return float(text[:-1]) / 100
        return float(text) if "." in text else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: allowed are entries (512) and shares (0.2, 20%)") from None


def _model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, metavar="MODEL", help="a GGUF file")
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count() or 1, help="default: %(default)s, all of the machine's"
    )
    parser.add_argument("--type", default="f16", choices=CACHE_TYPES, help="type of keys and values (default: f16)")


def _read(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{what} {path}: not a text file in UTF-8") from None
    except OSError as e:
        raise ValueError(f"{what} {path}: {e.strerror}; allowed is a text file") from None


def _sha256(path: Path | None) -> str | None:
    return None if path is None else hashlib.sha256(path.read_bytes()).hexdigest()


def _files_read(args: argparse.Namespace) -> dict[str, Path]:
    prompt = getattr(args, "prompt", "")
    named = {"MODEL": args.model, "PROMPT": Path(prompt[1:]) if prompt.startswith("@") else None}
    named |= {f"--{name}": getattr(args, name, None) for name in ("text", "questions")}
    return {name: path for name, path in named.items() if path is not None}


def _check_files(args: argparse.Namespace, *names: str) -> None:
    """Before any work: files to write are in folders that are there, and are none of those that are read."""
    taken = {path.resolve(): what for what, path in _files_read(args).items()}
    for name in names:
        path = getattr(args, name)
        if path is None:
            continue
        if path.is_dir() or not path.parent.is_dir():
            raise ValueError(f"--{name} {path}: allowed is a file in a folder that is there")
        other = taken.setdefault(path.resolve(), f"--{name}")
        if other != f"--{name}":
            raise ValueError(f"--{name} {path}: {other} and --{name} are the same file; give another name")
        if name == "plot":
            from pycriticalkv.evaluation.plots import check_picture  # noqa: PLC0415

            check_picture(path)


def _llama_arguments(args: argparse.Namespace) -> dict[str, Any]:
    if not 1 <= args.threads <= MOST_THREADS:
        raise ValueError(f"--threads {args.threads}: allowed is 1 to {MOST_THREADS}")
    kind = CACHE_TYPES[args.type]
    return {"n_threads": args.threads, "n_threads_batch": args.threads, "type_k": kind, "type_v": kind}


def _add_eval(commands: Any) -> None:
    from pycriticalkv.evaluation.runner import PREFILLS, SETTINGS  # noqa: PLC0415
    from pycriticalkv.evaluation.tasks import TASKS  # noqa: PLC0415
    from pycriticalkv.policy import PRESETS  # noqa: PLC0415

    parser = commands.add_parser(
        "eval",
        usage="pycriticalkv eval MODEL [options]",
        help="does it still answer right? accuracy by policy and budget",
        description="Accuracy on tasks with known answers, by policy and budget, beside the full cache. Every outcome "
        "is appended to the --out file; started again with the same file, it goes on where it stopped.",
    )
    _model_arguments(parser)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS, metavar="TASK",
                        help=f"of {', '.join(TASKS)} (default: all)")  # fmt: skip
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048], help="prompt lengths (default: 2048)")
    parser.add_argument("--samples", type=int, default=20, help="samples per task and length (default: 20)")
    parser.add_argument("--first-seed", type=int, default=0, help="of the samples (default: 0)")
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=SETTINGS,
                        help="query-aware: the question is part of what is evicted; context-only: it comes after "
                        "(default: both)")  # fmt: skip
    parser.add_argument("--policies", nargs="+", default=list(PRESETS), choices=PRESETS, help="default: all")
    parser.add_argument("--budgets", type=budget, nargs="+", default=[0.1, 0.2, 512],
                        help="entries per KV head (512) or shares (0.2, 20%%) (default: 0.1 0.2 512)")  # fmt: skip
    parser.add_argument("--prefill", nargs="+", default=["full"], choices=PREFILLS, dest="prefills",
                        help="how prompts are read: full, exact, or in a stream that looks at the question before each "
                        "eviction (stream), once (stream-peek) or not (stream-window) (default: full, "
                        "once for all policies and budgets; the others read the prompt for each of them)")  # fmt: skip
    parser.add_argument(
        "--window", type=int, help="queries that observe, 1 to 256, in place of the policies' common 16"
    )
    parser.add_argument(
        "--text", type=Path, help="a text file to hide things in, instead of Python's language reference"
    )
    parser.add_argument(
        "--questions",
        type=Path,
        metavar="FILE",
        help="your own instead of the tasks: JSON lines of context (or context_file), question, answers (a list: all "
        "have to be in the output); --tasks, --tokens, --samples and --passages then have no effect",
    )
    parser.add_argument("--passages", type=int,
                        help="passages to measure perplexity and KL after (default: 4, or what fits)")  # fmt: skip
    parser.add_argument("--forced", type=int, default=256, help="tokens that follow each passage (default: 256)")
    parser.add_argument("--out", type=Path, default=Path("eval.jsonl"),
                        help="JSON lines; a file of another model, cache type, window, text or questions "
                        "is refused (default: eval.jsonl)")  # fmt: skip
    parser.add_argument("--plot", type=Path, help="also draw accuracy and KL divergence over budget as a PNG")
    parser.set_defaults(run=_eval)


def _eval(args: argparse.Namespace) -> None:
    from tqdm import tqdm  # noqa: PLC0415

    from pycriticalkv.evaluation.continuation import (  # noqa: PLC0415
        Continuation,
        continuation_table,
        continuations,
        passages_that_fit,
        summarize_continuations,
    )
    from pycriticalkv.evaluation.runner import (  # noqa: PLC0415
        Evaluator,
        Grid,
        Outcome,
        Source,
        append_outcome,
        open_outcomes,
    )
    from pycriticalkv.evaluation.summary import summarize, table  # noqa: PLC0415
    from pycriticalkv.evaluation.tasks import load_questions  # noqa: PLC0415
    from pycriticalkv.state import model_digest  # noqa: PLC0415

    _check_files(args, "out", "plot")
    for name, least, most in (("samples", 1, 100_000), ("passages", 0, 100_000), ("forced", 2, 2**31 - 1)):
        value = getattr(args, name)
        if value is not None and not least <= value <= most:
            raise ValueError(f"--{name} {value}: allowed is {least} to {most}")
    grid = Grid(
        tasks=tuple(args.tasks), n_tokens=tuple(args.tokens), settings=tuple(args.settings),
        seeds=tuple(range(args.first_seed, args.first_seed + args.samples)),
        policies=tuple(args.policies), budgets=tuple(args.budgets), window=args.window,
        prefills=tuple(args.prefills),
    )  # fmt: skip
    questions = load_questions(args.questions) if args.questions else []
    if questions:
        grid = replace(grid, tasks=())
    text = _read(args.text, "--text") if args.text else None
    forced = args.forced
    bar = tqdm(unit="answer", disable=None)

    def reading(done: int, total: int) -> None:
        bar.set_postfix_str(f"read {done} of {total} tokens")

    arguments = {**_llama_arguments(args), "prefill_progress": reading}
    with bar, Evaluator(args.model, grid, forced=forced, **arguments) as evaluator:
        passages = 0 if questions else args.passages
        if passages is None:
            passages = passages_that_fit(evaluator, forced, most=DEFAULT_PASSAGES, text=text)
            if passages < DEFAULT_PASSAGES:
                print(f"{passages} passages of {max(args.tokens)} + {forced} tokens fit", file=sys.stderr)
        for task in grid.tasks:  # whether the shortest prompts hold what they have to, before any work
            evaluator.sample(task, min(grid.n_tokens), grid.seeds[0], text)
        source = Source(
            model=args.model.name, model_digest=model_digest(str(args.model)).hex(), cache_type=args.type,
            window=args.window, text=_sha256(args.text), questions=_sha256(args.questions),
        )  # fmt: skip
        records = open_outcomes(args.out, source, (Outcome, Continuation))
        outcomes = [o for o in records if isinstance(o, Outcome) and grid.asks(o)]
        followed = [
            c for c in records if isinstance(c, Continuation) and c.passage < passages and c.forced == forced
            and c.n_tokens in grid.n_tokens and c.arm in grid.arms
        ]  # fmt: skip
        bar.total = grid.size or len(questions) * len(grid.settings) * len(grid.arms)
        bar.total += passages * len(grid.n_tokens) * len(grid.arms)
        bar.update(len(outcomes) + len(followed))

        def keep(record: Any, records: list[Any]) -> None:
            append_outcome(args.out, record)
            records.append(record)
            bar.update()

        for c in continuations(evaluator, passages, forced, done=followed, text=text):
            keep(c, followed)
        missing = evaluator.ask(questions, done=outcomes) if questions else evaluator.run(done=outcomes, text=text)
        for outcome in missing:
            keep(outcome, outcomes)
    print(table(summarize(outcomes)))
    overall = summarize(outcomes, by_task=False)
    if len({o.task for o in outcomes}) > 1:
        print()
        print(table(overall))
    cells = summarize_continuations(followed)
    if cells:
        print()
        print(continuation_table(cells))
    if args.plot:
        from pycriticalkv.evaluation.plots import plot_evaluation  # noqa: PLC0415

        plot_evaluation(overall, cells, args.plot, args.model.name)


def _add_bench(commands: Any) -> None:
    from pycriticalkv.policy import DEFAULT_PRESET, PRESETS  # noqa: PLC0415

    parser = commands.add_parser(
        "bench",
        usage="pycriticalkv bench MODEL [options]",
        help="what does it save? speed and memory by length and budget",
        description="Speed and memory beside the full cache, by length of the prompt and budget. All sides take turns "
        "in one run; other programs on the machine spoil the figures.",
    )
    _model_arguments(parser)
    parser.add_argument("--tokens", type=int, nargs="+", help="prompt lengths (default: of 1024 2048 4096 what fits)")
    parser.add_argument("--budgets", type=budget, nargs="+", default=[512, 1024],
                        help="entries per KV head (512) or shares (0.2, 20%%) (default: 512 1024)")  # fmt: skip
    parser.add_argument("--policy", default=DEFAULT_PRESET, choices=PRESETS, help="default: %(default)s")
    parser.add_argument("--turns", type=int, default=5, help="turns of every side (default: 5)")
    parser.add_argument("--tokens-per-turn", type=int, default=24, help="tokens generated in a turn (default: 24)")
    parser.add_argument("--text", type=Path, help="a text file to read, instead of Python's language reference")
    parser.add_argument("--out", type=Path, help="also write what was measured as JSON lines")
    parser.add_argument("--plot", type=Path, help="also draw speed and memory as a PNG")
    parser.set_defaults(run=_bench)


def _bench(args: argparse.Namespace) -> None:
    from tqdm import tqdm  # noqa: PLC0415

    from pycriticalkv.evaluation.runner import append_outcome  # noqa: PLC0415
    from pycriticalkv.evaluation.speed import measure_speed, speed_rows, speed_table  # noqa: PLC0415

    _check_files(args, "out", "plot")
    text = _read(args.text, "--text") if args.text else None
    bar = tqdm(unit="side", disable=None)
    measured: list[Any] = []
    for speed in measure_speed(
        args.model, args.tokens or DEFAULT_LENGTHS, args.budgets, skip_longer=not args.tokens, policy=args.policy,
        turns=args.turns,
        tokens_per_turn=args.tokens_per_turn, text=text, **_llama_arguments(args),
    ):  # fmt: skip
        if args.out:
            if not measured:  # not before: a command that is refused leaves an older file as it was
                args.out.write_text("", encoding="utf-8")
            append_outcome(args.out, speed)
        measured.append(speed)
        bar.update()
    bar.close()
    print(speed_table(speed_rows(measured)))
    if args.plot:
        from pycriticalkv.evaluation.plots import plot_speed  # noqa: PLC0415

        plot_speed(measured, args.plot, args.model.name)


def _add_inspect(commands: Any) -> None:
    from pycriticalkv.policy import DEFAULT_PRESET, PRESETS  # noqa: PLC0415

    parser = commands.add_parser(
        "inspect",
        usage="pycriticalkv inspect MODEL PROMPT [options]",
        help="which tokens did each layer and head keep?",
        description="A report of the tokens that were kept.",
    )
    _model_arguments(parser)
    parser.add_argument("prompt", metavar="PROMPT", help="text, or @FILE (also for text that starts with @)")
    parser.add_argument("--budget", type=budget, default=0.2,
                        help="entries (512) or a share (0.2, 20%%) (default: 0.2)")  # fmt: skip
    parser.add_argument("--policy", default=DEFAULT_PRESET, choices=PRESETS, help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("inspect.html"), help="HTML report (default: inspect.html)")
    parser.add_argument("--json", type=Path, help="also write what was kept as JSON")
    parser.set_defaults(run=_inspect)


def _print_progress(done: int, total: int) -> None:
    print(f"\rread {done} of {total} tokens", end="\n" if done == total else "", file=sys.stderr, flush=True)


def _inspect(args: argparse.Namespace) -> None:
    from pycriticalkv import Llama  # noqa: PLC0415
    from pycriticalkv.evaluation.inspection import inspect_prompt, write_html  # noqa: PLC0415

    _check_files(args, "out", "json")
    prompt = args.prompt
    if prompt.startswith("@"):
        if not Path(prompt[1:]).is_file():
            raise ValueError(f"PROMPT {prompt}: there is no file {prompt[1:]!r}")
        prompt = _read(Path(prompt[1:]), "PROMPT")
    arguments = _llama_arguments(args)
    llm = Llama(str(args.model), kv_budget=args.budget, kv_policy=args.policy, verbose=False, **arguments)
    if sys.stderr.isatty():
        llm.prefill_progress = _print_progress
    inspection = inspect_prompt(llm, prompt)
    llm.close()
    write_html(inspection, args.out)
    print(args.out)
    if args.json:
        args.json.write_text(json.dumps(inspection.to_json()), encoding="utf-8")
        print(args.json)


def deliver_again(unraisable: Any) -> None:
    """A ``sys.unraisablehook``: Ctrl-C during a callback of llama.cpp (its log) is lost there, so it comes again."""
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        threading.Timer(0.1, _thread.interrupt_main).start()
    else:
        sys.__unraisablehook__(unraisable)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; problems the user can solve are told in one line, with exit status 1."""
    parser = argparse.ArgumentParser(prog="pycriticalkv", description="Tools around pycriticalkv.Llama.")
    parser.add_argument("--version", action="version", version=f"pycriticalkv {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_eval(commands)
    _add_bench(commands)
    _add_inspect(commands)
    args = parser.parse_args(arguments)
    hook, sys.unraisablehook = sys.unraisablehook, deliver_again
    try:
        args.run(args)
    except (ValueError, TypeError, OSError, ImportError, MemoryError) as error:
        print(f"pycriticalkv: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("pycriticalkv: interrupted", file=sys.stderr)
        return 130
    finally:
        sys.unraisablehook = hook
    return 0


if __name__ == "__main__":
    sys.exit(main())
