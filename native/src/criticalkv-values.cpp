#include "criticalkv-values.h"

#include "criticalkv-norms.h"

namespace criticalkv {

static ggml_tensor * values(graph & gr, const layer & l, const head_range & of) {
    return to_f32(gr.ctx(), value_rows(gr, l, of));
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

void plain_value_norms(llama_context & lctx, const layer & l, const head_range & all, float * out) {
    compute_by_heads(lctx, all, l.info.n_embd_v, all.n, out, [&](graph & gr, const head_range & of) {
        ggml_tensor * sizes = ggml_abs(gr.ctx(), unrotated(gr, l, values(gr, l, of)));
        return ggml_reshape_2d(gr.ctx(), ggml_sum_rows(gr.ctx(), sizes), of.n, of.heads);
    });
}

void output_distances(llama_context & lctx, const layer & l, const std::vector<float> & attn, const head_range & all,
                      int64_t n_before, float * out) {
    const int64_t d = l.info.n_embd_v;
    compute_by_heads(lctx, all, d, n_before, out, [&](graph & gr, const head_range & of) {
        ggml_context * ctx     = gr.ctx();
        ggml_tensor *  v       = values(gr, l, of);
        const float *  rows    = attn.data() + (of.head - all.head) * of.n;
        ggml_tensor *  weights = gr.input(GGML_TYPE_F32, of.n, 1, of.heads, rows);
        ggml_tensor *  turned  = ggml_cont(ctx, ggml_transpose(ctx, v));  // [n, d, heads]
        ggml_tensor *  o       = ggml_sum_rows(ctx, ggml_mul(ctx, turned, weights));
        return root_of_squares(ctx, ggml_sub(ctx, v, ggml_reshape_3d(ctx, o, d, 1, of.heads)));
    });
}

}  // namespace criticalkv
