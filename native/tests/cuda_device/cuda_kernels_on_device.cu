// The kernels' tests, compiled for a CUDA device: kernel_runs.h is the one beside this file.
#include "../test_cuda_kernels.cpp"
