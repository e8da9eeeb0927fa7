// The paper's projected value norm |v W_h|_1 (criticalkv-args.h has the formula) on tensor cores, f16 x f16 -> f32.
//
// A warp holds the values of 32 entries (16 of head size 256) as fragments while the W_O of all query heads of its KV head
// passes by in shared memory, 32 outputs at a time. Fragments of one kind have one layout, whatever it is: |x| of every
// accumulator is added to a fragment of sums, element by element, and rows are summed once at the end. v W_h is never in
// memory.
//
// Floor: 2 n d n_embd g operations per KV head, 1,100 GFLOP in the case of docs/performance.md: 1.1 ms on an H200, 19 ms on
// an RTX 4070; bytes are nothing beside them.
#pragma once

#include "criticalkv-rows.cuh"

#include <mma.h>

// Devices without tensor cores get an empty kernel, which nobody launches (has_kernel in criticalkv-nodes.h).
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 700
#define CRITICALKV_HAS_WMMA
#endif

namespace criticalkv {

constexpr int L1_WARPS   = 4;
constexpr int L1_OUTPUTS = 32;  // of W_O in shared memory
constexpr int FRAGMENT   = 16;  // rows and columns
constexpr int L1_PADDING = 8;   // numbers, so that rows start in different banks

#ifdef CRITICALKV_HAS_WMMA
namespace wmma = nvcuda::wmma;

using value_fragment  = wmma::fragment<wmma::matrix_a, FRAGMENT, FRAGMENT, FRAGMENT, half, wmma::row_major>;
using weight_fragment = wmma::fragment<wmma::matrix_b, FRAGMENT, FRAGMENT, FRAGMENT, half, wmma::row_major>;
using sum_fragment    = wmma::fragment<wmma::accumulator, FRAGMENT, FRAGMENT, FRAGMENT, float>;
#endif

// Fragments of entries per warp: with more, the values of a large head do not fit the registers.
template <int D> constexpr int ENTRY_FRAGMENTS = D <= 128 ? 2 : 1;
template <int D> constexpr int WARP_ENTRIES    = ENTRY_FRAGMENTS<D> * FRAGMENT;

// wmma loads from multiples of 32 bytes.
template <int D> struct alignas(32) l1_memory {
    static constexpr int ENTRIES = L1_WARPS * WARP_ENTRIES<D>;

    // one after the other
    union {
        half  values[ENTRIES][D + L1_PADDING];
        half  weights[D][L1_OUTPUTS + L1_PADDING];
        float sums[ENTRIES][FRAGMENT + L1_PADDING];
    };

    float factor[ENTRIES];  // what the values of an entry were divided by
};

static_assert(sizeof(l1_memory<128>) <= 48 * 1024 && sizeof(l1_memory<256>) <= 48 * 1024, "static shared memory");

// Exponent bits of x, so far inside their range that 254 minus them are those of a normal number as well.
__device__ inline uint32_t exponent_of(float x) {
    const uint32_t exponent = __float_as_uint(x) >> 23 & 255;
    return exponent < 1 ? 1 : exponent > 253 ? 253 : exponent;
}

// A warp reads its entries, scales and rounds them.
template <row_type T, int D>
__device__ void stage_values(l1_memory<D> & s, const l1_args & p, int64_t entry0, int kv_head) {
    constexpr int   STEPS = (D + 127) / 128;  // of 4 columns per lane
    const int       warp  = threadIdx.x / 32;
    const int       lane  = threadIdx.x % 32;
    const uint8_t * head  = head_of<T>(p.v, kv_head);
    for (int e = warp * WARP_ENTRIES<D>; e < (warp + 1) * WARP_ENTRIES<D>; ++e) {
        const int64_t entry = entry0 + e;
        float         x[STEPS][4];
        float         top = 0.0f;
        for (int i = 0; i < STEPS; ++i) {
            const int column = i * 128 + lane * 4;
            for (int k = 0; k < 4; ++k) {
                x[i][k] = 0.0f;
            }
            if (entry < p.n && column < D) {
                read_4<T>(head + entry * p.v.stride, column, x[i]);
            }
            for (int k = 0; k < 4; ++k) {
                top = fmaxf(top, fabsf(x[i][k]));
            }
        }
        // by bits: this is exact under all of the compiler's options for division
        const uint32_t exponent = exponent_of(max_over_lanes(top, 32));
        const float    inverse  = __uint_as_float((254 - exponent) << 23);
        for (int i = 0; i < STEPS; ++i) {
            const int column = i * 128 + lane * 4;
            for (int k = 0; k < 4 && column < D; ++k) {
                s.values[e][column + k] = __float2half_rn(x[i][k] * inverse);
            }
        }
        if (lane == 0) {
            s.factor[e] = __uint_as_float(exponent << 23);
        }
    }
}

// L1_OUTPUTS outputs from c0 on of all inputs of a query head, zeros beyond the last.
template <int D> __device__ void stage_weights(l1_memory<D> & s, const l1_args & p, int64_t head, int64_t c0) {
    constexpr int PIECES = L1_OUTPUTS / 8;  // 16 bytes each
    for (int i = threadIdx.x; i < D * PIECES; i += L1_WARPS * 32) {
        const int    j      = i / PIECES;
        const int    column = i % PIECES * 8;
        const char * row    = (const char *) p.w + (head * D + j) * p.w_stride;
        uint4        piece  = { 0, 0, 0, 0 };
        if (c0 + column < p.n_embd) {
            piece = *(const uint4 *) (row + (c0 + column) * 2);
        }
        *(uint4 *) &s.weights[j][column] = piece;
    }
}

// Block (entries, KV head).
template <row_type T, int D> __global__ void __launch_bounds__(L1_WARPS * 32) l1_kernel(l1_args p) {
#ifdef CRITICALKV_HAS_WMMA
    CRITICALKV_SHARED(l1_memory<D>, s);
    constexpr int STEPS     = D / FRAGMENT;
    constexpr int FRAGMENTS = ENTRY_FRAGMENTS<D>;
    const int     warp      = threadIdx.x / 32;
    const int     kv_head   = blockIdx.y;
    const int     first     = warp * WARP_ENTRIES<D>;  // of the warp's entries in the block
    const int64_t entry0    = (int64_t) blockIdx.x * l1_memory<D>::ENTRIES;

    value_fragment values[FRAGMENTS][STEPS];
    sum_fragment   sums[FRAGMENTS];
    stage_values<T>(s, p, entry0, kv_head);
    __syncwarp();
    for (int f = 0; f < FRAGMENTS; ++f) {
        for (int i = 0; i < STEPS; ++i) {
            wmma::load_matrix_sync(values[f][i], &s.values[first + f * FRAGMENT][i * FRAGMENT], D + L1_PADDING);
        }
        wmma::fill_fragment(sums[f], 0.0f);
    }

    for (int h = 0; h < p.group; ++h) {
        for (int64_t c0 = 0; c0 < p.n_embd; c0 += L1_OUTPUTS) {
            __syncthreads();  // all warps are through with what is in the union
            stage_weights(s, p, (int64_t) kv_head * p.group + h, c0);
            __syncthreads();
            for (int c = 0; c < L1_OUTPUTS; c += FRAGMENT) {
                sum_fragment acc[FRAGMENTS];
                for (int f = 0; f < FRAGMENTS; ++f) {
                    wmma::fill_fragment(acc[f], 0.0f);
                }
#pragma unroll
                for (int i = 0; i < STEPS; ++i) {
                    weight_fragment weights;
                    wmma::load_matrix_sync(weights, &s.weights[i * FRAGMENT][c], L1_OUTPUTS + L1_PADDING);
                    for (int f = 0; f < FRAGMENTS; ++f) {
                        wmma::mma_sync(acc[f], values[f][i], weights, acc[f]);
                    }
                }
                for (int f = 0; f < FRAGMENTS; ++f) {
                    for (int i = 0; i < acc[f].num_elements; ++i) {
                        sums[f].x[i] += fabsf(acc[f].x[i]);
                    }
                }
            }
        }
    }

    __syncthreads();
    for (int f = 0; f < FRAGMENTS; ++f) {
        wmma::store_matrix_sync(&s.sums[first + f * FRAGMENT][0], sums[f], FRAGMENT + L1_PADDING, wmma::mem_row_major);
    }
    __syncwarp();
    const int     e     = first + threadIdx.x % 32;
    const int64_t entry = entry0 + e;
    if (threadIdx.x % 32 < WARP_ENTRIES<D> && entry < p.n) {
        float norm = 0.0f;
        for (int i = 0; i < FRAGMENT; ++i) {
            norm += s.sums[e][i];
        }
        p.out[kv_head * p.n + entry] = norm * s.factor[e] / (float) p.group;
    }
#endif
}

template <row_type T> struct l1_launch {
    template <int D> static cudaError_t launch_for_head(const l1_args & p, cudaStream_t stream) {
        const dim3 grid(ceil_div(p.n, l1_memory<D>::ENTRIES), (unsigned) p.n_head_kv);
        return criticalkv::launch(l1_kernel<T, D>, grid, L1_WARPS * 32, stream, p);
    }

    static cudaError_t launch(const l1_args & p, cudaStream_t stream) {
        switch (p.v.head_size) {
            case 64:
                return launch_for_head<64>(p, stream);
            case 80:
                return launch_for_head<80>(p, stream);
            case 96:
                return launch_for_head<96>(p, stream);
            case 128:
                return launch_for_head<128>(p, stream);
            case 256:
                return launch_for_head<256>(p, stream);
            default:
                return cudaErrorInvalidValue;
        }
    }
};

inline cudaError_t launch_l1(const l1_args & p, cudaStream_t stream) {
    return launch_for_type<l1_launch>(p.v.type, p, stream);
}

}  // namespace criticalkv
