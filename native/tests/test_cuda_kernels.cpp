// The fused CUDA kernels against their CPU twins, and the twins against the formulas in double. The kernels run on the host,
// thread by thread under several schedules (cuda_shim/machine.h), or on a device (cuda_device/).
//
// Tolerances are relative, of single numbers. Kernels and twins round alike but add in other orders; a logit of size 8 has
// an error of a few 2^-24 * 8, which exp makes a relative one: 1e-5 is five times what is seen.

#include "criticalkv-attention.cuh"
#include "criticalkv-compaction.cuh"
#include "criticalkv-fused-cpu.h"
#include "criticalkv-gram.cuh"
#include "criticalkv-l1.cuh"
#include "cuda_cases.h"

#include <algorithm>
#include <numeric>

using namespace criticalkv;
using namespace cases;

static constexpr double TOLERANCE = 1e-5;

static double worst_kernel = 0.0;  // seen, of the test that runs
static double worst_twin   = 0.0;

static void check_kernel(double error, const std::string & what) {
    worst_kernel = std::max(worst_kernel, error);
    require_close(error, TOLERANCE, what + ", kernel against twin");
}

static void check_twin(double error, double tolerance, const std::string & what) {
    worst_twin = std::max(worst_twin, error);
    require_close(error, tolerance, what + ", twin against the formula");
}

// ---- observed attention ----------------------------------------------------------------------------------------------

struct attention_case {
    int     d, n_head, n_head_kv, m, pool;
    int64_t n, n_before;
    float   softcap;
    bool    sinks;
};

struct attention_data {
    cache                k;
    std::vector<float>   queries;
    std::vector<int32_t> rows;
    std::vector<float>   mask;
    std::vector<float>   sinks;
    attention_args       args;
};

static attention_data make_attention(const attention_case & c, row_type type, bool max) {
    attention_data a;
    const int      ring     = c.m + 5;
    const size_t   n_query  = (size_t) c.n_head * c.d;
    const size_t   n_number = (size_t) c.n * c.n_head_kv * c.d;
    a.k                     = make_cache(type, c.d, c.n_head_kv, c.n, random_numbers(n_number, 1));
    a.queries               = random_numbers(n_query * ring, 2, 1.5f);
    a.sinks                 = random_numbers(c.n_head, 3);
    for (int t = 0; t < c.m; ++t) {
        a.rows.push_back((t + 3) % ring);  // wraps around
        for (int64_t i = 0; i < c.n; ++i) {
            a.mask.push_back(i <= c.n - c.m + t ? 0.0f : -INFINITY);
        }
    }
    attention_args & p = a.args;
    p                  = {};
    p.k                = a.k.rows;
    p.n                = c.n;
    p.n_before         = c.n_before;
    p.n_head           = c.n_head;
    p.n_head_kv        = c.n_head_kv;
    p.m                = c.m;
    p.pool             = c.pool;
    p.max              = max;
    p.scale            = 1.0f / std::sqrt((float) c.d);
    p.softcap          = c.softcap;
    p.queries          = a.queries.data();
    p.query_stride     = (int64_t) (n_query * sizeof(float));
    p.query_rows       = a.rows.data();
    p.mask             = a.mask.data();
    p.mask_stride      = c.n * (int64_t) sizeof(float);
    p.sinks            = c.sinks ? a.sinks.data() : nullptr;
    return a;
}

// Probabilities of one query of one head.
static std::vector<double> probabilities(const attention_data & a, int head, int t) {
    const attention_args & p = a.args;
    const int              d = p.k.head_size;
    std::vector<double>    x(p.n);
    double                 top = p.sinks != nullptr ? p.sinks[head] : -INFINITY;
    for (int64_t i = 0; i < p.n; ++i) {
        double sum = 0.0;
        for (int j = 0; j < d; ++j) {
            sum += (double) a.queries[((size_t) p.query_rows[t] * p.n_head + head) * d + j] *
                   a.k.numbers[(i * p.n_head_kv + head / (p.n_head / p.n_head_kv)) * d + j];
        }
        sum *= p.scale;
        x[i] = (p.softcap != 0.0f ? p.softcap * std::tanh(sum / p.softcap) : sum) + p.mask[t * p.n + i];
        top  = std::max(top, x[i]);
    }
    double total = p.sinks != nullptr ? std::exp(p.sinks[head] - top) : 0.0;
    for (double & y : x) {
        y = std::exp(y - top);
        total += y;
    }
    for (double & y : x) {
        y /= total;
    }
    return x;
}

