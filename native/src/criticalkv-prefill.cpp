#include "criticalkv-prefill.h"

#include "criticalkv-error.h"
#include "criticalkv-selection.h"
#include "criticalkv-slots.h"
#include "criticalkv-store.h"
#include "llama-batch.h"
#include "llama-context.h"
#include "llama-kv-cache.h"
#include "llama-model.h"

#include <algorithm>

namespace criticalkv {

// ---- graphs of one layer -----------------------------------------------------------------------------------------------

llm_graph_cb store::window_callback(llama_memory_i * memory, llm_graph_result * res, llm_graph_cb cb) {
    llama_kv_cache * cache = evictable_cache(memory);
    if (cache == nullptr || !cache->kv_store || !cache->kv_store->reading) {
        return cb;
    }
    return criticalkv::window_callback(*cache->kv_store->reading, res, std::move(cb));
}

static int32_t n_layers(const llama_model & model) {
    return (int32_t) model.hparams.n_layer();
}

ggml_cgraph * store::build_graph(llama_context & lctx, llm_graph_result & res, const llama_ubatch & ubatch,
                                 const llama_memory_context_i * mctx) {
    const uint32_t n_outputs = lctx.n_outputs;
    lctx.n_outputs           = 0;
    for (uint32_t i = 0; i < ubatch.n_tokens; ++i) {
        lctx.n_outputs += ubatch.output[i] != 0 ? 1 : 0;
    }
    const llm_graph_params params = lctx.graph_params(&res, ubatch, mctx, LLM_GRAPH_TYPE_DEFAULT);
    lctx.n_outputs                = n_outputs;
    res.reset();
    try {
        model.build_graph(params);
    } catch (const window_complete &) {
    }
    return res.get_gf();
}

// Every window of the model is built once, and not run.
std::string store::examine_windows(llama_context & lctx) {
    const auto         memory   = memory_tensors();
    const uint32_t     n_tokens = std::min(lctx.get_cparams().n_ctx, lctx.get_cparams().n_ubatch);
    llm_graph_result   res(lctx.graph_max_nodes(n_tokens));
    llama_batch_allocr balloc(model.hparams.n_pos_per_embd());
    const llama_ubatch ubatch = balloc.ubatch_reserve(n_tokens, 1);
    const auto         mctx   = owner.get_memory()->init_full();
    reading                   = std::make_unique<prefill>();
    reading->examine          = true;
    reading->ctx              = make_hidden(n_tokens);
    reading->hidden           = ggml_get_first_tensor(reading->ctx.get());
    for (int32_t il = 0; il < n_layers(model); ++il) {
        reading->window      = { il, il + 1 == n_layers(model) };
        ggml_cgraph * gf     = build_graph(lctx, res, ubatch, mctx.get());
        const char *  reason = refuse_window(*reading, gf, memory);
        if (reason != nullptr) {
            return std::string(reason) + " (layer " + std::to_string(il) + ") [" + model.arch_name() + "]";
        }
    }
    return "";
}

ggml_context_ptr store::make_hidden(int64_t n) const {
    ggml_init_params init = {};
    init.mem_size         = ggml_tensor_overhead();
    init.no_alloc         = true;
    ggml_context_ptr ctx(ggml_init(init));
    if (!ctx) {
        throw error(CRITICALKV_ERR_MEMORY, "no memory on the host");
    }
    ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, model.hparams.n_embd, n);
    return ctx;
}

std::string store::refuse_prefill(llama_context & lctx) {
    if (params.layers == CRITICALKV_LAYERS_ADAPTIVE) {
        return "with adaptive layers, what one of them keeps depends on all";
    }
    if (!windows_examined) {
        try {
            windows_refused = examine_windows(lctx);
        } catch (...) {
            reading.reset();
            throw;
        }
        reading.reset();
        windows_examined = true;
    }
    return windows_refused;
}

// ---- reading a prompt --------------------------------------------------------------------------------------------------

std::vector<llama_batch_ext> make_batches(llama_context & lctx, const int32_t * tokens, int32_t n, int32_t first) {
    std::vector<llama_batch_ext> batches;
    for (int32_t i = 0; i < n; ++i) {
        if (i % (int32_t) lctx.n_batch() == 0) {
            batches.emplace_back(&lctx);
        }
        const int32_t   index = batches.back().add_token(0);
        const llama_pos pos   = first + i;
        if (!batches.back().set_token_id(index, tokens[i]) || !batches.back().set_token_pos(index, &pos)) {
            throw error(CRITICALKV_ERR_ARGUMENT, "token " + std::to_string(i) + " is " + std::to_string(tokens[i]) +
                                                     ", which is not in the vocabulary");
        }
    }
    return batches;
}

