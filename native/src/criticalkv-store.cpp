#include "criticalkv-store.h"

#include "criticalkv-error.h"
#include "criticalkv-params.h"
#include "criticalkv-selection.h"
#include "llama-context.h"
#include "llama-impl.h"
#include "llama-kv-cache.h"
#include "llama-model.h"

#include <algorithm>
#include <map>
#include <numeric>

namespace criticalkv {

// ---- creation --------------------------------------------------------------------------------------------------------

void store::attach(llama_memory_i * memory, const llama_model & model, const llama_cparams & cparams,
                   llama_context & owner) {
    const criticalkv_params * params = take_prepared_params();
    if (params == nullptr) {
        return;
    }
    try {
        if (const char * why = refuse_memory(memory, model, cparams)) {
            throw error(CRITICALKV_ERR_UNSUPPORTED, std::string(why) + " [" + model.arch_name() + "]");
        }
        llama_kv_cache & cache = *evictable_cache(memory);
        cache.kv_store         = std::make_shared<store>(cache, model, cparams, *params, owner);
    } catch (const error & e) {
        set_last_error(e.what());
        throw;
    }
}

store::store(llama_kv_cache & cache, const llama_model & model, const llama_cparams & cparams,
             const criticalkv_params & params, llama_context & owner) :
    cache(cache), model(model), owner(owner), params(params), budget(params.budget), slack(params.slack) {
    query_pos.assign(ring(), -1);
    for (const auto & from : cache.layers) {
        layer l    = {};
        l.il       = (int32_t) from.il;
        l.k        = from.k;
        l.v        = from.v;
        l.k_stream = from.k_stream[0];
        l.v_stream = from.v_stream[0];
        l.buft =
            cparams.offload_kqv ? ggml_backend_dev_buffer_type(model.dev_layer(l.il)) : ggml_backend_cpu_buffer_type();
        l.info.n_head    = (int32_t) model.hparams.n_head(from.il);
        l.info.n_head_kv = (int32_t) model.hparams.n_head_kv(from.il);
        l.info.n_embd_k  = (int32_t) model.hparams.n_embd_head_k(from.il);
        l.info.n_embd_v  = (int32_t) model.hparams.n_embd_head_v(from.il);
        l.kept.resize(l.info.n_head_kv);
        if (cache.attn_rot_v) {
            l.v_rotation = &cache.attn_rot_hadamard.at(V_ROTATION);
        }
        if (const char * why = refuse_layer(l)) {
            throw error(CRITICALKV_ERR_UNSUPPORTED, why);
        }
        layers.push_back(std::move(l));
    }
    if (layers.empty()) {
        throw error(CRITICALKV_ERR_UNSUPPORTED, "every layer has a sliding window, which already bounds the cache");
    }
    if (cache.map_layer_ids.size() != cache.layers.size() || cache.other != nullptr) {
        throw error(CRITICALKV_ERR_UNSUPPORTED, "models whose layers share a cache are not supported");
    }
    allocate();
    resize(padded(1));
}

void store::allocate() {
    std::map<ggml_backend_buffer_type_t, ggml_context *> by_buft;
    const bool with_norms = params.value == CRITICALKV_VALUE_CRITICAL || params.measure != 0;
    const bool with_gram  = with_norms && params.norm != CRITICALKV_NORM_L1;
    for (layer & l : layers) {
        if (by_buft.find(l.buft) == by_buft.end()) {
            ggml_init_params init = {};
            init.mem_size         = ggml_tensor_overhead() * 2 * layers.size();
            init.no_alloc         = true;
            buffers.emplace_back(ggml_context_ptr(ggml_init(init)), nullptr);
            by_buft[l.buft] = buffers.back().first.get();
        }
        ggml_context * ctx = by_buft[l.buft];
        l.queries          = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, l.info.n_embd_k * l.info.n_head, ring());
        ggml_format_name(l.queries, "criticalkv_queries_l%d", l.il);
        if (with_gram) {
            const int64_t n_gram = params.norm == CRITICALKV_NORM_GRAM ? l.info.n_head_kv : l.info.n_head;
            l.gram               = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, l.info.n_embd_v, l.info.n_embd_v, n_gram);
            ggml_format_name(l.gram, "criticalkv_gram_l%d", l.il);
        }
    }
    for (auto & [ctx, buf] : buffers) {
        for (const auto & [buft, of_buft] : by_buft) {
            if (of_buft == ctx.get()) {
                buf.reset(ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), buft));
            }
        }
        if (!buf) {
            throw error(CRITICALKV_ERR_MEMORY, "no memory for the saved queries");
        }
        ggml_backend_buffer_clear(buf.get(), 0);
    }
}

