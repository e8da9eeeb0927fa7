// The store: what a KV cache with a budget remembers beside its K and V, and the steps of an eviction.
//
// One store belongs to one llama_kv_cache (one sequence, one stream). It saves the last queries of every layer while the
// model runs (capture), scores entries with them (score), lets the pure selection choose, and moves the kept rows together,
// to smaller memory where that helps (compaction). The patches in native/patches call the functions under "hooks"; the C
// API calls the rest.
#pragma once

#include "criticalkv-change.h"
#include "criticalkv-memory.h"
#include "criticalkv-params.h"
#include "criticalkv-prefill.h"
#include "criticalkv.h"

#include "ggml-cpp.h"
#include "llama-memory.h"

#include <functional>
#include <memory>
#include <string>
#include <vector>

class llama_io_read_i;
class llama_io_write_i;
class llama_kv_cache;
class llama_kv_cells;
class llm_graph_result;
struct llama_batch_ext;
struct llama_context;
struct llama_cparams;
struct llama_model;
struct llama_ubatch;

namespace criticalkv {

// A low-rank part of W_O from a LoRA adapter: W_O + scale * b a.
struct lora_part {
    ggml_tensor * a;  // [n_embd_v * n_head, rank]
    ggml_tensor * b;  // [rank, n_embd]
    float         scale;
};

constexpr int64_t V_ROTATION = 64;

// Ascending slots, or original positions, per KV head.
using head_lists  = std::vector<std::vector<int32_t>>;
using layer_lists = std::vector<head_lists>;

// One layer that has a cache.
struct layer {
    int32_t               il   = -1;  // in the model
    criticalkv_layer_info info = {};

    ggml_tensor * k        = nullptr;  // [n_embd_k * n_head_kv, n_ctx], owned by the cache
    ggml_tensor * v        = nullptr;  // [n_embd_v * n_head_kv, n_ctx], owned by the cache
    ggml_tensor * k_stream = nullptr;  // views of all of k and v, owned by the cache
    ggml_tensor * v_stream = nullptr;
    kv_rows       rows;  // the memory behind them

    ggml_backend_buffer_type_t buft = nullptr;  // where the layer's memory is

    ggml_tensor * wo_scale = nullptr;  // [1] or [n_embd], of the products with wo, or nullptr, owned by the model
    ggml_tensor * wo       = nullptr;  // [n_embd_v * n_head, n_embd], owned by the model
    // Orthonormal Hadamard matrix [V_ROTATION, V_ROTATION], its own inverse, by which quantized caches rotate each
    // V_ROTATION numbers of a value (llama.cpp's attn_rot_v); nullptr: values are as the model made them
    const std::vector<float> * v_rotation = nullptr;

    ggml_tensor * sinks = nullptr;  // [n_head] sink logits or nullptr, owned by the model
    // F32 [n_embd_k * n_head, ring]: the query of position p in row p % ring
    ggml_tensor * queries = nullptr;
    // F32 [n_embd_v, n_embd_v, Gram matrices]; nullptr if the norm needs none
    ggml_tensor * gram = nullptr;

    bool          captured = false;  // a graph with this layer's attention was built
    bool          has_gram = false;  // gram has been computed, from gram_wo without adapters
    ggml_tensor * gram_wo  = nullptr;
    std::string   refused;  // why this layer cannot be scored, "" if it can

    // Original positions of the slots that evictions have left, per KV head, ascending. Later slots hold one position for
    // all heads, which the cells of the cache know. Empty before the first eviction.
    head_lists kept;
};

// Why a memory or a layer cannot have a store, or nullptr. (criticalkv-support.cpp)
const char * refuse_memory(llama_memory_i * memory, const llama_model & model, const llama_cparams & cparams);
const char * refuse_layer(const layer & l);

// The cache in a memory that can be evicted: the memory itself, its global half (iSWA), its attention part (hybrid).
llama_kv_cache * evictable_cache(llama_memory_i * memory);

// The kept rows of a layer that holds n, in new memory. (criticalkv-compaction.cpp)
// `base`: of the new rows, empty for uniform ones.
kv_rows compact_layer(llama_context & lctx, const layer & l, int64_t capacity, const head_lists & keep,
                      std::vector<int64_t> base);

// Scores of one layer: [n_head_kv][n - window], row by row, where n is the number of a head's own entries.
struct layer_scores {
    std::vector<size_t> first;  // [n_head_kv] where a head's row begins

