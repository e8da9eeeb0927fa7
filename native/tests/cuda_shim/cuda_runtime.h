// Stands in for CUDA's header of this name when a test compiles kernels with the host's compiler: the part of it that the
// kernels use, on machine.h.
#pragma once

#include "machine.h"

#include <cmath>

#define __global__
#define __device__
#define __host__
#define __launch_bounds__(...)
// A variable of the block: the fibers of a block share one. (Only CRITICALKV_SHARED is fresh in every block.)
#define __shared__ static

#define CRITICALKV_SHARED(type, name)                                                                                  \
    type & name = *static_cast<type *>(cuda_shim::the_machine.shared(                                                  \
        [] {                                                                                                           \
            static char key;                                                                                           \
            return &key;                                                                                               \
        }(),                                                                                                           \
        sizeof(type), alignof(type)))

#define __syncthreads() cuda_shim::the_machine.block_barrier(__LINE__)

// ---- launches --------------------------------------------------------------------------------------------------------

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1 };

using cudaStream_t = void *;

struct cudaLaunchConfig_t {
    dim3         gridDim;
    dim3         blockDim;
    size_t       dynamicSmemBytes;
    cudaStream_t stream;
    void *       attrs;
    unsigned     numAttrs;
};

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t * config, void (*kernel)(Parameters...),
                               Arguments &&... arguments) {
    if (config->dynamicSmemBytes != 0 || config->gridDim.x == 0 || config->gridDim.y == 0 ||
        config->gridDim.y > 65535 || config->gridDim.z == 0 || config->gridDim.z > 65535) {
        return cudaErrorInvalidValue;
    }
    cuda_shim::the_machine.run(config->gridDim, config->blockDim, [&] { kernel(arguments...); });
    return cudaSuccess;
}

// ---- numbers ---------------------------------------------------------------------------------------------------------

struct alignas(16) float4 {
    float x, y, z, w;
};

struct alignas(8) uint2 {
    unsigned x, y;
};

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

template <typename To, typename From> To cuda_shim_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "bits of one size");
    To to;
    std::memcpy(&to, &from, sizeof(to));
    return to;
}

inline float __uint_as_float(unsigned x) {
    return cuda_shim_bits<float>(x);
}

inline unsigned __float_as_uint(float x) {
    return cuda_shim_bits<unsigned>(x);
}

// ---- warps -----------------------------------------------------------------------------------------------------------

inline void __syncwarp(unsigned mask = 0xffffffffu) {
    int nothing = 0;
    cuda_shim::the_machine.warp_meeting<int>("__syncwarp", mask, &nothing, [](int * const *) {});
}

namespace cuda_shim {

template <typename T> struct shuffle {
    T        value;
    unsigned from;
    T        result;
};

template <typename T> T shuffle_from(const char * what, unsigned mask, T value, unsigned from) {
    shuffle<T> mine = { value, from % 32, value };
    the_machine.warp_meeting<shuffle<T>>(what, mask, &mine, [](shuffle<T> * const * all) {
        for (int lane = 0; lane < 32; ++lane) {
            if (all[lane] != nullptr && all[all[lane]->from] != nullptr) {
                all[lane]->result = all[all[lane]->from]->value;
            }
        }
    });
    return mine.result;
}

}  // namespace cuda_shim

template <typename T> T __shfl_sync(unsigned mask, T x, int from) {
    return cuda_shim::shuffle_from("__shfl_sync", mask, x, (unsigned) from);
}

template <typename T> T __shfl_xor_sync(unsigned mask, T x, int step) {
    return cuda_shim::shuffle_from("__shfl_xor_sync", mask, x, (threadIdx.x % 32) ^ (unsigned) step);
}

template <typename T> T __shfl_down_sync(unsigned mask, T x, unsigned step) {
    const unsigned lane = threadIdx.x % 32;
    return cuda_shim::shuffle_from("__shfl_down_sync", mask, x, lane + step < 32 ? lane + step : lane);
}

// ---- atomics: fibers do not interrupt one another --------------------------------------------------------------------

template <typename T> T atomicAdd(T * to, T x) {
    const T before = *to;
    *to            = before + x;
    return before;
}

template <typename T> T atomicMax(T * to, T x) {
    const T before = *to;
    *to            = std::max(before, x);
    return before;
}

template <typename T> T atomicCAS(T * to, T expected, T x) {
    const T before = *to;
    *to            = before == expected ? x : before;
    return before;
}