void store::check_layers() const {
    for (const layer & l : layers) {
        const std::string why = !l.captured ? "its attention is of an unsupported kind" : l.refused;
        if (!why.empty()) {
            throw error(CRITICALKV_ERR_UNSUPPORTED, "layer " + std::to_string(l.il) + " cannot be evicted: " + why +
                                                        " [" + model.arch_name() + "]");
        }
    }
}

// ---- what the cache holds --------------------------------------------------------------------------------------------

llama_kv_cells & store::cells() {
    return cache.v_cells[0];
}

const llama_kv_cells & store::cells() const {
    return cache.v_cells[0];
}

int32_t store::n_used() const {
    return (int32_t) cells().get_used();
}

bool store::is_ragged() const {
    return !criticalkv::is_uniform(params);
}

int32_t store::entries_of(const layer & l, int32_t head) const {
    const size_t i = (size_t) (&l - layers.data());
    if (!reading || reading->window.layer == l.il) {
        return (int32_t) l.rows.base_of(head) + n_used();
    }
    if (i < reading->kept.size()) {
        return (int32_t) reading->kept[i][head].size();
    }
    return (int32_t) l.rows.base_of(head) + reading->slots;
}

int32_t store::entries_of(const layer & l) const {
    int32_t n = 0;
    for (int32_t head = 0; head < l.info.n_head_kv; ++head) {
        n += entries_of(l, head);
    }
    return n;
}

// While a prompt is read, as if all layers had seen of it what the cells have.
int32_t store::n_entries() const {
    if (reading) {
        return reading->entries + n_positions() - reading->first;
    }
    int64_t n       = 0;
    int64_t n_heads = 0;
    for (const layer & l : layers) {
        n += entries_of(l);
        n_heads += l.info.n_head_kv;
    }
    return (int32_t) (n / n_heads);
}

// Of layers that have seen n_more tokens more; entries per head, where heads differ their mean.
std::vector<int32_t> store::budgets_of_layers(int32_t budget, int32_t n_more) const {
    std::vector<int32_t> n;
    for (const layer & l : layers) {
        n.push_back(entries_of(l) / l.info.n_head_kv + n_more);
    }
    return share_over_layers(params, budget, n);
}

// Once entries are evicted now.
int32_t store::next_tail_start() const {
    return std::max(tail_start, n_positions() - params.window);
}

// Entries before the slots of ragged rows: those before the tail, but for the last of them, whose slot stands for the
// sequence up to the tail.
std::vector<int64_t> store::bases_of(const layer & l, const head_lists & keep) const {
    std::vector<int64_t> bases;
    for (int32_t head = 0; is_ragged() && head < l.info.n_head_kv; ++head) {
        const std::vector<int32_t> pos   = positions(l, head);
        const auto                 below = std::partition_point(keep[head].begin(), keep[head].end(),
                                                                [&](int32_t i) { return pos[i] < next_tail_start(); });
        bases.push_back(below - keep[head].begin() - 1);
    }
    return bases;
}

int32_t store::n_positions() const {
    return cells().seq_pos_max(0) + 1;
}

const layer & store::find_layer(int32_t il) const {
    for (const layer & l : layers) {
        if (l.il == il) {
            return l;
        }
    }
    throw error(CRITICALKV_ERR_ARGUMENT, "layer " + std::to_string(il) + " has no cache");
}

std::vector<int32_t> store::layer_ids() const {
    std::vector<int32_t> ids;
    for (const layer & l : layers) {
        ids.push_back(l.il);
    }
    return ids;
}

