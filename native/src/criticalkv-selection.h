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

}  // namespace criticalkv
