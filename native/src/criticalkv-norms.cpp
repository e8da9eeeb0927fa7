#include "criticalkv-norms.h"

#include "criticalkv-error.h"
#include "criticalkv-fused.h"
#include "criticalkv-graph.h"
#include "criticalkv-l1-cpu.h"

#include <algorithm>

namespace criticalkv {

// Query heads per graph: a graph stays within the number of nodes that the context's scheduler was made for, also for
// models with hundreds of query heads on one KV head.
static constexpr int64_t HEADS_PER_GRAPH = 32;
static constexpr size_t  MAX_NODES       = 512;
static constexpr int64_t L1_COLUMNS      = 256;  // entries projected at once without the fused op

static ggml_tensor * dequantized(graph & gr, ggml_tensor * rows, const head_range & of) {
    return ggml_is_quantized(rows->type) ? ggml_get_rows(gr.ctx(), rows, gr.ranges(of.n, of.heads)) : rows;
}

ggml_tensor * key_rows(graph & gr, const layer & l, const head_range & of) {
    return dequantized(gr, key_view(gr.ctx(), l, l.rows, of), of);
}

ggml_tensor * value_rows(graph & gr, const layer & l, const head_range & of) {
    return dequantized(gr, value_view(gr.ctx(), l, l.rows, of), of);
}

ggml_tensor * matmul(ggml_context * ctx, ggml_tensor * a, ggml_tensor * b) {
    ggml_tensor * c = ggml_mul_mat(ctx, a, b);
    ggml_prec_set_acc(c, GGML_PREC_F32);
    return c;
}

ggml_tensor * to_f32(ggml_context * ctx, ggml_tensor * x) {
    return x->type == GGML_TYPE_F32 ? ggml_cont(ctx, x) : ggml_cast(ctx, x, GGML_TYPE_F32);
}

ggml_tensor * root_of_squares(ggml_context * ctx, ggml_tensor * x) {
    return ggml_sqrt(ctx, ggml_reshape_2d(ctx, ggml_sum_rows(ctx, ggml_mul(ctx, x, x)), x->ne[1], x->ne[2]));
}

void compute_by_heads(llama_context & lctx, const head_range & all, int64_t d, int64_t n_before, float * out,
                      const build_heads & build) {
    const int64_t at_once = std::max<int64_t>(1, MAX_ELEMENTS / (all.n * d));
    for (int64_t done = 0; done < all.heads; done += at_once) {
        const head_range of = { all.head + done, std::min<int64_t>(at_once, all.heads - done), 0, all.n };
        graph            gr(MAX_NODES);
        ggml_tensor *    result = build(gr, of);
        gr.output(result);
        gr.compute(lctx);
        const std::vector<float> part = read_f32(result);
        for (int64_t i = 0; i < of.heads; ++i) {
            std::copy_n(part.begin() + i * all.n, n_before, out + (done + i) * n_before);
        }
    }
}

// ---- W_O -------------------------------------------------------------------------------------------------------------

// Whether the backend of W_O can read its rows. Weights that the CPU backend keeps in a layout of its own (repacked,
// AMX) can only be multiplied.
static bool can_get_rows(const ggml_tensor * wo, ggml_tensor * get_rows) {
    ggml_backend_dev_t dev = ggml_backend_buft_get_device(ggml_backend_buffer_get_type(wo->buffer));
    return dev == nullptr || ggml_backend_dev_supports_op(dev, get_rows);
}

// Multiplied weights meet rows that the backend rounds to 8 bits with a scale of half precision: 127 is that without an error.
constexpr float UNIT = 127.0f;

// W_O as f32 [n_embd_v * n_head, n_embd].
static ggml_tensor * dequantized_wo(graph & gr, const layer & l, std::vector<float> & identity) {
    ggml_context * ctx  = gr.ctx();
    const int64_t  n    = l.wo->ne[0];
    ggml_tensor *  rows = ggml_get_rows(ctx, l.wo, gr.ranges(l.wo->ne[1], 1));
    if (can_get_rows(l.wo, rows)) {
        return rows;
    }
    identity.assign(n * n, 0.0f);
    for (int64_t i = 0; i < n; ++i) {
        identity[i * n + i] = UNIT;
    }
    ggml_tensor * columns = matmul(ctx, l.wo, gr.input(GGML_TYPE_F32, n, n, identity.data()));
    return ggml_cont(ctx, ggml_transpose(ctx, ggml_scale(ctx, columns, 1.0f / UNIT)));
}

unpacked_wo unpack_wo(llama_context & lctx, const layer & l, const std::vector<lora_part> & loras, bool turned,
                      ggml_type type) {
    unpacked_wo u;
    u.turned              = turned;
    ggml_init_params init = {};
    init.mem_size         = ggml_tensor_overhead();
    init.no_alloc         = true;
    u.ctx.reset(ggml_init(init));
    u.w   = ggml_new_tensor_2d(u.ctx.get(), type, l.wo->ne[turned ? 1 : 0], l.wo->ne[turned ? 0 : 1]);
    u.buf = allocate_tensors(u.ctx.get(), l.buft);
    if (!u.buf) {
        throw error(CRITICALKV_ERR_MEMORY, "no memory for " + std::to_string(ggml_nbytes(u.w)) + " bytes of W_O");
    }

    graph              gr(MAX_NODES);
    ggml_context *     ctx = gr.ctx();
    std::vector<float> identity;
    ggml_tensor *      w = dequantized_wo(gr, l, identity);
    if (l.wo_scale != nullptr) {
        w = ggml_mul(ctx, w, ggml_reshape_2d(ctx, to_f32(ctx, l.wo_scale), 1, ggml_nelements(l.wo_scale)));
    }
    for (const lora_part & lora : loras) {
        ggml_tensor * a    = ggml_cont(ctx, ggml_transpose(ctx, to_f32(ctx, lora.a)));  // [rank, n_embd_v * n_head]
        ggml_tensor * part = matmul(ctx, a, to_f32(ctx, lora.b));
        w                  = ggml_add(ctx, w, ggml_scale(ctx, part, lora.scale));
    }
    if (l.v_rotation != nullptr) {
        ggml_tensor * rotation = gr.input(GGML_TYPE_F32, V_ROTATION, V_ROTATION, l.v_rotation->data());
        ggml_tensor * blocks   = ggml_reshape_2d(ctx, w, V_ROTATION, ggml_nelements(w) / V_ROTATION);
        w                      = ggml_reshape_2d(ctx, matmul(ctx, rotation, blocks), w->ne[0], w->ne[1]);
    }
    w = turned ? ggml_transpose(ctx, w) : w;
    ggml_build_forward_expand(gr.gf(), ggml_cpy(ctx, w, u.w));
    gr.compute(lctx);
    return u;
}

// ---- Gram matrices ---------------------------------------------------------------------------------------------------

static ggml_tensor * gram_view(ggml_context * ctx, ggml_tensor * gram, int64_t i) {
    return ggml_view_2d(ctx, gram, gram->ne[0], gram->ne[1], gram->nb[1], i * gram->nb[2]);
}

static ggml_tensor * gram_views(ggml_context * ctx, ggml_tensor * gram, int64_t first, int64_t n) {
    return ggml_view_3d(ctx, gram, gram->ne[0], gram->ne[1], n, gram->nb[1], gram->nb[2], first * gram->nb[2]);
}

static ggml_tensor * rows_of(ggml_context * ctx, ggml_tensor * t, int64_t first, int64_t n) {
    return ggml_view_2d(ctx, t, t->ne[0], n, t->nb[1], first * t->nb[1]);
}

// gram = mean over the query heads [first, first + count) of W_h W_h^T.
static void compute_gram(llama_context & lctx, const layer & l, const unpacked_wo & wo, int64_t i, int64_t first,
                         int64_t count) {
    const int64_t d = l.info.n_embd_v;
    for (int64_t done = 0; done < count; done += HEADS_PER_GRAPH) {
        graph          gr(MAX_NODES);
        ggml_context * ctx  = gr.ctx();
        ggml_tensor *  gram = gram_view(ctx, l.gram, i);
        ggml_tensor *  sum  = nullptr;
        for (int64_t h = first + done; h < first + std::min(done + HEADS_PER_GRAPH, count); ++h) {
            ggml_tensor * block  = ggml_view_2d(ctx, wo.w, d, wo.w->ne[1], wo.w->nb[1], h * d * sizeof(float));
            ggml_tensor * turned = ggml_cont(ctx, ggml_transpose(ctx, block));  // [n_embd, d]
            ggml_tensor * one    = matmul(ctx, turned, turned);
            sum                  = sum == nullptr ? one : ggml_add(ctx, sum, one);
        }
        sum = ggml_scale(ctx, sum, 1.0f / (float) count);
        sum = done == 0 ? sum : ggml_add(ctx, sum, gram);
        ggml_build_forward_expand(gr.gf(), ggml_cpy(ctx, sum, gram));
        gr.compute(lctx);
    }
}

// Whether the layer's device has a kernel for the L1 norm.
static bool fuses_l1(const layer & l) {
    graph         gr(8);
    const int64_t heads = l.rows.is_ragged() ? 1 : l.info.n_head_kv;
    ggml_tensor * w = ggml_new_tensor_2d(gr.ctx(), GGML_TYPE_F16, l.wo->ne[1], l.wo->ne[0] / l.info.n_head_kv * heads);
    ggml_tensor * v = value_view(gr.ctx(), l, l.rows, { 0, heads, 0, 1 });
    return device_fuses(l.buft, fused_l1(gr.ctx(), v, w));
}

unpacked_wo prepare_norms(llama_context & lctx, const criticalkv_params & params, layer & l,
                          const std::vector<lora_part> & loras) {
    if (params.norm == CRITICALKV_NORM_L1) {
        // the fused ops read W_O turned, the one of the CPU reads the cache from the host
        const bool fused = fuses_l1(l);
        return unpack_wo(lctx, l, loras, fused || ggml_backend_buft_is_host(l.buft),
                         fused ? GGML_TYPE_F16 : GGML_TYPE_F32);
    }
    // with adapters it is made anew each time: which ones are loaded may have changed, also behind the same addresses
    if (!l.has_gram || l.gram_wo != l.wo || !loras.empty()) {
        l.has_gram           = false;
        const unpacked_wo wo = unpack_wo(lctx, l, loras, false);
        const int64_t     g  = params.norm == CRITICALKV_NORM_GRAM ? l.info.n_head / l.info.n_head_kv : 1;
        for (int64_t i = 0; i < l.gram->ne[2]; ++i) {
            compute_gram(lctx, l, wo, i, i * g, g);
        }
        l.has_gram = loras.empty();
        l.gram_wo  = l.wo;
    }
    return {};
}

// ---- the norms -------------------------------------------------------------------------------------------------------

// sqrt(v^T G v) for every v [d, n, heads], with a G [d, d, heads] for each head: [n * heads].
static ggml_tensor * gram_norm(ggml_context * ctx, ggml_tensor * v, ggml_tensor * gram, ggml_tensor * ones) {
    ggml_tensor * product = ggml_mul(ctx, matmul(ctx, gram, v), v);
    product               = ggml_reshape_2d(ctx, product, v->ne[0], v->ne[1] * v->ne[2]);
    ggml_tensor * square  = matmul(ctx, product, ones);
    return ggml_sqrt(ctx, ggml_relu(ctx, square));  // rounding may leave a small negative number
}

// out[heads][n] = mean over the Gram matrices of each head, per_head of them, of sqrt(v^T G v).
static void norms_by_gram(llama_context & lctx, const layer & l, const head_range & of, int64_t per_head, float * out) {
    const int64_t            d = l.info.n_embd_v;
    const std::vector<float> ones(d, 1.0f);
    std::fill_n(out, of.heads * of.n, 0.0f);
    for (int64_t done = 0; done < per_head; done += HEADS_PER_GRAPH) {
        graph          gr(MAX_NODES);
        ggml_context * ctx = gr.ctx();
        ggml_tensor *  v   = to_f32(ctx, value_rows(gr, l, of));
        ggml_tensor *  one = gr.input(GGML_TYPE_F32, d, 1, ones.data());
        ggml_tensor *  sum = nullptr;
        for (int64_t i = done; i < std::min(done + HEADS_PER_GRAPH, per_head); ++i) {
            ggml_tensor * gram = ggml_view_3d(ctx, l.gram, d, d, of.heads, l.gram->nb[1], per_head * l.gram->nb[2],
                                              (of.head * per_head + i) * l.gram->nb[2]);
            ggml_tensor * norm = gram_norm(ctx, v, gram, one);
            sum                = sum == nullptr ? norm : ggml_add(ctx, sum, norm);
        }
        gr.output(sum);
        gr.compute(lctx);
        const std::vector<float> part = read_f32(sum);
        for (size_t i = 0; i < part.size(); ++i) {
            out[i] += part[i] / (float) per_head;
        }
    }
}

// |v W_h|_1 by the fused CPU op.
static void norms_l1_fused(llama_context & lctx, const layer & l, const unpacked_wo & wo, int32_t head, int64_t n,
                           float * out) {
    graph         gr(MAX_NODES);
    const int     g    = l.info.n_head / l.info.n_head_kv;
    ggml_tensor * v    = to_f32(gr.ctx(), value_rows(gr, l, { head, 1, 0, n }));
    ggml_tensor * norm = l1_norm_cpu(gr.ctx(), v, wo.w, head * g, g);
    gr.output(norm);
    gr.compute(lctx);
    ggml_backend_tensor_get(norm, out, 0, ggml_nbytes(norm));
}

// |v W_h|_1 from standard ops, for caches that the host cannot read.
static void norms_l1_standard(llama_context & lctx, const layer & l, const unpacked_wo & wo, int32_t head, int64_t n,
                              float * out) {
    const int64_t            d = l.info.n_embd_v;
    const int64_t            g = l.info.n_head / l.info.n_head_kv;
    const std::vector<float> ones(wo.w->ne[1], 1.0f);
    std::fill_n(out, n, 0.0f);
    for (int64_t c = 0; c < n; c += L1_COLUMNS) {
        const int64_t width = std::min(L1_COLUMNS, n - c);
        for (int64_t done = 0; done < g; done += HEADS_PER_GRAPH) {
            graph          gr(MAX_NODES);
            ggml_context * ctx = gr.ctx();
            ggml_tensor *  v   = to_f32(ctx, value_rows(gr, l, { head, 1, c, width }));
            ggml_tensor *  one = gr.input(GGML_TYPE_F32, wo.w->ne[1], 1, ones.data());
            ggml_tensor *  sum = nullptr;
            for (int64_t h = head * g + done; h < head * g + std::min(done + HEADS_PER_GRAPH, g); ++h) {
                ggml_tensor * block = ggml_view_2d(ctx, wo.w, d, wo.w->ne[1], wo.w->nb[1], h * d * sizeof(float));
                ggml_tensor * norm  = matmul(ctx, ggml_abs(ctx, matmul(ctx, block, v)), one);  // [width]
                sum                 = sum == nullptr ? norm : ggml_add(ctx, sum, norm);
            }
            gr.output(sum);
            gr.compute(lctx);
            const std::vector<float> part = read_f32(sum);
            for (int64_t i = 0; i < width; ++i) {
                out[c + i] += part[i] / (float) g;
            }
        }
    }
}

// Norms of these KV heads by one node, if the layer's device has a kernel for it: by W_O (L1) or, without, by Gram
// matrices.
static bool norms_by_kernel(llama_context & lctx, const layer & l, ggml_tensor * wo, const head_range & of,
                            float * out) {
    graph          gr(8);
    ggml_context * ctx = gr.ctx();
    ggml_tensor *  v   = value_view(ctx, l, l.rows, of);
    ggml_tensor *  node;
    if (wo != nullptr) {
        const int64_t columns = l.info.n_embd_v * (l.info.n_head / l.info.n_head_kv);  // of W_O, per KV head
        node                  = fused_l1(ctx, v, rows_of(ctx, wo, of.head * columns, of.heads * columns));
    } else {
        const int64_t per_head = l.gram->ne[2] / l.info.n_head_kv;
        node                   = fused_gram(ctx, v, gram_views(ctx, l.gram, of.head * per_head, of.heads * per_head));
    }
    return compute_fused(lctx, gr, l.buft, node, out);
}

void value_norms(llama_context & lctx, const criticalkv_params & params, const layer & l, const unpacked_wo & wo,
                 const head_range & of, float * out) {
    const bool is_l1     = params.norm == CRITICALKV_NORM_L1;
    const bool by_kernel = is_l1 ? wo.w->type == GGML_TYPE_F16 : !ggml_backend_buft_is_host(l.buft);
    if (by_kernel && norms_by_kernel(lctx, l, is_l1 ? wo.w : nullptr, of, out)) {
        return;
    }
    if (is_l1 && by_kernel) {
        throw error(CRITICALKV_ERR_COMPUTE, "the device refuses the L1 norm that it took before");
    }
    if (params.norm != CRITICALKV_NORM_L1) {
        const int64_t per_head = l.gram->ne[2] / l.info.n_head_kv;
        const int64_t at_once  = std::max<int64_t>(1, MAX_ELEMENTS / (of.n * l.info.n_embd_v));
        for (int64_t done = 0; done < of.heads; done += at_once) {
            const head_range part = { of.head + done, std::min(at_once, of.heads - done), 0, of.n };
            norms_by_gram(lctx, l, part, per_head, out + done * of.n);
        }
        return;
    }
    for (int64_t done = 0; done < of.heads; ++done) {
        const int32_t head = (int32_t) (of.head + done);
        if (wo.turned) {
            norms_l1_fused(lctx, l, wo, head, of.n, out + done * of.n);
        } else {
            norms_l1_standard(lctx, l, wo, head, of.n, out + done * of.n);
        }
    }
}

}  // namespace criticalkv