std::vector<int32_t> store::positions(const layer & l, int32_t head) const {
    std::vector<int32_t> pos  = l.kept[head];
    const int32_t        base = (int32_t) l.rows.base_of(head);
    for (int32_t i = (int32_t) pos.size() - base; i < n_used(); ++i) {
        pos.push_back(cells().pos_get(i));
    }
    return pos;
}

// Slots are taken in order and given back from the end, so they are dense and ascending, unless a caller of the C API cut
// a hole into a cache that was never evicted.
void store::check_cells() const {
    const int32_t n  = n_used();
    bool          ok = (int32_t) cells().used_max_p1() == n && n <= capacity();
    for (int32_t i = 1; ok && i < n; ++i) {
        ok = cells().pos_get(i - 1) < cells().pos_get(i);
    }
    if (!ok) {
        throw error(CRITICALKV_ERR_STATE,
                    "the cache has holes or is not in the order of positions, or a decode failed; clear it");
    }
}

// Of all heads of a layer.
static int64_t bytes_per_entry(const layer & l) {
    return (int64_t) (ggml_row_size(l.k->type, l.k->ne[0]) + ggml_row_size(l.v->type, l.v->ne[0]));
}

int64_t store::bytes_entries() const {
    int64_t bytes = 0;
    for (const layer & l : layers) {
        bytes += bytes_per_entry(l) / l.info.n_head_kv * entries_of(l);
    }
    return bytes;
}

void store::note_entries() {
    entries_peak       = std::max(entries_peak, n_entries());
    bytes_entries_peak = std::max(bytes_entries_peak, bytes_entries());
}

criticalkv_stats store::stats() const {
    criticalkv_stats s = counters;
    s.budget           = budget;
    s.n_layer          = (int32_t) layers.size();
    s.evicted          = evicted;
    s.ragged           = evicted && is_ragged();
    s.evicted_at       = evicted_at;
    s.n_queries        = (int32_t) window_queries().size();
    s.n_tokens         = n_positions();
    s.n_entries        = n_entries();
    s.n_entries_peak   = std::max(entries_peak, n_entries());
    for (const layer & l : layers) {
        s.bytes_per_token += bytes_per_entry(l);
    }
    s.bytes_allocated      = bytes_allocated();
    s.bytes_allocated_peak = bytes_peak;
    s.bytes_hidden_peak    = bytes_hidden_peak;
    s.bytes_entries        = bytes_entries();
    s.bytes_entries_peak   = std::max(bytes_entries_peak, s.bytes_entries);
    for (const auto & [buft, bytes] : owner.get_memory()->memory_breakdown()) {
        s.bytes_other += (int64_t) bytes;
    }
    for (const auto & [ctx, buf] : buffers) {
        s.bytes_store += (int64_t) ggml_backend_buffer_get_size(buf.get());
    }
    for (const query_ring & r : seen_by.rings) {
        s.bytes_store += (int64_t) ggml_backend_buffer_get_size(r.buf.get());
    }
    return s;
}

measurement store::measured_of(int32_t il) const {
    const size_t i = (size_t) (&find_layer(il) - layers.data());
    return i < measured.size() ? measured[i] : measurement{};
}

// ---- clearing and cutting back ---------------------------------------------------------------------------------------

void store::on_clear(bool data) {
    if (reading) {
        owner.synchronize();  // a graph may still read the hidden states
        memory_version += 1;  // graphs of a part of the model
        reading.reset();
    }
    seen_by = {};
    measured.clear();
    std::fill(query_pos.begin(), query_pos.end(), -1);
    for (layer & l : layers) {
        for (auto & head : l.kept) {
            head.clear();
        }
    }
    evicted            = false;
    evicted_at         = 0;
    tail_start         = 0;
    budget             = params.budget;
    slack              = params.slack;
    entries_peak       = 0;
    bytes_entries_peak = 0;
    bytes_peak         = bytes_allocated();
    bytes_hidden_peak  = 0;
    counters           = {};
    for (layer & l : layers) {
        if (l.rows.is_ragged()) {
            make_uniform(l);
            memory_version += 1;
        }
        if (data) {
            ggml_backend_buffer_clear(l.rows.buf.get(), 0);
        }
    }
}

