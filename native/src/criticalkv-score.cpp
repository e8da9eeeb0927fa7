// Scoring of one layer, in ggml graphs on the backend that holds the cache: observed attention, and what keys and values say.
//
// Built from standard ggml ops, a block of heads per graph: several KV heads whole while they are short, or some query
// heads of one. The largest tensors are n x MAX_ROWS floats, whatever the window and the number of heads, and three of
// them are alive at a time.

#include "criticalkv-score.h"

#include "criticalkv-error.h"
#include "criticalkv-fused.h"
#include "criticalkv-graph.h"
#include "criticalkv-keys.h"
#include "criticalkv-norms.h"
#include "criticalkv-store.h"
#include "criticalkv-values.h"
#include "llama-adapter.h"
#include "llama-kv-cells.h"

#include <algorithm>
#include <cmath>

namespace criticalkv {

static constexpr size_t MAX_NODES = 512;

// a[from + i] += x[i] along dim 0, in place, as far as both go.
static ggml_tensor * add_shifted(ggml_context * ctx, ggml_tensor * a, ggml_tensor * x, int64_t shift) {
    const int64_t n    = x->ne[0] - std::abs(shift);
    const size_t  from = std::max<int64_t>(0, -shift) * sizeof(float);
    const size_t  to   = std::max<int64_t>(0, shift) * sizeof(float);
    ggml_tensor * part = ggml_view_2d(ctx, x, n, x->ne[1], x->nb[1], from);
    // CUDA adds contiguous tensors only
    return ggml_acc_inplace(ctx, a, ggml_cont(ctx, part), a->nb[1], a->nb[2], a->nb[3], to);
}

// Average pool along dim 0 with stride 1 and zero padding that counts in the divisor. (The padding of ggml's own 1d pool
// does not count on all backends.)
static ggml_tensor * average_pool(ggml_context * ctx, ggml_tensor * x, int32_t k) {
    if (k == 1) {
        return x;
    }
    ggml_tensor * sum = ggml_cont(ctx, x);
    for (int64_t j = 1; j <= std::min<int64_t>(k / 2, x->ne[0] - 1); ++j) {
        sum = add_shifted(ctx, sum, x, j);
        sum = add_shifted(ctx, sum, x, -j);
    }
    return ggml_scale(ctx, sum, 1.0f / (float) k);
}

ggml_tensor * observed_logits(graph & gr, const layer & l, const observation & o, const head_block & b) {
    ggml_context * ctx   = gr.ctx();
    const int64_t  d     = l.info.n_embd_k;
    const int64_t  count = b.group * b.heads;
    ggml_tensor *  rows  = gr.input(GGML_TYPE_I32, o.m, 1, o.rows.data());

    ggml_tensor * q = ggml_get_rows(ctx, o.queries, rows);  // [d * n_head, m]
    q               = ggml_view_3d(ctx, q, d, o.m, count, q->nb[1], d * sizeof(float), b.first * d * sizeof(float));
    q               = ggml_reshape_3d(ctx, ggml_cont(ctx, q), d, o.m * b.group, b.heads);

    ggml_tensor * logits = matmul(ctx, key_rows(gr, l, { b.kv_head, b.heads, 0, o.of.n }), q);
    if (l.info.softcap != 0.0f) {
        logits = ggml_tanh(ctx, ggml_scale(ctx, logits, l.info.scale / l.info.softcap));
        logits = ggml_scale(ctx, logits, l.info.softcap);
    }
    return logits;
}

ggml_tensor * softmax_of_logits(ggml_context * ctx, const layer & l, const head_block & b, ggml_tensor * logits,
                                ggml_tensor * mask) {
    const int64_t count = b.group * b.heads;
    const float   scale = l.info.softcap != 0.0f ? 1.0f : l.info.scale;  // capped logits are scaled already
    logits              = ggml_reshape_3d(ctx, logits, mask->ne[0], mask->ne[1], count);
    ggml_tensor * attn  = ggml_soft_max_ext(ctx, logits, mask, scale, 0.0f);
    if (l.sinks != nullptr) {
        ggml_soft_max_add_sinks(attn, ggml_view_1d(ctx, l.sinks, count, b.first * l.sinks->nb[0]));
    }
    return ggml_reshape_2d(ctx, attn, mask->ne[0], mask->ne[1] * count);
}

// The aggregate over the window queries and the query heads of each KV head: [n_before, heads].
static ggml_tensor * aggregate_attention(graph & gr, const criticalkv_params & params, const observation & o,
                                         const head_block & b, ggml_tensor * attn) {
    ggml_context * ctx    = gr.ctx();
    const int32_t  rows   = (int32_t) (o.m * b.group);  // of one KV head
    const bool     is_max = params.aggregate == CRITICALKV_AGGREGATE_MAX;
    ggml_tensor *  before = ggml_view_2d(ctx, attn, o.n_before, attn->ne[1], attn->nb[1], 0);
    // pooling over entries is linear, so for the mean it may follow the aggregate
    before               = is_max ? average_pool(ctx, before, params.pool) : before;
    ggml_tensor * turned = ggml_cont(ctx, ggml_transpose(ctx, before));  // [rows * heads, n_before]
    ggml_tensor * total  = ggml_pool_1d(ctx, turned, is_max ? GGML_OP_POOL_MAX : GGML_OP_POOL_AVG, rows, rows, 0);
    total                = ggml_cont(ctx, ggml_transpose(ctx, total));
    return is_max ? total : average_pool(ctx, total, params.pool);
}

head_block next_block(const criticalkv_layer_info & info, const observation & o, int32_t kv_head, int64_t done) {
    const int64_t g    = info.n_head / info.n_head_kv;
    const int64_t rows = std::min(MAX_ROWS, MAX_ELEMENTS / o.of.n);
    // the second bound is for the keys of a quantized cache, which the graph dequantizes
    const int64_t heads = std::min(rows / (o.m * g), MAX_ELEMENTS / (o.of.n * info.n_embd_k));
    if (done == 0 && heads > 1) {
        return { kv_head, std::min<int64_t>(heads, o.of.head + o.of.heads - kv_head), kv_head * g, g };
    }
    return { kv_head, 1, kv_head * g + done, std::min(std::max<int64_t>(1, MAX_ROWS / o.m), g - done) };
}

// The scores of these KV heads by one node, if the layer's device has a kernel for it.
static bool scores_by_kernel(llama_context & lctx, const criticalkv_params & params, const layer & l,
                             const observation & o, float * out) {
    graph          gr(16);
    ggml_context * ctx     = gr.ctx();
    const int64_t  g       = l.info.n_head / l.info.n_head_kv;
    const int64_t  columns = l.info.n_embd_k * g;  // of the queries, per KV head
    ggml_tensor *  queries = ggml_view_2d(ctx, o.queries, columns * o.of.heads, o.queries->ne[1], o.queries->nb[1],
                                          o.of.head * columns * sizeof(float));
    ggml_tensor *  sinks =
        l.sinks == nullptr ? nullptr : ggml_view_1d(ctx, l.sinks, g * o.of.heads, o.of.head * g * l.sinks->nb[0]);
    ggml_tensor * rows = gr.input(GGML_TYPE_I32, o.m, 1, o.rows.data());
    ggml_tensor * mask = gr.input(GGML_TYPE_F32, o.of.n, o.m, o.mask.data());
    fused_params  p    = {};
    p.pool             = params.pool;
    p.max              = params.aggregate == CRITICALKV_AGGREGATE_MAX;
    p.scale            = l.info.scale;
    p.softcap          = l.info.softcap;
    ggml_tensor * node =
        fused_attention(ctx, key_view(ctx, l, l.rows, o.of), queries, rows, mask, sinks, o.n_before, p);
    return compute_fused(lctx, gr, l.buft, node, out);
}

// A or R of these KV heads, to out[heads][n_before].
static void attention_scores(llama_context & lctx, const criticalkv_params & params, const layer & l,
                             const observation & o, float * out) {
    if (!ggml_backend_buft_is_host(l.buft) && scores_by_kernel(lctx, params, l, o, out)) {
        return;
    }
    const float g = (float) (l.info.n_head / l.info.n_head_kv);
    std::fill_n(out, o.of.heads * o.n_before, 0.0f);
    for_each_block(l.info, o, [&](const head_block & b) {
        graph         gr(MAX_NODES);
        ggml_tensor * mask   = gr.input(GGML_TYPE_F32, o.of.n, o.m, o.mask.data());
        ggml_tensor * attn   = softmax_of_logits(gr.ctx(), l, b, observed_logits(gr, l, o, b), mask);
        ggml_tensor * scores = aggregate_attention(gr, params, o, b, attn);
        gr.output(scores);
        gr.compute(lctx);
        const std::vector<float> part  = read_f32(scores);
        const float              share = (float) b.group / g;
        float *                  to    = out + (b.kv_head - o.of.head) * o.n_before;
        for (size_t i = 0; i < part.size(); ++i) {
            if (params.aggregate == CRITICALKV_AGGREGATE_MEAN) {
                to[i] += share * part[i];
            } else if (!(part[i] <= to[i])) {  // so that a NaN stays one
                to[i] = part[i];
            }
        }
    });
}

static void check_finite(const std::vector<float> & scores, int32_t il) {
    for (const float s : scores) {
        if (!std::isfinite(s)) {
            throw error(CRITICALKV_ERR_COMPUTE, "scores of layer " + std::to_string(il) + " are not finite");
        }
    }
}

std::vector<lora_part> store::loras_of(const llama_context & lctx, const layer & l) const {
    std::vector<lora_part> parts;
    for (const auto & [adapter, scale] : *lctx.loras) {
        if (const llama_adapter_lora_weight * weight = adapter->get_weight(l.wo)) {
            parts.push_back({ weight->a, weight->b, weight->get_scale(adapter->alpha, scale) });
        }
    }
    return parts;
}

// What each head's window sees of all n entries, without pool: [heads][n].
static std::vector<float> mean_attention(llama_context & lctx, criticalkv_params params, const layer & l,
                                         observation o) {
    params.aggregate = CRITICALKV_AGGREGATE_MEAN;
    params.pool      = 1;
    o.n_before       = o.of.n;
    std::vector<float> attn(o.of.heads * o.of.n);
    attention_scores(lctx, params, l, o, attn.data());
    return attn;
}

// Every row becomes the mean of the rows [n_rows][n].
static void share_rows(float * rows, int64_t n_rows, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
        double sum = 0.0;
        for (int64_t r = 0; r < n_rows; ++r) {
            sum += rows[r * n + i];
        }
        for (int64_t r = 0; r < n_rows; ++r) {
            rows[r * n + i] = (float) (sum / (double) n_rows);
        }
    }
}

