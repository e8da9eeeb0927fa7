// Gram norms (criticalkv-args.h has the formula) of all entries and KV heads of a layer in one launch. G v is never in
// memory: a tile of it is multiplied by v and added up where it was made.
//
// Floor: 2 n (d^2 + d) f32 operations per KV head and matrix, 8.7 GFLOP with one matrix in the case of
// docs/performance.md: 0.13 ms on an H200, 0.30 ms on an RTX 4070; its 68 MB take 0.014 and 0.14 ms.
#pragma once

#include "criticalkv-tile.cuh"

namespace criticalkv {

// Block (64 entries, KV head). Rows of A: values, rows of B: 64 rows of a Gram matrix at a time.
template <row_type T> __global__ void __launch_bounds__(TILE_THREADS, TILE_BLOCKS) gram_kernel(gram_args p) {
    CRITICALKV_SHARED(tile_memory, s);
    const int             ty      = threadIdx.x / 16;
    const int             tx      = threadIdx.x % 16;
    const int             kv_head = blockIdx.y;
    const int             d       = p.v.head_size;
    const int64_t         entry0  = (int64_t) blockIdx.x * TILE;
    const head_rows_of<T> values  = rows_of_head<T>(p.v, kv_head, entry0, p.n);
    float                 norm[4] = { 0.0f, 0.0f, 0.0f, 0.0f };
    for (int g = 0; g < p.per_head; ++g) {
        const char * gram      = (const char *) p.gram + ((int64_t) kv_head * p.per_head + g) * p.gram_stride;
        float        square[4] = { 0.0f, 0.0f, 0.0f, 0.0f };
        for (int c0 = 0; c0 < d; c0 += TILE) {
            const head_rows_of<row_type::F32> columns = { (const uint8_t *) gram, p.gram_row_stride, c0, d };
            float                             acc[4][4];
            tile_product(s, values, columns, d, acc);
            const int column = c0 + tx * 4;
            for (int i = 0; i < 4; ++i) {
                float v[4] = { 0.0f, 0.0f, 0.0f, 0.0f };
                if (column < d) {
                    values.read(ty * 4 + i, column, v);
                }
                for (int k = 0; k < 4; ++k) {
                    square[i] += acc[i][k] * v[k];
                }
            }
        }
        for (int i = 0; i < 4; ++i) {
            const float sum = sum_over_lanes(square[i], 16);
            norm[i] += sum > 0.0f ? sqrtf(sum) : 0.0f;
        }
    }
    for (int i = 0; i < 4; ++i) {
        const int64_t entry = entry0 + ty * 4 + i;
        if (tx == 0 && entry < p.n) {
            p.out[kv_head * p.n + entry] = norm[i] / (float) p.per_head;
        }
    }
}

template <row_type T> struct gram_launch {
    static cudaError_t launch(const gram_args & p, cudaStream_t stream) {
        const dim3 grid(ceil_div(p.n, TILE), (unsigned) p.n_head_kv);
        return criticalkv::launch(gram_kernel<T>, grid, TILE_THREADS, stream, p);
    }
};

inline cudaError_t launch_gram(const gram_args & p, cudaStream_t stream) {
    return launch_for_type<gram_launch>(p.v.type, p, stream);
}

}  // namespace criticalkv
