#include "criticalkv-graph.h"

#include "criticalkv-error.h"
#include "criticalkv-placement.h"

namespace criticalkv {

graph::graph(size_t max_nodes) {
    ggml_init_params init = {};
    init.mem_size         = ggml_tensor_overhead() * 2 * max_nodes + ggml_graph_overhead_custom(max_nodes, false);
    init.no_alloc         = true;
    context.reset(ggml_init(init));
    if (!context) {
        throw error(CRITICALKV_ERR_MEMORY, "no memory for a graph");
    }
    cgraph = ggml_new_graph_custom(context.get(), max_nodes, false);
}

ggml_tensor * graph::input(ggml_type type, int64_t ne0, int64_t ne1, const void * data) {
    return input(type, ne0, ne1, 1, data);
}

ggml_tensor * graph::input(ggml_type type, int64_t ne0, int64_t ne1, int64_t ne2, const void * data) {
    ggml_tensor * t = ggml_new_tensor_3d(context.get(), type, ne0, ne1, ne2);
    ggml_set_input(t);
    inputs.push_back({ t, data });
    return t;
}

ggml_tensor * graph::ranges(int64_t n, int64_t times) {
    std::vector<int32_t> & all = numbers.emplace_back(n * times);
    for (int64_t i = 0; i < n * times; ++i) {
        all[i] = (int32_t) (i % n);
    }
    return input(GGML_TYPE_I32, n, times, all.data());
}

void graph::output(ggml_tensor * t) {
    ggml_set_output(t);
    ggml_build_forward_expand(cgraph, t);
}

void graph::compute(llama_context & lctx) {
    ggml_backend_sched_t sched = lctx.get_sched();
    ggml_backend_sched_reset(sched);
    const placement_record placement(cgraph);
    if (!ggml_backend_sched_alloc_graph(sched, cgraph)) {
        throw error(CRITICALKV_ERR_MEMORY, "no memory for the compute buffer of an eviction");
    }
    placement.add(sched);
    for (const graph_input & in : inputs) {
        if (in.tensor->buffer != nullptr) {
            ggml_backend_tensor_set(in.tensor, in.data, 0, ggml_nbytes(in.tensor));
        }
    }
    const ggml_status status = lctx.graph_compute(cgraph, true);
    ggml_backend_sched_synchronize(sched);
    if (status != GGML_STATUS_SUCCESS) {
        throw error(CRITICALKV_ERR_COMPUTE,
                    status == GGML_STATUS_ABORTED ? "the eviction was aborted" : "a graph of the eviction failed");
    }
}

std::vector<float> read_f32(const ggml_tensor * t) {
    std::vector<float> data(ggml_nelements(t));
    ggml_backend_tensor_get(t, data.data(), 0, ggml_nbytes(t));
    return data;
}

}  // namespace criticalkv
