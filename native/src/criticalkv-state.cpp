// The store's part of a state blob: a header, the kept positions, the saved queries.
//
// It stands before the cache's own part, so that a blob from another model, with other parameters, or from a context
// without a store is refused before anything in the cache has changed.

#include "criticalkv-error.h"
#include "criticalkv-store.h"
#include "llama-io.h"
#include "llama-kv-cells.h"

#include <cstring>

namespace criticalkv {

static constexpr uint32_t STATE_MAGIC   = 0x31564B43;  // "CKV1"
static constexpr uint32_t STATE_VERSION = 1;

struct state_header {
    uint32_t          magic;
    uint32_t          version;
    uint64_t          fingerprint;  // of the model
    criticalkv_params params;       // see same_policy
    int32_t           n_layer;
    int32_t           evicted;
    int32_t           tail_start;
    int32_t           budget;  // in force at the last eviction
};

static state_header make_header(uint64_t fingerprint, const criticalkv_params & params, size_t n_layer) {
    state_header h;
    std::memset(&h, 0, sizeof(h));  // padding is compared too
    h.magic       = STATE_MAGIC;
    h.version     = STATE_VERSION;
    h.fingerprint = fingerprint;
    h.n_layer     = (int32_t) n_layer;

    h.params.budget    = params.budget;
    h.params.slack     = params.slack;
    h.params.window    = params.window;
    h.params.sinks     = params.sinks;
    h.params.pool      = params.pool;
    h.params.score     = params.score;
    h.params.aggregate = params.aggregate;
    h.params.value     = params.value;
    h.params.norm      = params.norm;
    h.params.alpha     = params.alpha;
    h.params.eps       = params.eps;
    h.params.seed      = params.seed;
    return h;
}

static void reject_state(const std::string & why) {
    set_last_error("the state cannot be loaded: " + why);
    throw error(CRITICALKV_ERR_STATE, "the state cannot be loaded: " + why);
}

void store::state_write(llama_io_write_i & io) const {
    state_header h = make_header(fingerprint(), params, layers.size());
    h.evicted      = evicted;
    h.tail_start   = tail_start;
    h.budget       = budget;
    io.write(&h, sizeof(h));
    io.write(query_pos.data(), query_pos.size() * sizeof(int32_t));
    for (const layer & l : layers) {
        for (const auto & head : l.kept) {
            const int32_t n = (int32_t) head.size();
            io.write(&n, sizeof(n));
            io.write(head.data(), head.size() * sizeof(int32_t));
        }
        io.write_tensor(l.queries, 0, ggml_nbytes(l.queries));
    }
}

static std::vector<int32_t> read_positions(llama_io_read_i & io, int32_t n_max) {
    int32_t n = 0;
    io.read(&n, sizeof(n));
    if (n < 0 || n > n_max) {
        reject_state("a list of positions has an impossible length");
    }
    std::vector<int32_t> pos(n);
    io.read(pos.data(), pos.size() * sizeof(int32_t));
    for (int32_t i = 0; i < n; ++i) {
        if (pos[i] < 0 || (i > 0 && pos[i] <= pos[i - 1])) {
            reject_state("positions are not ascending");
        }
    }
    return pos;
}

// As long as nothing was evicted, only the number of saved queries depends on the policy.
static bool same_policy(const criticalkv_params & got, criticalkv_params want, bool evicted) {
    if (!evicted) {
        return got.window == want.window;
    }
    want.budget = got.budget;
    want.slack  = got.slack;
    return std::memcmp(&got, &want, sizeof(got)) == 0;
}

void store::state_read(llama_io_read_i & io) {
    state_header got;
    io.read(&got, sizeof(got));
    state_header want = make_header(fingerprint(), params, layers.size());
    if (got.magic != want.magic || got.version != want.version) {
        reject_state("it was not saved by a context with a budget, or by another version");
    }
    if (got.fingerprint != want.fingerprint || got.n_layer != want.n_layer) {
        reject_state("it was saved by another model");
    }
    if (!same_policy(got.params, want.params, got.evicted != 0)) {
        reject_state("it was saved with another policy");
    }
    auto state        = std::make_unique<loaded_state>();
    state->evicted    = got.evicted;
    state->tail_start = got.tail_start;
    state->budget     = got.budget;
    state->query_pos.resize(params.window);
    io.read(state->query_pos.data(), state->query_pos.size() * sizeof(int32_t));
    for (int32_t i = 0; i < params.window; ++i) {
        const int32_t pos = state->query_pos[i];
        if (pos != -1 && (pos < 0 || pos % params.window != i)) {
            reject_state("saved queries are out of place");
        }
    }
    const int32_t n_max = (int32_t) cells().size();
    size_t        n     = 0;
    for (const layer & l : layers) {
        state->kept.emplace_back();
        for (size_t head = 0; head < l.kept.size(); ++head) {
            state->kept.back().push_back(read_positions(io, n_max));
            n = state->kept[0][0].size();
            if (state->kept.back().back().size() != n || (n > 0) != (got.evicted != 0)) {
                reject_state("its heads hold different numbers of entries");
            }
        }
        state->queries.emplace_back(ggml_nelements(l.queries));
        io.read(state->queries.back().data(), ggml_nbytes(l.queries));
    }
    loaded = std::move(state);
}

void store::state_commit() {
    const std::unique_ptr<loaded_state> state = std::move(loaded);
    if (!state) {
        return;
    }
    if ((int32_t) state->kept[0][0].size() > n_entries()) {
        clear_cache();
        reject_state("it holds fewer entries than positions");
    }
    evicted    = state->evicted != 0;
    tail_start = state->tail_start;
    budget     = state->budget;
    query_pos  = state->query_pos;
    for (size_t i = 0; i < layers.size(); ++i) {
        layers[i].kept = state->kept[i];
        ggml_backend_tensor_set(layers[i].queries, state->queries[i].data(), 0, ggml_nbytes(layers[i].queries));
    }
}

}  // namespace criticalkv
