// What ggml-cuda calls for a GGML_OP_CUSTOM (native/patches/0006-cuda.patch).
#pragma once

#include "criticalkv-nodes.h"

struct ggml_backend_cuda_context;

namespace criticalkv {

#if defined(GGML_USE_HIP) || defined(GGML_USE_MUSA)

// They compile the same source file of ggml-cuda, without our kernels: their graphs are the standard ones.
inline bool cuda_supports(const ggml_tensor *, int) {
    return false;
}

inline void cuda_compute(ggml_backend_cuda_context &, ggml_tensor *) {}

#else

inline bool cuda_supports(const ggml_tensor * node, int cc) {
    return has_kernel(node, cc);
}

// Puts the kernels of a node that cuda_supports() takes on the context's stream.
void cuda_compute(ggml_backend_cuda_context & ctx, ggml_tensor * node);

#endif

}  // namespace criticalkv
