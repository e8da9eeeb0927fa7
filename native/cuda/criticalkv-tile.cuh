// The product of 64 rows with 64 rows, in f32: the inner loop of observed attention and of the Gram norm.
//
// A block of 256 threads; thread (ty, tx) = (tid / 16, tid % 16) holds the 4 x 4 products of rows 4 ty ... of A with rows
// 4 tx ... of B. 32 columns at a time pass through shared memory, turned, so that four rows are one load.
#pragma once

#include "criticalkv-rows.cuh"

namespace criticalkv {

constexpr int TILE         = 64;
constexpr int TILE_COLUMNS = 32;
constexpr int TILE_THREADS = 256;
constexpr int TILE_BLOCKS =
    2;  // per multiprocessor at least: up to 128 registers, where ptxas would stop at 64 and spill

struct alignas(16) tile_memory {
    float a[TILE_COLUMNS][TILE];
    float b[TILE_COLUMNS][TILE];
};

// Where row x of a column is. The threads of a warp store 8 rows of 4 groups of 8 columns at once: without this the
// four groups would meet in the same banks.
__device__ inline int tile_index(int column, int x) {
    return x ^ (column & 24);
}

// Rows of one head in a cache, starting with some entry; what lies outside [0, n) reads as zeros.
template <row_type T> struct head_rows_of {
    const uint8_t * head;
    int64_t         stride;
    int64_t         first;
    int64_t         n;

    __device__ void read(int row, int column, float x[4]) const {
        const int64_t entry = first + row;
        if (entry >= 0 && entry < n) {
            read_4<T>(head + entry * stride, column, x);
        }
    }
};

template <row_type T>
__device__ head_rows_of<T> rows_of_head(const cache_rows & rows, int kv_head, int64_t first, int64_t n) {
    return { head_of<T>(rows, kv_head), rows.stride, first, n };
}

// Thread: 8 columns of one row.
template <typename Rows> __device__ void fill_tile(float to[TILE_COLUMNS][TILE], const Rows & rows, int first, int d) {
    const int row = threadIdx.x / 4;
    for (int half = 0; half < 2; ++half) {
        const int column = threadIdx.x % 4 * 8 + half * 4;
        float     x[4]   = { 0.0f, 0.0f, 0.0f, 0.0f };
        if (first + column < d) {
            rows.read(row, first + column, x);
        }
        for (int i = 0; i < 4; ++i) {
            to[column + i][tile_index(column + i, row)] = x[i];
        }
    }
}

// acc = the thread's 4 x 4 products of d columns; d is a multiple of 4. All threads of the block must come, and may
// write to `s` again after their next barrier.
template <typename A, typename B>
__device__ void tile_product(tile_memory & s, const A & a, const B & b, int d, float acc[4][4]) {
    const int ty = threadIdx.x / 16;
    const int tx = threadIdx.x % 16;
    for (int i = 0; i < 16; ++i) {
        acc[i / 4][i % 4] = 0.0f;
    }
    for (int first = 0; first < d; first += TILE_COLUMNS) {
        __syncthreads();  // the columns before have been used
        fill_tile(s.a, a, first, d);
        fill_tile(s.b, b, first, d);
        __syncthreads();
#pragma unroll 8
        for (int j = 0; j < TILE_COLUMNS; ++j) {
            const float4 x    = *(const float4 *) &s.a[j][tile_index(j, ty * 4)];
            const float4 y    = *(const float4 *) &s.b[j][tile_index(j, tx * 4)];
            const float  r[4] = { x.x, x.y, x.z, x.w };
            const float  c[4] = { y.x, y.y, y.z, y.w };
            for (int i = 0; i < 4; ++i) {
                for (int k = 0; k < 4; ++k) {
                    acc[i][k] += r[i] * c[k];
                }
            }
        }
    }
}

}  // namespace criticalkv
