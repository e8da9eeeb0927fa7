// Numbers of cache rows as f32, four at a time.
#pragma once

#include "criticalkv-device.cuh"

namespace criticalkv {

// ggml's blocks of 32 numbers: an f16 scale, then the numbers. q4_0 has number i in the low half of byte i and number
// i + 16 in its high half, both with 8 added.
constexpr int BLOCK      = 32;
constexpr int Q8_0_BYTES = 2 + 32;
constexpr int Q4_0_BYTES = 2 + 16;

__device__ inline float half_bits_to_float(uint32_t bits) {
    return __half2float(__ushort_as_half((unsigned short) bits));
}

// Blocks are aligned to 2 bytes only.
__device__ inline uint32_t load_4_bytes(const uint8_t * at) {
    const uint16_t * halves = (const uint16_t *) at;
    return halves[0] | (uint32_t) halves[1] << 16;
}

// x[i] = number column + i of a head; column is a multiple of 4.
template <row_type T> __device__ inline void read_4(const uint8_t * head, int column, float x[4]) {
    if constexpr (T == row_type::F32) {
        const float4 v = *(const float4 *) (head + column * 4);
        x[0]           = v.x;
        x[1]           = v.y;
        x[2]           = v.z;
        x[3]           = v.w;
    } else if constexpr (T == row_type::F16 || T == row_type::BF16) {
        const uint2    v       = *(const uint2 *) (head + column * 2);
        const uint32_t bits[4] = { v.x & 0xffff, v.x >> 16, v.y & 0xffff, v.y >> 16 };
        for (int i = 0; i < 4; ++i) {
            x[i] = T == row_type::F16 ? half_bits_to_float(bits[i]) : __uint_as_float(bits[i] << 16);
        }
    } else if constexpr (T == row_type::Q8_0) {
        const uint8_t * block = head + column / BLOCK * Q8_0_BYTES;
        const float     scale = half_bits_to_float(*(const uint16_t *) block);
        const uint32_t  bytes = load_4_bytes(block + 2 + column % BLOCK);
        for (int i = 0; i < 4; ++i) {
            x[i] = scale * (float) (int8_t) (bytes >> 8 * i);
        }
    } else {
        const uint8_t * block = head + column / BLOCK * Q4_0_BYTES;
        const float     scale = half_bits_to_float(*(const uint16_t *) block);
        const int       at    = column % BLOCK;
        const uint32_t  bytes = load_4_bytes(block + 2 + at % 16) >> (at < 16 ? 0 : 4);
        for (int i = 0; i < 4; ++i) {
            x[i] = scale * (float) ((int) (bytes >> 8 * i & 15) - 8);
        }
    }
}

// The first row of a head.
template <row_type T> const __device__ uint8_t * head_of(const cache_rows & rows, int kv_head) {
    const int64_t d     = rows.head_size;
    int64_t       bytes = d * 4;
    if constexpr (T == row_type::F16 || T == row_type::BF16) {
        bytes = d * 2;
    } else if constexpr (T == row_type::Q8_0 || T == row_type::Q4_0) {
        bytes = d / BLOCK * (T == row_type::Q8_0 ? Q8_0_BYTES : Q4_0_BYTES);
    }
    return (const uint8_t *) rows.data + kv_head * bytes;
}

// Calls Kernel<T>::launch for the type of some rows.
template <template <row_type> class Kernel, typename Args>
cudaError_t launch_for_type(row_type type, const Args & args, cudaStream_t stream) {
    switch (type) {
        case row_type::F32:
            return Kernel<row_type::F32>::launch(args, stream);
        case row_type::F16:
            return Kernel<row_type::F16>::launch(args, stream);
        case row_type::BF16:
            return Kernel<row_type::BF16>::launch(args, stream);
        case row_type::Q8_0:
            return Kernel<row_type::Q8_0>::launch(args, stream);
        case row_type::Q4_0:
            return Kernel<row_type::Q4_0>::launch(args, stream);
    }
    return cudaErrorInvalidValue;
}

}  // namespace criticalkv
