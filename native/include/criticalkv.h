/* criticalkv.h: the C API of pycriticalkv.
 *
 * A context of the patched llama.cpp may carry a *store*, which evicts key/value entries so that the attention output
 * changes least (CriticalKV, arXiv 2502.03805). This header is plain C: cffi reads it as it stands.
 *
 * Words: an *entry* is one key/value pair of one KV head of one layer; a *slot* is its row in the cache. A kept key
 * stays rotated for the position at which it was computed, so slot and position differ after an eviction.
 * `n` counts entries of one head, `il` is a layer of the model, `head` a KV head.
 *
 * Threads: functions that take a context must not run at the same time as any other call on that context. Different
 * contexts may be used from different threads. criticalkv_prepare and criticalkv_last_error act on the calling thread.
 *
 * Errors: functions that can fail return a criticalkv_status; criticalkv_last_error() then holds a sentence. After a
 * failed eviction or scoring the cache is as it was.
 */
#ifndef CRITICALKV_H
#define CRITICALKV_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define CRITICALKV_API __declspec(dllexport)
#else
#define CRITICALKV_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

struct llama_context;

enum criticalkv_status {
    CRITICALKV_OK              = 0,
    CRITICALKV_ERR_ARGUMENT    = 1, /* a parameter is out of range */
    CRITICALKV_ERR_UNSUPPORTED = 2, /* this model or context cannot be evicted */
    CRITICALKV_ERR_STATE       = 3, /* not possible now: no store, empty cache, cells with holes, unknown queries */
    CRITICALKV_ERR_COMPUTE     = 4, /* a graph failed or was aborted, or scores were not finite */
    CRITICALKV_ERR_MEMORY      = 5, /* memory for scratch or for staging could not be had */
    CRITICALKV_ERR_ABORTED     = 6, /* a callback asked for it */
};

/* What ranks an entry. */
enum criticalkv_score {
    CRITICALKV_SCORE_WINDOW   = 0, /* attention of the last `window` queries (SnapKV, arXiv 2404.14469) */
    CRITICALKV_SCORE_RECENCY  = 1, /* position: the most recent stay (StreamingLLM, arXiv 2309.17453) */
    CRITICALKV_SCORE_RANDOM   = 2, /* a hash of seed, layer, head and position */
    CRITICALKV_SCORE_KEY_NORM = 3, /* -|k|_2: short keys stay (arXiv 2406.11430) */
    CRITICALKV_SCORE_KEYDIFF  = 4, /* -cos(k, mean of all k / |k|): unusual keys stay (KeyDiff, arXiv 2504.15364) */
};

/* How the window's queries and the query heads of one KV head are combined. */
enum criticalkv_aggregate {
    CRITICALKV_AGGREGATE_MEAN = 0, /* mean over queries, pool, mean over heads */
    CRITICALKV_AGGREGATE_MAX  = 1, /* pool, maximum over both, with the mean over entries as floor (arXiv 2510.13334) */
};

/* How values enter. */
enum criticalkv_value {
    CRITICALKV_VALUE_NONE     = 0, /* not at all */
    CRITICALKV_VALUE_CRITICAL = 1, /* two stages with the projected value norm (arXiv 2502.03805, algorithm 1) */
    CRITICALKV_VALUE_VATP     = 2, /* A |v|_1 (VATP, arXiv 2406.12335) */
    CRITICALKV_VALUE_CAOTE    = 3, /* A / (1 - A) |o - v|_2, o the head's output: mean attention times values
                                      (CAOTE, arXiv 2504.14051) */
};

/* The norm of a value projected by W_O. W_h is the block of W_O of query head h; means run over the KV head's group. */
enum criticalkv_norm {
    CRITICALKV_NORM_GRAM = 0, /* sqrt(mean_h |v W_h|_2^2), through one d x d Gram matrix per KV head */
    CRITICALKV_NORM_L2   = 1, /* mean_h |v W_h|_2, one Gram matrix per query head */
    CRITICALKV_NORM_L1   = 2, /* mean_h |v W_h|_1, the paper's */
};

/* How the KV heads of a layer share the budget. */
enum criticalkv_heads {
    CRITICALKV_HEADS_UNIFORM = 0, /* each head the same number, of its own choice */
    CRITICALKV_HEADS_SHARED  = 1, /* all heads the same entries, by the mean of their scores (TOVA, arXiv 2401.06104) */
    CRITICALKV_HEADS_ADAPTIVE = 2, /* as many as the best entries of the layer are in it (Ada-KV, arXiv 2407.11550) */
};