void store::run_ubatch(llama_context & lctx, llm_graph_result & res, llama_memory_context_i & mctx) {
    if (!mctx.apply()) {
        throw error(CRITICALKV_ERR_STATE, "no slots for the prompt");
    }
    const llama_ubatch & ubatch = mctx.get_ubatch();
    ggml_backend_sched_reset(lctx.get_sched());
    ggml_cgraph * gf = build_graph(lctx, res, ubatch, &mctx);
    if (!ggml_backend_sched_alloc_graph(lctx.get_sched(), gf)) {
        throw error(CRITICALKV_ERR_MEMORY, "no memory for the compute buffer of a prompt");
    }
    res.set_inputs(&ubatch);
    const ggml_status status = lctx.graph_compute(gf, ubatch.n_tokens > 1);
    ggml_backend_sched_synchronize(lctx.get_sched());
    if (status == GGML_STATUS_ABORTED) {
        throw error(CRITICALKV_ERR_ABORTED, "the prompt was aborted");
    }
    if (status != GGML_STATUS_SUCCESS) {
        throw error(CRITICALKV_ERR_COMPUTE, "a graph of the prompt failed");
    }
}

layer * store::evictable_layer(int32_t il) {
    const auto found = std::find_if(layers.begin(), layers.end(), [&](const layer & l) { return l.il == il; });
    return found == layers.end() ? nullptr : &*found;
}

// The next layer to be read, from the slots that there were before the prompt.
void store::enter_layer(int32_t il, const slots_snapshot & slots) {
    rewind(slots);
    reading->window = { il, il + 1 == n_layers(model) };
    if (layer * l = evictable_layer(il)) {
        resize_layer(*l, padded(n_used() + reading->n_tokens));
    }
}

// All of the prompt is in a layer: it keeps what its budget allows.
void store::leave_layer(llama_context & lctx, layer & l, int64_t capacity) {
    note_entries();
    const auto keep = choose_layer(lctx, l, reading->budgets[&l - layers.data()]);
    const auto now  = measure_layer(lctx, l, keep);
    const auto t0   = ggml_time_us();
    kv_rows    rows = compact_layer(lctx, l, capacity, keep, bases_of(l, keep));
    note_allocated(bytes_allocated() + rows.bytes());
    reading->kept.push_back(positions_of(l, keep));
    reading->measured.push_back(now);
    adopt_rows(l, std::move(rows));
    counters.seconds_compact += (double) (ggml_time_us() - t0) * 1e-6;
}

void store::read_layers(llama_context & lctx, const std::vector<llama_batch_ext> & batches, int64_t capacity,
                        const progress & report) {
    const uint32_t       n_ubatch = lctx.get_cparams().n_ubatch;
    const slots_snapshot slots    = take_snapshot();
    llm_graph_result     res(lctx.graph_max_nodes(std::min(lctx.get_cparams().n_ctx, n_ubatch)));
    llama_batch_allocr   balloc(model.hparams.n_pos_per_embd());
    for (int32_t il = 0; il + 1 < n_layers(model); ++il) {
        enter_layer(il, slots);
        int32_t done = 0;
        for (const llama_batch_ext & batch : batches) {
            if (!balloc.init(batch, model.vocab, false)) {
                throw error(CRITICALKV_ERR_ARGUMENT, "the tokens do not follow those in the cache");
            }
            const auto mctx = owner.get_memory()->init_batch(balloc, n_ubatch, false);
            if (!mctx || mctx->get_status() != LLAMA_MEMORY_STATUS_SUCCESS) {
                throw error(CRITICALKV_ERR_STATE, "no slots for the prompt");
            }
            do {
                run_ubatch(lctx, res, *mctx);
                done += (int32_t) mctx->get_ubatch().n_tokens;
                report(il, done);
            } while (mctx->next());
        }
        if (layer * l = evictable_layer(il)) {
            const int64_t t0 = ggml_time_us();
            leave_layer(lctx, *l, capacity);
            counters.seconds_total += (double) (ggml_time_us() - t0) * 1e-6;
        }
    }
    enter_layer(n_layers(model) - 1, slots);
    expect_buffer_sizes(lctx);
}

static std::vector<uint8_t> context_state(llama_context & lctx) {
    std::vector<uint8_t> state(llama_state_get_size(&lctx));
    if (llama_state_get_data(&lctx, state.data(), state.size()) != state.size()) {
        throw error(CRITICALKV_ERR_STATE, "the cache before the prompt could not be saved");
    }
    return state;
}

