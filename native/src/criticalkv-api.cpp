// The C API over a context: finds the store and turns exceptions into a status and a sentence.

#include "criticalkv-error.h"
#include "criticalkv-params.h"
#include "criticalkv-placement.h"
#include "criticalkv-selection.h"
#include "criticalkv-store.h"
#include "llama-context.h"
#include "llama-kv-cache.h"

#include <algorithm>
#include <new>

namespace criticalkv {

static thread_local std::string last_error;

void set_last_error(const std::string & text) {
    last_error = text;
}

static store & store_of(const llama_context * ctx) {
    if (ctx == nullptr) {
        throw error(CRITICALKV_ERR_ARGUMENT, "ctx is NULL");
    }
    auto * cache = evictable_cache(ctx->get_memory());
    if (cache == nullptr || !cache->kv_store) {
        throw error(CRITICALKV_ERR_STATE, "the context was created without a store (see criticalkv_prepare)");
    }
    return *cache->kv_store;
}

// Between the parts of a prefill the layers do not hold the same tokens.
static store & idle_store_of(const llama_context * ctx) {
    store & s = store_of(ctx);
    if (s.is_reading()) {
        throw error(CRITICALKV_ERR_STATE, "a prompt is being read (criticalkv_prefill)");
    }
    return s;
}

static void require_pointer(const void * p, const char * name) {
    if (p == nullptr) {
        throw error(CRITICALKV_ERR_ARGUMENT, std::string(name) + " is NULL");
    }
}

// The layer, which has that KV head.
static const layer & find_head(const store & s, int32_t il, int32_t head) {
    const layer & l = s.find_layer(il);
    if (head < 0 || head >= l.info.n_head_kv) {
        throw error(CRITICALKV_ERR_ARGUMENT,
                    "head is " + std::to_string(head) + ", allowed: 0 to " + std::to_string(l.info.n_head_kv - 1));
    }
    return l;
}

// Runs f; on an exception notes the sentence and returns its status.
template <typename F> static int guarded(F && f) {
    set_last_error("");
    try {
        f();
        return CRITICALKV_OK;
    } catch (const error & e) {
        set_last_error(e.what());
        return e.status;
    } catch (const std::bad_alloc &) {
        set_last_error("no memory on the host");
        return CRITICALKV_ERR_MEMORY;
    } catch (const std::exception & e) {
        set_last_error(e.what());
        return CRITICALKV_ERR_COMPUTE;
    }
}

}  // namespace criticalkv

using criticalkv::find_head;
using criticalkv::guarded;
using criticalkv::idle_store_of;
using criticalkv::require_pointer;
using criticalkv::store_of;

int criticalkv_check(llama_context * ctx) {
    return guarded([&] { store_of(ctx).check_layers(); });
}

int criticalkv_evict(llama_context * ctx, int32_t budget, int32_t slack) {
    return guarded([&] { store_of(ctx).evict(*ctx, budget, slack); });
}

int criticalkv_prefill_check(llama_context * ctx) {
    return guarded([&] {
        const std::string why = store_of(ctx).refuse_prefill(*ctx);
        if (!why.empty()) {
            throw criticalkv::error(CRITICALKV_ERR_UNSUPPORTED, why);
        }
    });
}

int criticalkv_prefill(llama_context * ctx, const int32_t * tokens, int32_t n, int32_t budget, int32_t slack,
                       criticalkv_progress callback, void * user) {
    return guarded([&] {
        require_pointer(tokens, "tokens");
        const auto report = [&](int32_t il, int32_t done) {
            if (callback != nullptr && !callback(il, done, user)) {
                throw criticalkv::error(CRITICALKV_ERR_ABORTED, "the prompt was aborted");
            }
        };
        store_of(ctx).read_prompt(*ctx, tokens, n, budget, slack, report);
    });
}

int criticalkv_fail_allocation(int32_t k) {
    return guarded([&] { criticalkv::fail_allocation(k); });
}

int criticalkv_watch_placement(criticalkv_placement * placement) {
    return guarded([&] { criticalkv::watch_placement(placement); });
}

int criticalkv_prefill_cancel(llama_context * ctx) {
    return guarded([&] { store_of(ctx).cancel_prompt(*ctx); });
}

int criticalkv_peek(llama_context * ctx, const int32_t * tokens, int32_t n, int32_t pos) {
    return guarded([&] {
        if (n != 0) {
            require_pointer(tokens, "tokens");
        }
        idle_store_of(ctx).peek(*ctx, tokens, n, pos);
    });
}

int criticalkv_reserve(llama_context * ctx, int64_t n) {
    return guarded([&] { idle_store_of(ctx).reserve(*ctx, n); });
}

int criticalkv_get_stats(const llama_context * ctx, criticalkv_stats * stats) {
    return guarded([&] {
        require_pointer(stats, "stats");
        *stats = store_of(ctx).stats();
    });
}

int criticalkv_get_change(const llama_context * ctx, int32_t il, double * bound, double * change) {
    return guarded([&] {
        require_pointer(bound, "bound");
        require_pointer(change, "change");
        const criticalkv::measurement m = store_of(ctx).measured_of(il);
        *bound                          = m.bound;
        *change                         = m.change;
    });
}

int criticalkv_get_layers(const llama_context * ctx, int32_t * out, int32_t capacity) {
    return guarded([&] {
        require_pointer(out, "out");
        const std::vector<int32_t> ids = store_of(ctx).layer_ids();
        std::copy_n(ids.begin(), std::clamp<int32_t>(capacity, 0, (int32_t) ids.size()), out);
    });
}

