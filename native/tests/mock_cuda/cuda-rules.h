// ggml's own rules for what runs on a CUDA device, compiled for the host. `dev` is the mock device.
#pragma once

#include "ggml-backend.h"

bool cuda_supports_op(ggml_backend_dev_t dev, const ggml_tensor * op);
bool cuda_supports_buft(ggml_backend_dev_t dev, ggml_backend_buffer_type_t buft);
bool cuda_offload_op(ggml_backend_dev_t dev, const ggml_tensor * op);
