// What CUDA 12.8 added; left out of doubles of older drivers.
#include "state.hpp"

using namespace cuda_double;

DOUBLE_API cuMemcpyBatchAsync(CUdeviceptr* to, CUdeviceptr* from, size_t* sizes, size_t count,
                              CUmemcpyAttributes* attributes, size_t* firsts, size_t kinds, size_t* bad,
                              CUstream stream) {
  return enqueue_batch(to, from, sizes, count, attributes, firsts, kinds, bad, stream);
}
