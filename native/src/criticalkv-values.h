// What values weigh without the output projection.
#pragma once

#include "criticalkv-store.h"

namespace criticalkv {

// |v[i]|_1 of the first n entries, of values as the model made them, to out[n_head_kv][n].
void plain_value_norms(llama_context & lctx, const layer & l, int64_t n, float * out);

// |o - v[i]|_2 of the first n_before of n entries, where o[head] = sum over all n of attn[head][i] v[i] is what the
// head puts out; attn [n_head_kv][n]. To out[n_head_kv][n_before].
void output_distances(llama_context & lctx, const layer & l, const std::vector<float> & attn, int64_t n,
                      int64_t n_before, float * out);

}  // namespace criticalkv
