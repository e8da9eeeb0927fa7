// Stands in for CUDA's header of this name: 16 x 16 x 16 wmma fragments of half with float accumulators. The numbers of a
// fragment are spread over the lanes of a warp in an order that is not any card's: code may only rely on what CUDA promises,
// that fragments of one kind have the same order.
#pragma once

#include "cuda_fp16.h"

#include <cstdio>
#include <type_traits>

namespace nvcuda {
namespace wmma {

struct matrix_a {};

struct matrix_b {};

struct accumulator {};

struct row_major {};

struct col_major {};

enum layout_t { mem_row_major, mem_col_major };

template <typename Use, int M, int N, int K, typename T, typename Layout = void> struct fragment {
    static_assert(M == 16 && N == 16 && K == 16, "the one shape of the shim");
    static constexpr int num_elements = 8;

    T            x[num_elements];
    const void * source = nullptr;  // where it was loaded from
};

// Row * 16 + column of number i of a lane.
inline int place(int lane, int i) {
    return (lane * 8 + i) * 37 % 256;
}

inline void check(bool good, const char * what) {
    if (!good) {
        std::fprintf(stderr, "wmma: %s\n", what);
        std::abort();  // a fiber cannot throw to the machine
    }
}

template <typename T> void check_memory(const T * at, unsigned ldm) {
    check((uintptr_t) at % 32 == 0, "memory is not aligned to 32 bytes");
    check(ldm * sizeof(T) % 16 == 0, "rows are not multiples of 16 bytes");
}

template <typename Use, typename T, typename Layout>
void load_matrix_sync(fragment<Use, 16, 16, 16, T, Layout> & a, const T * at, unsigned ldm) {
    check_memory(at, ldm);
    for (int i = 0; i < a.num_elements; ++i) {
        const int  row    = place(threadIdx.x % 32, i) / 16;
        const int  column = place(threadIdx.x % 32, i) % 16;
        const bool turn   = std::is_same<Layout, col_major>::value;
        a.x[i]            = turn ? at[column * ldm + row] : at[row * ldm + column];
    }
    a.source = at;
}

template <typename Use, typename T, typename Layout> void fill_fragment(fragment<Use, 16, 16, 16, T, Layout> & a, T x) {
    std::fill_n(a.x, a.num_elements, x);
}

template <typename T>
void store_matrix_sync(T * at, const fragment<accumulator, 16, 16, 16, T> & a, unsigned ldm, layout_t layout) {
    check_memory(at, ldm);
    for (int i = 0; i < a.num_elements; ++i) {
        const int row                                                         = place(threadIdx.x % 32, i) / 16;
        const int column                                                      = place(threadIdx.x % 32, i) % 16;
        at[layout == mem_row_major ? row * ldm + column : column * ldm + row] = a.x[i];
    }
}

template <typename A, typename B, typename C> struct product {
    C *       d;
    const A * a;
    const B * b;
    const C * c;
};

template <typename P> void multiply(P * const * all) {
    float a[256];
    float b[256];
    float d[256];
    for (int lane = 0; lane < 32; ++lane) {
        check(all[lane]->a->source == all[0]->a->source && all[lane]->b->source == all[0]->b->source,
              "lanes multiply different matrices");
        for (int i = 0; i < 8; ++i) {
            a[place(lane, i)] = __half2float(all[lane]->a->x[i]);
            b[place(lane, i)] = __half2float(all[lane]->b->x[i]);
            d[place(lane, i)] = all[lane]->c->x[i];
        }
    }
    for (int row = 0; row < 16; ++row) {
        for (int k = 0; k < 16; ++k) {
            for (int column = 0; column < 16; ++column) {
                d[row * 16 + column] += a[row * 16 + k] * b[k * 16 + column];
            }
        }
    }
    for (int lane = 0; lane < 32; ++lane) {
        for (int i = 0; i < 8; ++i) {
            all[lane]->d->x[i] = d[place(lane, i)];
        }
    }
}

template <typename LayoutA, typename LayoutB>
void mma_sync(fragment<accumulator, 16, 16, 16, float> & d, const fragment<matrix_a, 16, 16, 16, half, LayoutA> & a,
              const fragment<matrix_b, 16, 16, 16, half, LayoutB> & b,
              const fragment<accumulator, 16, 16, 16, float> &      c) {
    using P = product<fragment<matrix_a, 16, 16, 16, half, LayoutA>, fragment<matrix_b, 16, 16, 16, half, LayoutB>,
                      fragment<accumulator, 16, 16, 16, float>>;
    P mine  = { &d, &a, &b, &c };
    cuda_shim::the_machine.warp_meeting<P>("mma_sync", 0xffffffffu, &mine, multiply<P>);
}

}  // namespace wmma
}  // namespace nvcuda
