// Small things that all kernels share.
#pragma once

#include "criticalkv-args.h"

#include <cuda_fp16.h>
#include <cuda_runtime.h>

// Shared memory of a kernel. The host shim of the tests puts memory of its own there, of just this size and full of NaNs.
#ifndef CRITICALKV_SHARED
#define CRITICALKV_SHARED(type, name) __shared__ type name
#endif

namespace criticalkv {

constexpr unsigned ALL_LANES = 0xffffffffu;

// Sum over neighbouring lanes, `width` of them (a power of two); every lane gets it.
__device__ inline float sum_over_lanes(float x, int width) {
    for (int step = width / 2; step > 0; step /= 2) {
        x += __shfl_xor_sync(ALL_LANES, x, step);
    }
    return x;
}

__device__ inline float max_over_lanes(float x, int width) {
    for (int step = width / 2; step > 0; step /= 2) {
        x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, step));
    }
    return x;
}

inline unsigned ceil_div(int64_t a, int64_t b) {
    return (unsigned) ((a + b - 1) / b);
}

template <typename Args>
cudaError_t launch(void (*kernel)(Args), dim3 grid, unsigned threads, cudaStream_t stream, const Args & args) {
    cudaLaunchConfig_t config = {};
    config.gridDim            = grid;
    config.blockDim           = dim3(threads);
    config.stream             = stream;
    return cudaLaunchKernelEx(&config, kernel, args);
}

}  // namespace criticalkv
