// In ggml graphs on the layer's backend, block of heads by block as for scores. W_O is unpacked to F32 once: products with
// quantized weights would round the outputs, whose difference is what counts.

#include "criticalkv-change.h"

#include "criticalkv-error.h"
#include "criticalkv-norms.h"
#include "criticalkv-score.h"

#include <algorithm>
#include <array>
#include <cmath>

namespace criticalkv {

static constexpr size_t MAX_NODES = 128;

// Sums over the entries of a KV head of attention times a factor, as the bound needs them.
enum attention_sum { KEPT, DROPPED, KEPT_NORM, DROPPED_NORM, N_SUMS };

using attention_sums = std::array<double, N_SUMS>;

// What graphs need to know of the entries of some KV heads.
struct kept_factors {
    std::vector<float> keep;     // [heads][n] added to logits: 0 where kept, -inf where not
    std::vector<float> drop;     // [heads][n] 0 where kept, 1 where not
    std::vector<float> factors;  // [heads][N_SUMS][n]
};

// Outputs of all query heads before W_O, and their changes: [2][m][n_head][n_embd_v].
struct head_outputs {
    int64_t            m;
    std::vector<float> rows;
};

static kept_factors make_factors(const head_lists & keep, const std::vector<float> & norms, const head_range & of) {
    const int64_t heads = of.heads;
    const int64_t n     = of.n;
    kept_factors  f;
    f.keep.assign(heads * n, -INFINITY);
    f.drop.assign(heads * n, 1.0f);
    f.factors.assign(heads * N_SUMS * n, 0.0f);
    for (int64_t head = 0; head < heads; ++head) {
        for (const int32_t slot : keep[of.head + head]) {
            f.keep[head * n + slot] = 0.0f;
            f.drop[head * n + slot] = 0.0f;
        }
        for (int64_t i = 0; i < n; ++i) {
            const bool dropped                                = f.drop[head * n + i] != 0.0f;
            float *    of_head                                = f.factors.data() + head * N_SUMS * n + i;
            of_head[(dropped ? DROPPED : KEPT) * n]           = 1.0f;
            of_head[(dropped ? DROPPED_NORM : KEPT_NORM) * n] = norms[head * n + i];
        }
    }
    return f;
}

// [n_embd_v, rows, heads], a row per query and query head, to their places.
static void place_outputs(const layer & l, const head_block & b, const std::vector<float> & from, int64_t m,
                          float * to) {
    const int64_t d = l.info.n_embd_v;
    for (int64_t h = 0; h < b.heads * b.group; ++h) {
        for (int64_t t = 0; t < m; ++t) {
            std::copy_n(from.begin() + (h * m + t) * d, d, to + (t * l.info.n_head + b.first + h) * d);
        }
    }
}

// Adds the means over queries and the heads of a group of [N_SUMS, rows, heads].
static void add_sums(const layer & l, const head_block & b, const std::vector<float> & from, int64_t m,
                     std::vector<attention_sums> & sums) {
    const double of_group = (double) (m * (l.info.n_head / l.info.n_head_kv));
    for (size_t i = 0; i < from.size(); ++i) {
        const int64_t row = (int64_t) i / N_SUMS;
        sums[b.kv_head + row / (m * b.group)][i % N_SUMS] += from[i] / of_group;
    }
}

static void measure_block(llama_context & lctx, const layer & l, const observation & o, const kept_factors & f,
                          const head_block & b, std::vector<attention_sums> & sums, head_outputs & out) {
    graph          gr(MAX_NODES);
    ggml_context * ctx     = gr.ctx();
    const int64_t  n       = o.of.n;
    const int64_t  first   = (b.kv_head - o.of.head) * n;
    ggml_tensor *  mask    = gr.input(GGML_TYPE_F32, n, o.m, o.mask.data());
    ggml_tensor *  keep    = gr.input(GGML_TYPE_F32, n, 1, b.heads, f.keep.data() + first);
    ggml_tensor *  drop    = gr.input(GGML_TYPE_F32, n, 1, b.heads, f.drop.data() + first);
    ggml_tensor *  factor  = gr.input(GGML_TYPE_F32, n, N_SUMS, b.heads, f.factors.data() + first * N_SUMS);
    const auto     softmax = [&](ggml_tensor * logits) {
        return ggml_reshape_3d(ctx, softmax_of_logits(ctx, l, b, logits, mask), n, o.m * b.group, b.heads);
    };
    ggml_tensor * logits  = observed_logits(gr, l, o, b);
    ggml_tensor * attn    = softmax(logits);
    ggml_tensor * v       = to_f32(ctx, value_rows(gr, l, { b.kv_head, b.heads, 0, n }));
    ggml_tensor * turned  = ggml_cont(ctx, ggml_transpose(ctx, v));  // [n, n_embd_v, heads]
    ggml_tensor * totals  = matmul(ctx, factor, attn);               // [N_SUMS, rows, heads]
    ggml_tensor * before  = matmul(ctx, turned, attn);               // [n_embd_v, rows, heads]
    ggml_tensor * after   = softmax(ggml_add(ctx, logits, keep));
    ggml_tensor * dropped = ggml_mul(ctx, attn, drop);
    ggml_tensor * moved   = ggml_sub(ctx, ggml_mul(ctx, after, ggml_sum_rows(ctx, dropped)), dropped);
    ggml_tensor * change  = matmul(ctx, turned, moved);
    // in this order, so that the large tensors before can make room
    gr.output(totals);
    gr.output(before);
    gr.output(change);
    gr.compute(lctx);
    add_sums(l, b, read_f32(totals), o.m, sums);
    place_outputs(l, b, read_f32(before), o.m, out.rows.data());
    place_outputs(l, b, read_f32(change), o.m, out.rows.data() + out.rows.size() / 2);
}

// Mean over the queries of |change|_2 / |output|_2, through W_O.
static double relative_change(llama_context & lctx, const layer & l, const unpacked_wo & wo, const head_outputs & out) {
    graph          gr(MAX_NODES);
    ggml_context * ctx   = gr.ctx();
    ggml_tensor *  x     = gr.input(GGML_TYPE_F32, wo.w->ne[0], 2 * out.m, out.rows.data());
    ggml_tensor *  sizes = root_of_squares(ctx, matmul(ctx, wo.w, x));
    gr.output(sizes);
    gr.compute(lctx);
    const std::vector<float> all  = read_f32(sizes);
    double                   mean = 0.0;
    for (int64_t t = 0; t < out.m; ++t) {
        const double change = all[out.m + t];
        mean += change == 0.0 ? 0.0 : change / all[t] / (double) out.m;  // where W_O is zero nothing changes
    }
    return mean;
}

static double relative_bound(const layer & l, const std::vector<attention_sums> & sums) {
    double bound = 0.0;
    double all   = 0.0;
    for (const attention_sums & s : sums) {
        const double sink = l.sinks != nullptr ? std::max(0.0, 1.0 - s[KEPT] - s[DROPPED]) : 0.0;
        // with less attention than a float can hold on what is kept, that has no say
        const double grown = s[KEPT_NORM] > 0.0 ? s[KEPT_NORM] * s[DROPPED] / (s[KEPT] + sink) : 0.0;
        bound += grown + s[DROPPED_NORM];
        all += s[KEPT_NORM] + s[DROPPED_NORM];
    }
    return bound == 0.0 ? 0.0 : bound / all;
}

measurement measure_change(llama_context & lctx, const criticalkv_params & params, layer & l,
                           const std::vector<observation> & observed, const std::vector<lora_part> & loras,
                           const head_lists & keep) {
    std::vector<attention_sums> sums(l.info.n_head_kv, attention_sums{});
    head_outputs                out;
    out.m = observed[0].m;
    out.rows.resize(2 * out.m * l.info.n_head * l.info.n_embd_v);
    unpacked_wo for_norms = prepare_norms(lctx, params, l, loras);
    for (const observation & o : observed) {
        std::vector<float> norms(o.of.heads * o.of.n);
        value_norms(lctx, params, l, for_norms, o.of, norms.data());
        const kept_factors f = make_factors(keep, norms, o.of);
        for_each_block(l.info, o, [&](const head_block & b) { measure_block(lctx, l, o, f, b, sums, out); });
    }
    for_norms = {};
    measurement found;
    found.bound  = relative_bound(l, sums);
    found.change = relative_change(lctx, l, unpack_wo(lctx, l, loras, false), out);
    return found;
}

measurement store::measure_layer(llama_context & lctx, layer & l, const head_lists & keep) {
    if (params.measure == 0) {
        return {};
    }
    const int64_t            t0 = ggml_time_us();
    std::vector<observation> observed;
    for (const head_range & of : ranges_of(l)) {
        observed.push_back(observe(l, of));
    }
    const measurement found = measure_change(lctx, params, l, observed, loras_of(lctx, l), keep);
    if (!std::isfinite(found.bound) || !std::isfinite(found.change)) {
        throw error(CRITICALKV_ERR_COMPUTE, "what layer " + std::to_string(l.il) + " loses is not finite");
    }
    counters.seconds_measure += (double) (ggml_time_us() - t0) * 1e-6;
    return found;
}

}  // namespace criticalkv
