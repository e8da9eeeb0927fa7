"""Layers on a GPU: every node of our graphs runs there, and only inputs and scores travel.

Proven without a GPU: the mock device accepts what ggml's own CUDA backend accepts, keeps its memory out of the host's
reach and computes with the CPU's code, so the answers are those of the CPU.
"""

from __future__ import annotations

import os
import subprocess
import sys

import mock_cuda
import numpy as np
import pytest
from expected import AGGREGATES, NORMS, QUANTIZED, TYPES
from test_families import FAMILIES
from tiny import write_tiny_lora

KINDS = {**TYPES, **QUANTIZED}
POLICIES = [{"norm": norm, "aggregate": aggregate} for norm in NORMS for aggregate in AGGREGATES]
CAPABILITIES = (610, 750, 890, 900, 1200)  # 860 is the mock's own
# Everything takes several times as long there.
UNDER_SANITIZERS = "ASAN_OPTIONS" in os.environ
N, BUDGET = 300, 64


@pytest.fixture(scope="module")
def library():
    found = mock_cuda.find_library()
    if found is None:
        why = "the mock device is not there: it is built with the C++ tests (make test)"
        if mock_cuda.FOLDER in os.environ:
            pytest.fail(why)
        pytest.skip(why)
    return found


@pytest.fixture
def job(make_tiny, tokens):
    """A job for mock_cuda.answer: a model of a family, all of it on the device."""

    def make(arch="llama", kind="f16", policy=POLICIES[0], shape=None, n=N, **more):
        shape = {"n_layer": 4, "n_head": 4, "head_dim": 64, "wo_type": "F32", "weight_type": "F32", **(shape or {})}
        model = {"n_ctx": 1024, "kv_budget": BUDGET, "type_k": KINDS[kind], "type_v": KINDS[kind], "n_gpu_layers": -1}
        path = make_tiny(arch=arch, **shape)
        more = more or {"evict": BUDGET}
        more["model"] = {**model, **more.get("model", {})}
        return {"path": path, "policy": policy, "prompt": tokens(n), **more}

    return make


def on_device(placement):
    """The total of a placement; nothing of it may be on the CPU or have moved, but for inputs."""
    assert placement["n_graphs"] > 0 < placement["n_nodes"]
    assert (placement["n_nodes_cpu"], placement["n_copies"]) == (0, 0), placement["first"]


def families(*names):
    """All families, or those of these names; three under sanitizers."""
    chosen = names or tuple(FAMILIES)
    return [arch for arch in chosen if not UNDER_SANITIZERS or arch in ("llama", "gemma3", "lfm2")]


def combinations(arch, kinds):
    """Every type of cache with one policy; over families and types each policy has its turns."""
    for at, kind in enumerate(kinds, start=list(FAMILIES).index(arch)):
        yield kind, at % len(POLICIES), POLICIES[at % len(POLICIES)]


# With the kernels for our own ops, as CUDA has them, and with standard ops alone. These compute what the CPU does, and
# so keep the same; kernels may round a tie to another side.
FUSED = pytest.mark.parametrize("fused", [True, False], ids=["fused", "standard"])


def name(kind, policy):
    return f"{kind}/{policy['norm']}/{policy['aggregate']}"


