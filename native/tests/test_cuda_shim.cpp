// The host shim itself: what it must find, and that its half numbers, shuffles, atomics and fragments are right.

#include "cuda_cases.h"

#include <mma.h>

using namespace cases;
using cuda_shim::the_machine;

namespace wmma = nvcuda::wmma;

template <typename Kernel> static void run_block(unsigned threads, const Kernel & kernel) {
    the_machine.run(dim3(1), dim3(threads), kernel);
}

static bool diverges(void (*kernel)()) {
    for (const cuda_shim::schedule & order : SCHEDULES) {
        the_machine.order = order;
        try {
            run_block(64, kernel);
            return false;
        } catch (const cuda_shim::failure & e) {
            require(std::strstr(e.what(), "divergent") != nullptr, e.what());
        }
    }
    return true;
}

// clang-format off
static void test_divergence() {
    require(diverges([] { if (threadIdx.x != 5) { __syncthreads(); } }), "a thread that ended was not missed");
    require(diverges([] { if (threadIdx.x < 32) { __syncwarp(); __syncthreads(); } }), "a warp that ended was not missed");
    require(diverges([] { if (threadIdx.x != 40) { __syncwarp(); } __syncthreads(); }), "half a warp met unnoticed");
    require(diverges([] {
        if (threadIdx.x < 32) {
            __syncthreads();
        } else {
            __syncthreads();
        }
    }), "two barriers passed for one");
    require(diverges([] {
        for (int i = 0; i < (threadIdx.x == 0 ? 1 : 2); ++i) {
            __syncthreads();
        }
    }), "a thread that ended after the same barrier was not missed");
    require(!diverges([] { __syncwarp(); __syncthreads(); __syncthreads(); }), "good barriers were refused");
}
// clang-format on

// Passes a number on to the next thread through shared memory; right only with the barrier.
static std::vector<int> pass_on(bool with_barrier) {
    std::vector<int> out(64);
    run_block(64, [&] {
        struct numbers {
            int x[64];
        };

        CRITICALKV_SHARED(numbers, s);
        s.x[threadIdx.x] = (int) threadIdx.x;
        if (with_barrier) {
            __syncthreads();
        }
        out[threadIdx.x] = s.x[(threadIdx.x + 1) % 64];
    });
    return out;
}

static void test_races() {
    std::vector<std::vector<int>> with;
    std::vector<std::vector<int>> without;
    for (const cuda_shim::schedule & order : SCHEDULES) {
        the_machine.order = order;
        with.push_back(pass_on(true));
        without.push_back(pass_on(false));
    }
    for (size_t i = 1; i < with.size(); ++i) {
        require(with[i] == with[0], "the order of threads shows through a barrier");
    }
    require(without[1] != without[0], "a missing barrier does not show");
    require(with[0][3] == 4 && with[0][63] == 0, "shared memory");
}

static void test_warps_and_atomics() {
    for (const cuda_shim::schedule & order : SCHEDULES) {
        the_machine.order = order;
        std::vector<int> out(128);
        int              sum = 0;
        int              max = 0;
        run_block(128, [&] {
            int x = (int) threadIdx.x;
            for (int step = 16; step > 0; step /= 2) {
                x += __shfl_xor_sync(0xffffffffu, x, step);
            }
            x += __shfl_sync(0xffffffffu, (int) threadIdx.x, 3) + __shfl_down_sync(0xffffffffu, (int) threadIdx.x, 1);
            out[threadIdx.x] = x;
            atomicAdd(&sum, x);
            atomicMax(&max, x);
        });
        int expected = 0;
        for (int i = 0; i < 128; ++i) {
            const int warp = i / 32 * 32;
            const int x    = 32 * warp + 31 * 16 + warp + 3 + (i % 32 == 31 ? i : i + 1);
            require(out[i] == x, "shuffles");
            expected += x;
        }
        require(sum == expected && max == out[127], "atomics");
    }
}

static void test_halves() {
    for (unsigned bits = 0; bits < 65536; ++bits) {
        const float mine  = __half2float({ (unsigned short) bits });
        const float other = ggml_fp16_to_fp32((ggml_fp16_t) bits);
        require(mine == other || (std::isnan(mine) && std::isnan(other)), "half to float");
    }
    std::mt19937 random(5);
    for (int i = 0; i < 200000; ++i) {
        // all signs and mantissas, exponents around the range of half
        const float x = __uint_as_float((random() & 0x807fffffu) | (100 + random() % 45) << 23);
        require(__float2half_rn(x).bits == ggml_fp32_to_fp16(x), "float to half");
    }
}

static void test_fragments() {
    const std::vector<float> x = random_numbers(512, 9);
    alignas(32) half         a[256];
    alignas(32) half         b[256];
    alignas(32) float        c[256];
    for (int i = 0; i < 256; ++i) {
        a[i] = __float2half_rn(x[i]);
        b[i] = __float2half_rn(x[256 + i]);
    }
    the_machine.order = { true, false, 0 };
    run_block(32, [&] {
        wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> fa;
        wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::row_major> fb;
        wmma::fragment<wmma::accumulator, 16, 16, 16, float>              fc;
        wmma::load_matrix_sync(fa, a, 16);
        wmma::load_matrix_sync(fb, b, 16);
        wmma::fill_fragment(fc, 1.0f);
        wmma::mma_sync(fc, fa, fb, fc);
        wmma::store_matrix_sync(c, fc, 16, wmma::mem_row_major);
    });
    for (int i = 0; i < 256; ++i) {
        double sum = 1.0;
        for (int k = 0; k < 16; ++k) {
            sum += (double) __half2float(a[i / 16 * 16 + k]) * __half2float(b[k * 16 + i % 16]);
        }
        require(std::fabs(c[i] - sum) < 1e-4, "a product of fragments");
    }
}

int main() {
    test_divergence();
    test_races();
    test_warps_and_atomics();
    test_halves();
    test_fragments();
    std::puts("ok");
}
