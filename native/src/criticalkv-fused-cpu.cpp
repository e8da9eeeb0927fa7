#include "criticalkv-fused-cpu.h"

#include "ggml.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

namespace criticalkv {

// ---- rows ------------------------------------------------------------------------------------------------------------

static ggml_type ggml_type_of(row_type type) {
    switch (type) {
        case row_type::F32:
            return GGML_TYPE_F32;
        case row_type::F16:
            return GGML_TYPE_F16;
        case row_type::BF16:
            return GGML_TYPE_BF16;
        case row_type::Q8_0:
            return GGML_TYPE_Q8_0;
        case row_type::Q4_0:
            return GGML_TYPE_Q4_0;
    }
    GGML_ABORT("no such type of rows");
}

// The numbers of one entry of one head.
static void read_entry(const cache_rows & rows, int32_t head, int64_t entry, float * out) {
    const ggml_type type = ggml_type_of(rows.type);
    const int64_t   d    = rows.head_size;
    const char *    at   = (const char *) rows.data + entry * rows.stride + head * (int64_t) ggml_row_size(type, d);
    if (type == GGML_TYPE_F32) {
        std::memcpy(out, at, d * sizeof(float));
    } else {
        ggml_get_type_traits(type)->to_float(at, out, d);
    }
}

static float dot(const float * a, const float * b, int64_t n) {
    float sum = 0.0f;
    for (int64_t i = 0; i < n; ++i) {
        sum += a[i] * b[i];
    }
    return sum;
}

// ---- observed attention ----------------------------------------------------------------------------------------------

// So many rows of logits are in memory at once: each entry is unpacked once for all of them.
static constexpr int32_t ROWS = 16;

static float logit(const attention_args & p, float product, int32_t t, int64_t entry) {
    float x = product * p.scale;
    if (p.softcap != 0.0f) {
        x = p.softcap * std::tanh(product * (p.scale / p.softcap));
    }
    return x + ((const float *) ((const char *) p.mask + t * p.mask_stride))[entry];
}

static const float * query(const attention_args & p, int64_t head, int32_t t) {
    const char * row = (const char *) p.queries + p.query_rows[t] * p.query_stride;
    return (const float *) row + head * p.k.head_size;
}

static void softmax(float * x, int64_t n, const float * sink) {
    float top  = *std::max_element(x, x + n);
    top        = sink != nullptr ? std::max(top, *sink) : top;
    double sum = sink != nullptr ? std::exp(*sink - top) : 0.0;
    for (int64_t i = 0; i < n; ++i) {
        x[i] = std::exp(x[i] - top);
        sum += x[i];
    }
    for (int64_t i = 0; i < n; ++i) {
        x[i] = (float) (x[i] / sum);
    }
}

static float pool_at(const float * x, int64_t n, int64_t i, int32_t pool) {
    float         sum  = 0.0f;
    const int64_t last = std::min<int64_t>(n - 1, i + pool / 2);
    for (int64_t j = std::max<int64_t>(0, i - pool / 2); j <= last; ++j) {
        sum += x[j];
    }
    return sum / (float) pool;
}

static void attention_of_head(const attention_args & p, int32_t kv_head, std::vector<float> & x) {
    const int32_t       group = p.n_head / p.n_head_kv;
    const int32_t       rows  = group * p.m;  // row r: window query r % m of query head r / m
    std::vector<float>  key(p.k.head_size);
    std::vector<double> total(p.n_before, 0.0);
    for (int32_t first = 0; first < rows; first += ROWS) {
        const int32_t count = std::min(ROWS, rows - first);
        for (int64_t i = 0; i < p.n; ++i) {
            read_entry(p.k, kv_head, i, key.data());
            for (int32_t r = 0; r < count; ++r) {
                const int32_t t    = (first + r) % p.m;
                const int64_t head = (int64_t) kv_head * group + (first + r) / p.m;
                x[r * p.n + i]     = logit(p, dot(query(p, head, t), key.data(), p.k.head_size), t, i);
            }
        }
        for (int32_t r = 0; r < count; ++r) {
            const int64_t head = (int64_t) kv_head * group + (first + r) / p.m;
            float *       row  = x.data() + r * p.n;
            softmax(row, p.n, p.sinks != nullptr ? p.sinks + head : nullptr);
            for (int64_t i = 0; i < p.n_before; ++i) {
                if (!p.max) {
                    total[i] += row[i];
                } else {
                    const double pooled = pool_at(row, p.n_before, i, p.pool);
                    total[i]            = pooled > total[i] || std::isnan(pooled) ? pooled : total[i];
                }
            }
        }
    }
    float * out = p.out + kv_head * p.n_before;
    if (p.max) {
        std::copy(total.begin(), total.end(), out);
        return;
    }
    std::transform(total.begin(), total.end(), x.begin(), [rows](double sum) { return (float) (sum / rows); });
    for (int64_t i = 0; i < p.n_before; ++i) {
        out[i] = pool_at(x.data(), p.n_before, i, p.pool);
    }
}

void observed_attention_cpu(const attention_args & p, int ith, int nth) {
    std::vector<float> logits(ROWS * p.n);
    for (int32_t head = ith; head < p.n_head_kv; head += nth) {
        attention_of_head(p, head, logits);
    }
}

// ---- compaction ------------------------------------------------------------------------------------------------------

static void move_head(const moved_rows & rows, int32_t head, const int32_t * slots, int64_t n) {
    const char * from = (const char *) rows.from + head * rows.head_bytes;
    char *       to   = (char *) rows.to + head * rows.head_bytes;
    for (int64_t i = 0; i < n; ++i) {
        std::memmove(to + i * rows.to_stride, from + slots[i] * rows.from_stride, rows.head_bytes);
    }
}

void compact_rows_cpu(const compaction_args & p, int ith, int nth) {
    for (int32_t head = ith; head < p.n_head_kv; head += nth) {
        move_head(p.k, head, p.slots + head * p.n_keep, p.n_keep);
        move_head(p.v, head, p.slots + head * p.n_keep, p.n_keep);
    }
}

// ---- norms -----------------------------------------------------------------------------------------------------------

static double quadratic_form(const char * gram, int64_t row_stride, const float * v, int64_t d) {
    double sum = 0.0;
    for (int64_t c = 0; c < d; ++c) {
        sum += (double) dot((const float *) (gram + c * row_stride), v, d) * v[c];
    }
    return sum;
}

void gram_norms_cpu(const gram_args & p, int ith, int nth) {
    std::vector<float> v(p.v.head_size);
    for (int64_t i = ith; i < p.n * p.n_head_kv; i += nth) {
        const int32_t head = (int32_t) (i / p.n);
        double        norm = 0.0;
        read_entry(p.v, head, i % p.n, v.data());
        for (int32_t g = 0; g < p.per_head; ++g) {
            const char * gram   = (const char *) p.gram + ((int64_t) head * p.per_head + g) * p.gram_stride;
            const double square = quadratic_form(gram, p.gram_row_stride, v.data(), p.v.head_size);
            norm += square > 0.0 ? std::sqrt(square) : 0.0;
        }
        p.out[i] = (float) (norm / p.per_head);
    }
}

// The power of two in [1, 2) times which the largest |v| is, as far as it and its inverse are normal numbers.
static float power_of_two_below(const std::vector<float> & v) {
    float top = 0.0f;
    for (const float x : v) {
        top = std::fmax(top, std::fabs(x));
    }
    const int exponent = std::isinf(top) ? 126 : top > 0.0f ? std::ilogb(top) : -126;
    return std::ldexp(1.0f, std::max(-126, std::min(126, exponent)));
}

// sum over the outputs of |v W_h|, of one query head. x: [n_embd], scratch.
static double l1_of_head(const l1_args & p, const std::vector<float> & v, int64_t head, std::vector<float> & row,
                         std::vector<float> & x) {
    const int64_t d = p.v.head_size;
    std::fill(x.begin(), x.end(), 0.0f);
    for (int64_t j = 0; j < d; ++j) {
        ggml_fp16_to_fp32_row((const ggml_fp16_t *) ((const char *) p.w + (head * d + j) * p.w_stride), row.data(),
                              p.n_embd);
        for (int64_t c = 0; c < p.n_embd; ++c) {
            x[c] += v[j] * row[c];
        }
    }
    double sum = 0.0;
    for (const float y : x) {
        sum += std::fabs(y);
    }
    return sum;
}

void l1_norms_cpu(const l1_args & p, int ith, int nth) {
    std::vector<float> v(p.v.head_size);
    std::vector<float> row(p.n_embd);
    std::vector<float> x(p.n_embd);
    for (int64_t i = ith; i < p.n * p.n_head_kv; i += nth) {
        const int64_t kv_head = i / p.n;
        read_entry(p.v, (int32_t) kv_head, i % p.n, v.data());
        const float factor = power_of_two_below(v);
        for (float & y : v) {
            y = ggml_fp16_to_fp32(ggml_fp32_to_fp16(y / factor));
        }
        double sum = 0.0;
        for (int64_t h = kv_head * p.group; h < (kv_head + 1) * p.group; ++h) {
            sum += l1_of_head(p, v, h, row, x);
        }
        p.out[i] = (float) (sum * factor / p.group);
    }
}

}  // namespace criticalkv
