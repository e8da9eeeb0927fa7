// Projected value norms N[i] = mean over the query heads h of a KV head of |v[i] W_h|, in the norms of criticalkv.h.
#pragma once

#include "criticalkv-graph.h"
#include "criticalkv-store.h"

#include <functional>

namespace criticalkv {

// W_O of one layer, dequantized into a buffer of its own.
struct unpacked_wo {
    ggml_context_ptr        ctx;
    ggml_backend_buffer_ptr buf;
    // F32 [n_embd_v * n_head, n_embd], or turned [n_embd, n_embd_v * n_head], then F32 or F16
    ggml_tensor * w      = nullptr;
    bool          turned = false;
};

// W_O for values as the cache holds them: the model's weights, with its adapters, after the inverse of the cache's
// rotation.
unpacked_wo unpack_wo(llama_context & lctx, const layer & l, const std::vector<lora_part> & loras, bool turned,
                      ggml_type type = GGML_TYPE_F32);

// What the norms of one layer need: the layer's Gram matrices, filled when they are not there or adapters are loaded, or
// for L1 the unpacked W_O, which lives as long as the result.
unpacked_wo prepare_norms(llama_context & lctx, const criticalkv_params & params, layer & l,
                          const std::vector<lora_part> & loras);

// Norms of some entries of some KV heads, to out[heads][n].
void value_norms(llama_context & lctx, const criticalkv_params & params, const layer & l, const unpacked_wo & wo,
                 const head_range & of, float * out);

// Building blocks that the attention scores share.

// Floats of one tensor up to which several KV heads share a graph: small graphs cost more to set up than to run, large
// ones would make the compute buffer grow.
constexpr int64_t MAX_ELEMENTS = 1 << 19;

// The keys or values of some entries of some KV heads. Numbers of quantized caches are dequantized: products with the
// quantized rows themselves would round the other side too.
ggml_tensor * key_rows(graph & gr, const layer & l, const head_range & of);
ggml_tensor * value_rows(graph & gr, const layer & l, const head_range & of);
ggml_tensor * matmul(ggml_context * ctx, ggml_tensor * a, ggml_tensor * b);
ggml_tensor * to_f32(ggml_context * ctx, ggml_tensor * x);  // contiguous

// |x|_2 along dim 0 of x [d, n, heads], f32 and contiguous: [n, heads]. Sums of rows stay f32 on every device, where
// products may round to TF32 (CUDA).
ggml_tensor * root_of_squares(ggml_context * ctx, ggml_tensor * x);

// One number for each of the first n_before entries of these KV heads, to out[heads][n_before]. `build` makes the
// nodes [n, heads] of some of them, as many as MAX_ELEMENTS of d floats per entry allow.
using build_heads = std::function<ggml_tensor *(graph & gr, const head_range & of)>;
void compute_by_heads(llama_context & lctx, const head_range & all, int64_t d, int64_t n_before, float * out,
                      const build_heads & build);

}  // namespace criticalkv