static std::vector<double> pooled(const std::vector<double> & x, int64_t n, int k) {
    std::vector<double> out(n, 0.0);
    for (int64_t i = 0; i < n; ++i) {
        for (int64_t j = i - k / 2; j <= i + k / 2; ++j) {
            out[i] += j >= 0 && j < n ? x[j] / k : 0.0;
        }
    }
    return out;
}

static std::vector<double> attention_formula(const attention_data & a) {
    const attention_args & p     = a.args;
    const int              group = p.n_head / p.n_head_kv;
    std::vector<double>    out(p.n_head_kv * p.n_before, 0.0);
    for (int head = 0; head < p.n_head; ++head) {
        for (int t = 0; t < p.m; ++t) {
            const std::vector<double> x = pooled(probabilities(a, head, t), p.n_before, p.pool);
            for (int64_t i = 0; i < p.n_before; ++i) {
                double & to = out[head / group * p.n_before + i];
                to          = p.max ? std::max(to, x[i]) : to + x[i] / (group * p.m);
            }
        }
    }
    return out;
}

static std::vector<float> attention_by_kernel(const attention_data & a) {
    device_memory  device;
    attention_args p = a.args;
    output         out((size_t) (p.n_head_kv * p.n_before));
    p.k.data     = device.put(a.k.bytes);
    p.queries    = device.put(a.queries);
    p.query_rows = device.put(a.rows);
    p.mask       = device.put(a.mask);
    p.sinks      = p.sinks != nullptr ? device.put(a.sinks) : nullptr;
    p.workspace  = device.put(std::vector<float>(attention_workspace(p) / sizeof(float), NAN));
    p.out        = out.data();
    require(supports(p), std::string("refused: ") + (supports(p) ? "" : refuse(p)));
    finish(launch_attention(p, nullptr));
    return out.take();
}

static std::vector<float> attention_by_twin(attention_args p) {
    output out((size_t) (p.n_head_kv * p.n_before));
    p.out = out.host_data();
    run_shares(observed_attention_cpu, p, 3);
    return out.take();
}

static const attention_case ATTENTION_CASES[] = {
    { 64, 4, 2, 16, 5, 150, 134, 0.0f, false },  // the default window
    { 128, 6, 2, 5, 7, 300, 289, 0.0f, true },   // two stretches of keys, sinks
    { 80, 5, 1, 16, 1, 67, 51, 20.0f, false },   // more rows than a tile, soft-cap, no pool
    { 96, 1, 1, 1, 3, 33, 32, 0.0f, false },     // one query
    { 256, 2, 2, 3, 33, 129, 61, 30.0f, true },  // the widest pool
    { 64, 3, 1, 2, 9, 70, 2, 0.0f, false },      // fewer entries than the pool
};

static void test_attention() {
    for (const attention_case & c : ATTENTION_CASES) {
        for (const row_type type : TYPES) {
            if (is_quantized(type) && c.d % 32 != 0) {
                continue;
            }
            for (const bool max : { false, true }) {
                const std::string    what = std::string("attention, ") + name_of(type) + ", d " + std::to_string(c.d) +
                                            (max ? ", max" : ", mean");
                const attention_data a    = make_attention(c, type, max);
                const std::vector<float> twin = attention_by_twin(a.args);
                check_twin(difference(twin, attention_formula(a)), TOLERANCE, what);
                const auto kernel = under_all_schedules(what, [&] { return attention_by_kernel(a); });
                check_kernel(difference(kernel, twin), what);
            }
        }
    }
}

// Windows and prompts far over a tile: many rows and few entries to score, and many stretches of keys.
static void test_attention_at_size() {
    static const attention_case CASES[] = {
        { 64, 2, 1, 288, 33, 700, 12, 0.0f, false },
        { 64, 1, 1, 16, 33, 4100, 4084, 0.0f, true },
    };
    for (const attention_case & c : CASES) {
        for (const bool max : { false, true }) {
            const std::string        what   = "attention, m " + std::to_string(c.m) + (max ? ", max" : ", mean");
            const attention_data     a      = make_attention(c, row_type::F16, max);
            const std::vector<float> twin   = attention_by_twin(a.args);
            const auto               kernel = under_all_schedules(what, [&] { return attention_by_kernel(a); });
            check_twin(difference(twin, attention_formula(a)), TOLERANCE, what);
            check_kernel(difference(kernel, twin), what);
        }
    }
}

