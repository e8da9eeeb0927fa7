#include "criticalkv-keys.h"

#include "criticalkv-norms.h"

namespace criticalkv {

static constexpr float TINY = 1e-12f;  // a norm is never taken for less

// -|k|_2 of k [d, n, heads]: [n, heads].
static ggml_tensor * negative_norms(ggml_context * ctx, ggml_tensor * k) {
    return ggml_scale(ctx, root_of_squares(ctx, k), -1.0f);
}

// -cos(k, mean direction) of k [d, n, heads]: [n, heads].
static ggml_tensor * unlikeness(ggml_context * ctx, ggml_tensor * k) {
    ggml_tensor * directions = ggml_l2_norm(ctx, k, TINY);
    ggml_tensor * turned     = ggml_cont(ctx, ggml_transpose(ctx, directions));  // [n, d, heads]
    // the sum in place of the mean: only its direction matters
    ggml_tensor * sum     = ggml_reshape_3d(ctx, ggml_sum_rows(ctx, turned), k->ne[0], 1, k->ne[2]);
    ggml_tensor * cosines = ggml_sum_rows(ctx, ggml_mul(ctx, directions, ggml_l2_norm(ctx, sum, TINY)));
    return ggml_scale(ctx, ggml_reshape_2d(ctx, cosines, k->ne[1], k->ne[2]), -1.0f);
}

void key_scores(llama_context & lctx, int32_t score, const layer & l, const head_range & all, int64_t n_before,
                float * out) {
    compute_by_heads(lctx, all, l.info.n_embd_k, n_before, out, [&](graph & gr, const head_range & of) {
        ggml_tensor * k = to_f32(gr.ctx(), key_rows(gr, l, of));
        return score == CRITICALKV_SCORE_KEYDIFF ? unlikeness(gr.ctx(), k) : negative_norms(gr.ctx(), k);
    });
}

}  // namespace criticalkv
