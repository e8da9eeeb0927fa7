#include "cuda-rules.h"

#include "cuda-stand-ins.h"

// generated
#include "cuda-rules.inc"

bool cuda_supports_op(ggml_backend_dev_t dev, const ggml_tensor * op) {
    return ggml_backend_cuda_device_supports_op(dev, op);
}

bool cuda_supports_buft(ggml_backend_dev_t dev, ggml_backend_buffer_type_t buft) {
    return ggml_backend_cuda_device_supports_buft(dev, buft);
}

bool cuda_offload_op(ggml_backend_dev_t dev, const ggml_tensor * op) {
    return ggml_backend_cuda_device_offload_op(dev, op);
}

bool cuda_replays(ggml_backend_cuda_context & context, ggml_cgraph * graph) {
    // what ggml_backend_cuda_graph_compute makes of it: the first computation without a change is captured, the next replayed
    return !ggml_cuda_graph_update_required(&context, graph);
}
