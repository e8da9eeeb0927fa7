// A peek at the question: tokens that come much later are run over the cache as it is now, at their own positions, and
// only their queries are kept. Evictions while a prompt streams in are scored with them.

#include "criticalkv-error.h"
#include "criticalkv-slots.h"
#include "criticalkv-store.h"
#include "llama-batch.h"
#include "llama-context.h"
#include "llama-graph.h"
#include "llama-kv-cache.h"
#include "llama-model.h"

#include <algorithm>

namespace criticalkv {

std::vector<std::vector<float>> store::read_rings() const {
    std::vector<std::vector<float>> rings;
    for (const layer & l : layers) {
        rings.emplace_back(ggml_nelements(l.queries));
        ggml_backend_tensor_get(l.queries, rings.back().data(), 0, ggml_nbytes(l.queries));
    }
    return rings;
}

void store::write_rings(const std::vector<std::vector<float>> & rings) {
    for (size_t i = 0; i < layers.size(); ++i) {
        ggml_backend_tensor_set(layers[i].queries, rings[i].data(), 0, ggml_nbytes(layers[i].queries));
    }
}

static observers queries_of(const std::vector<std::vector<float>> & rings, const std::vector<layer> & layers,
                            int32_t ring, int32_t first, int32_t n) {
    observers seen;
    for (int32_t i = 0; i < n; ++i) {
        seen.pos.push_back(first + i);
    }
    for (size_t i = 0; i < layers.size(); ++i) {
        const int64_t      width = layers[i].queries->ne[0];
        std::vector<float> rows;
        for (const int32_t pos : seen.pos) {
            const auto row = rings[i].begin() + (pos % ring) * width;
            rows.insert(rows.end(), row, row + width);
        }
        seen.queries.push_back(std::move(rows));
    }
    return seen;
}

// The tokens take free slots for a moment; those, recurrent states and the ring of queries are as before in the end.
// In a sliding window they may take slots of entries that no later token sees; those are gone.
void store::run_peek(llama_context & lctx, const request & what) {
    const int32_t  n       = (int32_t) what.tokens.size();
    const auto     batches = make_batches(lctx, what.tokens.data(), n, what.first);
    slots_snapshot slots   = take_snapshot();
    const auto     states  = read_states();
    const auto     rings   = read_rings();
    const auto     before  = query_pos;
    const auto     restore = [&] {
        forget_overwritten(slots, what.first);
        rewind(slots);
        write_states(states);
        write_rings(rings);
        query_pos = before;
    };
    try {
        place_states(what.first - 1);
        llm_graph_result   res(lctx.graph_max_nodes(std::min(lctx.get_cparams().n_ctx, lctx.get_cparams().n_ubatch)));
        llama_batch_allocr balloc(model.hparams.n_pos_per_embd());
        for (llama_batch_ext batch : batches) {
            batch.mem = nullptr;  // the positions do not follow those in the cache
            if (!balloc.init(batch, model.vocab, false)) {
                throw error(CRITICALKV_ERR_ARGUMENT, "the tokens cannot be evaluated");
            }
            const auto mctx = owner.get_memory()->init_batch(balloc, lctx.get_cparams().n_ubatch, false);
            if (!mctx || mctx->get_status() != LLAMA_MEMORY_STATUS_SUCCESS) {
                throw error(CRITICALKV_ERR_STATE, "no slots for a look ahead");
            }
            do {
                run_ubatch(lctx, res, *mctx);
            } while (mctx->next());
        }
        seen_by = queries_of(read_rings(), layers, ring(), what.first, n);
    } catch (...) {
        restore();
        throw;
    }
    restore();
}

void store::peek(llama_context & lctx, const int32_t * tokens, int32_t n, int32_t pos) {
    if (n == 0) {
        seen_by = {};
        return;
    }
    // one ubatch: a second one could take the slots of what is still in the window before the first
    const int32_t most = std::min(ring(), (int32_t) lctx.get_cparams().n_ubatch);
    if (n < 0 || n > most) {
        throw error(CRITICALKV_ERR_ARGUMENT, "n is " + std::to_string(n) +
                                                 ", allowed: 0 to window + 32, in one ubatch: " + std::to_string(most));
    }
    const int64_t n_cells = (int64_t) cells().size();
    if (pos < n_positions() || pos + (int64_t) n > n_cells || n_entries() + (int64_t) n > n_cells) {
        throw error(CRITICALKV_ERR_ARGUMENT, "pos is " + std::to_string(pos) +
                                                 ", allowed: from the end of the cache, " +
                                                 std::to_string(n_positions()) + ", to the end of n_ctx");
    }
    request what;
    what.what = request::PEEK;
    what.tokens.assign(tokens, tokens + n);
    what.first = pos;
    run(lctx, what);
}

}  // namespace criticalkv