@FUSED
@pytest.mark.parametrize("arch", families())
def test_an_eviction_stays_on_the_device(library, job, arch, fused):
    """pytest -s: the family's row of the table: nodes on the device / on the CPU / tensors copied, by cache type."""
    jobs = {(kind, i): job(arch, kind, policy) for kind, i, policy in combinations(arch, KINDS)}
    got = dict(zip(jobs, mock_cuda.answers(library, list(jobs.values()), fused=fused), strict=True))
    row = {kind: [0, 0, 0] for kind in KINDS}
    for (kind, i), answer in got.items():
        placement, traffic = answer["placement"], answer["traffic"]
        for at, count in enumerate(("n_nodes", "n_nodes_cpu", "n_copies")):
            row[kind][at] += placement[count]
        # what the device computed and what crossed the bus, as it counted by itself
        assert traffic["n_nodes"] == placement["n_nodes"] - placement["n_nodes_cpu"]
        assert traffic["bytes_up"] == placement["bytes_inputs"], name(kind, POLICIES[i])
        assert traffic["bytes_down"] == answer["scored"], name(kind, POLICIES[i])
    print(f"\n{arch:14}", *(f"{kind} {nodes - cpu}/{cpu}/{copies} " for kind, (nodes, cpu, copies) in row.items()))
    for answer in got.values():
        on_device(answer["placement"])
        assert (answer["fused"] > 0) == fused
    for key, each in jobs.items() if not fused else ():
        assert got[key]["kept"] == mock_cuda.answer(each)["kept"], name(key[0], POLICIES[key[1]])


MODES = [
    {"model": {"prefill": "full"}},
    {"model": {"prefill": "exact"}},
    {"model": {"prefill": "stream"}, "stream": {"observe": "re-peek", "tokens": 24, "chunk": 64}},
    {"model": {"prefill": "stream"}, "stream": {"observe": "peek", "tokens": 24, "chunk": 64}},
    {"model": {"prefill": "stream"}, "stream": {"observe": "window", "chunk": 64}},
]


@pytest.mark.parametrize("arch", families())
def test_prompts_and_answers(library, job, arch):
    """In every mode of prefill, with evictions while the answer is generated."""
    jobs = []
    for i, mode in enumerate(MODES):
        kind = list(KINDS)[(i + list(FAMILIES).index(arch)) % len(KINDS)]
        model = {"n_ubatch": 128, "n_ctx": 2048, **mode["model"]}
        jobs.append(job(arch, kind, POLICIES[i], n=500, **{**mode, "model": model}))
        jobs[-1]["n"] = 80
    for each, got in zip(jobs, mock_cuda.answers(library, jobs, fused=False), strict=True):
        on_device(got["placement"])
        want = mock_cuda.answer(each)
        for same in ("mode", "evictions", "kept", "text"):
            assert got[same] == want[same], (each["model"], same)
        assert got["mode"] == each["model"]["prefill"]
        assert got["evictions"] > 1


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_generation_of_devices(library, job, capability):
    for answer in mock_cuda.answers(
        library, [job(arch, "q8_0") for arch in families("llama", "gemma2", "gpt-oss", "lfm2")], capability
    ):
        on_device(answer["placement"])


@pytest.mark.parametrize("capability,kernels", [(610, 2), (700, 3)])
def test_the_l1_kernel_needs_tensor_cores(library, job, capability, kernels):
    (got,) = mock_cuda.answers(library, [job(policy={"norm": "l1"})], capability)
    on_device(got["placement"])
    assert got["fused"] == kernels * got["layers"]


@pytest.mark.parametrize("wo_type", ["F16", "BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0", "Q4_K", "Q6_K"])
def test_types_of_the_output_projection(library, job, wo_type):
    jobs = [job(policy=policy, shape={"wo_type": wo_type}) for policy in POLICIES[::2]]
    for answer in mock_cuda.answers(library, jobs):
        on_device(answer["placement"])


@FUSED
def test_adapters(library, job, tmp_path, fused):
    path = tmp_path / "lora.gguf"
    jobs = [job(policy=policy) for policy in POLICIES[::2]]
    write_tiny_lora(path, jobs[0]["path"], rank=4)
    for each in jobs:
        each["model"]["lora_path"] = str(path)
    for each, got in zip(jobs, mock_cuda.answers(library, jobs, fused=fused), strict=True):
        on_device(got["placement"])
        assert fused or got["kept"] == mock_cuda.answer(each)["kept"]


