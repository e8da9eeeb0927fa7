// Times the fused kernels on a device at the sizes of docs/performance.md, one layer of an 8B Llama with a long prompt, and
// compares them with the floors for this very card. Prints a table in Markdown. benchmarks/gpu_check.sh runs it.

#include "criticalkv-attention.cuh"
#include "criticalkv-compaction.cuh"
#include "criticalkv-gram.cuh"
#include "criticalkv-l1.cuh"
#include "kernel_runs.h"

#include <cstdint>
#include <random>

using namespace criticalkv;
using cases::require;

static constexpr int64_t N         = 32768;  // entries
static constexpr int     N_HEAD_KV = 8;
static constexpr int     GROUP     = 4;  // query heads of a KV head
static constexpr int     N_HEAD    = GROUP * N_HEAD_KV;
static constexpr int     D         = 128;  // head size
static constexpr int64_t N_EMBD    = 4096;
static constexpr int     WINDOW    = 16;
static constexpr int     POOL      = 5;
static constexpr size_t  L2_BYTES  = (size_t) 256 << 20;

// ---- the card --------------------------------------------------------------------------------------------------------

struct card {
    double bytes;   // per second
    double f32;     // operations per second
    double tensor;  // the same, f16 with f32 accumulation
};

static int attribute(cudaDeviceAttr which) {
    int value = 0;
    require(cudaDeviceGetAttribute(&value, which, 0) == cudaSuccess, "an attribute of the device");
    return value;
}

// Operations per clock and multiprocessor, from the makers' tables by compute capability. Within 7.x, 8.6 and 8.9 cards differ in
// tensor operations: GeForce cards do the 512 that stand here, others 1,024.
static card peaks() {
    const int    cc = attribute(cudaDevAttrComputeCapabilityMajor) * 10 + attribute(cudaDevAttrComputeCapabilityMinor);
    const double clock  = attribute(cudaDevAttrClockRate) * 1e3;
    const double sm     = attribute(cudaDevAttrMultiProcessorCount);
    const double lanes  = cc <= 80 ? 64 : 128;
    const double tensor = cc == 80 ? 2048 : cc == 90 ? 4096 : cc >= 100 && cc < 120 ? 8192 : 512;
    const double memory =
        attribute(cudaDevAttrMemoryClockRate) * 1e3 * 2 * attribute(cudaDevAttrGlobalMemoryBusWidth) / 8;
    return { memory, sm * lanes * 2 * clock, sm * tensor * clock };
}

// ---- data ------------------------------------------------------------------------------------------------------------

// A cache of f16 numbers: a random stretch, again and again.
static std::vector<uint16_t> random_halves(int64_t n, float size) {
    std::mt19937                    random(1);
    std::normal_distribution<float> normal(0.0f, size);
    std::vector<uint16_t>           x(n);
    for (int64_t i = 0; i < n; ++i) {
        x[i] = i < 1 << 20 ? __half_as_ushort(__float2half_rn(normal(random))) : x[i - (1 << 20)];
    }
    return x;
}

static std::vector<float> random_floats(int64_t n) {
    std::mt19937                    random(2);
    std::normal_distribution<float> normal;
    std::vector<float>              x(n);
    for (float & y : x) {
        y = normal(random);
    }
    return x;
}

// ---- times -----------------------------------------------------------------------------------------------------------

// Milliseconds of one launch: the median of several, after one that does not count. What the floors take from memory must
// not be in the L2 cache, so before each launch more than any of them has is overwritten.
template <typename Launch> double milliseconds(const Launch & launch) {
    static cases::device_memory memory;
    static char * const         l2     = memory.put(std::vector<char>(L2_BYTES));
    constexpr int               ROUNDS = 31;
    std::vector<double>         times;
    cudaEvent_t                 start, stop;
    require(cudaEventCreate(&start) == cudaSuccess && cudaEventCreate(&stop) == cudaSuccess, "an event");
    cases::finish(launch());
    for (int round = 0; round < ROUNDS; ++round) {
        require(cudaMemsetAsync(l2, round, L2_BYTES) == cudaSuccess, "overwriting the L2 cache");
        cudaEventRecord(start);
        require(launch() == cudaSuccess, "the launch failed");
        cudaEventRecord(stop);
        cases::finish(cudaEventSynchronize(stop));
        float ms = 0.0f;
        require(cudaEventElapsedTime(&ms, start, stop) == cudaSuccess, "the time between two events");
        times.push_back(ms);
    }
    std::sort(times.begin(), times.end());
    return times[ROUNDS / 2];
}

static void row(const char * name, double ms, double bytes, double operations, double peak, const card & c) {
    const double memory     = bytes / c.bytes * 1e3;
    const double arithmetic = operations / peak * 1e3;
    const double floor      = std::max(memory, arithmetic);
    std::printf("| %s | %.4f | %.4f | %.4f | **%.2f** |\n", name, ms, memory, arithmetic, ms / floor);
    std::fflush(stdout);
}

