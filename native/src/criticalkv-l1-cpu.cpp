// Floor: 2 * n * d * n_embd * n_head operations per layer (150 GFLOP for a prompt of 7,500 tokens on a model of 30 layers
// with 9 heads of 64 and n_embd 576), and n * d * n_head_kv cache reads, which are nothing beside them. As ggml ops this
// ran at 27 GFLOP/s on two cores: products over d = 64 are too short for a matrix product made of dot products, and the
// n x n_embd result was written and read twice. Here it stays in registers.

#include "criticalkv-l1-cpu.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace criticalkv {

// 16 floats; the compiler makes of them what the target has.
typedef float vec __attribute__((vector_size(64), aligned(4), may_alias));

static constexpr int LANES   = 16;
static constexpr int VECTORS = 4;                // of 16 outputs, per tile
static constexpr int ENTRIES = 4;                // per tile: 16 accumulators
static constexpr int COLUMNS = LANES * VECTORS;  // outputs per block: d * 64 floats of W stay in the L1 cache
static constexpr int CHUNK   = 64;               // entries that share a block of W while it is there

struct l1_params {
    int first_head;
    int n_heads;
};

static_assert(sizeof(l1_params) == sizeof(void *), "the parameters travel in the userdata pointer");

#define L1_INLINE inline __attribute__((always_inline))

// sum += |v[e] . w[:, c]| over the 64 columns c of a block, for ENTRIES entries.
static L1_INLINE void tile(const float * v, int64_t d, const float * w, int64_t stride, float * sum) {
    vec acc[ENTRIES][VECTORS] = {};
    for (int64_t j = 0; j < d; ++j) {
        const vec * row = (const vec *) (w + j * stride);
        for (int e = 0; e < ENTRIES; ++e) {
            const float x = v[e * d + j];
            for (int c = 0; c < VECTORS; ++c) {
                acc[e][c] += x * row[c];
            }
        }
    }
    for (int e = 0; e < ENTRIES; ++e) {
        vec total = {};
        for (int c = 0; c < VECTORS; ++c) {
            total += acc[e][c] < 0.0f ? -acc[e][c] : acc[e][c];
        }
        float s = 0.0f;
        for (int i = 0; i < LANES; ++i) {
            s += total[i];
        }
        sum[e] += s;
    }
}

// The same for any number of entries and columns.
static L1_INLINE void rest(const float * v, int64_t d, const float * w, int64_t stride, int64_t entries,
                           int64_t columns, float * sum) {
    for (int64_t e = 0; e < entries; ++e) {
        for (int64_t c = 0; c < columns; ++c) {
            float acc = 0.0f;
            for (int64_t j = 0; j < d; ++j) {
                acc += v[e * d + j] * w[j * stride + c];
            }
            sum[e] += std::fabs(acc);
        }
    }
}

// sum[e] += |v[e] W_h|_1 for n entries.
static L1_INLINE void head(const float * v, int64_t d, const float * w, int64_t n_embd, int64_t n, float * sum) {
    for (int64_t e0 = 0; e0 < n; e0 += CHUNK) {
        const int64_t last = std::min<int64_t>(e0 + CHUNK, n);
        int64_t       c    = 0;
        for (; c + COLUMNS <= n_embd; c += COLUMNS) {
            int64_t e = e0;
            for (; e + ENTRIES <= last; e += ENTRIES) {
                tile(v + e * d, d, w + c, n_embd, sum + e);
            }
            rest(v + e * d, d, w + c, n_embd, last - e, COLUMNS, sum + e);
        }
        rest(v + e0 * d, d, w + c, n_embd, last - e0, n_embd - c, sum + e0);
    }
}

using head_function = void (*)(const float *, int64_t, const float *, int64_t, int64_t, float *);

static void head_baseline(const float * v, int64_t d, const float * w, int64_t n_embd, int64_t n, float * sum) {
    head(v, d, w, n_embd, n, sum);
}

#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) static void head_avx2(const float * v, int64_t d, const float * w, int64_t n_embd,
                                                          int64_t n, float * sum) {
    head(v, d, w, n_embd, n, sum);
}

__attribute__((target("avx512f,avx512dq,fma"))) static void head_avx512(const float * v, int64_t d, const float * w,
                                                                        int64_t n_embd, int64_t n, float * sum) {
    head(v, d, w, n_embd, n, sum);
}
#endif

static head_function best_head_function() {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq")) {
        return head_avx512;
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        return head_avx2;
    }
#endif
    return head_baseline;
}

static void compute(ggml_tensor * dst, int ith, int nth, void * userdata) {
    l1_params params;
    memcpy(&params, &userdata, sizeof(params));
    const ggml_tensor * v    = dst->src[0];
    const ggml_tensor * w    = dst->src[1];
    const int64_t       d    = v->ne[0];
    const int64_t       n    = v->ne[1];
    const int64_t       each = (n + nth - 1) / nth;
    const int64_t       from = std::min(n, each * ith);
    const int64_t       to   = std::min(n, from + each);
    float *             out  = (float *) dst->data + from;
    const float *       rows = (const float *) v->data + from * d;
    const head_function f    = best_head_function();

    std::fill(out, out + (to - from), 0.0f);
    for (int h = params.first_head; h < params.first_head + params.n_heads; ++h) {
        f(rows, d, (const float *) w->data + h * d * w->ne[0], w->ne[0], to - from, out);
    }
    for (int64_t i = 0; i < to - from; ++i) {
        out[i] /= (float) params.n_heads;
    }
}

ggml_tensor * l1_norm_cpu(ggml_context * ctx, ggml_tensor * v, ggml_tensor * w, int first_head, int n_heads) {
    const l1_params params = { first_head, n_heads };
    void *          userdata;
    memcpy(&userdata, &params, sizeof(userdata));
    ggml_tensor * args[] = { v, w };
    return ggml_custom_4d(ctx, GGML_TYPE_F32, v->ne[1], 1, 1, 1, args, 2, compute, GGML_N_TASKS_MAX, userdata);
}

}  // namespace criticalkv
