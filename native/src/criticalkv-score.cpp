// Scoring: observed attention and projected value norms of one layer, in ggml graphs on the backend that holds the cache.
//
// Built from standard ggml ops, a block of query heads of one KV head per graph. The largest tensors are n x MAX_ROWS
// floats, whatever the window and the number of query heads, and three of them are alive at a time.

#include "criticalkv-error.h"
#include "criticalkv-graph.h"
#include "criticalkv-norms.h"
#include "criticalkv-store.h"
#include "llama-adapter.h"
#include "llama-kv-cells.h"

#include <algorithm>
#include <cmath>

namespace criticalkv {

static constexpr size_t  MAX_NODES = 512;
static constexpr int64_t MAX_ROWS  = 512;  // window queries times query heads in one graph

// Query heads [first, first + count), all of one KV head.
struct head_block {
    int32_t kv_head;
    int64_t first;
    int64_t count;
};

// What the graphs of one layer share.
struct observation {
    int64_t              n;         // entries
    int64_t              n_before;  // of these, before the window
    int64_t              m;         // window queries that are known
    std::vector<int32_t> rows;      // [m] their rows in the ring
    std::vector<float>   mask;      // [m][n] causal: 0 or -inf
    std::vector<float>   ones;      // [MAX_ROWS or more]
};

// Average pool along dim 0 with stride 1 and zero padding that counts in the divisor. (The padding of ggml's own 1d pool
// does not count on all backends.)
static ggml_tensor * average_pool(ggml_context * ctx, ggml_tensor * x, int32_t k) {
    if (k == 1) {
        return x;
    }
    const int64_t n      = x->ne[0];
    ggml_tensor * padded = ggml_pad_ext(ctx, x, k / 2, k / 2, 0, 0, 0, 0, 0, 0);
    ggml_tensor * sum    = nullptr;
    for (int32_t j = 0; j < k; ++j) {
        ggml_tensor * shifted = ggml_view_2d(ctx, padded, n, x->ne[1], padded->nb[1], j * sizeof(float));
        sum                   = sum == nullptr ? shifted : ggml_add(ctx, sum, shifted);
    }
    return ggml_scale(ctx, sum, 1.0f / (float) k);
}

// softmax over all n keys of the window's queries of a block of heads, sink logits in the divisor: [n, m * heads].
static ggml_tensor * observed_attention(graph & gr, const layer & l, const observation & o, const head_block & b) {
    ggml_context * ctx  = gr.ctx();
    const int64_t  d    = l.info.n_embd_k;
    ggml_tensor *  rows = gr.input(GGML_TYPE_I32, o.m, 1, o.rows.data());
    ggml_tensor *  mask = gr.input(GGML_TYPE_F32, o.n, o.m, o.mask.data());

    ggml_tensor * q = ggml_get_rows(ctx, l.queries, rows);  // [d * n_head, m]
    q               = ggml_view_3d(ctx, q, d, o.m, b.count, q->nb[1], d * sizeof(float), b.first * d * sizeof(float));
    q               = ggml_reshape_2d(ctx, ggml_cont(ctx, q), d, o.m * b.count);

    ggml_tensor * logits = matmul(ctx, head_rows(gr, l.rows.k, d, b.kv_head, 0, o.n), q);
    float         scale  = l.info.scale;
    if (l.info.softcap != 0.0f) {
        logits = ggml_tanh(ctx, ggml_scale(ctx, logits, scale / l.info.softcap));
        logits = ggml_scale(ctx, logits, l.info.softcap);
        scale  = 1.0f;
    }
    logits             = ggml_reshape_3d(ctx, logits, o.n, o.m, b.count);
    ggml_tensor * attn = ggml_soft_max_ext(ctx, logits, mask, scale, 0.0f);
    if (l.sinks != nullptr) {
        ggml_soft_max_add_sinks(attn, ggml_view_1d(ctx, l.sinks, b.count, b.first * l.sinks->nb[0]));
    }
    return ggml_reshape_2d(ctx, attn, o.n, o.m * b.count);
}

// The aggregate over window queries and the block's query heads: [n_before].
static ggml_tensor * aggregate_attention(graph & gr, const criticalkv_params & params, const observation & o,
                                         ggml_tensor * attn) {
    ggml_context * ctx    = gr.ctx();
    const int64_t  rows   = attn->ne[1];
    ggml_tensor *  before = ggml_view_2d(ctx, attn, o.n_before, rows, attn->nb[1], 0);
    if (params.aggregate == CRITICALKV_AGGREGATE_MAX) {
        ggml_tensor * pooled = average_pool(ctx, before, params.pool);
        ggml_tensor * turned = ggml_cont(ctx, ggml_transpose(ctx, pooled));  // [rows, n_before]
        return ggml_pool_1d(ctx, turned, GGML_OP_POOL_MAX, rows, rows, 0);
    }
    // pooling is linear, so it may follow the mean over all rows
    ggml_tensor * turned = ggml_cont(ctx, ggml_transpose(ctx, before));
    ggml_tensor * sum    = matmul(ctx, turned, gr.input(GGML_TYPE_F32, rows, 1, o.ones.data()));  // [n_before]
    return average_pool(ctx, ggml_scale(ctx, sum, 1.0f / (float) rows), params.pool);
}

// A or R of one KV head, to out[n_before].
static void attention_scores(llama_context & lctx, const criticalkv_params & params, const layer & l,
                             const observation & o, int32_t head, float * out) {
    const int64_t g        = l.info.n_head / l.info.n_head_kv;
    const int64_t per_pass = std::max<int64_t>(1, MAX_ROWS / o.m);
    std::fill_n(out, o.n_before, 0.0f);
    for (int64_t done = 0; done < g; done += per_pass) {
        const head_block b = { head, head * g + done, std::min(per_pass, g - done) };
        graph            gr(MAX_NODES);
        ggml_tensor *    scores = aggregate_attention(gr, params, o, observed_attention(gr, l, o, b));
        gr.output(scores);
        gr.compute(lctx);
        const std::vector<float> part  = read_f32(scores);
        const float              share = (float) b.count / (float) g;
        for (int64_t i = 0; i < o.n_before; ++i) {
            if (params.aggregate == CRITICALKV_AGGREGATE_MEAN) {
                out[i] += share * part[i];
            } else if (!(part[i] <= out[i])) {  // so that a NaN stays one
                out[i] = part[i];
            }
        }
    }
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

layer_scores store::compute_scores(llama_context & lctx, layer & l) {
    const std::vector<int32_t> queries = window_queries();
    observation                o       = {};
    o.n                                = n_entries();
    o.n_before                         = o.n - params.window;
    o.m                                = (int64_t) queries.size();
    if (o.n_before < 1) {
        throw error(CRITICALKV_ERR_STATE, "no entries before the window: " + std::to_string(o.n) + " entries, window " +
                                              std::to_string(params.window));
    }
    if (o.m == 0) {
        throw error(CRITICALKV_ERR_STATE, "the queries of the last positions are not known; evaluate a token first");
    }
    o.mask.assign(o.n * o.m, 0.0f);
    for (int64_t t = 0; t < o.m; ++t) {
        o.rows.push_back(queries[t] % ring());
        for (int64_t i = 0; i < o.n; ++i) {
            o.mask[t * o.n + i] = cells().pos_get((uint32_t) i) <= queries[t] ? 0.0f : -INFINITY;
        }
    }
    o.ones.assign(MAX_ROWS, 1.0f);

    const bool  with_norm = params.value == CRITICALKV_VALUE_CRITICAL;
    unpacked_wo wo        = with_norm ? prepare_norms(lctx, params, l, loras_of(lctx, l)) : unpacked_wo();

    layer_scores out;
    out.attn.resize((size_t) (l.info.n_head_kv * o.n_before));
    out.norm.resize(out.attn.size(), 0.0f);
    for (int32_t head = 0; head < l.info.n_head_kv; ++head) {
        const size_t offset = (size_t) (head * o.n_before);
        attention_scores(lctx, params, l, o, head, out.attn.data() + offset);
        if (with_norm) {
            value_norms(lctx, params, l, wo, head, o.n_before, out.norm.data() + offset);
        }
    }
    check_finite(out.attn, l.il);
    check_finite(out.norm, l.il);
    return out;
}

}  // namespace criticalkv