@FUSED
@pytest.mark.parametrize("n_head_kv", [1, 4])
def test_other_policies(library, job, n_head_kv, fused):
    others = [{"value": "vatp"}, {"value": "caote"}, {"score": "key-norm", "value": "none"},
              {"score": "keydiff", "value": "none"}, {"heads": "shared", "value": "none"},
              {"heads": "adaptive"}, {"heads": "adaptive", "norm": "l1", "measure": True}]  # fmt: skip
    policies = ({"window": 256}, {"window": 256, "aggregate": "mean"}, {"pool": 1}, {"pool": 63}, {"value": "none"},
                *others)  # fmt: skip
    shape, model = {"n_head_kv": n_head_kv}, {"kv_budget": 400}
    jobs = [job(policy=policy, shape=shape, n=700, evict=400, model=model) for policy in policies]
    for each, got in zip(jobs, mock_cuda.answers(library, jobs, fused=fused), strict=True):
        on_device(got["placement"])
        assert fused or got["kept"] == mock_cuda.answer(each)["kept"]


@FUSED
@pytest.mark.parametrize("arch", families())
def test_what_is_measured(library, job, arch, fused):
    """Bound and change are computed on the device too, also where the policy itself asks no query."""
    recency = {"score": "recency", "value": "none"}
    policies = [POLICIES[0], {**POLICIES[2], "window": 64}, POLICIES[4], recency]
    kinds = list(KINDS)
    at = list(FAMILIES).index(arch)
    jobs = [job(arch, kinds[(at + i) % len(kinds)], {**policy, "measure": True}, model={"kv_budget": 96}, evict=96)
            for i, policy in enumerate(policies)]  # fmt: skip
    for each, got in zip(jobs, mock_cuda.answers(library, jobs, fused=fused), strict=True):
        on_device(got["placement"])
        want = mock_cuda.answer(each)
        assert len(got["change"]) == len(got["bound"]) == got["layers"]
        if got["kept"] == want["kept"]:  # kernels may round a tie to another side
            rounding = L1_ROUNDING if fused and each["policy"].get("norm") == "l1" else 1e-5
            assert np.allclose(got["bound"], want["bound"], rtol=rounding)
            assert np.allclose(got["change"], want["change"], rtol=1e-5)
        else:
            assert fused


# Relative. The standard graphs round the query to the type of an f16 or bf16 cache; the L1 kernel rounds values and W_O
# to f16.
L1_ROUNDING = 2e-3
ROUNDING = {"f32": 1e-4, "f16": 5e-3, "bf16": 4e-2, "q8_0": 1e-4, "q4_0": 1e-4}


# with a soft-cap, sink logits, a sliding half and a hybrid memory
@pytest.mark.parametrize("arch", families("llama", "gemma2", "gpt-oss", "gemma3", "lfm2"))
def test_fused_kernels(library, job, arch):
    """One node for the scores, one for the norms and one for the move of each layer, all on the device."""
    jobs = {(kind, i): job(arch, kind, policy, evict=BUDGET, scores=True)
            for kind, i, policy in combinations(arch, ROUNDING)}  # fmt: skip
    answers = (mock_cuda.answers(library, list(jobs.values()), fused=fused) for fused in (True, False))
    for (kind, i), got, want in zip(jobs, *answers, strict=True):
        on_device(got["placement"])
        assert (got["fused"], want["fused"]) == (3 * got["layers"], 0), name(kind, POLICIES[i])
        rounding = (ROUNDING[kind], L1_ROUNDING if POLICIES[i]["norm"] == "l1" else ROUNDING["f32"])
        for at, (ours, standard) in enumerate(zip(got["scores"], want["scores"], strict=True)):
            assert np.allclose(ours, standard, rtol=rounding[at % 2], atol=1e-9), (name(kind, POLICIES[i]), at)


def test_fused_kernels_in_every_mode(library, job):
    jobs = []
    for mode in MODES:
        jobs.append(job("llama", "f32", POLICIES[0], n=500, **{**mode, "model": {"n_ubatch": 128, **mode["model"]}}))
        jobs[-1]["n"] = 80
    for each, got in zip(jobs, mock_cuda.answers(library, jobs, fused=True), strict=True):
        on_device(got["placement"])
        assert got["fused"] > 0 and len(got["text"]) == 80
        want = mock_cuda.answer(each)
        assert (got["mode"], got["evictions"], got["text"]) == (want["mode"], want["evictions"], want["text"])


