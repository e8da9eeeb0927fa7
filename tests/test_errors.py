"""Everything a user can get wrong raises a Python exception that names what is wrong and what is allowed."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import greedy

import pycriticalkv
from pycriticalkv import KVPolicy


@pytest.mark.parametrize("budget", [0, -1, 20, 2**31, float("nan"), float("inf"), 0.0, -0.5, 1.0, 1.5, np.float64(2)])
def test_bad_budgets(tiny, load, budget):
    with pytest.raises(ValueError, match=r"kv_budget=.*an int of at least .* = 21 .* or a float in \(0, 1\)"):
        load(tiny, kv_budget=budget)


@pytest.mark.parametrize("budget", [True, False, "1024", [64], 1j, KVPolicy()])
def test_budgets_of_the_wrong_type(tiny, load, budget):
    with pytest.raises(TypeError, match=r"kv_budget="):
        load(tiny, kv_budget=budget)


def test_numpy_budgets_are_numbers(tiny, load):
    assert load(tiny, kv_budget=np.int64(64))._kv_budget.entries == 64
    assert load(tiny, kv_budget=np.float32(0.25))._kv_budget.for_prompt(1000) == 250


def test_unknown_policy_lists_the_known(tiny, load):
    with pytest.raises(ValueError, match=r"kv_policy='h2o' is not known; known are critical-max, criticalkv, snapkv"):
        load(tiny, kv_budget=64, kv_policy="h2o")
    with pytest.raises(TypeError, match="kv_policy=7"):
        load(tiny, kv_budget=64, kv_policy=7)
    with pytest.raises(ValueError, match="without kv_budget"):
        load(tiny, kv_policy="snapkv")


@pytest.mark.parametrize(
    "arguments,error",
    [
        ({"window": 0}, ValueError), ({"window": 257}, ValueError),
        ({"window": 16.0}, TypeError), ({"window": True}, TypeError),
        ({"sinks": -1}, ValueError), ({"pool": 4}, ValueError), ({"pool": 65}, ValueError),
        ({"alpha": 1.5}, ValueError), ({"alpha": float("nan")}, ValueError), ({"alpha": "half"}, TypeError),
        ({"eps": -1e-9}, ValueError), ({"eps": float("inf")}, ValueError), ({"slack": 0}, ValueError),
        ({"norm": "L1"}, ValueError), ({"norm": None}, TypeError), ({"score": "attention"}, ValueError),
        ({"aggregate": "sum"}, ValueError), ({"value": "obcache"}, ValueError), ({"seed": -1}, ValueError),
        ({"layers": "adaptive"}, ValueError), ({"layers": "cone"}, ValueError), ({"layers": 1}, TypeError),
        ({"heads": "each"}, ValueError), ({"head_floor": 2.0, "heads": "adaptive"}, ValueError),
        ({"score": "random"}, ValueError), ({"score": "keydiff"}, ValueError), ({"heads": "shared"}, ValueError),
        ({"heads": "shared", "score": "random", "value": "none"}, ValueError),
    ],
)  # fmt: skip
def test_bad_policies_name_the_setting(arguments, error):
    # the default value, "critical", goes with neither
    with_values = ({"score": "random"}, {"score": "keydiff"}, {"heads": "shared"})
    name = "value" if arguments in with_values else next(iter(arguments))
    with pytest.raises(error, match=name):
        KVPolicy(**arguments)


def test_missing_and_corrupt_models(load, tmp_path, tiny):
    with pytest.raises(ValueError, match=r"no-such\.gguf"):
        load(str(tmp_path / "no-such.gguf"), kv_budget=64)
    for name, data in (("empty", b""), ("noise", bytes(range(256)) * 99), ("cut", Path(tiny).read_bytes()[:200_000])):
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(data)
        with pytest.raises(ValueError, match=rf"{name}\.gguf"):
            load(str(path), kv_budget=64)


@pytest.mark.parametrize(
    "arch,why",
    [
        ("mamba", "recurrent"), ("t5", "encoder-decoder"), ("deepseek2", "MLA"), ("bloom", "ALiBi"),
        ("deci", "a cache without KV heads"),
    ],
)  # fmt: skip
def test_models_that_cannot_be_evicted(make_tiny, load, arch, why):
    with pytest.raises(ValueError, match=why):
        load(make_tiny(arch=arch), kv_budget=64, n_ctx=512)


@pytest.mark.parametrize("arch", ["mamba", "deepseek2", "bloom", "gemma3"])
def test_they_still_run_without_a_budget(make_tiny, load, tokens, arch):
    assert len(greedy(load(make_tiny(arch=arch), n_ctx=512), tokens(30), 5)) == 5


def test_arguments_that_a_budget_cannot_serve(tiny, load):
    with pytest.raises(ValueError, match="flash_attn=False"):
        load(tiny, kv_budget=64, flash_attn=False)
    with pytest.raises(TypeError, match="flash_attn='no'"):
        load(tiny, kv_budget=64, flash_attn="no")
    for n_ctx, error in ((-1, ValueError), (2**31, ValueError), ("512", TypeError), (512.0, TypeError)):
        with pytest.raises(error, match=f"n_ctx={n_ctx!r}"):
            load(tiny, kv_budget=64, n_ctx=n_ctx)
    with pytest.raises(ValueError, match="embedding=True"):
        load(tiny, kv_budget=64, embedding=True)
    with pytest.raises(ValueError, match="vocab_only=True"):
        load(tiny, kv_budget=64, vocab_only=True)
    with pytest.raises(ValueError, match="swa_full=True"):
        load(tiny, kv_budget=64, swa_full=True)
    for name in ("type_k", "type_v"):
        with pytest.raises(ValueError, match=rf"{name}=12.*q8_0"):
            load(tiny, kv_budget=64, **{name: 12})
    with pytest.raises(TypeError, match="kv_buget"):
        load(tiny, kv_buget=64)


@pytest.mark.parametrize("name", ["n_batch", "n_ubatch"])
def test_batch_sizes_are_checked(tiny, load, name):
    for value, error in ((0, ValueError), (-1, ValueError), (2**31, ValueError), (1.5, TypeError), (True, TypeError)):
        with pytest.raises(error, match=f"{name}={value!r}"):
            load(tiny, kv_budget=64, **{name: value})


@pytest.mark.parametrize("budget", [None, 64])
def test_an_adapter_that_is_none(tiny, load, tmp_path, budget):
    (tmp_path / "text.gguf").write_text("nothing")
    for path in (tmp_path / "missing.gguf", tmp_path / "text.gguf"):
        with pytest.raises((ValueError, RuntimeError), match=path.name):
            load(tiny, kv_budget=budget, lora_path=str(path))


@pytest.mark.parametrize("budget", [None, 64])
def test_a_closed_model_says_so(tiny, load, budget):
    llm = load(tiny, kv_budget=budget, n_ctx=512)
    llm.eval([5, 6, 7])
    state = llm.save_state()
    for nothing in (None, b"state"):
        with pytest.raises(TypeError, match="allowed is what save_state"):
            llm.load_state(nothing)
    tokenizer, running = llm.tokenizer(), llm.generate([5, 6])
    next(running)
    llm.close()
    calls = [
        lambda: next(running), llm.token_bos, llm.token_eos, llm.n_vocab, llm.n_embd, lambda: llm.detokenize([1]),
        lambda: llm.create_embedding("a"), lambda: tokenizer.encode("a"), lambda: llm.ctx,
        lambda: llm("hi"), lambda: llm.eval([1]), lambda: llm.tokenize(b"a"), llm.n_ctx, llm.save_state, llm.sample,
        lambda: llm.load_state(state), lambda: llm.create_chat_completion([{"role": "user", "content": "hi"}]),
        lambda: next(llm.generate([5])),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises((RuntimeError, ctypes.ArgumentError), match="the model is closed"):
            call()
    llm.close()


def test_a_prompt_beyond_the_context_is_refused(tiny, load):
    llm = load(tiny, kv_budget=64, n_ctx=256)
    with pytest.raises(ValueError, match="exceed context window of 256"):
        llm("the keeper of the lighthouse " * 100)


def test_inspection_without_a_budget_or_of_a_layer_that_is_not_there(tiny, load):
    plain = load(tiny)
    for call in (plain.kv_stats, lambda: plain.kv_positions(0)):
        with pytest.raises(RuntimeError, match="needs a kv_budget"):
            call()
    llm = load(tiny, kv_budget=64)
    for il in (-1, 3, 99, 2**40, "0", None):
        with pytest.raises(ValueError, match=rf"il={il!r}: layers that are evicted are 0, 1, 2"):
            llm.kv_positions(il)


def test_counts_set_by_hand_to_nonsense(tiny, load):
    llm = load(tiny, kv_budget=64, n_ctx=512)
    for n in (-1, 512):
        llm.n_tokens = n
        with pytest.raises(ValueError, match=f"1 tokens after {n} exceed the context window of 512"):
            llm.eval([7])
    with pytest.raises(TypeError, match="state=None"):
        llm.load_state(None)


def test_a_path_object_is_a_path(tiny, load):
    assert load(Path(tiny), kv_budget=64).kv_stats().budget == 64


@pytest.mark.parametrize("budget", [None, 64])
@pytest.mark.parametrize("path", [None, 5, b"model.gguf"])
def test_a_path_that_is_none(load, path, budget, recwarn):
    with pytest.raises(TypeError, match=f"model_path={path!r}: allowed is the path of a GGUF file"):
        load(path, kv_budget=budget)


def test_a_closed_model_raises(tiny, load):
    llm = load(tiny, kv_budget=64)
    llm.close()
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.kv_stats()
    with pytest.raises(RuntimeError, match="closed"):
        llm.reset()


def test_the_c_api_refuses_contexts_without_a_store(tiny, load):
    from pycriticalkv.store import Store  # noqa: PLC0415

    plain = load(tiny)
    with pytest.raises(RuntimeError, match="without a store"):
        Store(lambda: plain._ctx.ctx).stats()


def test_shifting_an_evictable_cache_is_refused(tiny, load, tokens):
    llm = load(tiny, kv_budget=64, n_ctx=512)
    llm.eval(tokens(100))
    before = llm.kv_positions(0)[0].tolist()
    llm._ctx.kv_cache_seq_shift(0, 10, 20, 5)
    assert llm.kv_positions(0)[0].tolist() == before
    llm.eval([5])


def python(code, tmp_path, **environment):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False,
        env={**os.environ, **environment},
    )  # fmt: skip


def test_llama_cpp_imported_first_with_other_libraries(tmp_path):
    other = tmp_path / "other"
    shutil.copytree(Path(pycriticalkv.__file__).parent / "lib", other)
    run = python("import llama_cpp, pycriticalkv", tmp_path, LLAMA_CPP_LIB_PATH=str(other))
    assert "ImportError: llama_cpp was imported before pycriticalkv" in run.stderr
    run = python("import pycriticalkv", tmp_path, LLAMA_CPP_LIB_PATH=str(other))
    assert "ImportError: the environment variable LLAMA_CPP_LIB_PATH" in run.stderr


def test_another_version_of_llama_cpp_python(tmp_path):
    code = "import importlib.metadata as m; m.version = lambda name: '0.3.35'; import pycriticalkv"
    run = python(code, tmp_path)
    assert "ImportError: pycriticalkv needs llama-cpp-python 0.3.36, but it is 0.3.35" in run.stderr


def test_the_environment_is_left_alone(tmp_path):
    run = python("import os, pycriticalkv; print(os.environ.get('LLAMA_CPP_LIB_PATH'))", tmp_path)
    assert run.stdout.strip() == "None"


@pytest.mark.parametrize("name,meant", [("prefil", "prefill"), ("kv_bugdet", "kv_budget"), ("n_cxt", "n_ctx")])
def test_unknown_arguments(tiny, load, name, meant):
    with pytest.raises(TypeError, match=f"{name}=5 is not an argument of Llama; did you mean {meant}"):
        load(tiny, kv_budget=64, **{name: 5})


@pytest.mark.parametrize(
    "arguments,error,text",
    [
        ({"draft_model": "small.gguf"}, TypeError, "draft_model='small.gguf': allowed is"),
        ({"chat_format": 5}, TypeError, "chat_format=5: allowed is a str"),
        ({"chat_format": "lama-2"}, ValueError, "chat_format='lama-2': .*llama-2"),
    ],
)
def test_arguments_that_llama_cpp_python_reads_late(tiny, load, arguments, error, text):
    with pytest.raises(error, match=text):
        load(tiny, kv_budget=64, **arguments)


@pytest.mark.parametrize("budget", [None, 64])
def test_a_prompt_without_tokens(tiny, load, budget):
    llm = load(tiny, kv_budget=budget)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"no tokens \(tokens=\[\]\); allowed is at least one"):
            next(llm.generate([]))
        greedy(llm, [5, 6, 7], 3)


@pytest.mark.parametrize("threads,error", [(-5, ValueError), (513, ValueError), ("x", TypeError), (True, TypeError)])
def test_threads_out_of_range(tiny, load, threads, error):
    with pytest.raises(error, match=f"n_threads={threads!r}: allowed is an int"):
        load(tiny, kv_budget=64, n_threads=threads)
