// Observed attention (criticalkv-args.h has the formulas) without the n x m x g logits in memory. Three launches: partial
// maxima and sums of every query over stretches of keys, their totals, and a second pass over the keys that aggregates
// probabilities. Every sum has a fixed order, so the same input gives the same bits.
//
// Floor: two f32 products of n x d x m x g per KV head, 8.6 GFLOP in the case of docs/performance.md: 0.13 ms on an
// H200, 0.30 ms on an RTX 4070; its 137 MB take 0.03 and 0.27 ms.
#pragma once

#include "criticalkv-tile.cuh"

#include <cmath>

namespace criticalkv {

constexpr int TILES_PER_STRETCH = 4;

// The maximum of some logits and the sum of exp(logit - maximum).
struct softmax_part {
    float top;
    float sum;
};

// Without -inf - -inf; a NaN stays one.
__device__ inline float exp_below(float x, float top) {
    return x == -INFINITY ? 0.0f : expf(x - top);
}

__device__ inline softmax_part merge(const softmax_part & a, const softmax_part & b) {
    const float top = fmaxf(a.top, b.top);
    const float x   = a.top == top ? a.sum : a.sum * exp_below(a.top, top);
    const float y   = b.top == top ? b.sum : b.sum * exp_below(b.top, top);
    return { top, x + y };
}

// fmaxf would lose a NaN.
__device__ inline float larger(float a, float b) {
    return a > b || a != a ? a : b;
}

// Row r of a KV head: window query r % m of query head r / m.
struct query_rows_of {
    const attention_args & p;
    int                    kv_head;
    int                    first;
    int                    n;

