// Selection: which entries of one (layer, KV head) stay. Pure functions, no ggml, no state: all policies live here.
#pragma once

#include "criticalkv.h"

#include <vector>

namespace criticalkv {

// Entries of one KV head, in slot order.
struct head_entries {
    int32_t         il;    // layer of the model
    int32_t         head;  // KV head
    int32_t         n;     // entries
    const int32_t * pos;   // [n] original positions, ascending
    const float *   attn;  // [n - window] scores of the entries before the window, as layer_scores; nullptr if unused
    const float *   norm;  // [n - window] what their values weigh; nullptr if unused
};

// Indices of the entries to keep, ascending, min(n, budget) of them. Protected entries (the window and the sinks) always
// stay. Ranking is a total order: higher score first, then lower index, so the result depends on nothing else.
// Throws error(CRITICALKV_ERR_ARGUMENT) when the budget cannot hold the protected entries and one more.
std::vector<int32_t> select_entries(const criticalkv_params & params, int32_t budget, const head_entries & entries);

// The budgets of layers that hold n entries per KV head, `budget` on average. A pyramid (PyramidKV, arXiv 2406.02069,
// beta 20): what is free after the protected entries falls in equal steps from 2F - F/20 in the first layer to F/20 (at
// least 1) in the last, F of the mean; the sum over the first layers is rounded up. What a layer cannot use goes to the
// next ones, then to the first. The budgets add up to the number of layers * budget exactly, if there are that many.
std::vector<int32_t> share_over_layers(const criticalkv_params & params, int32_t budget,
                                       const std::vector<int32_t> & n);

// The budgets of all KV heads of a layer, `budget` on average. Uniform and shared heads all get it. Adaptive ones (Ada-KV, arXiv
// 2407.11550, algorithm 1): each head gets its protected entries and head_floor of the mean rest for its own best; what is
// left goes, one by one, to the heads that hold the best entries of the layer. Entries rank by the score of stage 1, then by
// lower position, then by lower head. The budgets add up to n_head_kv * budget exactly, if there are that many entries.
// For adaptive layers: the same with the heads of all of them.
std::vector<int32_t> share_budget(const criticalkv_params & params, int32_t budget,
                                  const std::vector<head_entries> & heads);

}  // namespace criticalkv
