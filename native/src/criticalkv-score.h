// Who observes what in one layer, and the graph nodes of the observed attention, block of heads by block.
#pragma once

#include "criticalkv-graph.h"
#include "criticalkv-store.h"

#include <vector>

namespace criticalkv {

constexpr int64_t MAX_ROWS = 512;  // window queries times query heads in one graph

// Query heads [first, first + heads * group) of the KV heads [kv_head, kv_head + heads): all of several KV heads, or a
// part of one.
struct head_block {
    int32_t kv_head;
    int64_t heads;
    int64_t first;
    int64_t group;
};

// What the graphs of one layer share: who observes what.
struct observation {
    ggml_tensor *        queries;   // [n_embd_k * n_head, ring]
    head_range           of;        // KV heads and their entries
    int64_t              n_before;  // of these, before the window
    int64_t              m;         // window queries that are known
    std::vector<int32_t> rows;      // [m] their rows in the ring
    std::vector<float>   mask;      // [m][of.n] causal: 0 or -inf
};

// Heads of one graph, from KV head kv_head and its query head done on.
head_block next_block(const criticalkv_layer_info & info, const observation & o, int32_t kv_head, int64_t done);

// Logits of the window's queries of a block of heads and all n keys, soft-capped where the model does that: [n, m * group,
// heads].
ggml_tensor * observed_logits(graph & gr, const layer & l, const observation & o, const head_block & b);

// Their softmax over all n keys under the observation's mask [n, m], sink logits in the divisor: [n, m * group * heads].
ggml_tensor * softmax_of_logits(ggml_context * ctx, const layer & l, const head_block & b, ggml_tensor * logits,
                                ggml_tensor * mask);

// Calls `work` with blocks that together are the heads of the observation, in order.
template <typename F> void for_each_block(const criticalkv_layer_info & info, const observation & o, F && work) {
    const int64_t g    = info.n_head / info.n_head_kv;
    int64_t       done = 0;  // query heads of head
    for (int32_t head = (int32_t) o.of.head; head < o.of.head + o.of.heads;) {
        const head_block b = next_block(info, o, head, done);
        work(b);
        done += b.group;
        if (done == g) {
            head += (int32_t) b.heads;
            done = 0;
        }
    }
}

}  // namespace criticalkv
