// What CUDA 13.0 made of it; left out of doubles of older drivers.
#include "state.hpp"

using namespace cuda_double;

DOUBLE_API cuMemcpyBatchAsync_v2(CUdeviceptr* to, CUdeviceptr* from, size_t* sizes, size_t count,
                                 CUmemcpyAttributes* attributes, size_t* firsts, size_t kinds,
                                 CUstream stream) {
  return enqueue_batch(to, from, sizes, count, attributes, firsts, kinds, nullptr, stream);
}