    __device__ void read(int row, int column, float x[4]) const {
        const int r = first + row;
        if (r < n) {
            const int64_t head = (int64_t) kv_head * (p.n_head / p.n_head_kv) + r / p.m;
            const char *  at   = (const char *) p.queries + p.query_rows[r % p.m] * p.query_stride;
            read_4<row_type::F32>((const uint8_t *) ((const float *) at + head * p.k.head_size), column, x);
        }
    }
};

__device__ inline float logit(const attention_args & p, float product, int t, int64_t key) {
    float x = product * p.scale;
    if (p.softcap != 0.0f) {
        x = p.softcap * tanhf(product * (p.scale / p.softcap));
    }
    const char * row = (const char *) p.mask + t * p.mask_stride;
    return x + ((const float *) row)[key];
}

// workspace: [stretches][n_head * m] parts, then [n_head * m] totals.
__device__ inline softmax_part * parts_of(const attention_args & p, int64_t stretch) {
    return (softmax_part *) p.workspace + stretch * p.n_head * p.m;
}

inline unsigned attention_stretches(const attention_args & p) {
    return ceil_div(p.n, TILE * TILES_PER_STRETCH);
}

inline int64_t attention_workspace(const attention_args & p) {
    return ((int64_t) attention_stretches(p) + 1) * p.n_head * p.m * (int64_t) sizeof(softmax_part);
}

// Block (stretch of keys, KV head, 64 of its rows).
template <row_type T> __global__ void __launch_bounds__(TILE_THREADS, TILE_BLOCKS) attention_parts(attention_args p) {
    CRITICALKV_SHARED(tile_memory, s);
    const int           ty      = threadIdx.x / 16;
    const int           tx      = threadIdx.x % 16;
    const int           kv_head = blockIdx.y;
    const int           rows    = p.n_head / p.n_head_kv * p.m;
    const int           first   = blockIdx.z * TILE;
    const query_rows_of queries = { p, kv_head, first, rows };
    softmax_part        part[4];
    for (int i = 0; i < 4; ++i) {
        part[i] = { -INFINITY, 0.0f };
    }
    for (int tile = 0; tile < TILES_PER_STRETCH; ++tile) {
        const int64_t key0 = ((int64_t) blockIdx.x * TILES_PER_STRETCH + tile) * TILE;
        if (key0 >= p.n) {
            break;
        }
        float acc[4][4];
        tile_product(s, queries, rows_of_head<T>(p.k, kv_head, key0, p.n), p.k.head_size, acc);
        for (int i = 0; i < 4; ++i) {
            const int    row = first + ty * 4 + i;
            softmax_part one = { -INFINITY, 0.0f };
            float        x[4];
            for (int k = 0; k < 4; ++k) {
                const int64_t key = key0 + tx * 4 + k;
                x[k]              = row < rows && key < p.n ? logit(p, acc[i][k], row % p.m, key) : -INFINITY;
                one.top           = fmaxf(one.top, x[k]);
            }
            for (int k = 0; k < 4; ++k) {
                one.sum += exp_below(x[k], one.top);
            }
            part[i] = merge(part[i], one);
        }
    }
    for (int i = 0; i < 4; ++i) {
        const int row = first + ty * 4 + i;
        for (int step = 8; step > 0; step /= 2) {
            const softmax_part other = { __shfl_xor_sync(ALL_LANES, part[i].top, step),
                                         __shfl_xor_sync(ALL_LANES, part[i].sum, step) };
            // both sides of an exchange merge in the same order
            part[i] = (tx & step) == 0 ? merge(part[i], other) : merge(other, part[i]);
        }
        if (tx == 0 && row < rows) {
            parts_of(p, blockIdx.x)[(int64_t) kv_head * rows + row] = part[i];
        }
    }
}

// Thread: one row. Totals hold 1 / sum.
static __global__ void attention_totals(attention_args p) {
    const int64_t row  = (int64_t) blockIdx.x * blockDim.x + threadIdx.x;
    const int64_t rows = (int64_t) p.n_head * p.m;
    const int64_t n    = (p.n + TILE * TILES_PER_STRETCH - 1) / (TILE * TILES_PER_STRETCH);
    if (row >= rows) {
        return;
    }
    softmax_part total = parts_of(p, 0)[row];
    for (int64_t i = 1; i < n; ++i) {
        total = merge(total, parts_of(p, i)[row]);
    }
    if (p.sinks != nullptr) {
        total = merge(total, { p.sinks[row / p.m], 1.0f });
    }
    parts_of(p, n)[row] = { total.top, 1.0f / total.sum };
}

struct attention_memory {
    tile_memory tile;
    float       probability[TILE][TILE + 1];  // [row][key]
    float       part[4][TILE];                // of a quarter of the rows each
    float       mean[TILE];
};

// The average pool of x around key, which is at least pool / 2 from both ends.
__device__ inline float pool_at(const float * x, int key, int pool) {
    float sum = 0.0f;
    for (int j = key - pool / 2; j <= key + pool / 2; ++j) {
        sum += x[j];
    }
    return sum / (float) pool;
}

// Adds a quarter of the rows in s.probability to `total`, for one key.
__device__ inline float aggregate_rows(const attention_args & p, const attention_memory & s, float total) {
    const int  key     = threadIdx.x % TILE;
    const int  quarter = threadIdx.x / TILE;
    const int  halo    = p.pool / 2;
    const bool inside  = key >= halo && key < TILE - halo;
    for (int row = quarter * 16; row < quarter * 16 + 16; ++row) {
        if (!p.max) {
            total += s.probability[row][key];
        } else if (inside) {
            total = larger(total, pool_at(s.probability[row], key, p.pool));
        }
    }
    return total;
}

// Block (TILE - pool + 1 entries, KV head): these and pool / 2 more on each side.
template <row_type T>
__global__ void __launch_bounds__(TILE_THREADS, TILE_BLOCKS) attention_scores_of(attention_args p) {
    CRITICALKV_SHARED(attention_memory, s);
    const int     ty      = threadIdx.x / 16;
    const int     tx      = threadIdx.x % 16;
    const int     kv_head = blockIdx.y;
    const int     rows    = p.n_head / p.n_head_kv * p.m;
    const int     halo    = p.pool / 2;
    const int64_t key0    = (int64_t) blockIdx.x * (TILE - 2 * halo) - halo;
    const int64_t n_parts = (p.n + TILE * TILES_PER_STRETCH - 1) / (TILE * TILES_PER_STRETCH);
    float         total   = 0.0f;
    for (int first = 0; first < rows; first += TILE) {
        const query_rows_of queries = { p, kv_head, first, rows };
        float               acc[4][4];
        tile_product(s.tile, queries, rows_of_head<T>(p.k, kv_head, key0, p.n_before), p.k.head_size, acc);
        for (int i = 0; i < 4; ++i) {
            const int row = first + ty * 4 + i;
            for (int k = 0; k < 4; ++k) {
                const int64_t key = key0 + tx * 4 + k;
                float         x   = 0.0f;
                if (row < rows && key >= 0 && key < p.n_before) {
                    const softmax_part whole = parts_of(p, n_parts)[(int64_t) kv_head * rows + row];
                    x                        = expf(logit(p, acc[i][k], row % p.m, key) - whole.top) * whole.sum;
                }
                s.probability[ty * 4 + i][tx * 4 + k] = x;
            }
        }
        __syncthreads();
        total = aggregate_rows(p, s, total);
    }

    const int key                   = threadIdx.x % TILE;
    s.part[threadIdx.x / TILE][key] = total;
    __syncthreads();
    float score = s.part[0][key];
    for (int i = 1; i < 4; ++i) {
        score = p.max ? larger(score, s.part[i][key]) : score + s.part[i][key];
    }
    const int64_t entry  = key0 + key;
    const bool    writes = threadIdx.x < TILE && key >= halo && key < TILE - halo && entry < p.n_before;
    if (!p.max) {
        if (threadIdx.x < TILE) {
            s.mean[key] = score / (float) rows;
        }
        __syncthreads();
        score = writes ? pool_at(s.mean, key, p.pool) : 0.0f;
    }
    if (writes) {
        p.out[kv_head * p.n_before + entry] = score;
    }
}

template <row_type T> struct attention_launch {
    static cudaError_t launch(const attention_args & p, cudaStream_t stream) {
        const unsigned heads = (unsigned) p.n_head_kv;
        const int      rows  = p.n_head / p.n_head_kv * p.m;
        cudaError_t    error = criticalkv::launch(
            attention_parts<T>, dim3(attention_stretches(p), heads, ceil_div(rows, TILE)), TILE_THREADS, stream, p);
        if (error != cudaSuccess) {
            return error;
        }
        error = criticalkv::launch(attention_totals, dim3(ceil_div((int64_t) p.n_head * p.m, 128)), 128, stream, p);
        if (error != cudaSuccess) {
            return error;
        }
        const dim3 grid(ceil_div(p.n_before, TILE - p.pool + 1), heads);
        return criticalkv::launch(attention_scores_of<T>, grid, TILE_THREADS, stream, p);
    }
};

inline cudaError_t launch_attention(const attention_args & p, cudaStream_t stream) {
    return launch_for_type<attention_launch>(p.k.type, p, stream);
}

}  // namespace criticalkv
