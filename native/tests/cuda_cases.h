// What the tests of the fused kernels share: cache rows of every type, results, comparisons.
#pragma once

#include "criticalkv-args.h"
#include "criticalkv-supports.h"
#include "ggml.h"
#include "kernel_runs.h"
#include "require.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace cases {

using criticalkv::cache_rows;
using criticalkv::row_type;

inline const row_type TYPES[] = { row_type::F32, row_type::F16, row_type::BF16, row_type::Q8_0, row_type::Q4_0 };

inline const char * name_of(row_type type) {
    static const char * const names[] = { "f32", "f16", "bf16", "q8_0", "q4_0" };
    return names[(int) type];
}

inline bool is_quantized(row_type type) {
    return type == row_type::Q8_0 || type == row_type::Q4_0;
}

inline ggml_type ggml_type_of(row_type type) {
    static const ggml_type types[] = { GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0 };
    return types[(int) type];
}

inline std::vector<float> random_numbers(size_t n, uint32_t seed, float size = 1.0f) {
    std::mt19937                    random(seed);
    std::normal_distribution<float> normal(0.0f, size);
    std::vector<float>              x(n);
    for (float & y : x) {
        y = normal(random);
    }
    return x;
}

// A cache with a gap between its rows, and what its numbers are.
struct cache {
    cache_rows           rows;
    std::vector<uint8_t> bytes;
    std::vector<double>  numbers;  // [n][n_head_kv][d]
};

inline cache make_cache(row_type type, int d, int n_head_kv, int64_t n, const std::vector<float> & x) {
    const ggml_type    t         = ggml_type_of(type);
    const size_t       row_bytes = ggml_row_size(t, (int64_t) d * n_head_kv);
    const size_t       stride    = (row_bytes + 15) / 16 * 16 + 16;
    cache              c;
    std::vector<float> row((size_t) d * n_head_kv);
    c.bytes.assign(stride * (n - 1) + row_bytes, 0xFF);
    for (int64_t i = 0; i < n; ++i) {
        uint8_t *     to   = c.bytes.data() + i * stride;
        const float * from = x.data() + i * row.size();
        if (type == row_type::F32) {
            std::memcpy(to, from, row_bytes);
            std::copy_n(from, row.size(), row.begin());
        } else {
            ggml_quantize_chunk(t, from, to, 0, 1, (int64_t) row.size(), nullptr);
            ggml_get_type_traits(t)->to_float(to, row.data(), (int64_t) row.size());
        }
        c.numbers.insert(c.numbers.end(), row.begin(), row.end());
    }
    c.rows = { c.bytes.data(), (int64_t) stride, d, type };
    return c;
}

// The largest relative error.
template <typename A, typename B> double difference(const std::vector<A> & a, const std::vector<B> & b) {
    require(a.size() == b.size(), "sizes differ");
    double worst = 0.0;
    for (size_t i = 0; i < a.size(); ++i) {
        const double x = (double) a[i];
        const double y = (double) b[i];
        const double e = x == y ? 0.0 : std::fabs(x - y) / std::fabs(y);
        worst          = std::isnan(e) ? std::numeric_limits<double>::infinity() : std::max(worst, e);
    }
    return worst;
}

inline void require_close(double error, double tolerance, const std::string & what) {
    require(error <= tolerance, what + ": relative error " + std::to_string(error * 1e6) + "e-6, allowed " +
                                    std::to_string(tolerance * 1e6) + "e-6");
}

// A result between two guards, which nobody may write to. A kernel writes to data(), a twin to host_data().
class output {
  public:
    explicit output(size_t n) : memory(n + 2 * GUARD, UNWRITTEN) {}

    float * host_data() { return memory.data() + GUARD; }

    float * data() {
        on_device = device.put(memory);
        return on_device + GUARD;
    }

    std::vector<float> take() {
        if (on_device != nullptr) {
            device.get(on_device, memory);
        }
        for (size_t i = 0; i < GUARD; ++i) {
            require(memory[i] == UNWRITTEN && memory[memory.size() - 1 - i] == UNWRITTEN, "written out of bounds");
        }
        return { memory.begin() + GUARD, memory.end() - GUARD };
    }

  private:
    static constexpr size_t GUARD     = 64;
    static constexpr float  UNWRITTEN = -12345.0f;

    std::vector<float> memory;
    device_memory      device;
    float *            on_device = nullptr;
};

// A call of a twin, in shares.
template <typename Args> void run_shares(void (*twin)(const Args &, int, int), const Args & args, int shares) {
    for (int i = 0; i < shares; ++i) {
        twin(args, i, shares);
    }
}

}  // namespace cases