uint32_t store::n_nodes(llama_memory_i * memory) {
    constexpr uint32_t NODES_PER_HEAD = 20;  // criticalkv-ragged.cpp
    llama_kv_cache *   cache          = evictable_cache(memory);
    uint32_t           n              = 0;
    if (cache != nullptr && cache->kv_store && cache->kv_store->is_ragged()) {
        for (const layer & l : cache->kv_store->layers) {
            n += NODES_PER_HEAD * (uint32_t) l.info.n_head_kv;
        }
    }
    return n;
}

void store::clear_cache() {
    cache.clear(false);
}

// p0, p1 within [0, end of the sequence], p0 < p1.
bool store::can_remove(int32_t p0, int32_t p1) const {
    const int32_t end = n_positions();
    return !evicted || (p0 == 0 && p1 == end) || (p0 >= tail_start && p1 == end);
}

// The token that comes next at p0 sees the n_swa - 1 positions before; what slid out of the window is gone.
bool store::can_remove(const llama_kv_cache & swa, int32_t seq_id, int32_t p0, int32_t p1) const {
    const int32_t end = n_positions();
    p0                = std::max(p0, 0);
    p1                = p1 < 0 ? end : std::min(p1, end);
    if (seq_id > 0 || p0 >= p1) {
        return true;
    }
    const bool slid = p0 > 0 && swa.seq_pos_min(0) > std::max(0, p0 - (int32_t) swa.n_swa + 1);
    return can_remove(p0, p1) && !slid;
}

bool store::on_seq_rm(int32_t seq_id, int32_t p0, int32_t p1) {
    if (seq_id > 0) {
        return true;  // there is only sequence 0
    }
    const int32_t end = n_positions();
    p0                = std::max(p0, 0);
    p1                = p1 < 0 ? end : std::min(p1, end);
    if (p0 >= p1) {
        return true;  // nothing there
    }
    if (reading ? p0 > 0 || p1 < end : !can_remove(p0, p1)) {
        return false;
    }
    if (p0 == 0 && p1 == end) {
        on_clear(false);
        return true;
    }
    for (layer & l : layers) {
        for (auto & head : l.kept) {
            head.erase(std::lower_bound(head.begin(), head.end(), p0), head.end());
        }
    }
    for (int32_t & pos : query_pos) {
        if (pos >= p0 && pos < p1) {
            pos = -1;
        }
    }
    return true;
}

bool store::refuse_operation(const char * operation) {
    set_last_error(std::string(operation) + " is not supported by a cache with a budget");
    LLAMA_LOG_ERROR("%s is not supported by a cache with a budget\n", operation);
    return true;
}

// ---- evictions -------------------------------------------------------------------------------------------------------

// The memory update that an eviction is for llama.cpp, as K-shift is one.
class update_context : public llama_memory_context_i {
  public:
    update_context(store & owner, llama_context & lctx) : owner(owner), lctx(lctx) {}

    bool next() override { return false; }

    bool apply() override { return owner.run_request(lctx); }

    const llama_ubatch & get_ubatch() const override { GGML_ABORT("an update has no ubatch"); }

    llama_memory_status get_status() const override { return LLAMA_MEMORY_STATUS_SUCCESS; }

  private:
    store &         owner;
    llama_context & lctx;
};

llama_memory_context_ptr store::init_update(llama_context * lctx, bool optimize) {
    note_entries();
    if (asked.what == request::NONE && optimize && budget > 0 && n_entries() > budget) {
        asked        = {};
        asked.what   = request::EVICT;
        asked.budget = budget;
        asked.slack  = slack;
    }
    if (asked.what == request::NONE) {
        return nullptr;
    }
    return std::make_unique<update_context>(*this, *lctx);
}