def test_layers_left_on_the_host_are_seen(library, job):
    """So the counts can be other than 0."""
    (got,) = mock_cuda.answers(library, [job(evict=BUDGET, model={"n_gpu_layers": 3})])
    placement = got["placement"]
    assert 0 < placement["n_nodes_cpu"] < placement["n_nodes"]
    assert placement["first"]


def test_queries_are_saved_on_the_device(library, job):
    (got,) = mock_cuda.answers(library, [job()])
    assert got["set_rows"] == 3 * got["layers"]  # a token's K, V and query


@FUSED
@pytest.mark.parametrize("arch", families("llama", "gemma3", "gpt-oss", "lfm2"))
def test_heads_of_different_lengths(library, job, arch, fused):
    """Evictions of such heads, and the attention over them, in every mode of prefill and with every type of cache."""
    jobs = []
    for i, kind in enumerate(KINDS):
        mode = MODES[i % len(MODES)]
        policy = {"heads": "adaptive", "slack": 16, **POLICIES[i % len(POLICIES)]}
        model = {"n_ubatch": 128, "n_ctx": 2048, **mode["model"]}
        jobs.append(job(arch, kind, policy, n=500, **{**mode, "model": model}))
        jobs[-1]["n"] = 80
    for each, got in zip(jobs, mock_cuda.answers(library, jobs, fused=fused), strict=True):
        on_device(got["placement"])
        n_head_kv = len(got["kept"][0])
        assert got["evictions"] >= 3
        assert got["set_rows"] >= (2 * n_head_kv + 1) * got["layers"]
        assert got["attended"] >= n_head_kv * got["layers"]
        assert fused or got["kept"] == mock_cuda.answer(each)["kept"]


@pytest.mark.parametrize("arch", families("llama", "gemma3"))
def test_the_mask_of_such_heads_is_uploaded_once(library, job, arch):
    """However many heads and layers read it."""
    counts = [
        mock_cuda.answers(library, [job(arch, policy=policy, shape={"n_layer": n_layer}, evict=BUDGET)])[0]["uploads"]
        for policy in ({}, {"heads": "adaptive"})
        for n_layer in (2, 6)
    ]
    assert counts[0] == counts[1] <= counts[2] == counts[3] <= counts[0] + 1


@pytest.mark.parametrize("n_gpu_layers", [1, 2, 3, 4])
@pytest.mark.parametrize("arch", families("llama", "gemma3"))
def test_such_heads_on_some_layers_of_the_device(library, job, arch, n_gpu_layers):
    jobs = []
    for mode in MODES[:3]:
        model = {"n_ubatch": 128, "n_ctx": 2048, **mode["model"], "n_gpu_layers": n_gpu_layers}
        jobs.append(job(arch, "f16", {"heads": "adaptive", "slack": 16}, n=500, **{**mode, "model": model}))
        jobs[-1]["n"] = 80
    for each, got in zip(jobs, mock_cuda.answers(library, jobs, fused=False), strict=True):
        want = mock_cuda.answer(each)
        assert (got["kept"], got["text"], got["mode"]) == (want["kept"], want["text"], want["mode"])
        assert got["evictions"] == want["evictions"] >= 3


@pytest.mark.parametrize("arch", families("llama", "gemma3", "gpt-oss", "lfm2"))
def test_decode_replays_cuda_graphs(library, job, arch):
    """Between evictions CUDA replays what it captured; a token that evicts is launched, the next replayed again."""
    (got,) = mock_cuda.answers(library, [job(arch, policy={"slack": 40}, evict=BUDGET, tokens=120)])
    before, n_evictions = 1, []
    for at, (replayed, launched, evictions) in enumerate(got["tokens"]):
        if evictions > before:
            n_evictions.append(at)
            # scores, norms and move of each layer, and the token
            assert (replayed, launched) == (0, 3 * got["layers"] + 1), at
        else:
            assert (replayed, launched) == (1, 0), at
        before = evictions
    print(f"\n{arch}: evictions before tokens {n_evictions} of 120; all other tokens replayed")
    assert n_evictions == [39, 79, 119]


