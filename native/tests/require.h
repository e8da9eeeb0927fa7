// What a test of the kernels says of a failure, and how it compares bits.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

namespace cases {

inline void require(bool good, const std::string & what) {
    if (!good) {
        std::fprintf(stderr, "FAILED: %s\n", what.c_str());
        std::exit(1);
    }
}

template <typename T> bool same_bytes(const std::vector<T> & a, const std::vector<T> & b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

}  // namespace cases
