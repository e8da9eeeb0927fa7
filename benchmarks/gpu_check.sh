#!/usr/bin/env bash
# Checks everything that needs a GPU, in less than 8 minutes and without a network, and prints a table of the steps last:
#   kernels on the device against their CPU twins; the same under compute-sanitizer (memcheck, racecheck); kernel times over
#   their floors; the model tests with all layers on the device; prefill, eviction, decode and memory on an 8B shape.
#
#   make install CMAKE_ARGS=-DGGML_CUDA=ON      before, or bring .venv and build/ along
#   benchmarks/gpu_check.sh
#   benchmarks/gpu_check.sh --dry-run           a rehearsal without a GPU: the kernels on the host, the model tests on the mock
#                                               device, the benchmark small and on the CPU; what is left out is said
#
# Ends with 0 if no step failed, with 1 if one did, with 2 if it cannot start, and with 77 if there is no GPU. Tests of SmolLM2
# are skipped where it cannot be fetched and is not in the cache.
# VENV names another environment than .venv, BUILD another build folder, SCRATCH where the 4.1 GB model goes.
set -uo pipefail
cd "$(dirname "$0")/.."

VENV=${VENV:-.venv}
BUILD=${BUILD:-$(ls -td build/cp3* 2>/dev/null | head -n 1)}
SCRATCH=${SCRATCH:-${TMPDIR:-/tmp}}
PROGRAMS=$BUILD/native-tests
MODEL_TESTS="tests/test_scores.py tests/test_budget.py tests/test_prefill.py tests/test_stream.py tests/test_state.py"
BENCH_ARGS=(--folder "$SCRATCH")
DRY_RUN=
SUMMARY=()
FAILED=0

# Seconds that each step may take, and after that to end. With six steps they add up to less than 8 minutes.
LIMIT_KERNELS=30 LIMIT_SANITIZER=55 LIMIT_TIMES=20 LIMIT_MODELS=110 LIMIT_BENCH=150 LIMIT_END=8

case ${1:-} in
    "") ;;
    --dry-run)
        DRY_RUN=1
        LIMIT_KERNELS=300 LIMIT_MODELS=1200
        BENCH_ARGS+=(--layers 1 --gpu-layers 0 --tokens 1100 1500 --turns 2)
        ;;
    *)
        sed -n '2,/^set/p' benchmarks/gpu_check.sh | sed '$d; s/^# \{0,1\}//'
        [ "$1" = --help ] && exit 0
        exit 2
        ;;
esac

skip() { # name, reason
    echo "== $1: skipped, $2"
    SUMMARY+=("| $1 | skipped: $2 | |")
}

# SIGINT at the limit: pytest then still says what it has found.
step() { # name, limit, command...
    local name=$1 limit=$2 from=$SECONDS status=0 result
    shift 2
    echo "== $name"
    timeout --signal=INT --kill-after=$LIMIT_END "$limit" "$@" || status=$?
    case $status in
        0) result=ok ;;
        124 | 137) result="FAILED: not done after $limit s" ;;
        *) result="FAILED: status $status" ;;
    esac
    [ $status -eq 0 ] || FAILED=1
    echo "== $name: $result"
    SUMMARY+=("| $name | $result | $((SECONDS - from)) s |")
}

has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep GPU >/dev/null; }

on_device() { # the checks that need a GPU
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv
    step "kernels on the device" $LIMIT_KERNELS "$PROGRAMS/cuda_kernels_on_device"
    local sanitizer
    sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null)
    for tool in memcheck racecheck; do
        if [ -n "$sanitizer" ]; then
            step "$tool" $LIMIT_SANITIZER "$sanitizer" --tool $tool --error-exitcode 1 "$PROGRAMS/cuda_kernels_on_device"
        else
            skip $tool "there is no compute-sanitizer"
        fi
    done
    step "kernel times" $LIMIT_TIMES "$PROGRAMS/kernel_times"
    # cuBLAS would round f32 products to TF32, which the references do not
    NVIDIA_TF32_OVERRIDE=0 PIP_NO_INDEX=1 PYCRITICALKV_TEST_GPU_LAYERS=-1 step "model tests on the device" $LIMIT_MODELS \
        "$VENV/bin/pytest" -q -rs -p no:cacheprovider $MODEL_TESTS
}

rehearsed() { # what stands in for them
    step "kernels, on the host" $LIMIT_KERNELS "$PROGRAMS/test_cuda_kernels"
    for name in "kernels on the device" memcheck racecheck "kernel times"; do
        skip "$name" "needs a GPU"
    done
    PIP_NO_INDEX=1 PYCRITICALKV_TEST_GPU_LAYERS=-1 PYCRITICALKV_TEST_DEVICE=mock PYCRITICALKV_NATIVE_TESTS=$PROGRAMS \
        step "model tests, on the mock device" $LIMIT_MODELS "$VENV/bin/pytest" -q -rs -p no:cacheprovider $MODEL_TESTS
}

if [ ! -x "$VENV/bin/pytest" ] || [ ! -d "$PROGRAMS" ]; then
    echo "nothing is built: run make install CMAKE_ARGS=-DGGML_CUDA=ON first"
    exit 2
fi
if [ -n "$DRY_RUN" ]; then
    rehearsed
elif has_gpu; then
    if [ ! -x "$PROGRAMS/cuda_kernels_on_device" ]; then
        echo "built without CUDA: run make install CMAKE_ARGS=-DGGML_CUDA=ON"
        exit 2
    fi
    on_device
else
    echo "there is no GPU here; benchmarks/gpu_check.sh --dry-run does what can be done without one"
    exit 77
fi
step "benchmark" $LIMIT_BENCH "$VENV/bin/python" benchmarks/gpu.py "${BENCH_ARGS[@]}"

printf '\n| step | result | time |\n| --- | --- | --- |\n'
printf '%s\n' "${SUMMARY[@]}"
echo "all of it took $SECONDS s"
exit $FAILED