bool store::run_request(llama_context & lctx) {
    const request what = asked;
    const int64_t t0   = ggml_time_us();
    asked              = {};
    failure.clear();
    failure_status = CRITICALKV_OK;
    try {
        lctx.synchronize();  // a decode may still read what moves
        check_layers();
        check_cells();
        if (what.what == request::EVICT) {
            run_eviction(lctx, what.budget, what.slack);
        } else if (what.what == request::SCORE) {
            *what.out = compute_scores(lctx, layers[what.index]);
        } else {
            run_peek(lctx, what);
        }
    } catch (const error & e) {
        failure        = e.what();
        failure_status = e.status;
    } catch (const std::bad_alloc &) {
        failure        = "no memory on the host";
        failure_status = CRITICALKV_ERR_MEMORY;
    } catch (const std::exception & e) {
        failure        = e.what();
        failure_status = CRITICALKV_ERR_COMPUTE;
    }
    if (failure_status != CRITICALKV_OK) {
        set_last_error(failure);
    } else if (what.what == request::EVICT) {
        counters.seconds_total += (double) (ggml_time_us() - t0) * 1e-6;
    }
    return failure_status == CRITICALKV_OK;
}

// llama.cpp warns when its compute buffers are not as large as it made them, but our graphs may need more.
void store::expect_buffer_sizes(llama_context & lctx) {
    for (size_t i = 0; i < lctx.backend_ptrs.size(); ++i) {
        lctx.backend_buf_exp_size[i] = ggml_backend_sched_get_buffer_size(lctx.get_sched(), lctx.backend_ptrs[i]);
    }
}

void store::run(llama_context & lctx, const request & what) {
    lctx.synchronize();
    asked          = what;
    failure_status = CRITICALKV_OK;
    try {
        lctx.memory_update(false);
    } catch (...) {
        asked = {};
        throw;
    }
    asked = {};
    expect_buffer_sizes(lctx);
    if (failure_status != CRITICALKV_OK) {
        throw error(failure_status, failure);
    }
}

void store::evict(llama_context & lctx, int32_t new_budget, int32_t new_slack) {
    if (new_budget < least_budget(params)) {
        throw error(CRITICALKV_ERR_ARGUMENT, "budget is " + std::to_string(new_budget) + ", allowed: at least " +
                                                 std::to_string(least_budget(params)) + " (window + sinks + 1)");
    }
    if (new_slack < 0) {
        throw error(CRITICALKV_ERR_ARGUMENT, "slack is " + std::to_string(new_slack) + ", allowed: 0 or more");
    }
    new_slack = new_slack == 0 ? params.slack : new_slack;
    if (!reading && n_entries() <= new_budget) {
        budget = new_budget;
        slack  = new_slack;
        return;
    }
    const double  before = counters.seconds_total;
    const int64_t t0     = ggml_time_us();
    request       what;
    what.what   = request::EVICT;
    what.budget = new_budget;
    what.slack  = new_slack;
    run(lctx, what);
    budget                 = new_budget;
    counters.seconds_total = before + (double) (ggml_time_us() - t0) * 1e-6;  // with the new reservation of the graph
}

layer_scores store::scores(llama_context & lctx, int32_t il) {
    layer_scores out;
    request      what;
    what.what  = request::SCORE;
    what.index = (size_t) (&find_layer(il) - layers.data());
    what.out   = &out;
    run(lctx, what);
    return out;
}

// The entries of one layer with their scores, which live here.
struct scored_layer {
    layer_scores              scores;
    head_lists                pos;
    std::vector<head_entries> heads;
};

static head_lists select_heads(const criticalkv_params & params, const scored_layer & from, const int32_t * budgets) {
    head_lists keep;
    for (size_t head = 0; head < from.heads.size(); ++head) {
        keep.push_back(select_entries(params, budgets[head], from.heads[head]));
    }
    return keep;
}

scored_layer store::score_layer(llama_context & lctx, layer & l) {
    const int64_t t0 = ggml_time_us();
    scored_layer  s;
    if (reads_cache(params)) {
        s.scores = compute_scores(lctx, l);
    }
    for (int32_t head = 0; head < l.info.n_head_kv; ++head) {
        s.pos.push_back(positions(l, head));
        const float * attn = s.scores.attn.empty() ? nullptr : s.scores.attn.data() + s.scores.first[head];
        const float * norm = s.scores.norm.empty() ? nullptr : s.scores.norm.data() + s.scores.first[head];
        s.heads.push_back({ l.il, head, (int32_t) s.pos[head].size(), s.pos[head].data(), attn, norm });
    }
    counters.seconds_score += (double) (ggml_time_us() - t0) * 1e-6;
    return s;
}

