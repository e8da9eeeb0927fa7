// A peek at the question: tokens that come much later are run over the cache as it is now, at their own positions, and
// only their queries are kept. Evictions while a prompt streams in are scored with them.

#include "criticalkv-error.h"
#include "criticalkv-memory.h"
#include "criticalkv-slots.h"
#include "criticalkv-store.h"
#include "llama-batch.h"
#include "llama-context.h"
#include "llama-graph.h"
#include "llama-kv-cache.h"
#include "llama-model.h"

#include <algorithm>

namespace criticalkv {

static std::vector<query_ring> allocate_rings(const std::vector<layer> & layers) {
    std::vector<query_ring> rings;
    for (const layer & l : layers) {
        ggml_init_params init = {};
        init.mem_size         = ggml_tensor_overhead();
        init.no_alloc         = true;
        query_ring & ring     = rings.emplace_back();
        ring.ctx.reset(ggml_init(init));
        ring.queries = ggml_new_tensor_2d(ring.ctx.get(), GGML_TYPE_F32, l.queries->ne[0], l.queries->ne[1]);
        ring.buf     = allocate_tensors(ring.ctx.get(), l.buft);
        if (!ring.buf) {
            throw error(CRITICALKV_ERR_MEMORY, "no memory for the queries of a look ahead");
        }
    }
    return rings;
}

// Graphs that are built from now on save their queries to the other rings.
void store::swap_rings(std::vector<query_ring> & rings) noexcept {
    for (size_t i = 0; i < layers.size(); ++i) {
        std::swap(layers[i].queries, rings[i].queries);
    }
}

// The tokens take free slots for a moment; those, recurrent states and the rings of queries are as before in the end.
// In a sliding window they may take slots of entries that no later token sees; those are gone.
void store::run_peek(llama_context & lctx, const request & what) {
    const int32_t  n       = (int32_t) what.tokens.size();
    const auto     batches = make_batches(lctx, what.tokens.data(), n, what.first);
    slots_snapshot slots   = take_snapshot();
    const auto     states  = read_states();
    auto           before  = query_pos;
    observers      seen;
    seen.rings = allocate_rings(layers);
    for (int32_t i = 0; i < n; ++i) {
        seen.pos.push_back(what.first + i);
    }
    const auto restore = [&] {
        // what cannot fail comes first: the layers must not be left with rings that end here
        swap_rings(seen.rings);
        query_pos.swap(before);
        forget_overwritten(slots, what.first);
        rewind(slots);
        write_states(states);
    };
    swap_rings(seen.rings);
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
    } catch (...) {
        restore();
        throw;
    }
    restore();
    seen_by = std::move(seen);
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
