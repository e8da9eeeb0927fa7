#include "criticalkv-values.h"

#include "criticalkv-graph.h"
#include "criticalkv-norms.h"

#include <algorithm>

namespace criticalkv {

static constexpr size_t MAX_NODES = 64;

// KV heads of one graph.
static int64_t heads_at_once(const layer & l, int64_t n) {
    return std::max<int64_t>(1, MAX_ELEMENTS / (n * l.info.n_embd_v));
}

static ggml_tensor * values(graph & gr, const layer & l, const head_range & of) {
    return to_f32(gr.ctx(), head_rows(gr, l.rows.v, l.info.n_embd_v, of));
}

// Takes back the rotation of a quantized cache.
static ggml_tensor * unrotated(graph & gr, const layer & l, ggml_tensor * v) {
    if (l.v_rotation == nullptr) {
        return v;
    }
    ggml_context * ctx      = gr.ctx();
    ggml_tensor *  rotation = gr.input(GGML_TYPE_F32, V_ROTATION, V_ROTATION, l.v_rotation->data());
    ggml_tensor *  blocks   = ggml_reshape_2d(ctx, v, V_ROTATION, ggml_nelements(v) / V_ROTATION);
    return ggml_reshape_3d(ctx, matmul(ctx, rotation, blocks), v->ne[0], v->ne[1], v->ne[2]);
}

void plain_value_norms(llama_context & lctx, const layer & l, int64_t n, float * out) {
    const int64_t            at_once = heads_at_once(l, n);
    const std::vector<float> ones(l.info.n_embd_v, 1.0f);
    for (int64_t head = 0; head < l.info.n_head_kv; head += at_once) {
        const int64_t  heads = std::min<int64_t>(at_once, l.info.n_head_kv - head);
        graph          gr(MAX_NODES);
        ggml_context * ctx  = gr.ctx();
        ggml_tensor *  size = ggml_abs(ctx, unrotated(gr, l, values(gr, l, { head, heads, 0, n })));
        size                = ggml_reshape_2d(ctx, size, l.info.n_embd_v, n * heads);
        ggml_tensor * norm  = matmul(ctx, size, gr.input(GGML_TYPE_F32, l.info.n_embd_v, 1, ones.data()));
        gr.output(norm);
        gr.compute(lctx);
        ggml_backend_tensor_get(norm, out + head * n, 0, ggml_nbytes(norm));
    }
}

void output_distances(llama_context & lctx, const layer & l, const std::vector<float> & attn, int64_t n,
                      int64_t n_before, float * out) {
    const int64_t d       = l.info.n_embd_v;
    const int64_t at_once = heads_at_once(l, n);
    for (int64_t head = 0; head < l.info.n_head_kv; head += at_once) {
        const int64_t  heads = std::min<int64_t>(at_once, l.info.n_head_kv - head);
        graph          gr(MAX_NODES);
        ggml_context * ctx    = gr.ctx();
        ggml_tensor *  v      = values(gr, l, { head, heads, 0, n });
        ggml_tensor *  weight = gr.input(GGML_TYPE_F32, n, 1, heads, attn.data() + head * n);
        ggml_tensor *  turned = ggml_cont(ctx, ggml_transpose(ctx, v));  // [n, d, heads]
        ggml_tensor *  o      = matmul(ctx, turned, weight);
        ggml_tensor *  apart  = ggml_sub(ctx, v, ggml_reshape_3d(ctx, o, d, 1, heads));
        ggml_tensor *  far    = root_of_squares(ctx, apart);
        gr.output(far);
        gr.compute(lctx);
        const std::vector<float> all = read_f32(far);
        for (int64_t i = 0; i < heads; ++i) {
            std::copy_n(all.begin() + i * n, n_before, out + (head + i) * n_before);
        }
    }
}

}  // namespace criticalkv