head_lists store::choose_layer(llama_context & lctx, layer & l, int32_t new_budget) {
    const scored_layer s       = score_layer(lctx, l);
    const int64_t      t0      = ggml_time_us();
    const auto         budgets = share_budget(params, new_budget, s.heads);
    head_lists         keep    = select_heads(params, s, budgets.data());
    counters.seconds_select += (double) (ggml_time_us() - t0) * 1e-6;
    return keep;
}

layer_lists store::choose_layers(llama_context & lctx, int32_t new_budget) {
    layer_lists keep;
    if (params.layers != CRITICALKV_LAYERS_ADAPTIVE) {
        const std::vector<int32_t> budgets = budgets_of_layers(new_budget, 0);
        for (size_t i = 0; i < layers.size(); ++i) {
            keep.push_back(choose_layer(lctx, layers[i], budgets[i]));
        }
        return keep;
    }
    std::vector<scored_layer> scored;
    std::vector<head_entries> heads;
    for (layer & l : layers) {
        scored.push_back(score_layer(lctx, l));
        heads.insert(heads.end(), scored.back().heads.begin(), scored.back().heads.end());
    }
    const int64_t              t0      = ggml_time_us();
    const std::vector<int32_t> budgets = share_budget(params, new_budget, heads);
    const int32_t *            next    = budgets.data();
    for (const scored_layer & s : scored) {
        keep.push_back(select_heads(params, s, next));
        next += s.heads.size();
    }
    counters.seconds_select += (double) (ggml_time_us() - t0) * 1e-6;
    return keep;
}

head_lists store::positions_of(const layer & l, const head_lists & keep) const {
    head_lists kept;
    for (int32_t head = 0; head < l.info.n_head_kv; ++head) {
        std::vector<int32_t> pos;
        const auto           all = positions(l, head);
        for (const int32_t slot : keep[head]) {
            pos.push_back(all[slot]);
        }
        kept.push_back(std::move(pos));
    }
    return kept;
}

// Puts the new slots in force. A slot of the cells stands for all heads. In the tail, which every head holds in full, it
// has its true position; the slots before take stand-ins, the positions just below the tail. So all kept slots stay
// visible to every later query, and the sequence ends where it did, also after it is cut back to the tail's start.
// Without new rows the kept ones have moved already.
void store::commit(layer_lists kept, std::vector<kv_rows> rows) {
    tail_start           = next_tail_start();
    evicted              = true;
    evicted_at           = n_positions();
    const int64_t before = bytes_allocated();
    for (size_t i = 0; i < layers.size(); ++i) {
        layers[i].kept = std::move(kept[i]);
    }
    if (!rows.empty()) {
        for (size_t i = 0; i < layers.size(); ++i) {
            adopt_rows(layers[i], std::move(rows[i]));
        }
        memory_version += 1;
        return_freed_memory(before);
    }
    const std::vector<int32_t> & first   = layers[0].kept[0];
    const int32_t                base    = (int32_t) layers[0].rows.base_of(0);
    const auto                   tail    = std::lower_bound(first.begin(), first.end(), tail_start);
    const int32_t                n_below = (int32_t) (tail - first.begin()) - base;
    const int32_t                n       = (int32_t) first.size() - base;
    llama_kv_cells &             c       = cells();
    c.reset();
    for (int32_t i = 0; i < n; ++i) {
        c.pos_set(i, i < n_below ? tail_start - n_below + i : first[base + i]);
        c.seq_add(i, 0);
    }
    cache.v_heads[0] = (uint32_t) n;
}