static void time_attention(const cache_rows & k, const card & c) {
    cases::device_memory memory;
    std::vector<int32_t> rows(WINDOW);
    std::vector<float>   mask;
    for (int t = 0; t < WINDOW; ++t) {
        rows[t] = t;
        for (int64_t i = 0; i < N; ++i) {
            mask.push_back(i <= N - WINDOW + t ? 0.0f : -INFINITY);
        }
    }
    attention_args p   = {};
    p.k                = k;
    p.n                = N;
    p.n_before         = N - WINDOW;
    p.n_head           = N_HEAD;
    p.n_head_kv        = N_HEAD_KV;
    p.m                = WINDOW;
    p.pool             = POOL;
    p.max              = true;
    p.scale            = 1.0f / std::sqrt((float) D);
    p.queries          = memory.put(random_floats((int64_t) WINDOW * N_HEAD * D));
    p.query_stride     = (int64_t) N_HEAD * D * sizeof(float);
    p.query_rows       = memory.put(rows);
    p.mask             = memory.put(mask);
    p.mask_stride      = N * (int64_t) sizeof(float);
    p.out              = memory.put(std::vector<float>(N * N_HEAD_KV));
    p.workspace        = memory.put(std::vector<float>(attention_workspace(p) / sizeof(float)));
    const double bytes = 2.0 * N * N_HEAD_KV * D * 2 + (double) mask.size() * 4 + (double) N * N_HEAD_KV * 4;
    row("observed attention", milliseconds([&] { return launch_attention(p, nullptr); }), bytes,
        2.0 * 2 * N * N_HEAD * WINDOW * D, c.f32, c);
}

static void time_compaction(const cache_rows & k, const cache_rows & v, int64_t n_keep, const card & c) {
    cases::device_memory  memory;
    const int64_t         row_bytes = (int64_t) N_HEAD_KV * D * 2;
    std::vector<int32_t>  slots;
    std::vector<uint16_t> target(n_keep * N_HEAD_KV * D);
    for (int64_t i = 0; i < n_keep * N_HEAD_KV; ++i) {
        slots.push_back((int32_t) (i % n_keep * (N / n_keep)));
    }
    compaction_args p = {};
    p.k               = { k.data, memory.put(target), row_bytes, row_bytes, D * 2 };
    p.v               = { v.data, memory.put(target), row_bytes, row_bytes, D * 2 };
    p.slots           = memory.put(slots);
    p.n_keep          = n_keep;
    p.n_head_kv       = N_HEAD_KV;
    row(("compaction to " + std::to_string(n_keep) + " entries").c_str(),
        milliseconds([&] { return launch_compaction(p, nullptr); }), 2.0 * 2 * n_keep * row_bytes, 0.0, c.f32, c);
}

static void time_gram(const cache_rows & v, int per_head, const card & c) {
    cases::device_memory memory;
    const int64_t        n_gram = (int64_t) N_HEAD_KV * per_head * D * D;
    gram_args            p      = {};
    p.v                         = v;
    p.n                         = N;
    p.n_head_kv                 = N_HEAD_KV;
    p.per_head                  = per_head;
    p.gram                      = memory.put(random_floats(n_gram));
    p.gram_row_stride           = D * (int64_t) sizeof(float);
    p.gram_stride               = D * p.gram_row_stride;
    p.out                       = memory.put(std::vector<float>(N * N_HEAD_KV));
    row(per_head == 1 ? "Gram norm" : "Gram norm per query head", milliseconds([&] { return launch_gram(p, nullptr); }),
        (double) N * N_HEAD_KV * D * 2 + n_gram * 4.0 + (double) N * N_HEAD_KV * 4,
        2.0 * N * N_HEAD_KV * per_head * (D * D + D), c.f32, c);
}

static void time_l1(const cache_rows & v, const card & c) {
    cases::device_memory memory;
    l1_args              p = {};
    p.v                    = v;
    p.n                    = N;
    p.n_head_kv            = N_HEAD_KV;
    p.group                = GROUP;
    p.w                    = memory.put(random_halves((int64_t) N_HEAD * D * N_EMBD, 0.02f));
    p.w_stride             = N_EMBD * 2;
    p.n_embd               = N_EMBD;
    p.out                  = memory.put(std::vector<float>(N * N_HEAD_KV));
    row("L1 norm", milliseconds([&] { return launch_l1(p, nullptr); }),
        (double) N * N_HEAD_KV * D * 2 + (double) N_HEAD * D * N_EMBD * 2 + (double) N * N_HEAD_KV * 4,
        2.0 * N * N_HEAD * D * N_EMBD, c.tensor, c);
}

int main() {
    cudaDeviceProp device;
    require(cudaGetDeviceProperties(&device, 0) == cudaSuccess, "no CUDA device");
    const card c = peaks();
    std::printf("%s: peaks by its clocks %.2f TB/s, f32 %.0f TFLOP/s, tensor cores %.0f TFLOP/s\n\n", device.name,
                c.bytes / 1e12, c.f32 / 1e12, c.tensor / 1e12);
    std::printf(
        "| kernel | ms | floor: memory | arithmetic | measured over floor |\n| --- | --- | --- | --- | --- |\n");
    cases::device_memory        memory;
    const std::vector<uint16_t> numbers = random_halves(N * N_HEAD_KV * D, 1.0f);
    const int64_t               stride  = (int64_t) N_HEAD_KV * D * 2;
    const cache_rows            k       = { memory.put(numbers), stride, D, row_type::F16 };
    const cache_rows            v       = { memory.put(numbers), stride, D, row_type::F16 };
    time_attention(k, c);
    time_compaction(k, v, 1024, c);
    time_compaction(k, v, 8192, c);
    time_gram(v, 1, c);
    time_gram(v, GROUP, c);
    time_l1(v, c);
}