    std::vector<float> attn;  // aggregated attention of the window's queries, or what the keys say
    std::vector<float> norm;  // projected value norms, |v|_1 (VATP) or |o - v|_2 (CAOTE)
};

struct observation;  // (criticalkv-score.h)
struct scored_layer;
struct slots_snapshot;

// A ring of queries like that of a layer, where its cache is.
struct query_ring {
    ggml_context_ptr        ctx;
    ggml_backend_buffer_ptr buf;
    ggml_tensor *           queries = nullptr;
};

// Queries that score in place of the window's: a peek at the question. (criticalkv-peek.cpp)
struct observers {
    std::vector<int32_t>    pos;    // [m] ascending, none of them in the cache
    std::vector<query_ring> rings;  // [layer]
};

// The tokens in batches as llama_decode takes them, so that they are split into the same ubatches.
// (criticalkv-prefill.cpp)
std::vector<llama_batch_ext> make_batches(llama_context & lctx, const int32_t * tokens, int32_t n, int32_t first);

// Called as a prompt is read: layer, tokens of it that are through. Throws to stop.
using progress = std::function<void(int32_t il, int32_t n_done)>;

// What the attention of one layer hands to the capture hook.
struct attention_call {
    ggml_tensor * q;      // [n_embd_k, n_head, n_tokens], after RoPE (and after the cache's own rotation)
    ggml_tensor * wo;     // nullptr: applied elsewhere
    ggml_tensor * wo_s;   // scale of the products with wo, or nullptr
    ggml_tensor * bias;   // of the logits (kq_b)
    ggml_tensor * sinks;  // [n_head] or nullptr
    float         scale;
    float         softcap;
    int           il;
    ggml_tensor * k_cur;  // [n_embd_k, n_head_kv, n_tokens]
    ggml_tensor * v_cur;
    ggml_tensor * k_idxs;  // [n_tokens] slots
    ggml_tensor * v_idxs;
    ggml_tensor * kq_mask;  // llama.cpp's, of the slots
    int64_t       n_kv;     // slots to attend to
};

// First bytes of the store's part of a state blob.
struct state_header {
    uint32_t          magic;
    uint32_t          version;
    uint64_t          fingerprint;  // of the model
    criticalkv_params params;
    int32_t           type_k;
    int32_t           type_v;
    int32_t           n_layer;
    int32_t           evicted;
    int32_t           evicted_at;
    int32_t           tail_start;
    int32_t           budget;     // in force at the last eviction
    int32_t           n_entries;  // of one head
    int32_t           n_positions;
    int32_t           rotated;      // bit 0: K, bit 1: V
    int32_t           n_cells_swa;  // of the cache of sliding-window layers, 0 without
    int32_t           n_slots;      // in use; n_entries, unless heads hold different numbers
};

class store {
  public:
    // ---- hooks -------------------------------------------------------------------------------------------------------

    // After a context made its memory: gives the cache a store if this thread prepared parameters for one.
    // Throws error when the memory cannot have one.
    static void attach(llama_memory_i * memory, const llama_model & model, const llama_cparams & cparams,
                       llama_context & owner);

    // In build_attn: add the nodes that save the last queries to the graph of `res`. Where heads hold different numbers of
    // entries the store does the attention itself and returns its output, else nullptr.
    ggml_tensor * capture(ggml_context * ctx, ggml_cgraph * gf, llm_graph_result * res, const llama_ubatch & ubatch,
                          const attention_call & call);

    // Whether the store writes keys and values of this layer itself.
    bool is_ragged(int32_t il) const;

    // Nodes that graphs may have more than llama.cpp counts on.
    static uint32_t n_nodes(llama_memory_i * memory);

    // Everything was removed from the cache; `data`: its memory shall be zeroed too.
    void on_clear(bool data);

    // Positions [p0, p1) of a sequence (-1: any) are about to be removed; false: this cannot be done exactly, leave the
    // cache alone.
    bool on_seq_rm(int32_t seq_id, int32_t p0, int32_t p1);

    // Of a cache whose other half slides (iSWA): whether positions [p0, p1) can be removed from both.
    bool can_remove(const llama_kv_cache & swa, int32_t seq_id, int32_t p0, int32_t p1) const;

    // The number of slots that attention reads is a multiple of this.
    uint32_t kv_padding() const;

    // A ubatch got its slots, of which attention will read the first n_kv: makes the memory for them. False: there is
    // none, and the cache is as it was.
    bool make_room(int64_t n_kv);

    // For operations that would make the kept positions wrong (shifting, copying sequences): logs an error, returns true.
    bool refuse_operation(const char * operation);

    // A memory update if an eviction (or a scoring) is asked for, else nullptr. `optimize`: a decode found no free cells.
    llama_memory_context_ptr init_update(llama_context * lctx, bool optimize);

    // The store's part of a state blob comes before the cache's own. Reading checks all of it before anything changes and
    // keeps it aside; state_commit puts it in force once the cache has read its part.
    void state_write(llama_io_write_i & io) const;
    void state_read(llama_io_read_i & io);
    void state_check_cells(uint32_t n_cells) const;
    void state_commit();
    void state_abort();  // the cache could not read its part
    // Whether the rows are in the store's part of a state, and the cache's own has none.
    bool has_ragged_rows() const;
    bool loads_ragged_rows() const;