/* How the layers share the budget, which is then their mean. */
enum criticalkv_layers {
    CRITICALKV_LAYERS_UNIFORM = 0, /* each layer the same */
    CRITICALKV_LAYERS_PYRAMID = 1, /* falling in equal steps from the first to the last (PyramidKV, arXiv 2406.02069) */
    CRITICALKV_LAYERS_ADAPTIVE = 2, /* as many as the best entries of all layers are in it; adaptive heads only */
};

struct criticalkv_params {
    int32_t  budget; /* entries to keep per KV head and layer, window and sinks included; 0: only on explicit request */
    int32_t  slack;  /* entries over the budget that generation may add before it evicts again, >= 1 */
    int32_t  window; /* last entries, always kept; their queries observe; 1..256 */
    int32_t  sinks;  /* first positions, always kept; >= 0 */
    int32_t  pool;   /* odd width of the average pool over entries, 1..63 */
    int32_t  score;  /* enum criticalkv_score */
    int32_t  aggregate;  /* enum criticalkv_aggregate */
    int32_t  value;      /* enum criticalkv_value */
    int32_t  norm;       /* enum criticalkv_norm */
    int32_t  heads;      /* enum criticalkv_heads */
    int32_t  layers;     /* enum criticalkv_layers */
    double   alpha;      /* share of the free budget that stage 1 takes, 0..1 */
    double   eps;        /* added to the attention in stage 2 (mean aggregate only), >= 0 */
    uint64_t seed;       /* of CRITICALKV_SCORE_RANDOM */
    double   head_floor; /* share of the mean free budget that each adaptive head gets at least, 0..1 */
    int32_t  measure; /* 1: evictions measure what they change (criticalkv_get_change); changes nothing that is kept */
};

struct criticalkv_stats {
    int32_t budget;          /* entries per head in force at the last eviction, or the parameter before any */
    int32_t n_layer;         /* layers with a cache */
    int32_t evicted_at;      /* positions there were at the last eviction, 0 before any */
    int32_t n_queries;       /* queries of the window that are known, at most `window`; an eviction needs one */
    bool    ragged;          /* whether heads may hold different numbers of entries now */
    bool    evicted;         /* whether entries were evicted since the cache was last cleared, or before it was saved */
    int64_t n_tokens;        /* positions of the sequence so far, evicted ones included */
    int64_t n_entries;       /* entries of one head now; where heads or layers differ the mean over all heads */
    int64_t n_entries_peak;  /* the most that one head has held at the start of a decode, or now */
    int64_t bytes_entries;   /* bytes of K and V of all entries now */
    int64_t bytes_allocated; /* bytes of the K and V buffers as allocated */
    int64_t bytes_allocated_peak; /* the most since the cache was last cleared, an eviction's copies included */
    int64_t bytes_per_token;      /* bytes of K and V of one token, all layers, nothing evicted */
    int64_t
        bytes_entries_peak;    /* the most bytes of entries that all heads have held at the start of a decode, or now */
    int64_t bytes_other;       /* bytes of the memory that is not evicted: sliding-window layers, recurrent states */
    int64_t bytes_hidden_peak; /* the most bytes that hidden states took in an exact prefill since it was cleared */
    int64_t bytes_store;       /* bytes of the store itself: saved queries and Gram matrices */
    int64_t n_evictions;       /* since the cache was last cleared, as are the times */
    double  seconds_score;
    double  seconds_select;
    double  seconds_compact;
    double  seconds_measure;
    double  seconds_total; /* of all evictions, the new reservation of the graph included */
};

struct criticalkv_layer_info {
    int32_t n_head;    /* query heads */
    int32_t n_head_kv; /* KV heads */
    int32_t n_embd_k;  /* head size of keys and queries */
    int32_t n_embd_v;  /* head size of values */
    float   scale;     /* of the attention logits */
    float   softcap;   /* c in c*tanh(x/c); 0: none */
};

/* What criticalkv_read returns. All f32, dequantized, the last dimension contiguous. */
enum criticalkv_tensor {
    /* adaptive heads, after an eviction: one head after the other, [n of the head, n_embd_k] */
    CRITICALKV_TENSOR_K = 0, /* [n, n_head_kv, n_embd_k], in slot order, rotated as cached */
    CRITICALKV_TENSOR_V = 1, /* [n, n_head_kv, n_embd_v] */
    CRITICALKV_TENSOR_Q = 2, /* [m, n_head, n_embd_k]: the saved queries of the window, oldest first, m <= window */
};

CRITICALKV_API struct criticalkv_params criticalkv_params_default(void);