// What is not a number must not look like a score.
static void test_attention_keeps_nans() {
    for (const bool max : { false, true }) {
        attention_data a = make_attention({ 64, 4, 2, 3, 5, 100, 90, 0.0f, false }, row_type::F32, max);
        ((float *) (a.k.bytes.data() + 20 * a.args.k.stride))[64 + 7] = NAN;  // entry 20 of KV head 1
        for (const std::vector<float> & scores : { attention_by_kernel(a), attention_by_twin(a.args) }) {
            for (size_t i = 0; i < scores.size(); ++i) {
                require(std::isnan(scores[i]) == (i >= 90), "attention of a NaN");
            }
        }
    }
}

// ---- compaction ------------------------------------------------------------------------------------------------------

struct compaction_case {
    int64_t k_bytes, v_bytes;  // of a head
    int     n_head_kv;
    int64_t n, n_keep;
};

struct compaction_data {
    std::vector<uint8_t> k, v;
    std::vector<int32_t> slots;
    compaction_args      args;
};

static compaction_data make_compaction(const compaction_case & c) {
    compaction_data a;
    std::mt19937    random(11);
    const int64_t   k_stride = c.k_bytes * c.n_head_kv;
    const int64_t   v_stride = c.v_bytes * c.n_head_kv;
    for (auto [bytes, stride] : { std::pair{ &a.k, k_stride }, std::pair{ &a.v, v_stride } }) {
        bytes->resize(stride * c.n);
        std::generate(bytes->begin(), bytes->end(), [&] { return (uint8_t) random(); });
    }
    for (int head = 0; head < c.n_head_kv; ++head) {
        std::vector<int32_t> all(c.n);
        std::iota(all.begin(), all.end(), 0);
        // one head keeps its first rows, which then stay where they are
        std::shuffle(all.begin() + (head == 0 ? c.n_keep / 2 : 0), all.end(), random);
        std::sort(all.begin(), all.begin() + c.n_keep);
        a.slots.insert(a.slots.end(), all.begin(), all.begin() + c.n_keep);
    }
    a.args           = {};
    a.args.k         = { nullptr, nullptr, k_stride, k_stride, c.k_bytes };
    a.args.v         = { nullptr, nullptr, v_stride, v_stride, c.v_bytes };
    a.args.slots     = a.slots.data();
    a.args.n_keep    = c.n_keep;
    a.args.n_head_kv = c.n_head_kv;
    return a;
}

// What is in both targets afterwards. Apart from the source, they have wider rows.
template <typename Move> std::vector<uint8_t> compacted(const compaction_data & a, bool in_place, const Move & move) {
    compaction_args      p   = a.args;
    const int64_t        gap = in_place ? 0 : 32;
    std::vector<uint8_t> k   = in_place ? a.k : std::vector<uint8_t>(p.n_keep * (p.k.from_stride + gap), 0xEE);
    std::vector<uint8_t> v   = in_place ? a.v : std::vector<uint8_t>(p.n_keep * (p.v.from_stride + gap), 0xEE);
    p.k.to_stride += gap;
    p.v.to_stride += gap;
    move(p, a, in_place, k, v);
    k.insert(k.end(), v.begin(), v.end());
    return k;
}

static void compact_by_twin(compaction_args p, const compaction_data & a, bool in_place, std::vector<uint8_t> & k,
                            std::vector<uint8_t> & v) {
    p.slots  = a.slots.data();
    p.k.from = in_place ? k.data() : a.k.data();
    p.v.from = in_place ? v.data() : a.v.data();
    p.k.to   = k.data();
    p.v.to   = v.data();
    require(supports(p), "refused");
    run_shares(compact_rows_cpu, p, 2);
}

static void compact_by_kernel(compaction_args p, const compaction_data & a, bool in_place, std::vector<uint8_t> & k,
                              std::vector<uint8_t> & v) {
    device_memory device;
    uint8_t *     k_to = device.put(k);
    uint8_t *     v_to = device.put(v);
    p.slots            = device.put(a.slots);
    p.k.from           = in_place ? k_to : device.put(a.k);
    p.v.from           = in_place ? v_to : device.put(a.v);
    p.k.to             = k_to;
    p.v.to             = v_to;
    require(supports(p), "refused");
    finish(launch_compaction(p, nullptr));
    device.get(k_to, k);
    device.get(v_to, v);
}

