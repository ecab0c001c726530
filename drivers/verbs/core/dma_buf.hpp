// Memory of a GPU as a DMA-BUF, the form in which the driver of a NIC takes it.
#pragma once

#include <cstdint>

#include "support/status.hpp"

namespace mooncake::verbs {

// Asks CUDA for a DMA-BUF of the pages that the memory is in, and says where it begins in them. The caller
// closes `fd`. libcuda is loaded by the first call. MC_UNSUPPORTED says what is missing and what to do.
driver::Status dma_buf_of(uint64_t address, uint64_t length, int& fd, uint64_t& offset);

}  // namespace mooncake::verbs
