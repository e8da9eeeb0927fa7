// The store's part of a state blob: a header, the kept positions, the saved queries.
//
// It stands before the cache's own part, so that a blob from another model, with other parameters, or from a context
// without a store is refused before anything in the cache has changed.
//
// Ragged rows are written here as well, head by head; the cache's own part, which knows one layout only, then has cells but
// no rows. (What it reads would reach memory only after the state is in force.)

#include "criticalkv-error.h"
#include "criticalkv-params.h"
#include "criticalkv-store.h"
#include "llama-context.h"
#include "llama-io.h"
#include "llama-kv-cache-iswa.h"
#include "llama-kv-cells.h"

#include <algorithm>
#include <cstring>

namespace criticalkv {

static constexpr uint32_t STATE_MAGIC   = 0x31564B43;  // "CKV1"
static constexpr uint32_t STATE_VERSION = 4;

[[noreturn]] static void reject_state(const std::string & why) {
    set_last_error("the state cannot be loaded: " + why);
    throw error(CRITICALKV_ERR_STATE, "the state cannot be loaded: " + why);
}

state_header store::make_header() const {
    state_header h;
    std::memset(&h, 0, sizeof(h));  // padding is written and compared too, and params.measure, which changes nothing
    h.magic             = STATE_MAGIC;
    h.version           = STATE_VERSION;
    h.fingerprint       = fingerprint();
    h.params.budget     = params.budget;
    h.params.slack      = params.slack;
    h.params.window     = params.window;
    h.params.sinks      = params.sinks;
    h.params.pool       = params.pool;
    h.params.score      = params.score;
    h.params.aggregate  = params.aggregate;
    h.params.value      = params.value;
    h.params.norm       = params.norm;
    h.params.heads      = params.heads;
    h.params.layers     = params.layers;
    h.params.alpha      = params.alpha;
    h.params.eps        = params.eps;
    h.params.seed       = params.seed;
    h.params.head_floor = params.head_floor;
    h.type_k            = layers[0].k->type;
    h.type_v            = layers[0].v->type;
    h.n_layer           = (int32_t) layers.size();
    h.evicted           = evicted;
    h.evicted_at        = evicted_at;
    h.tail_start        = tail_start;
    h.budget            = budget;
    h.n_entries         = n_entries();
    h.n_slots           = n_used();
    h.n_positions       = n_positions();
    h.rotated           = (cache.attn_rot_k ? 1 : 0) + (cache.attn_rot_v ? 2 : 0);
    if (auto * iswa = dynamic_cast<llama_kv_cache_iswa *>(owner.get_memory())) {
        h.n_cells_swa = (int32_t) iswa->get_swa()->get_size();
    }
    return h;
}

void store::state_write(llama_io_write_i & io) const {
    if (reading) {
        throw error(CRITICALKV_ERR_STATE, "a prompt is being read");
    }
    if ((int64_t) cells().used_max_p1() > capacity()) {
        throw error(CRITICALKV_ERR_STATE, "the last decode failed; clear the cache");
    }
    const state_header h = make_header();
    io.write(&h, sizeof(h));
    io.write(query_pos.data(), query_pos.size() * sizeof(int32_t));
    for (const layer & l : layers) {
        for (const auto & head : l.kept) {
            const int32_t n = (int32_t) head.size();
            io.write(&n, sizeof(n));
            if (n > 0) {
                io.write(head.data(), head.size() * sizeof(int32_t));
            }
        }
        io.write_tensor(l.queries, 0, ggml_nbytes(l.queries));
        for (int32_t head = 0; l.rows.is_ragged() && head < l.info.n_head_kv; ++head) {
            for (ggml_tensor * t : { l.rows.k, l.rows.v }) {
                io.write_tensor(t, l.rows.first_row(head) * t->nb[1], entries_of(l, head) * t->nb[1]);
            }
        }
    }
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

static void check_header(const state_header & got, const state_header & want, int32_t n_cells) {
    if (got.magic != want.magic || got.version != want.version) {
        reject_state("it was not saved by a context with a budget, or by another version");
    }
    if (got.fingerprint != want.fingerprint || got.n_layer != want.n_layer) {
        reject_state("it was saved by another model");
    }
    if (!same_policy(got.params, want.params, got.evicted != 0)) {
        reject_state("it was saved with another policy");
    }
    if (got.type_k != want.type_k || got.type_v != want.type_v) {
        reject_state("it was saved with another cache type (type_k, type_v)");
    }
    if (got.rotated != want.rotated) {
        reject_state("it was saved with another rotation of the cache (LLAMA_ATTN_ROT_DISABLE)");
    }
    if (got.n_cells_swa != want.n_cells_swa) {
        reject_state("it was saved with another n_ctx or n_ubatch, and its sliding-window layers do not fit");
    }
    if (got.n_entries < 0 || got.n_entries > n_cells) {
        reject_state("it holds " + std::to_string(got.n_entries) + " entries, this cache has room for " +
                     std::to_string(n_cells));
    }
    const bool ragged = got.evicted != 0 && !is_uniform(want.params);
    if (got.n_slots < 0 || (ragged ? got.n_slots > got.n_entries : got.n_slots != got.n_entries)) {
        reject_state("its numbers contradict each other");
    }
    const bool possible = got.n_positions >= got.n_entries && got.tail_start >= 0 && got.evicted_at >= got.tail_start &&
                          got.tail_start <= got.n_positions && (got.evicted == 0 || got.evicted == 1);
    if (!possible || (got.evicted == 0 && (got.tail_start != 0 || got.n_positions != got.n_entries))) {
        reject_state("its numbers contradict each other");
    }
}

static std::vector<int32_t> read_positions(llama_io_read_i & io, const state_header & h, int32_t n_cells) {
    int32_t n = 0;
    io.read(&n, sizeof(n));
    if (n < 0 || n > std::min(h.n_positions, n_cells)) {
        reject_state("a list of positions has an impossible length");
    }
    std::vector<int32_t> pos(n);
    if (n > 0) {
        io.read(pos.data(), pos.size() * sizeof(int32_t));
    }
    for (int32_t i = 0; i < n; ++i) {
        if (pos[i] < (i == 0 ? 0 : pos[i - 1] + 1) || pos[i] >= h.n_positions) {
            reject_state("positions are not ascending, or beyond the last");
        }
    }
    return pos;
}

static int64_t count_below(const std::vector<int32_t> & pos, int32_t end) {
    return std::lower_bound(pos.begin(), pos.end(), end) - pos.begin();
}

void store::check_loaded(const loaded_state & state) const {
    const state_header & h = state.header;
    for (int32_t i = 0; i < ring(); ++i) {
        const int32_t pos = state.query_pos[i];
        if (pos != -1 && (pos < 0 || pos % ring() != i || pos >= h.n_positions)) {
            reject_state("saved queries are out of place");
        }
    }
    const std::vector<int32_t> & first = state.kept[0][0];
    if (first.empty() != (h.evicted == 0)) {
        reject_state("kept positions are missing or too many");
    }
    // what came after the last eviction follows the kept positions without a gap
    const bool    ragged  = h.evicted != 0 && is_ragged();
    const int64_t n_below = count_below(first, h.tail_start);
    const int64_t n_kept  = (int64_t) first.size() - (ragged ? n_below - 1 : 0);  // in slots
    const int64_t n_after = h.n_slots - n_kept;
    if (n_after < 0 || (h.evicted != 0 && first.back() + 1 + n_after != h.n_positions)) {
        reject_state("its numbers contradict each other");
    }
    int64_t total   = 0;
    int64_t n_heads = 0;
    for (const auto & heads : state.kept) {
        n_heads += (int64_t) heads.size();
        for (const auto & head : heads) {
            const int64_t below = count_below(head, h.tail_start);
            const bool    same  = (ragged ? below > 0 : below == n_below) &&
                                  std::equal(first.begin() + n_below, first.end(), head.begin() + below, head.end());
            if (!same) {
                reject_state("its heads do not hold the same tail");
            }
            total += h.n_slots + (ragged ? below - 1 : 0);
        }
    }
    if (total / n_heads != h.n_entries) {
        reject_state("its heads do not hold as many entries as it says");
    }
}

// The rows of a state in memory of their own, which state_commit puts in force.
kv_rows store::read_ragged(llama_io_read_i & io, const layer & l, const loaded_state & state) const {
    const state_header & h = state.header;
    std::vector<int64_t> base;
    for (const auto & head : state.kept.back()) {
        base.push_back(std::max<int64_t>(count_below(head, h.tail_start) - 1, 0));
    }
    kv_rows rows = allocate_rows(l, padded(h.n_slots), std::move(base));
    for (int32_t head = 0; head < l.info.n_head_kv; ++head) {
        for (ggml_tensor * t : { rows.k, rows.v }) {
            std::vector<uint8_t> bytes((rows.base[head] + h.n_slots) * t->nb[1]);
            io.read(bytes.data(), bytes.size());
            ggml_backend_tensor_set(t, bytes.data(), rows.first_row(head) * t->nb[1], bytes.size());
        }
    }
    return rows;
}

void store::state_read(llama_io_read_i & io) {
    if (reading) {  // the layers do not have room for the same entries
        reject_state("a prompt is being read");
    }
    owner.synchronize();
    loaded.reset();
    auto state = std::make_unique<loaded_state>();
    io.read(&state->header, sizeof(state->header));
    check_header(state->header, make_header(), (int32_t) cells().size());
    state->query_pos.resize(ring());
    io.read(state->query_pos.data(), state->query_pos.size() * sizeof(int32_t));
    for (const layer & l : layers) {
        state->kept.emplace_back();
        for (size_t head = 0; head < l.kept.size(); ++head) {
            state->kept.back().push_back(read_positions(io, state->header, (int32_t) cells().size()));
        }
        state->queries.emplace_back(ggml_nelements(l.queries));
        io.read(state->queries.back().data(), ggml_nbytes(l.queries));
        if (is_ragged() && state->header.evicted != 0) {
            state->rows.push_back(read_ragged(io, l, *state));
        }
    }
    check_loaded(*state);
    const int64_t needed = padded(state->header.n_slots);
    if (state->rows.empty() && capacity() < needed) {
        resize(needed);
    }
    int64_t bytes = bytes_allocated();
    for (const kv_rows & rows : state->rows) {
        bytes += rows.bytes();
    }
    note_allocated(bytes);
    loaded = std::move(state);
}

void store::state_abort() {
    loaded.reset();
}

bool store::has_ragged_rows() const {
    return layers[0].rows.is_ragged();
}

bool store::loads_ragged_rows() const {
    return loaded && !loaded->rows.empty();
}

void store::state_check_cells(uint32_t n_cells) const {
    if (!loaded || (int64_t) n_cells != loaded->header.n_slots) {
        reject_state("the cache in it is not the one that its positions belong to");
    }
}

void store::state_commit() {
    const std::unique_ptr<loaded_state> state = std::move(loaded);
    if (state->header.n_slots == 0) {
        clear_cache();  // restoring one empty sequence leaves the cells alone
        return;
    }
    if (n_used() != state->header.n_slots || n_positions() != state->header.n_positions) {
        clear_cache();
        reject_state("the cache in it is not the one that its positions belong to");
    }
    evicted    = state->header.evicted != 0;
    evicted_at = state->header.evicted_at;
    tail_start = state->header.tail_start;
    budget     = state->header.budget;
    query_pos  = state->query_pos;
    measured.clear();
    for (size_t i = 0; i < layers.size(); ++i) {
        layers[i].kept = state->kept[i];
        if (!state->rows.empty()) {
            adopt_rows(layers[i], std::move(state->rows[i]));
            memory_version += 1;
        }
        ggml_backend_tensor_set(layers[i].queries, state->queries[i].data(), 0, ggml_nbytes(layers[i].queries));
    }
}

}  // namespace criticalkv
