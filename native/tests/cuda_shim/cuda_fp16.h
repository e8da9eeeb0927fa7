// Stands in for CUDA's header of this name: half numbers as the kernels use them, written for the tests.
#pragma once

#include "cuda_runtime.h"

struct half {
    unsigned short bits;
};

inline half __ushort_as_half(unsigned short bits) {
    return { bits };
}

inline float __half2float(half x) {
    const unsigned sign     = (x.bits & 0x8000u) << 16;
    const unsigned exponent = x.bits >> 10 & 31;
    const unsigned mantissa = x.bits & 1023;
    if (exponent == 0) {
        const float small = std::ldexp((float) mantissa, -24);
        return sign != 0 ? -small : small;
    }
    return __uint_as_float(sign | (exponent == 31 ? 255 : exponent + 112) << 23 | mantissa << 13);
}

// To nearest, ties to even.
inline half __float2half_rn(float x) {
    const unsigned bits = __float_as_uint(x);
    const unsigned sign = bits >> 16 & 0x8000;
    const float    size = std::fabs(x);
    if (std::isnan(x)) {
        return { (unsigned short) (sign | 0x7e00) };
    }
    if (size >= 65520.0f) {
        return { (unsigned short) (sign | 0x7c00) };
    }
    // in units of the last place of the result; nearbyint rounds to even
    const int   exponent = std::max(-14, size > 0.0f ? std::ilogb(size) : -14);
    const float units    = std::nearbyint(std::ldexp(size, 10 - exponent));
    // a sum, so that a mantissa that was rounded up carries into the exponent
    return { (unsigned short) (sign + ((unsigned) (exponent + 14) << 10) + (unsigned) units) };
}
