// Attention over heads that hold different numbers of entries (ragged rows, criticalkv-memory.h).
//
// Each KV head is a call of its own: ggml's flash attention takes one number of keys for all of its heads, and padding all
// heads to the longest would give back in memory what adaptive budgets save. The slots are masked as llama.cpp does it; a
// head's base, which lies right before its slots, is seen by every query. So all heads share one mask, as wide as the longest
// base and the slots, and each reads the end of it that is as long as its own rows.
#pragma once

#include <cstdint>

struct ggml_cgraph;
struct ggml_context;
struct ggml_tensor;
class llm_graph_result;

namespace criticalkv {

struct attention_call;
struct layer;
class store;

// Kernels of devices want keys in a multiple of this; masked rows fill up.
constexpr int64_t RAGGED_PADDING = 256;

// Writes the keys and values of `call` to the layer's slots and attends to all of its entries:
// [n_embd_v * n_head, n_tokens].
ggml_tensor * attend_ragged(store & owner, ggml_context * ctx, ggml_cgraph * gf, llm_graph_result * res,
                            const layer & l, const attention_call & call);

}  // namespace criticalkv
