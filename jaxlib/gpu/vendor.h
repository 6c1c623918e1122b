// SPDX-License-Identifier: Apache-2.0

// One source for ROCm and CUDA: names that differ between the two. Compile with
// JAX_GPU_HIP or JAX_GPU_CUDA defined.
#ifndef JAXLIB_GPU_VENDOR_H_
#define JAXLIB_GPU_VENDOR_H_

#if defined(JAX_GPU_HIP)

struct ihipStream_t;
typedef ihipStream_t* gpuStream_t;

#define JAX_GPU_NAMESPACE hip
#define JAX_GPU_PREFIX "hip"
#define JAX_GPU_PLATFORM "ROCM"

#elif defined(JAX_GPU_CUDA)

struct CUstream_st;
typedef CUstream_st* gpuStream_t;

#define JAX_GPU_NAMESPACE cuda
#define JAX_GPU_PREFIX "cu"
#define JAX_GPU_PLATFORM "CUDA"

#else
#error "Define JAX_GPU_HIP or JAX_GPU_CUDA"
#endif

#endif  // JAXLIB_GPU_VENDOR_H_