/* CRITICALKV_OK if every parameter is in range, else CRITICALKV_ERR_ARGUMENT. */
CRITICALKV_API int criticalkv_params_check(const struct criticalkv_params * params);

/* The next context that this thread creates gets a store with these parameters (copied); NULL takes that back. When the
 * context cannot have one (recurrent, encoder-decoder, MLA, ALiBi models; no flash attention; more
 * than one sequence), creating it fails and criticalkv_last_error() says why. struct llama_context_params
 * keeps its layout, which callers in other languages rely on; that is why the parameters do not travel in it. */
CRITICALKV_API int criticalkv_prepare(const struct criticalkv_params * params);

/* Whether every layer of a context with a store was seen to be usable when its graphs were reserved; call it once after
 * the context was created. CRITICALKV_ERR_STATE without a store. */
CRITICALKV_API int criticalkv_check(struct llama_context * ctx);

/* Evict now down to `budget` entries per head (window and sinks included), and leave room for `slack` more (0: as in the
 * parameters). Fewer entries than the budget: nothing happens.
 * Waits for the graph in flight. The logits of the last decode stay readable. */
CRITICALKV_API int criticalkv_evict(struct llama_context * ctx, int32_t budget, int32_t slack);

/* Whether the model can be read layer by layer (criticalkv_prefill); CRITICALKV_ERR_UNSUPPORTED if not. The first call
 * builds the graph of every layer by itself and examines it, which takes milliseconds. */
CRITICALKV_API int criticalkv_prefill_check(struct llama_context * ctx);

/* Called as tokens pass through layer `il`: `done` of them have. False stops the prefill. */
typedef bool (*criticalkv_progress)(int32_t il, int32_t done, void * user);

/* Exact prefill: reads the next n tokens of the sequence through all layers but the last, one layer after the other, and
 * evicts each to `budget` entries, with room for `slack` more (0: as in the parameters), before the next one starts: only
 * one layer holds the whole prompt. Then llama_decode takes the same tokens, in batches of n_batch (the last may be
 * shorter), through the last layer, and criticalkv_evict with the same budget and slack ends the prefill. Kept entries
 * and logits are those of decoding all and evicting then.
 * The hidden states of all tokens take n * n_embd floats meanwhile; a cache that is not empty is saved before, on the host.
 * CRITICALKV_ERR_ARGUMENT: tokens that do not fit, or a prompt within the budget. On an error the cache is as it was. */
CRITICALKV_API int criticalkv_prefill(struct llama_context * ctx, const int32_t * tokens, int32_t n, int32_t budget,
                                      int32_t slack, criticalkv_progress callback, void * user);

/* Give up a prompt between criticalkv_prefill and the eviction that ends it: the cache is as it was before, or, when there
 * is no memory for that, empty. Without such a prompt nothing happens. */
CRITICALKV_API int criticalkv_prefill_cancel(struct llama_context * ctx);

/* Peek at tokens that come later: runs n tokens (at most window + 32, and at most one ubatch) at positions pos and up over
 * the cache as it is, and keeps only their queries. Until the cache is cleared, or n is 0, evictions ask what these attend
 * to instead of the window, which stays as well. The cache itself is unchanged, recurrent states too; of sliding windows
 * entries may be gone that no token from the next on sees. */
CRITICALKV_API int criticalkv_peek(struct llama_context * ctx, const int32_t * tokens, int32_t n, int32_t pos);

/* Where the graphs of evictions and scorings ran: totals. */
struct criticalkv_placement {
    int64_t n_graphs;
    int64_t n_nodes;      /* that compute something; views do not */
    int64_t n_nodes_cpu;  /* of these, on the CPU */
    int64_t n_inputs;     /* tensors of the host that were copied to a device: the inputs of graphs */
    int64_t bytes_inputs; /* of these */
    int64_t n_copies;     /* all other tensors that were copied between devices for a graph */
    char    first[64];    /* the first node on the CPU, "" if none: op, type and type of its first operand */
};

/* For tests: from now on the graphs of this thread's evictions and scorings are added to *placement, until NULL is given.
 * With all layers on a device, n_nodes_cpu and n_copies are to stay 0. */
CRITICALKV_API int criticalkv_watch_placement(struct criticalkv_placement * placement);

/* For tests: the k-th allocation of rows or hidden states on this thread from now on fails; 0: none does. */
CRITICALKV_API int criticalkv_fail_allocation(int32_t k);