void store::run_eviction(llama_context & lctx, int32_t new_budget, int32_t new_slack) {
    if (reading) {
        finish_prompt(lctx, new_budget, new_slack);
        return;
    }
    const layer_lists        keep = choose_layers(lctx, new_budget);
    std::vector<measurement> now;
    for (size_t i = 0; i < layers.size(); ++i) {
        now.push_back(measure_layer(lctx, layers[i], keep[i]));
    }
    const int64_t        t0       = ggml_time_us();
    const int64_t        capacity = evicted_capacity(new_budget, new_slack);
    layer_lists          kept;
    std::vector<kv_rows> rows;
    for (size_t i = 0; i < layers.size(); ++i) {
        kept.push_back(positions_of(layers[i], keep[i]));
    }
    if (is_on_host() && !is_ragged()) {
        compact_in_place(keep);  // cannot fail, and needs no memory
        commit(std::move(kept), {});
        shrink_layers(capacity);
    } else {
        rows = compact(lctx, keep, capacity);
        commit(std::move(kept), std::move(rows));
    }
    measured = std::move(now);
    counters.seconds_compact += (double) (ggml_time_us() - t0) * 1e-6;
    counters.n_evictions += 1;
    slack = new_slack;
}

// ---- read back -------------------------------------------------------------------------------------------------------

static std::vector<float> dequantize(const ggml_tensor * t, int64_t rows, int64_t first = 0) {
    const size_t         row_bytes = ggml_row_size(t->type, t->ne[0]);
    std::vector<uint8_t> raw(row_bytes * rows);
    ggml_backend_tensor_get(t, raw.data(), first * row_bytes, raw.size());
    std::vector<float> out(t->ne[0] * rows);
    if (t->type == GGML_TYPE_F32) {
        std::copy_n((const float *) raw.data(), out.size(), out.begin());
    } else {
        ggml_get_type_traits(t->type)->to_float(raw.data(), out.data(), (int64_t) out.size());
    }
    return out;
}

std::vector<float> store::read_entries(const layer & l, const ggml_tensor * rows) const {
    if (!l.rows.is_ragged()) {
        return dequantize(rows, n_used());
    }
    std::vector<float> all;
    for (int32_t head = 0; head < l.info.n_head_kv; ++head) {
        const std::vector<float> part = dequantize(rows, entries_of(l, head), l.rows.first_row(head));
        all.insert(all.end(), part.begin(), part.end());
    }
    return all;
}

std::vector<float> store::read(llama_context & lctx, int32_t which, int32_t il) const {
    lctx.synchronize();
    check_cells();
    const layer & l = find_layer(il);
    if (which == CRITICALKV_TENSOR_K || which == CRITICALKV_TENSOR_V) {
        return read_entries(l, which == CRITICALKV_TENSOR_K ? l.rows.k : l.rows.v);
    }
    if (which != CRITICALKV_TENSOR_Q) {
        throw error(CRITICALKV_ERR_ARGUMENT, "which is " + std::to_string(which) + ", allowed: 0 to 2");
    }
    const std::vector<float> rows = dequantize(l.queries, ring());
    std::vector<float>       out;
    for (const int32_t pos : window_queries()) {
        const auto row = rows.begin() + (pos % ring()) * l.queries->ne[0];
        out.insert(out.end(), row, row + l.queries->ne[0]);
    }
    return out;
}

// FNV-1a.
static void hash_bytes(uint64_t & h, const void * data, size_t n) {
    for (size_t i = 0; i < n; ++i) {
        h = (h ^ ((const uint8_t *) data)[i]) * 0x100000001B3ULL;
    }
}

uint64_t store::fingerprint() const {
    // by name and once each: their order, and copies of tied ones, depend on the devices that hold them
    std::map<std::string, const ggml_tensor *> tensors;
    for (const auto & [name, t] : model.tensors_by_name) {
        tensors.emplace(name, t);
    }
    uint64_t h = 0xCBF29CE484222325ULL;
    for (const auto & [name, t] : tensors) {
        hash_bytes(h, name.data(), name.size());
        hash_bytes(h, &t->type, sizeof(t->type));
        hash_bytes(h, t->ne, sizeof(t->ne));
        // weights in a layout of their own cannot be read back; norms and biases never have one
        if (t->type == GGML_TYPE_F32 && ggml_n_dims(t) == 1 && t->buffer != nullptr) {
            std::vector<uint8_t> bytes(std::min<size_t>(ggml_nbytes(t), 1024));
            ggml_backend_tensor_get(t, bytes.data(), 0, bytes.size());
            hash_bytes(h, bytes.data(), bytes.size());
        }
    }
    return h;
}

}  // namespace criticalkv