    // The callback with which a graph shall be built: `cb`, unless a prompt is being read layer by layer.
    static llm_graph_cb window_callback(llama_memory_i * memory, llm_graph_result * res, llm_graph_cb cb);

    // ---- for the C API -----------------------------------------------------------------------------------------------

    store(llama_kv_cache & cache, const llama_model & model, const llama_cparams & cparams,
          const criticalkv_params & params, llama_context & owner);

    void         check_layers() const;
    void         reserve(llama_context & lctx, int64_t n);
    void         evict(llama_context & lctx, int32_t budget, int32_t slack);
    layer_scores scores(llama_context & lctx, int32_t il);

    // Exact prefill (criticalkv-prefill.h). refuse_prefill: why this model cannot be read layer by layer, "" if it can.
    std::string refuse_prefill(llama_context & lctx);
    void        read_prompt(llama_context & lctx, const int32_t * tokens, int32_t n, int32_t budget, int32_t slack,
                            const progress & report);
    void        cancel_prompt(llama_context & lctx);

    // From now on, until the cache is cleared or n is 0, evictions ask what these tokens at positions pos... attend to.
    void peek(llama_context & lctx, const int32_t * tokens, int32_t n, int32_t pos);

    criticalkv_stats     stats() const;
    measurement          measured_of(int32_t il) const;
    int32_t              entries_of(const layer & l, int32_t head) const;  // also while a prompt is read
    std::vector<int32_t> positions(const layer & l, int32_t head) const;
    std::vector<float>   read(llama_context & lctx, int32_t which, int32_t il) const;
    std::vector<float>   read_entries(const layer & l, const ggml_tensor * rows) const;
    const layer &        find_layer(int32_t il) const;
    void                 check_cells() const;
    std::vector<int32_t> layer_ids() const;
    uint64_t             fingerprint() const;

    // ---- for the update context --------------------------------------------------------------------------------------

    // Does what was asked for; false after a failure, which the caller of evict() or scores() then gets.
    bool run_request(llama_context & lctx);

    // Changes with the memory behind K and V: a graph built under another version must not be used again.
    int64_t memory_version = 0;

    // Whether graphs are of one layer, with a place in the prompt, and so never the same.
    bool is_reading() const { return reading != nullptr; }

    // Called by the input of a captured graph: the query of `pos` is being written to its row of the ring.
    void note_query(int32_t pos);

    // Called by the input of a graph with ragged layers: F16 [width, n_tokens] of 0, seen, and -inf.
    void    fill_mask(const llama_ubatch & ubatch, int64_t base, int64_t slots, int64_t width, uint16_t * out) const;
    int64_t longest_base() const;
    int64_t most_slots() const;  // that any layer has room for
    bool    is_on_host() const;  // all of the cache

    // Rows of the query rings: the window, and some to spare, so that a few tokens that are taken back (drafts that were
    // not accepted) do not leave the window without its queries.
    int32_t ring() const { return params.window + 32; }

  private:
    struct request {
        enum { NONE, EVICT, SCORE, PEEK } what = NONE;

        int32_t        budget = 0;        // of EVICT
        int32_t        slack  = 0;        // of EVICT
        size_t         index  = 0;        // of SCORE, in layers
        layer_scores * out    = nullptr;  // of SCORE

        std::vector<int32_t> tokens;     // of PEEK
        int32_t              first = 0;  // of PEEK
    };

    // A state blob that was read and checked, until the cache has read its part.
    struct loaded_state {
        state_header                    header = {};
        std::vector<int32_t>            query_pos;
        layer_lists                     kept;
        std::vector<std::vector<float>> queries;  // [layer], the rings
        std::vector<kv_rows>            rows;     // [layer] if ragged
    };

    llama_kv_cells &       cells();
    const llama_kv_cells & cells() const;
    bool    is_ragged() const;  // whether evictions leave heads or layers with different numbers of entries
    int32_t n_used() const;     // slots that hold an entry
    int32_t n_entries() const;  // of one head, the mean
    int32_t entries_of(const layer & l) const;  // of all its heads
    int32_t n_positions() const;
    std::vector<int32_t> window_queries() const;  // positions whose queries are in the ring, the tail of the sequence
    bool                 can_remove(int32_t p0, int32_t p1) const;
    void                 clear_cache();            // metadata only
    int64_t              capacity() const;         // entries per head that all layers have room for
    int64_t              padded(int64_t n) const;  // rows of memory for n entries
    int64_t              evicted_capacity(int64_t budget, int64_t slack) const;
    int32_t              next_tail_start() const;
    std::vector<int64_t> bases_of(const layer & l, const head_lists & keep) const;
    int64_t              bytes_allocated() const;
    void                 note_allocated(int64_t bytes);
    int64_t              bytes_entries() const;
    void                 note_entries();
    void                 resize_layer(layer & l, int64_t capacity);
    void                 resize(int64_t capacity);
    void                 shrink_layers(int64_t capacity);
    state_header         make_header() const;
    void                 check_loaded(const loaded_state & state) const;
    kv_rows              read_ragged(llama_io_read_i & io, const layer & l, const loaded_state & state) const;
    void                 allocate();
    void                 run(llama_context & lctx, const request & what);
    void                 expect_buffer_sizes(llama_context & lctx);