/* Make the memory of the cache hold n entries per head (0..n_ctx): it grows to that at once, where a decode would let it
 * grow step by step, and gives back what an earlier, longer content left. Entries that are there stay. When memory runs
 * out (CRITICALKV_ERR_MEMORY, the sentence says how much was asked for) the cache is as it was. */
CRITICALKV_API int criticalkv_reserve(struct llama_context * ctx, int64_t n);

CRITICALKV_API int criticalkv_get_stats(const struct llama_context * ctx, struct criticalkv_stats * stats);

/* What the last eviction changed in a layer, for the queries that it asked (of the window, or peeked at); NaN before any
 * eviction and without params.measure. criticalkv-change.h has the formulas.
 * bound: the worst case of the norms' argument, for the mean attention of all queries and of the heads of a group, over
 * the sum of attention times norm of all entries: 0 if nothing was lost, about 2 if everything was.
 * change: mean over the queries of |o' - o|_2 / |o|_2, o the layer's attention output through W_O over all entries, without
 * its bias, o' the same over those that were kept. */
CRITICALKV_API int criticalkv_get_change(const struct llama_context * ctx, int32_t il, double * bound, double * change);

/* Layers of the model that have a cache, ascending: writes at most `capacity` of them; stats.n_layer is their number. */
CRITICALKV_API int criticalkv_get_layers(const struct llama_context * ctx, int32_t * out, int32_t capacity);

/* CRITICALKV_ERR_ARGUMENT for a layer without a cache. */
CRITICALKV_API int criticalkv_get_layer(const struct llama_context * ctx, int32_t il,
                                        struct criticalkv_layer_info * info);

/* Original positions that a KV head holds, ascending: writes at most `capacity` of them and returns how many there are,
 * or minus the criticalkv_status on error. */
CRITICALKV_API int32_t criticalkv_positions(const struct llama_context * ctx, int32_t il, int32_t head, int32_t * out,
                                            int32_t capacity);

/* How many they are, also while a prompt is read or after a failed decode; minus the criticalkv_status on error. */
CRITICALKV_API int32_t criticalkv_entries(const struct llama_context * ctx, int32_t il, int32_t head);

/* Score now, without evicting. attn and norm: [n_head_kv, n - window] f32, row by row, each `count` floats large; entries
 * before the window in slot order. attn: the score, of keys where the policy ranks by them; for the maximum aggregate R
 * before its floor; where heads share their entries, the heads' mean. norm: what the policy weighs values by, or zeros. */
CRITICALKV_API int criticalkv_scores(struct llama_context * ctx, int32_t il, float * attn, float * norm, size_t count);

/* Read a tensor back (enum criticalkv_tensor), for tests and inspection. Returns the floats needed and writes them if
 * `count` is at least that; 0 on error. */
CRITICALKV_API size_t criticalkv_read(struct llama_context * ctx, int32_t which, int32_t il, float * out, size_t count);

/* The selection by itself, a pure function. n entries of one KV head with ascending original positions pos[n]; attn and
 * norm: n - window floats each, as criticalkv_scores gives them (may be NULL where the policy does not use them). Writes the kept indices, ascending, to
 * out[min(n, budget)] and returns their number, or -1 on error. */
CRITICALKV_API int32_t criticalkv_select(const struct criticalkv_params * params, int32_t budget, int32_t il,
                                         int32_t head, int32_t n, const int32_t * pos, const float * attn,
                                         const float * norm, int32_t * out);

/* How the heads of one layer share a budget, a pure function: n_head_kv heads with n[head] entries each; pos: their positions,
 * head by head; attn: n[head] - window scores each, head by head (may be NULL where the policy does not use them). Writes
 * n_head_kv budgets to out. */
CRITICALKV_API int criticalkv_share(const struct criticalkv_params * params, int32_t budget, int32_t il,
                                    int32_t n_head_kv, const int32_t * n, const int32_t * pos, const float * attn,
                                    int32_t * out);

/* How layers share a budget: out gets the budget of each of the layers, which hold n[layer] entries per head. */
CRITICALKV_API int criticalkv_share_layers(const struct criticalkv_params * params, int32_t budget, int32_t n_layers,
                                           const int32_t * n, int32_t * out);

/* A hash over names, shapes and types of all weights and over the values of the small ones (norms, biases): it tells
 * kinds of models apart, not every two models of the same shape. 0 without a store. */
CRITICALKV_API uint64_t criticalkv_model_fingerprint(const struct llama_context * ctx);

/* Why the last call on this thread failed; "" if none did. Valid until the next call on this thread. */
CRITICALKV_API const char * criticalkv_last_error(void);

#ifdef __cplusplus
}
#endif

#endif /* CRITICALKV_H */
