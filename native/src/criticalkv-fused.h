// Makes the nodes of criticalkv-nodes.h. Only graphs for a device that takes them have such nodes; all others, the CPU's
// too, are built from standard ops. The function of a node is its CPU twin, by which the mock device of the tests computes.
#pragma once

#include "criticalkv-graph.h"
#include "criticalkv-nodes.h"
#include "ggml-backend.h"

namespace criticalkv {

// Whether the device with this memory has a kernel for a node.
bool device_fuses(ggml_backend_buffer_type_t buft, const ggml_tensor * node);

// Computes a graph of one such node and reads its result; false, with nothing done, if there is no kernel for it.
bool compute_fused(llama_context & lctx, graph & gr, ggml_backend_buffer_type_t buft, ggml_tensor * node, float * out);

// Arguments and results as criticalkv-nodes.h says. sinks may be nullptr.
ggml_tensor * fused_attention(ggml_context * ctx, ggml_tensor * k, ggml_tensor * queries, ggml_tensor * rows,
                              ggml_tensor * mask, ggml_tensor * sinks, int64_t n_before, const fused_params & params);
ggml_tensor * fused_compaction(ggml_context * ctx, ggml_tensor * k_from, ggml_tensor * k_to, ggml_tensor * v_from,
                               ggml_tensor * v_to, ggml_tensor * slots);
ggml_tensor * fused_gram(ggml_context * ctx, ggml_tensor * v, ggml_tensor * gram);
ggml_tensor * fused_l1(ggml_context * ctx, ggml_tensor * v, ggml_tensor * w);

}  // namespace criticalkv