def run_with_mock(library, code, *arguments):
    """The output of a program that has the mock device, and `open_model(path, **more)` for models on it."""
    begin = (
        "import sys, numpy as np, mock_cuda; from pycriticalkv import Llama; mock_cuda.Mock(sys.argv[1])\n"
        "def open_model(path, **more):\n"
        "    common = {'n_ctx': 2048, 'n_ubatch': 64, 'kv_budget': 64, 'verbose': False, 'n_gpu_layers': -1}\n"
        "    return Llama(path, n_threads=1, n_threads_batch=2, **{**common, **more})\n"
    )
    folders = os.pathsep.join(str(mock_cuda.ROOT / name) for name in ("tests", "models"))
    environment = {**os.environ, "PYTHONPATH": folders}
    command = [sys.executable, "-c", begin + code, str(library), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=mock_cuda.ROOT / "tests",
                          timeout=600, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


FAILURES = """
from helpers import fail_allocations

llm, other = (open_model(sys.argv[2], prefill=sys.argv[3]) for _ in range(2))
prompt, conversation = np.random.default_rng(1).integers(10, 440, (2, 200)).tolist()
print(fail_allocations(llm, other, prompt, conversation))
"""


@pytest.mark.parametrize("prefill", ["full", "exact", "stream"])
def test_the_kth_allocation_fails(library, job, prefill):
    """On a device evictions move to new memory, so the last one of a prompt can fail as well."""
    assert int(run_with_mock(library, FAILURES, job()["path"], prefill)) > 5


MOVES = """
from helpers import kept, last_logits

device, host = open_model(sys.argv[2]), open_model(sys.argv[2], n_gpu_layers=0)
for one, other in ((device, host), (host, device)):
    one.reset()
    one.eval(np.random.default_rng(1).integers(10, 440, 300).tolist())
    other.load_state(one.save_state())
    assert kept(one) == kept(other)
    one.eval([5])
    other.eval([5])
    assert np.array_equal(last_logits(one), last_logits(other))  # the mock computes with the CPU's code
"""


@pytest.mark.parametrize("arch", families("llama", "gemma3"))
def test_a_state_moves_between_devices(library, job, arch):
    """The same model file is the same model, wherever its weights are, also where they are tied (gemma3)."""
    run_with_mock(library, MOVES, job(arch)["path"])


TOUCH = """
import ctypes, sys
import pycriticalkv
import mock_cuda
from pycriticalkv._library import LIBRARY_FOLDER

mock_cuda.Mock(sys.argv[1])
ggml = ctypes.CDLL(str(LIBRARY_FOLDER / "libggml.so"))
pointer = ctypes.c_void_p
for name, *arguments in (("dev_by_name", ctypes.c_char_p), ("dev_buffer_type", pointer), ("buffer_get_base", pointer),
                         ("buft_alloc_buffer", pointer, ctypes.c_size_t), ("buffer_is_host", pointer)):
    function = getattr(ggml, "ggml_backend_" + name)
    function.argtypes, function.restype = arguments, pointer
buft = ggml.ggml_backend_dev_buffer_type(ggml.ggml_backend_dev_by_name(b"MockCUDA0"))
base = ggml.ggml_backend_buffer_get_base(ggml.ggml_backend_buft_alloc_buffer(buft, 64))
print("allocated", flush=True)
ctypes.string_at(base, 1)
print("read", flush=True)
"""


def test_the_host_cannot_read_device_memory(library):
    """So that code which takes a device address for a host address ends the process."""
    done = subprocess.run([sys.executable, "-c", TOUCH, str(library)], capture_output=True, text=True,
                          cwd=mock_cuda.ROOT / "tests", timeout=60, check=False)  # fmt: skip
    assert done.stdout.split()[-1] == "allocated" and done.returncode != 0
