// Capture: while the model runs, the last queries of every layer go to a small ring beside the cache.
//
// The query of position p is written to row p % ring, so the graph of a decode stays the same from token to token and
// llama.cpp keeps reusing it: only the row indices, an input, change.

#include "criticalkv-ragged.h"
#include "criticalkv-store.h"
#include "llama-graph.h"
#include "llama-kv-cells.h"

#include <algorithm>
#include <cmath>

namespace criticalkv {

// Row indices of the ring for the last tokens of a ubatch.
class input_query_rows : public llm_graph_input_i {
  public:
    input_query_rows(store & owner, ggml_tensor * rows) :
        rows(rows), owner(owner), memory_version(owner.memory_version) {}

    void set_input(const llama_ubatch * ubatch) override {
        const int64_t        n = rows->ne[0];
        std::vector<int64_t> data(n);
        for (int64_t i = 0; i < n; ++i) {
            const llama_pos pos = ubatch->pos[ubatch->n_tokens - n + i];
            data[i]             = pos % owner.ring();
            owner.note_query(pos);
        }
        ggml_backend_tensor_set(rows, data.data(), 0, ggml_nbytes(rows));
    }

    bool can_reuse(const llm_graph_params & params) override {
        return memory_version == owner.memory_version && !owner.is_reading() &&
               rows->ne[0] == std::min<int64_t>(owner.ring(), params.ubatch.n_tokens);
    }

    ggml_tensor * rows;  // I64 [min(ring, n_tokens)]

  private:
    store &       owner;
    const int64_t memory_version;  // of the store when the graph was built
};

static ggml_tensor * query_rows(store & owner, ggml_context * ctx, llm_graph_result * res, int64_t n) {
    for (const auto & input : res->inputs) {
        if (auto * found = dynamic_cast<input_query_rows *>(input.get())) {
            return found->rows;
        }
    }
    ggml_tensor * rows = ggml_new_tensor_1d(ctx, GGML_TYPE_I64, n);
    ggml_set_input(rows);
    ggml_set_name(rows, "criticalkv_query_rows");
    res->add_input(std::make_unique<input_query_rows>(owner, rows));
    return rows;
}

ggml_tensor * store::capture(ggml_context * ctx, ggml_cgraph * gf, llm_graph_result * res, const llama_ubatch & ubatch,
                             const attention_call & call) {
    const auto found = std::find_if(layers.begin(), layers.end(), [&](const layer & l) { return l.il == call.il; });
    if (found == layers.end()) {
        return nullptr;
    }
    layer & l      = *found;
    l.captured     = true;
    l.wo           = call.wo;
    l.wo_scale     = call.wo_s;
    l.sinks        = call.sinks;
    l.info.scale   = call.scale;
    l.info.softcap = call.softcap;
    l.refused.clear();
    if (call.bias != nullptr) {
        l.refused = "its attention adds a bias to the logits";
    } else if (call.wo == nullptr) {
        l.refused = "its output projection is not part of the attention block";
    }

    ggml_tensor * q = call.q;
    const int64_t n = std::min<int64_t>(ring(), ubatch.n_tokens);
    if (q->ne[2] < n) {
        l.refused = "it does not hand all queries to its attention";
        return nullptr;
    }
    q = ggml_view_3d(ctx, q, q->ne[0], q->ne[1], n, q->nb[1], q->nb[2], (q->ne[2] - n) * q->nb[2]);
    if (!ggml_is_contiguous(q)) {
        q = ggml_cont(ctx, q);
    }
    q = ggml_reshape_2d(ctx, q, q->ne[0] * q->ne[1], n);
    ggml_build_forward_expand(gf, ggml_set_rows(ctx, l.queries, q, query_rows(*this, ctx, res, n)));
    return l.rows.is_ragged() ? attend_ragged(*this, ctx, gf, res, l, call) : nullptr;
}

bool store::is_ragged(int32_t il) const {
    return std::any_of(layers.begin(), layers.end(), [&](const layer & l) { return l.il == il && l.rows.is_ragged(); });
}

int64_t store::most_slots() const {
    int64_t most = 0;
    for (const layer & l : layers) {
        most = std::max(most, l.rows.capacity);
    }
    return most;
}

int64_t store::longest_base() const {
    int64_t longest = 0;
    for (const layer & l : layers) {
        for (const int64_t base : l.rows.base) {
            longest = std::max(longest, base);
        }
    }
    return longest;
}

void store::fill_mask(const llama_ubatch & ubatch, int64_t base, int64_t slots, int64_t width, uint16_t * out) const {
    const uint16_t seen   = ggml_fp32_to_fp16(0.0f);
    const uint16_t unseen = ggml_fp32_to_fp16(-INFINITY);
    for (uint32_t t = 0; t < ubatch.n_tokens; ++t) {
        uint16_t * row = out + t * width;
        std::fill_n(row, base, seen);
        std::fill_n(row + base, width - base, unseen);
        for (int64_t i = 0; i < slots; ++i) {
            if (!cells().is_empty((uint32_t) i) && cells().pos_get((uint32_t) i) <= ubatch.pos[t]) {
                row[base + i] = seen;
            }
        }
    }
}

void store::note_query(int32_t pos) {
    query_pos[pos % ring()] = pos;
}

std::vector<int32_t> store::window_queries() const {
    std::vector<int32_t> pos;
    for (int32_t p = n_positions() - 1; p >= 0 && (int32_t) pos.size() < params.window; --p) {
        if (query_pos[p % ring()] != p) {
            break;
        }
        pos.push_back(p);
    }
    std::reverse(pos.begin(), pos.end());
    return pos;
}

}  // namespace criticalkv
