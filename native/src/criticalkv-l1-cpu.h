// The paper's projected value norm on the CPU, fused: |v W_h|_1 without writing v W_h to memory.
#pragma once

#include "ggml.h"

namespace criticalkv {

// Adds a custom CPU op to a graph: the mean over query heads h in [first_head, first_head + n_heads) of |v W_h|_1.
//   v: F32 [d, n], contiguous
//   w: F32 [n_embd, d * heads], contiguous, so that row h * d + j belongs to input j of head h
// Result: F32 [n]. Both tensors must be in host memory.
ggml_tensor * l1_norm_cpu(ggml_context * ctx, ggml_tensor * v, ggml_tensor * w, int first_head, int n_heads);

}  // namespace criticalkv