observation store::observe(const layer & l, const head_range & of) const {
    const bool                 peeked  = !seen_by.pos.empty();
    const std::vector<int32_t> queries = peeked ? seen_by.pos : window_queries();
    observation                o       = {};
    o.queries                          = peeked ? seen_by.rings[&l - layers.data()].queries : l.queries;
    o.of                               = of;
    o.n_before                         = of.n - params.window;
    o.m                                = (int64_t) queries.size();
    if (o.m == 0) {
        throw error(CRITICALKV_ERR_STATE, "the queries of the last positions are not known; evaluate a token first");
    }
    const int64_t base = l.rows.base_of(of.head);  // entries before the first slot, which every query sees
    o.mask.assign(of.n * o.m, 0.0f);
    for (int64_t t = 0; t < o.m; ++t) {
        o.rows.push_back(queries[t] % ring());
        for (int64_t i = base; i < of.n; ++i) {
            o.mask[t * of.n + i] = cells().pos_get((uint32_t) (i - base)) <= queries[t] ? 0.0f : -INFINITY;
        }
    }
    return o;
}

void store::weigh_values(llama_context & lctx, layer & l, const observation & o, float * out) {
    switch (params.value) {
        case CRITICALKV_VALUE_CRITICAL: {
            const unpacked_wo wo = prepare_norms(lctx, params, l, loras_of(lctx, l));
            value_norms(lctx, params, l, wo, { o.of.head, o.of.heads, 0, o.n_before }, out);
            return;
        }
        case CRITICALKV_VALUE_VATP:
            plain_value_norms(lctx, l, { o.of.head, o.of.heads, 0, o.n_before }, out);
            return;
        case CRITICALKV_VALUE_CAOTE:
            output_distances(lctx, l, mean_attention(lctx, params, l, o), o.of, o.n_before, out);
            return;
    }
}