    std::vector<lora_part>  loras_of(const llama_context & lctx, const layer & l) const;
    observation             observe(const layer & l, const head_range & of) const;
    std::vector<head_range> ranges_of(const layer & l) const;
    void         score_range(llama_context & lctx, layer & l, const head_range & of, float * attn, float * norm);
    void         weigh_values(llama_context & lctx, layer & l, const observation & o, float * out);
    layer_scores compute_scores(llama_context & lctx, layer & l);
    head_lists   positions_of(const layer & l, const head_lists & keep) const;
    scored_layer score_layer(llama_context & lctx, layer & l);
    head_lists   choose_layer(llama_context & lctx, layer & l, int32_t budget);
    layer_lists  choose_layers(llama_context & lctx, int32_t budget);
    std::vector<int32_t> budgets_of_layers(int32_t budget, int32_t n_more) const;
    measurement          measure_layer(llama_context & lctx, layer & l, const head_lists & keep);
    void                 compact_in_place(const layer_lists & keep) noexcept;
    std::vector<kv_rows> compact(llama_context & lctx, const layer_lists & keep, int64_t capacity);
    void                 commit(layer_lists kept, std::vector<kv_rows> rows);
    void                 run_eviction(llama_context & lctx, int32_t budget, int32_t slack);
    void                 finish_prompt(llama_context & lctx, int32_t budget, int32_t slack);

    std::vector<llama_kv_cache *>           caches() const;
    slots_snapshot                          take_snapshot() const;
    void                                    rewind(const slots_snapshot & s);
    void                                    forget_overwritten(slots_snapshot & s, int32_t first);
    void                                    place_states(int32_t pos);
    std::vector<std::vector<uint8_t>>       read_states() const;
    void                                    write_states(const std::vector<std::vector<uint8_t>> & states);
    void                                    swap_rings(std::vector<query_ring> & rings) noexcept;
    void                                    run_peek(llama_context & lctx, const request & what);
    std::unordered_set<const ggml_tensor *> memory_tensors() const;
    ggml_context_ptr                        make_hidden(int64_t n) const;
    ggml_cgraph * build_graph(llama_context & lctx, llm_graph_result & res, const llama_ubatch & ubatch,
                              const llama_memory_context_i * mctx);
    std::string   examine_windows(llama_context & lctx);
    void          run_ubatch(llama_context & lctx, llm_graph_result & res, llama_memory_context_i & mctx);
    layer *       evictable_layer(int32_t il);
    void          enter_layer(int32_t il, const slots_snapshot & slots);
    void          leave_layer(llama_context & lctx, layer & l, int64_t capacity);
    void          read_layers(llama_context & lctx, const std::vector<llama_batch_ext> & batches, int64_t capacity,
                              const progress & report);
    void          forget_graphs(llama_context & lctx);

    llama_kv_cache &    cache;
    const llama_model & model;
    llama_context &     owner;
    criticalkv_params   params;

    std::vector<layer>   layers;
    std::vector<int32_t> query_pos;  // [ring]: position whose query the ring's row holds, -1 if none
    bool                 evicted    = false;
    int32_t              evicted_at = 0;  // positions there were at the last eviction
    int32_t              tail_start = 0;  // every head holds all positions from here on
    int32_t              budget     = 0;  // of the last eviction
    int32_t              slack      = 0;  // entries over it that there is room for

    std::vector<measurement> measured;  // [layer] at the last eviction; empty before any

    observers                     seen_by;  // no positions: the window observes
    request                       asked;
    std::string                   failure;  // of the last request, "" if none
    criticalkv_status             failure_status = CRITICALKV_OK;
    std::unique_ptr<loaded_state> loaded;

    std::unique_ptr<prefill> reading;  // a prompt that is read layer by layer, until it is evicted or given up
    bool                     windows_examined = false;
    std::string              windows_refused;

    int64_t          bytes_hidden_peak  = 0;
    int32_t          entries_peak       = 0;
    int64_t          bytes_entries_peak = 0;
    int64_t          bytes_peak         = 0;   // allocated for K and V
    criticalkv_stats counters           = {};  // evictions and seconds only

    std::vector<std::pair<ggml_context_ptr, ggml_backend_buffer_ptr>> buffers;
};

}  // namespace criticalkv
