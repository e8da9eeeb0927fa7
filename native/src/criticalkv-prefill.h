// Exact prefill: a prompt is read layer by layer. All its ubatches go through one layer, that layer is evicted, then
// comes the next. So only one layer ever holds the whole prompt, and each is evicted having seen all of it: what is kept,
// and the logits, are those of an ordinary prefill that is evicted at its end.
//
// Between two layers the hidden states of all tokens wait in one buffer. The graph of a layer is llama.cpp's own, cut
// where its architecture reports the layer's output ("l_out"): there the tensor becomes a view of the buffer, what was
// built before is dropped, and at the next output building ends. The model's last layer is left to the ordinary decode,
// so logits need nothing special.
#pragma once

#include "criticalkv-change.h"

#include "ggml-cpp.h"
#include "llama-graph.h"

#include <cstdint>
#include <unordered_set>
#include <vector>

namespace criticalkv {

// The layers that a graph is built for: `layer` alone, or all from there on.
struct layer_window {
    int32_t layer = 0;      // of the model
    bool    open  = false;  // to the end of the model, outputs included
};

// A prompt between store::read_prompt and the eviction that ends it.
struct prefill {
    int32_t first    = 0;  // position of its first token
    int32_t n_tokens = 0;
    int32_t budget   = 0;  // to evict to
    int32_t entries  = 0;  // per KV head, before its first token
    int32_t slots    = 0;  // likewise

    std::vector<int32_t> budgets;  // [layers with a cache]

    layer_window window;

    ggml_context_ptr        ctx;
    ggml_backend_buffer_ptr buf;
    ggml_tensor *           hidden = nullptr;  // F32 [n_embd, n_tokens]; without data while a model is examined

    std::vector<std::vector<std::vector<int32_t>>> kept;      // [layers evicted so far][KV head]: positions
    std::vector<measurement>                       measured;  // [layers evicted so far]
    std::vector<uint8_t>                           before;    // state of the context, if its cache was not empty

    bool                                    examine = false;  // note what the examination of a model needs to know
    bool                                    cut     = false;  // the graph built last began with the hidden states
    const char *                            refused = nullptr;
    std::unordered_set<const ggml_tensor *> dropped;  // tensors that were there before the cut
};

// Thrown by the callback at the end of a window: nothing above it shall be built.
struct window_complete {};

// The callback of a graph for p's window, around llama.cpp's own.
llm_graph_cb window_callback(prefill & p, llm_graph_result * res, llm_graph_cb cb);

// Why the window's graph cannot be run by itself, or nullptr. `memory`: all tensors of the context's memory. It must begin
// with the hidden states (but for layer 0), nothing that was built before them may read the memory, and what it reads of
// the memory it must write.
const char * refuse_window(const prefill & p, ggml_cgraph * gf, const std::unordered_set<const ggml_tensor *> & memory);

}  // namespace criticalkv