// In place, from copies of all rows.
static std::vector<uint8_t> expected_in_place(const compaction_data & a) {
    std::vector<uint8_t> out;
    for (auto [rows, bytes] : { std::pair{ &a.args.k, &a.k }, std::pair{ &a.args.v, &a.v } }) {
        std::vector<uint8_t> to = *bytes;
        for (int64_t i = 0; i < a.args.n_keep * a.args.n_head_kv; ++i) {
            const int64_t head = i / a.args.n_keep;
            const int64_t at   = head * rows->head_bytes;
            std::copy_n(bytes->begin() + a.slots[i] * rows->from_stride + at, rows->head_bytes,
                        to.begin() + i % a.args.n_keep * rows->to_stride + at);
        }
        out.insert(out.end(), to.begin(), to.end());
    }
    return out;
}

static void test_compaction() {
    const compaction_case all[] = {
        { 128, 128, 2, 1500, 1100 },  // f16, head size 64; three steps
        { 256, 512, 3, 90, 33 },      // V wider than K
        { 136, 136, 2, 700, 513 },    // units of 8 bytes
        { 68, 36, 3, 1300, 600 },     // q8_0 and q4_0, head size 64: units of 4 bytes
        { 102, 102, 2, 800, 530 },    // q8_0, head size 96: units of 2 bytes
        { 128, 128, 1, 5, 5 },        // nothing goes
        { 128, 128, 2, 9, 1 },
    };
    for (const compaction_case & c : all) {
        const compaction_data a = make_compaction(c);
        require(compacted(a, true, compact_by_twin) == expected_in_place(a), "compaction in place by the twin");
        for (const bool in_place : { true, false }) {
            const std::string what =
                "compaction of " + std::to_string(c.k_bytes) + " bytes" + (in_place ? ", in place" : "");
            const auto kernel = under_all_schedules(what, [&] { return compacted(a, in_place, compact_by_kernel); });
            require(kernel == compacted(a, in_place, compact_by_twin), what + ": bytes differ");
        }
    }
}

// ---- norms -----------------------------------------------------------------------------------------------------------

static std::string describe(const char * norm, row_type type, int d, int64_t n) {
    return std::string(norm) + ", " + name_of(type) + ", d " + std::to_string(d) + ", n " + std::to_string(n);
}

static std::vector<float> gram_by_kernel(gram_args p, const cache & v, const std::vector<float> & gram) {
    device_memory device;
    output        out((size_t) (p.n_head_kv * p.n));
    p.v.data = device.put(v.bytes);
    p.gram   = device.put(gram);
    p.out    = out.data();
    require(supports(p), std::string("refused: ") + (supports(p) ? "" : refuse(p)));
    finish(launch_gram(p, nullptr));
    return out.take();
}

static std::vector<float> l1_by_kernel(l1_args p, const cache & v, const std::vector<ggml_fp16_t> & w) {
    device_memory device;
    output        out((size_t) (p.n_head_kv * p.n));
    p.v.data = device.put(v.bytes);
    p.w      = device.put(w);
    p.out    = out.data();
    require(supports(p), std::string("refused: ") + (supports(p) ? "" : refuse(p)));
    finish(launch_l1(p, nullptr));
    return out.take();
}

template <typename Args> std::vector<float> norms_by_twin(Args p, void (*twin)(const Args &, int, int)) {
    output out((size_t) (p.n_head_kv * p.n));
    p.out = out.host_data();
    run_shares(twin, p, 3);
    return out.take();
}

// [matrices][d][d + 4]: W W^T of random W [d][3 d].
static std::vector<float> random_gram(int d, int matrices) {
    const std::vector<float> w = random_numbers((size_t) matrices * d * 3 * d, 21);
    std::vector<float>       gram((size_t) matrices * d * (d + 4), NAN);
    for (int g = 0; g < matrices; ++g) {
        for (int i = 0; i < d * d; ++i) {
            double sum = 0.0;
            for (int j = 0; j < 3 * d; ++j) {
                sum += (double) w[((size_t) g * d + i / d) * 3 * d + j] * w[((size_t) g * d + i % d) * 3 * d + j];
            }
            gram[((size_t) g * d + i / d) * (d + 4) + i % d] = (float) sum;
        }
    }
    return gram;
}

