// Small helpers for graphs that work on the cache between two decodes.
#pragma once

#include "ggml-cpp.h"
#include "llama-context.h"

#include <list>
#include <vector>

namespace criticalkv {

// Host data for an input tensor of a graph.
struct graph_input {
    ggml_tensor * tensor;
    const void *  data;  // ggml_nbytes(tensor) bytes
};

// A graph with room for max_nodes nodes and leafs, in a ggml context of its own.
class graph {
  public:
    explicit graph(size_t max_nodes);

    ggml_tensor * input(ggml_type type, int64_t ne0, int64_t ne1, const void * data);
    ggml_tensor * input(ggml_type type, int64_t ne0, int64_t ne1, int64_t ne2, const void * data);
    void          output(ggml_tensor * t);

    // I32 [n, times]: 0, 1, ... n - 1, so many times.
    ggml_tensor * ranges(int64_t n, int64_t times);

    // Runs on the context's own scheduler, as K-shift does; returns when the outputs can be read.
    // Throws error(CRITICALKV_ERR_MEMORY or CRITICALKV_ERR_COMPUTE).
    void compute(llama_context & lctx);

    ggml_context * ctx() { return context.get(); }

    ggml_cgraph * gf() { return cgraph; }

  private:
    ggml_context_ptr         context;
    ggml_cgraph *            cgraph;
    std::vector<graph_input> inputs;

    std::list<std::vector<int32_t>> numbers;  // a list, because inputs point into its vectors
};

// Host tensor content, f32.
std::vector<float> read_f32(const ggml_tensor * t);

}  // namespace criticalkv