// Graphs that llama.cpp keeps for reuse are of another scheduler run, or of a window.
void store::forget_graphs(llama_context & lctx) {
    memory_version += 1;
    for (auto & res : lctx.gf_res_prev) {
        if (res) {
            res->reset();
        }
    }
    lctx.gf_res_prev_active = nullptr;
}

void store::read_prompt(llama_context & lctx, const int32_t * tokens, int32_t n, int32_t new_budget, int32_t new_slack,
                        const progress & report) {
    if (new_budget < least_budget(params)) {
        throw error(CRITICALKV_ERR_ARGUMENT, "budget is " + std::to_string(new_budget) + ", allowed: at least " +
                                                 std::to_string(least_budget(params)) + " (window + sinks + 1)");
    }
    if (n < 1 || new_slack < 0 || n_entries() + (int64_t) n > (int64_t) cells().size()) {
        throw error(CRITICALKV_ERR_ARGUMENT, "n is " + std::to_string(n) + ", slack is " + std::to_string(new_slack) +
                                                 "; allowed: tokens that fit n_ctx, and 0 or more");
    }
    if (n_entries() + n <= new_budget) {
        throw error(CRITICALKV_ERR_ARGUMENT, "the prompt fits the budget: there is nothing to evict");
    }
    new_slack = new_slack == 0 ? params.slack : new_slack;
    cancel_prompt(lctx);
    check_layers();
    check_cells();
    const std::string why = refuse_prefill(lctx);
    if (!why.empty()) {
        throw error(CRITICALKV_ERR_UNSUPPORTED, why);
    }
    const auto batches = make_batches(lctx, tokens, n, n_positions());
    lctx.synchronize();
    lctx.sched_reserve();
    auto started      = std::make_unique<prefill>();
    started->first    = n_positions();
    started->n_tokens = n;
    started->budget   = new_budget;
    started->budgets  = budgets_of_layers(new_budget, n);
    started->entries  = n_entries();
    started->slots    = n_used();
    if (n_entries() > 0) {
        started->before = context_state(lctx);
    }
    started->ctx    = make_hidden(n);
    started->hidden = ggml_get_first_tensor(started->ctx.get());
    started->buf    = allocate_tensors(started->ctx.get(), layers[0].buft);
    if (!started->buf) {
        throw error(CRITICALKV_ERR_MEMORY, "no memory for the hidden states of " + std::to_string(n) +
                                               " tokens: asked for " + std::to_string(ggml_nbytes(started->hidden)) +
                                               " bytes");
    }
    bytes_hidden_peak = std::max(bytes_hidden_peak, (int64_t) ggml_backend_buffer_get_size(started->buf.get()));
    reading           = std::move(started);
    forget_graphs(lctx);
    try {
        read_layers(lctx, batches, evicted_capacity(new_budget, new_slack), report);
    } catch (...) {
        cancel_prompt(lctx);
        throw;
    }
}

// The ordinary decode has taken the prompt through the last layer too.
void store::finish_prompt(llama_context & lctx, int32_t new_budget, int32_t new_slack) {
    if (new_budget != reading->budget || n_positions() != reading->first + reading->n_tokens) {
        throw error(CRITICALKV_ERR_STATE, "the prompt that is being read is not complete, or was for another budget");
    }
    const int64_t before = bytes_allocated() + (int64_t) ggml_backend_buffer_get_size(reading->buf.get());
    if (layer * l = evictable_layer(reading->window.layer); l != nullptr && reading->kept.size() < layers.size()) {
        leave_layer(lctx, *l, evicted_capacity(new_budget, new_slack));
    }
    layer_lists kept = std::move(reading->kept);
    measured         = std::move(reading->measured);
    reading.reset();
    commit(std::move(kept), {});
    return_freed_memory(before - bytes_allocated());
    memory_version += 1;
    counters.n_evictions += 1;
    slack = new_slack;
}

// The cache as it was before the prompt; empty if even that fails.
void store::cancel_prompt(llama_context & lctx) {
    if (!reading) {
        return;
    }
    const std::vector<uint8_t> before  = std::move(reading->before);
    const criticalkv_stats     counted = counters;
    std::vector<measurement>   last    = std::move(measured);
    lctx.synchronize();
    reading.reset();
    owner.get_memory()->clear(false);
    forget_graphs(lctx);
    expect_buffer_sizes(lctx);
    shrink_layers(padded(1));
    if (before.empty()) {
        return;
    }
    if (llama_state_set_data(&lctx, before.data(), before.size()) == before.size()) {
        counters = counted;
        measured = std::move(last);
    } else {
        owner.get_memory()->clear(false);
    }
}

}  // namespace criticalkv