// KV heads that hold the same number of entries, as one range; heads of different lengths one by one.
std::vector<head_range> store::ranges_of(const layer & l) const {
    if (!l.rows.is_ragged()) {
        return { { 0, l.info.n_head_kv, 0, n_used() } };
    }
    std::vector<head_range> all;
    for (int32_t head = 0; head < l.info.n_head_kv; ++head) {
        all.push_back({ head, 1, 0, entries_of(l, head) });
    }
    return all;
}

void store::score_range(llama_context & lctx, layer & l, const head_range & of, float * attn, float * norm) {
    const int64_t n_before = of.n - params.window;
    if (n_before < 1) {
        throw error(CRITICALKV_ERR_STATE, "no entries before the window: " + std::to_string(of.n) +
                                              " entries, window " + std::to_string(params.window));
    }
    if (params.score == CRITICALKV_SCORE_KEY_NORM || params.score == CRITICALKV_SCORE_KEYDIFF) {
        key_scores(lctx, params.score, l, of, n_before, attn);
    } else {
        const observation o = observe(l, of);
        attention_scores(lctx, params, l, o, attn);
        weigh_values(lctx, l, o, norm);
    }
    if (params.heads == CRITICALKV_HEADS_SHARED) {
        share_rows(attn, of.heads, n_before);
    }
}

layer_scores store::compute_scores(llama_context & lctx, layer & l) {
    layer_scores out;
    for (int32_t head = 0; head < l.info.n_head_kv; ++head) {
        out.first.push_back(out.attn.size());
        out.attn.resize(out.attn.size() + std::max(entries_of(l, head) - params.window, 0));
    }
    out.norm.resize(out.attn.size(), 0.0f);
    for (const head_range & of : ranges_of(l)) {
        const size_t first = out.first[of.head];
        if (l.rows.is_ragged() && of.n <= params.window) {
            continue;  // such a head keeps all that it has
        }
        score_range(lctx, l, of, out.attn.data() + first, out.norm.data() + first);
    }
    check_finite(out.attn, l.il);
    check_finite(out.norm, l.il);
    return out;
}

}  // namespace criticalkv