static std::vector<double> gram_formula(const gram_args & p, const cache & v) {
    const int           d = p.v.head_size;
    std::vector<double> out(p.n_head_kv * p.n, 0.0);
    for (int64_t i = 0; i < (int64_t) out.size(); ++i) {
        const int64_t  head = i / p.n;
        const double * x    = v.numbers.data() + (i % p.n * p.n_head_kv + head) * d;
        for (int g = 0; g < p.per_head; ++g) {
            const float * gram = p.gram + (head * p.per_head + g) * d * (d + 4);
            double        sum  = 0.0;
            for (int a = 0; a < d; ++a) {
                for (int b = 0; b < d; ++b) {
                    sum += x[a] * gram[a * (d + 4) + b] * x[b];
                }
            }
            out[i] += std::sqrt(std::max(sum, 0.0)) / p.per_head;
        }
    }
    return out;
}

static void test_gram() {
    for (const int d : { 64, 80, 96, 128, 256 }) {
        const int                per_head = d == 64 || d == 80 ? 3 : 1;
        const int                heads    = 2;
        const std::vector<float> gram     = random_gram(d, heads * per_head);
        for (const row_type type : TYPES) {
            if (is_quantized(type) && d % 32 != 0) {
                continue;
            }
            const int64_t n        = type == row_type::F32 ? 1 : 70;
            const cache   v        = make_cache(type, d, heads, n, random_numbers(n * heads * d, 22));
            gram_args     p        = {};
            p.v                    = v.rows;
            p.n                    = n;
            p.n_head_kv            = heads;
            p.per_head             = per_head;
            p.gram                 = gram.data();
            p.gram_row_stride      = (d + 4) * (int64_t) sizeof(float);
            p.gram_stride          = d * p.gram_row_stride;
            const std::string what = describe("Gram norm", type, d, n);
            const auto        twin = norms_by_twin(p, gram_norms_cpu);
            check_twin(difference(twin, gram_formula(p, v)), TOLERANCE, what);
            const auto kernel = under_all_schedules(what, [&] { return gram_by_kernel(p, v, gram); });
            check_kernel(difference(kernel, twin), what);
        }
    }
}

static void test_gram_of_rounding() {
    std::vector<float> gram(64 * 64, 0.0f);
    gram[0]       = -1.0f;  // below zero for the first entry
    gram[65]      = 4.0f;
    const cache v = make_cache(row_type::F32, 64, 1, 2, [] {
        std::vector<float> x(128, 0.0f);
        x[0]  = 1.0f;
        x[65] = 3.0f;
        return x;
    }());
    gram_args   p = { v.rows, 2, 1, 1, gram.data(), 64 * sizeof(float), 64 * 64 * sizeof(float), nullptr };
    for (const auto & norms : { gram_by_kernel(p, v, gram), norms_by_twin(p, gram_norms_cpu) }) {
        require(norms[0] == 0.0f && norms[1] == 6.0f, "Gram norm below zero");
    }
}

static std::vector<double> l1_formula(const l1_args & p, const cache & v, const std::vector<ggml_fp16_t> & w) {
    const int           d      = p.v.head_size;
    const int64_t       stride = p.w_stride / 2;
    std::vector<float>  f(w.size());
    std::vector<double> out(p.n_head_kv * p.n, 0.0);
    ggml_fp16_to_fp32_row(w.data(), f.data(), (int64_t) w.size());
    for (int64_t i = 0; i < (int64_t) out.size(); ++i) {
        const int64_t  kv_head = i / p.n;
        const double * x       = v.numbers.data() + (i % p.n * p.n_head_kv + kv_head) * d;
        for (int64_t h = kv_head * p.group; h < (kv_head + 1) * p.group; ++h) {
            for (int64_t c = 0; c < p.n_embd; ++c) {
                double sum = 0.0;
                for (int j = 0; j < d; ++j) {
                    sum += x[j] * f[(h * d + j) * stride + c];
                }
                out[i] += std::fabs(sum) / p.group;
            }
        }
    }
    return out;
}

// f16 has 11 bits: a value is rounded by up to 2^-12 of itself, and so, at most, is a product of them with a norm near the
// sum of |v| |W|; with signs that cancel it can be a little more.
static constexpr double F16_TOLERANCE = 0x1p-11;

