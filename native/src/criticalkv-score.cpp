// Scoring: observed attention and projected value norms of one layer, in ggml graphs on the backend that holds the cache.
//
// Built from standard ggml ops, one KV head per graph, so that the scratch memory stays near n * window * group floats
// and the number of nodes within what the context's scheduler was made for.

#include "criticalkv-error.h"
#include "criticalkv-graph.h"
#include "criticalkv-l1-cpu.h"
#include "criticalkv-store.h"
#include "llama-kv-cells.h"

#include <cmath>
#include <numeric>

namespace criticalkv {

static constexpr size_t  MAX_NODES   = 1000;
static constexpr int64_t L1_COLUMNS  = 256;  // entries projected at once: n_embd * 256 floats stay in a CPU's L2 cache
static constexpr size_t  L1_MAX_HEAD = 128;  // query heads times chunks per graph, 6 nodes each

// Rows [0, n) of one KV head of a cache tensor: [d, n], strided.
static ggml_tensor * head_view(ggml_context * ctx, ggml_tensor * cache, int64_t d, int64_t n, int32_t head) {
    return ggml_view_2d(ctx, cache, d, n, cache->nb[1], ggml_row_size(cache->type, d) * head);
}

static ggml_tensor * to_f32(ggml_context * ctx, ggml_tensor * x) {
    return x->type == GGML_TYPE_F32 ? ggml_cont(ctx, x) : ggml_cast(ctx, x, GGML_TYPE_F32);
}

static ggml_tensor * matmul(ggml_context * ctx, ggml_tensor * a, ggml_tensor * b) {
    ggml_tensor * c = ggml_mul_mat(ctx, a, b);
    ggml_prec_set_acc(c, GGML_PREC_F32);
    return c;
}

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

// softmax over all n keys of the window's queries of one group, sink logits in the divisor: [n, m * g].
static ggml_tensor * observed_attention(graph & gr, const layer & l, int32_t head, int64_t n, ggml_tensor * query_rows,
                                        ggml_tensor * mask) {
    ggml_context * ctx = gr.ctx();
    const int64_t  m   = query_rows->ne[0];
    const int64_t  d   = l.info.n_embd_k;
    const int64_t  g   = l.info.n_head / l.info.n_head_kv;

    ggml_tensor * q = ggml_get_rows(ctx, l.queries, query_rows);  // [d * n_head, m]
    q               = ggml_view_3d(ctx, q, d, m, g, q->nb[1], d * sizeof(float), head * g * d * sizeof(float));
    q               = ggml_reshape_2d(ctx, ggml_cont(ctx, q), d, m * g);

    ggml_tensor * logits = matmul(ctx, head_view(ctx, l.k, d, n, head), q);
    float         scale  = l.info.scale;
    if (l.info.softcap != 0.0f) {
        logits = ggml_tanh(ctx, ggml_scale(ctx, logits, scale / l.info.softcap));
        logits = ggml_scale(ctx, logits, l.info.softcap);
        scale  = 1.0f;
    }
    logits             = ggml_reshape_3d(ctx, logits, n, m, g);
    ggml_tensor * attn = ggml_soft_max_ext(ctx, logits, mask, scale, 0.0f);
    if (l.sinks != nullptr) {
        ggml_soft_max_add_sinks(attn, ggml_view_1d(ctx, l.sinks, g, head * g * l.sinks->nb[0]));
    }
    return ggml_reshape_2d(ctx, attn, n, m * g);
}

// The aggregate over window queries and query heads: [n_before].
static ggml_tensor * aggregate_attention(graph & gr, const criticalkv_params & params, ggml_tensor * attn,
                                         int64_t n_before, ggml_tensor * ones) {
    ggml_context * ctx    = gr.ctx();
    const int64_t  rows   = attn->ne[1];
    ggml_tensor *  before = ggml_view_2d(ctx, attn, n_before, rows, attn->nb[1], 0);
    if (params.aggregate == CRITICALKV_AGGREGATE_MAX) {
        ggml_tensor * pooled = average_pool(ctx, before, params.pool);
        ggml_tensor * t      = ggml_cont(ctx, ggml_transpose(ctx, pooled));  // [rows, n_before]
        return ggml_pool_1d(ctx, t, GGML_OP_POOL_MAX, rows, rows, 0);
    }
    // pooling is linear, so it may follow the mean over all rows
    ggml_tensor * t   = ggml_cont(ctx, ggml_transpose(ctx, before));
    ggml_tensor * sum = matmul(ctx, t, ggml_view_1d(ctx, ones, rows, 0));  // [n_before]
    return average_pool(ctx, ggml_scale(ctx, sum, 1.0f / (float) rows), params.pool);
}

// sqrt(v^T G v) for every column of v [d, n]: [n].
static ggml_tensor * gram_norm(ggml_context * ctx, ggml_tensor * v, ggml_tensor * gram, ggml_tensor * ones) {
    ggml_tensor * product = ggml_mul(ctx, matmul(ctx, gram, v), v);
    ggml_tensor * square  = matmul(ctx, product, ggml_view_1d(ctx, ones, v->ne[0], 0));
    return ggml_sqrt(ctx, ggml_relu(ctx, square));  // rounding may leave a small negative number
}

static ggml_tensor * gram_view(ggml_context * ctx, ggml_tensor * gram, int64_t i) {
    return ggml_view_2d(ctx, gram, gram->ne[0], gram->ne[1], gram->nb[1], i * gram->nb[2]);
}

// N of the first n entries of a KV head by Gram matrices (norms "gram" and "l2"): [n].
static ggml_tensor * projected_norm_l2(graph & gr, const criticalkv_params & params, const layer & l, int32_t head,
                                       int64_t n, ggml_tensor * ones) {
    ggml_context * ctx = gr.ctx();
    const int64_t  g   = l.info.n_head / l.info.n_head_kv;
    ggml_tensor *  v   = to_f32(ctx, head_view(ctx, l.v, l.info.n_embd_v, n, head));
    if (params.norm == CRITICALKV_NORM_GRAM) {
        return gram_norm(ctx, v, gram_view(ctx, l.gram, head), ones);
    }
    ggml_tensor * sum = nullptr;
    for (int64_t h = head * g; h < (head + 1) * g; ++h) {
        ggml_tensor * norm = gram_norm(ctx, v, gram_view(ctx, l.gram, h), ones);
        sum                = sum == nullptr ? norm : ggml_add(ctx, sum, norm);
    }
    return ggml_scale(ctx, sum, 1.0f / (float) g);
}

// Whether the backend of W_O can read its rows. Weights that the CPU backend keeps in a layout of its own (repacked,
// AMX) can only be multiplied.
static bool can_get_rows(const ggml_tensor * wo, ggml_tensor * get_rows) {
    ggml_backend_dev_t dev = ggml_backend_buft_get_device(ggml_backend_buffer_get_type(wo->buffer));
    return dev == nullptr || ggml_backend_dev_supports_op(dev, get_rows);
}

// W_O dequantized: F32 [n_embd_v * n_head, n_embd]. `rows` and `identity` must live until the graph has run.
static ggml_tensor * unpack_wo(graph & gr, const layer & l, std::vector<int32_t> & rows,
                               std::vector<float> & identity) {
    ggml_context * ctx = gr.ctx();
    const int64_t  n   = l.wo->ne[0];
    rows.resize(l.wo->ne[1]);
    std::iota(rows.begin(), rows.end(), 0);
    ggml_tensor * w = ggml_get_rows(ctx, l.wo, gr.input(GGML_TYPE_I32, l.wo->ne[1], 1, rows.data()));
    if (can_get_rows(l.wo, w)) {
        return w;
    }
    identity.assign(n * n, 0.0f);
    for (int64_t i = 0; i < n; ++i) {
        identity[i * n + i] = 1.0f;
    }
    ggml_tensor * turned = matmul(ctx, l.wo, gr.input(GGML_TYPE_F32, n, n, identity.data()));
    return ggml_cont(ctx, ggml_transpose(ctx, turned));
}

// Fills the layer's Gram matrices: per KV head the mean over its group of W_h W_h^T, or per query head W_h W_h^T.
static void compute_gram(llama_context & lctx, const criticalkv_params & params, const layer & l) {
    graph                gr(MAX_NODES);
    std::vector<int32_t> rows;
    std::vector<float>   identity;

    ggml_context * ctx = gr.ctx();
    const int64_t  d   = l.info.n_embd_v;
    const int64_t  g   = params.norm == CRITICALKV_NORM_GRAM ? l.info.n_head / l.info.n_head_kv : 1;
    ggml_tensor *  w   = unpack_wo(gr, l, rows, identity);
    for (int64_t i = 0; i < l.gram->ne[2]; ++i) {
        ggml_tensor * sum = nullptr;
        for (int64_t h = i * g; h < (i + 1) * g; ++h) {
            ggml_tensor * block  = ggml_view_2d(ctx, w, d, w->ne[1], w->nb[1], h * d * sizeof(float));
            ggml_tensor * turned = ggml_cont(ctx, ggml_transpose(ctx, block));  // [n_embd, d]
            ggml_tensor * one    = matmul(ctx, turned, turned);
            sum                  = sum == nullptr ? one : ggml_add(ctx, sum, one);
        }
        ggml_tensor * mean = ggml_scale(ctx, sum, 1.0f / (float) g);
        ggml_build_forward_expand(gr.gf(), ggml_cpy(ctx, mean, gram_view(ctx, l.gram, i)));
    }
    gr.compute(lctx);
}

// W_O of one layer in a buffer of its own, for the L1 norm.
struct unpacked_wo {
    ggml_context_ptr        ctx;
    ggml_backend_buffer_ptr buf;
    ggml_tensor *           w = nullptr;    // F32: fused [n_embd, n_embd_v * n_head], else [n_embd_v * n_head, n_embd]
    bool                    fused = false;  // in host memory, for the fused CPU op
};

static unpacked_wo unpack_wo_for_l1(llama_context & lctx, const layer & l) {
    unpacked_wo u;
    u.fused = ggml_backend_buffer_is_host(l.v->buffer);

    ggml_init_params init = {};
    init.mem_size         = ggml_tensor_overhead();
    init.no_alloc         = true;
    u.ctx.reset(ggml_init(init));
    u.w = ggml_new_tensor_2d(u.ctx.get(), GGML_TYPE_F32, l.wo->ne[u.fused ? 1 : 0], l.wo->ne[u.fused ? 0 : 1]);
    u.buf.reset(ggml_backend_alloc_ctx_tensors_from_buft(u.ctx.get(), ggml_backend_buffer_get_type(l.v->buffer)));
    if (!u.buf) {
        throw error(CRITICALKV_ERR_MEMORY, "no memory for " + std::to_string(ggml_nbytes(u.w)) + " bytes of W_O");
    }
    graph                gr(MAX_NODES);
    std::vector<int32_t> rows;
    std::vector<float>   identity;
    ggml_tensor *        w = unpack_wo(gr, l, rows, identity);
    if (u.fused) {
        w = ggml_transpose(gr.ctx(), w);
    }
    ggml_build_forward_expand(gr.gf(), ggml_cpy(gr.ctx(), w, u.w));
    gr.compute(lctx);
    return u;
}

// The paper's norm, mean over the group of |v W_h|_1, for the first n entries of a KV head, to out[n].
static void projected_norm_l1(llama_context & lctx, const layer & l, const unpacked_wo & wo, int32_t head, int64_t n,
                              float * out) {
    const int64_t d = l.info.n_embd_v;
    const int64_t g = l.info.n_head / l.info.n_head_kv;
    if (wo.fused) {
        graph         gr(MAX_NODES);
        ggml_tensor * v    = to_f32(gr.ctx(), head_view(gr.ctx(), l.v, d, n, head));
        ggml_tensor * norm = l1_norm_cpu(gr.ctx(), v, wo.w, (int) (head * g), (int) g);
        gr.output(norm);
        gr.compute(lctx);
        ggml_backend_tensor_get(norm, out, 0, ggml_nbytes(norm));
        return;
    }
    ggml_tensor *            w       = wo.w;
    const int64_t            columns = L1_COLUMNS * std::max<int64_t>(1, L1_MAX_HEAD / g);
    const std::vector<float> ones(w->ne[1], 1.0f);
    for (int64_t first = 0; first < n; first += columns) {
        graph                      gr(MAX_NODES);
        ggml_context *             ctx   = gr.ctx();
        ggml_tensor *              one   = gr.input(GGML_TYPE_F32, w->ne[1], 1, ones.data());
        ggml_tensor *              cache = head_view(ctx, l.v, d, n, head);
        const int64_t              last  = std::min(first + columns, n);
        std::vector<ggml_tensor *> parts;
        for (int64_t c = first; c < last; c += L1_COLUMNS) {
            const int64_t width = std::min(L1_COLUMNS, last - c);
            ggml_tensor * v     = to_f32(ctx, ggml_view_2d(ctx, cache, d, width, cache->nb[1], c * cache->nb[1]));
            ggml_tensor * sum   = nullptr;
            for (int64_t h = head * g; h < (head + 1) * g; ++h) {
                ggml_tensor * block = ggml_view_2d(ctx, w, d, w->ne[1], w->nb[1], h * d * sizeof(float));
                ggml_tensor * norm  = matmul(ctx, ggml_abs(ctx, matmul(ctx, block, v)), one);  // [width]
                sum                 = sum == nullptr ? norm : ggml_add(ctx, sum, norm);
            }
            parts.push_back(ggml_scale(ctx, sum, 1.0f / (float) g));
            gr.output(parts.back());
        }
        gr.compute(lctx);
        for (int64_t c = first, i = 0; c < last; c += L1_COLUMNS, ++i) {
            ggml_backend_tensor_get(parts[i], out + c, 0, ggml_nbytes(parts[i]));
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

layer_scores store::compute_scores(llama_context & lctx, layer & l) const {
    const int32_t              n        = n_entries();
    const int32_t              n_before = n - params.window;
    const std::vector<int32_t> queries  = window_queries();
    const int64_t              m        = (int64_t) queries.size();
    const int64_t              g        = l.info.n_head / l.info.n_head_kv;
    if (n_before < 1) {
        throw error(CRITICALKV_ERR_STATE, "no entries before the window: " + std::to_string(n) + " entries, window " +
                                              std::to_string(params.window));
    }
    if (m == 0) {
        throw error(CRITICALKV_ERR_STATE, "the queries of the last positions are not known; evaluate a token first");
    }

    std::vector<int32_t> rows;
    std::vector<float>   mask(n * m, 0.0f);
    for (int64_t t = 0; t < m; ++t) {
        rows.push_back(queries[t] % params.window);
        for (int32_t i = 0; i < n; ++i) {
            mask[t * n + i] = cells().pos_get(i) <= queries[t] ? 0.0f : -INFINITY;
        }
    }
    const std::vector<float> ones(std::max<int64_t>(m * g, l.info.n_embd_v), 1.0f);
    const bool               with_norm = params.value == CRITICALKV_VALUE_CRITICAL;
    const bool               with_gram = with_norm && params.norm != CRITICALKV_NORM_L1;
    if (with_gram && !l.has_gram) {
        compute_gram(lctx, params, l);
        l.has_gram = true;
    }
    unpacked_wo wo;
    if (with_norm && !with_gram) {
        wo = unpack_wo_for_l1(lctx, l);
    }

    layer_scores out;
    out.attn.resize((size_t) l.info.n_head_kv * n_before);
    out.norm.resize(out.attn.size(), 0.0f);
    for (int32_t head = 0; head < l.info.n_head_kv; ++head) {
        graph         gr(MAX_NODES);
        ggml_tensor * in_rows = gr.input(GGML_TYPE_I32, m, 1, rows.data());
        ggml_tensor * in_mask = gr.input(GGML_TYPE_F32, n, m, mask.data());
        ggml_tensor * in_ones = gr.input(GGML_TYPE_F32, (int64_t) ones.size(), 1, ones.data());
        ggml_tensor * attn    = observed_attention(gr, l, head, n, in_rows, in_mask);
        attn                  = aggregate_attention(gr, params, attn, n_before, in_ones);
        gr.output(attn);
        ggml_tensor * norm = nullptr;
        if (with_gram) {
            norm = projected_norm_l2(gr, params, l, head, n_before, in_ones);
            gr.output(norm);
        }
        gr.compute(lctx);
        const size_t offset = (size_t) head * n_before;
        ggml_backend_tensor_get(attn, out.attn.data() + offset, 0, ggml_nbytes(attn));
        if (norm != nullptr) {
            ggml_backend_tensor_get(norm, out.norm.data() + offset, 0, ggml_nbytes(norm));
        } else if (with_norm) {
            projected_norm_l1(lctx, l, wo, head, n_before, out.norm.data() + offset);
        }
    }
    check_finite(out.attn, l.il);
    check_finite(out.norm, l.il);
    return out;
}

}  // namespace criticalkv
