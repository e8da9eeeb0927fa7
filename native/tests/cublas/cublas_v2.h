// Stands in for cuBLAS's header where criticalkv-dispatch.cu is compiled on a machine without it (native/cuda/report.py): the names
// that ggml's common.cuh uses. Nothing is linked.
#pragma once

#include <cuda_runtime.h>

#define CUBLAS_VER_MAJOR 13
#define CUBLAS_VER_MINOR 0

using cublasHandle_t = struct cublasContext *;

enum cublasStatus_t { CUBLAS_STATUS_SUCCESS };

enum cublasMath_t { CUBLAS_TF32_TENSOR_OP_MATH };

const char *   cublasGetStatusString(cublasStatus_t status);
cublasStatus_t cublasCreate(cublasHandle_t * handle);
cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t mode);
cublasStatus_t cublasSetStream(cublasHandle_t handle, cudaStream_t stream);
cublasStatus_t cublasSetWorkspace(cublasHandle_t handle, void * workspace, size_t bytes);
