// What values weigh without the output projection.
#pragma once

#include "criticalkv-store.h"

namespace criticalkv {

// |v[i]|_1 of values as the model made them, to out[heads][n].
void plain_value_norms(llama_context & lctx, const layer & l, const head_range & of, float * out);

// |o - v[i]|_2 of the first n_before entries, where o[head] = sum over all n of attn[head][i] v[i] is what the
// head puts out; attn [heads][n]. To out[heads][n_before].
void output_distances(llama_context & lctx, const layer & l, const std::vector<float> & attn, const head_range & of,
                      int64_t n_before, float * out);

}  // namespace criticalkv
