#include "criticalkv-keys.h"

#include "criticalkv-graph.h"
#include "criticalkv-norms.h"

#include <algorithm>

namespace criticalkv {

static constexpr size_t MAX_NODES = 64;
static constexpr float  TINY      = 1e-12f;  // a norm is never taken for less

// -|k|_2 of k [d, n, heads]: [n, heads].
static ggml_tensor * negative_norms(ggml_context * ctx, ggml_tensor * k) {
    return ggml_scale(ctx, root_of_squares(ctx, k), -1.0f);
}

// -cos(k, mean direction) of k [d, n, heads]: [n, heads].
static ggml_tensor * unlikeness(graph & gr, ggml_tensor * k, const std::vector<float> & shares) {
    ggml_context * ctx        = gr.ctx();
    const int64_t  n          = k->ne[1];
    const int64_t  heads      = k->ne[2];
    ggml_tensor *  directions = ggml_l2_norm(ctx, k, TINY);
    ggml_tensor *  share      = gr.input(GGML_TYPE_F32, n, 1, heads, shares.data());
    ggml_tensor *  turned     = ggml_cont(ctx, ggml_transpose(ctx, directions));  // [n, d, heads]
    // [d, 1, heads] after turning back; its length does not matter, its direction does
    ggml_tensor * mean    = ggml_reshape_3d(ctx, matmul(ctx, turned, share), k->ne[0], 1, heads);
    ggml_tensor * cosines = matmul(ctx, directions, ggml_l2_norm(ctx, mean, TINY));
    return ggml_scale(ctx, ggml_reshape_2d(ctx, cosines, n, heads), -1.0f);
}

void key_scores(llama_context & lctx, int32_t score, const layer & l, int64_t n, int64_t n_before, float * out) {
    const int64_t d       = l.info.n_embd_k;
    const int64_t at_once = std::max<int64_t>(1, MAX_ELEMENTS / (n * d));
    for (int64_t head = 0; head < l.info.n_head_kv; head += at_once) {
        const int64_t            heads = std::min<int64_t>(at_once, l.info.n_head_kv - head);
        const std::vector<float> shares(n * heads, 1.0f / (float) n);
        graph                    gr(MAX_NODES);
        ggml_tensor *            k = to_f32(gr.ctx(), head_rows(gr, l.rows.k, d, { head, heads, 0, n }));
        ggml_tensor *            scores =
            score == CRITICALKV_SCORE_KEYDIFF ? unlikeness(gr, k, shares) : negative_norms(gr.ctx(), k);
        gr.output(scores);
        gr.compute(lctx);
        const std::vector<float> all = read_f32(scores);
        for (int64_t i = 0; i < heads; ++i) {
            std::copy_n(all.begin() + i * n, n_before, out + (head + i) * n_before);
        }
    }
}

}  // namespace criticalkv