int criticalkv_get_layer(const llama_context * ctx, int32_t il, criticalkv_layer_info * info) {
    return guarded([&] {
        require_pointer(info, "info");
        *info = store_of(ctx).find_layer(il).info;
    });
}

int32_t criticalkv_positions(const llama_context * ctx, int32_t il, int32_t head, int32_t * out, int32_t capacity) {
    int32_t   n      = 0;
    const int status = guarded([&] {
        const criticalkv::store & s = idle_store_of(ctx);
        const criticalkv::layer & l = find_head(s, il, head);
        if (capacity > 0) {
            require_pointer(out, "out");
        }
        s.check_cells();
        const std::vector<int32_t> pos = s.positions(l, head);
        std::copy_n(pos.begin(), std::clamp<int32_t>(capacity, 0, (int32_t) pos.size()), out);
        n = (int32_t) pos.size();
    });
    return status == CRITICALKV_OK ? n : -status;
}

int32_t criticalkv_entries(const llama_context * ctx, int32_t il, int32_t head) {
    int32_t   n      = 0;
    const int status = guarded([&] {
        const criticalkv::store & s = store_of(ctx);
        n                           = s.entries_of(find_head(s, il, head), head);
    });
    return status == CRITICALKV_OK ? n : -status;
}

int criticalkv_scores(llama_context * ctx, int32_t il, float * attn, float * norm, size_t count) {
    return guarded([&] {
        require_pointer(attn, "attn");
        require_pointer(norm, "norm");
        const criticalkv::layer_scores s = idle_store_of(ctx).scores(*ctx, il);
        if (count != s.attn.size()) {
            throw criticalkv::error(CRITICALKV_ERR_ARGUMENT,
                                    "count is " + std::to_string(count) + ", needed: " + std::to_string(s.attn.size()));
        }
        std::copy(s.attn.begin(), s.attn.end(), attn);
        std::copy(s.norm.begin(), s.norm.end(), norm);
    });
}

size_t criticalkv_read(llama_context * ctx, int32_t which, int32_t il, float * out, size_t count) {
    size_t needed = 0;
    guarded([&] {
        const std::vector<float> data = idle_store_of(ctx).read(*ctx, which, il);
        if (out != nullptr && count >= data.size()) {
            std::copy(data.begin(), data.end(), out);
        }
        needed = data.size();
    });
    return needed;
}

int32_t criticalkv_select(const criticalkv_params * params, int32_t budget, int32_t il, int32_t head, int32_t n,
                          const int32_t * pos, const float * attn, const float * norm, int32_t * out) {
    int32_t   kept   = -1;
    const int status = guarded([&] {
        require_pointer(params, "params");
        require_pointer(pos, "pos");
        require_pointer(out, "out");
        criticalkv::check_params(*params);
        if (criticalkv::reads_cache(*params)) {
            require_pointer(attn, "attn");
        }
        if (params->value != CRITICALKV_VALUE_NONE) {
            require_pointer(norm, "norm");
        }
        const std::vector<int32_t> idx = criticalkv::select_entries(*params, budget, { il, head, n, pos, attn, norm });
        std::copy(idx.begin(), idx.end(), out);
        kept = (int32_t) idx.size();
    });
    return status == CRITICALKV_OK ? kept : -1;
}

int criticalkv_share(const criticalkv_params * params, int32_t budget, int32_t il, int32_t n_head_kv, const int32_t * n,
                     const int32_t * pos, const float * attn, int32_t * out) {
    return guarded([&] {
        require_pointer(params, "params");
        require_pointer(n, "n");
        require_pointer(pos, "pos");
        require_pointer(out, "out");
        criticalkv::check_params(*params);
        if (criticalkv::reads_cache(*params)) {
            require_pointer(attn, "attn");
        }
        if (budget < criticalkv::least_budget(*params)) {
            throw criticalkv::error(CRITICALKV_ERR_ARGUMENT,
                                    "budget is " + std::to_string(budget) + ", allowed: at least window + sinks + 1");
        }
        std::vector<criticalkv::head_entries> heads;
        for (int32_t head = 0; head < n_head_kv; ++head) {
            if (n[head] < 0) {
                throw criticalkv::error(CRITICALKV_ERR_ARGUMENT,
                                        "n of a head is " + std::to_string(n[head]) + ", allowed: 0 or more");
            }
            heads.push_back({ il, head, n[head], pos, attn, nullptr });
            pos += n[head];
            attn = attn == nullptr ? nullptr : attn + std::max(n[head] - params->window, 0);
        }
        const std::vector<int32_t> budgets = criticalkv::share_budget(*params, budget, heads);
        std::copy(budgets.begin(), budgets.end(), out);
    });
}

int criticalkv_share_layers(const criticalkv_params * params, int32_t budget, int32_t n_layers, const int32_t * n,
                            int32_t * out) {
    return guarded([&] {
        require_pointer(params, "params");
        require_pointer(n, "n");
        require_pointer(out, "out");
        criticalkv::check_params(*params);
        const auto budgets = criticalkv::share_over_layers(*params, budget, { n, n + std::max(n_layers, 0) });
        std::copy(budgets.begin(), budgets.end(), out);
    });
}

uint64_t criticalkv_model_fingerprint(const llama_context * ctx) {
    uint64_t h = 0;
    guarded([&] { h = store_of(ctx).fingerprint(); });
    return h;
}

const char * criticalkv_last_error(void) {
    return criticalkv::last_error.c_str();
}
