// ggml's own rules for what runs on a CUDA device, compiled for the host. `dev` is the mock device.
#pragma once

#include "ggml-backend.h"

struct ggml_backend_cuda_context;

bool cuda_supports_op(ggml_backend_dev_t dev, const ggml_tensor * op);
bool cuda_supports_buft(ggml_backend_dev_t dev, ggml_backend_buffer_type_t buft);
bool cuda_offload_op(ggml_backend_dev_t dev, const ggml_tensor * op);

// Whether the CUDA backend would run this graph as a captured CUDA graph, and not launch its kernels one by one: when it
// is, by ggml's own comparison, what it was the time before. `context` remembers.
bool cuda_replays(ggml_backend_cuda_context & context, ggml_cgraph * graph);