static void check_l1(row_type type, int d, int64_t n, int64_t n_embd, int group, float size) {
    const int                heads    = 2;
    const int64_t            w_stride = n_embd + 8;
    const std::vector<float> w        = random_numbers((size_t) (heads * group * d * w_stride), 31, 0.02f);
    std::vector<ggml_fp16_t> half_w(w.size());
    ggml_fp32_to_fp16_row(w.data(), half_w.data(), (int64_t) w.size());
    const cache v = make_cache(type, d, heads, n, random_numbers((size_t) (n * heads * d), 32, size));
    l1_args     p = { v.rows, n, heads, group, half_w.data(), w_stride * 2, n_embd, nullptr };

    const std::string what = describe("L1 norm", type, d, n);
    const auto        twin = norms_by_twin(p, l1_norms_cpu);
    check_twin(difference(twin, l1_formula(p, v, half_w)), F16_TOLERANCE, what);
    check_kernel(difference(under_all_schedules(what, [&] { return l1_by_kernel(p, v, half_w); }), twin), what);
}

static void test_l1() {
    for (const row_type type : TYPES) {
        check_l1(type, 64, 130, 72, 2, 1.0f);
        check_l1(type, 96, 5, 40, 1, 1.0f);
        check_l1(type, 128, 33, 40, 2, 1.0f);
        check_l1(type, 256, 70, 24, 1, 1.0f);
    }
    check_l1(row_type::F16, 80, 7, 104, 3, 1.0f);
    // beyond the range of f16, on both sides
    check_l1(row_type::F32, 64, 9, 48, 1, 1e9f);
    check_l1(row_type::BF16, 64, 9, 48, 1, 1e-12f);
    check_l1(row_type::F32, 80, 3, 8, 1, 0.0f);
}

// ---- what is refused -------------------------------------------------------------------------------------------------

template <typename Args, typename Change> void expect_refusal(Args p, const Change & change) {
    require(supports(p), "the unchanged arguments are refused");
    change(p);
    require(!supports(p), "not refused");
}

static void test_refusals() {
    const attention_data a = make_attention(ATTENTION_CASES[0], row_type::F16, false);
    expect_refusal(a.args, [](attention_args & p) { p.pool = 35; });
    expect_refusal(a.args, [](attention_args & p) { p.pool = 4; });
    expect_refusal(a.args, [](attention_args & p) { p.k.head_size = 66; });
    expect_refusal(a.args, [](attention_args & p) { p.k.type = (row_type) 9; });
    expect_refusal(a.args, [](attention_args & p) { p.k.stride += 2; });
    expect_refusal(a.args, [](attention_args & p) { p.n_head = 3; });
    expect_refusal(a.args, [](attention_args & p) { p.n_before = p.n + 1; });
    expect_refusal(a.args, [](attention_args & p) {
        p.k.type      = row_type::Q8_0;
        p.k.head_size = 80;
    });

    static char     memory[64] = {};
    compaction_args c          = {};
    c.k = c.v   = { memory, memory, 16, 16, 16 };
    c.n_head_kv = 1;
    expect_refusal(c, [](compaction_args & p) { p.k.to_stride = 32; });
    expect_refusal(c, [](compaction_args & p) { p.v.head_bytes = 17; });

    alignas(16) static float gram[64 * 64];
    const gram_args          g = { a.args.k, 10, 2, 1, gram, 256, 64 * 256, nullptr };
    expect_refusal(g, [](gram_args & p) { p.gram_row_stride = 264; });
    expect_refusal(g, [](gram_args & p) { p.per_head = 0; });

    const l1_args l = { a.args.k, 10, 2, 2, gram, 64, 32, nullptr };
    expect_refusal(l, [](l1_args & p) { p.v.head_size = 112; });
    expect_refusal(l, [](l1_args & p) { p.n_embd = 30; });
    expect_refusal(l, [](l1_args & p) { p.w_stride = 72; });
}

static void run(const char * name, void (*test)()) {
    const int64_t before = launches();
    worst_kernel = worst_twin = 0.0;
    test();
    std::printf("%-28s %5lld launches, kernel against twin %.1e, twin against the formula %.1e\n", name,
                (long long) (launches() - before), worst_kernel, worst_twin);
    std::fflush(stdout);
}

int main() {
    run("attention", test_attention);
    run("attention at size", test_attention_at_size);
    run("attention keeps NaNs", test_attention_keeps_nans);
    run("compaction", test_compaction);
    run("Gram norms", test_gram);
    run("Gram norms below zero", test_gram_of_rounding);
    run("L1 norms", test_l1);
    run("refusals", test_refusals);
    std::puts("ok");
}
