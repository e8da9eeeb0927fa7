// What ggml-cuda calls for a GGML_OP_CUSTOM (native/patches/0006-cuda.patch).
#pragma once

#include "criticalkv-nodes.h"

struct ggml_backend_cuda_context;

namespace criticalkv {

// Puts the kernels of a node that cuda_supports() takes on the context's stream.
void cuda_compute(ggml_backend_cuda_context & ctx, ggml_tensor * node);

}  // namespace criticalkv
