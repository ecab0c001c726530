// Main memory that GPUs may copy from and to by themselves: locked pages, registered with CUDA.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "devices.hpp"

namespace mooncake::nvlink {

// CUDA refuses to register a page twice, and regions of one process overlap: engines share pages. So ranges
// are registered once per process, and counted.
class Pin {
 public:
  // For all GPUs, through the context of the first, which is kept as long. Memory that its allocator
  // registered already is taken as it is.
  static Status open(Devices& devices, uint64_t address, uint64_t length, bool read_only,
                     std::shared_ptr<Pin>& pin);
  ~Pin();
  Pin(const Pin&) = delete;
  Pin& operator=(const Pin&) = delete;

  // Where a copy that begins at `address` has to end at the latest: one copy must not go over two
  // registrations.
  uint64_t end_of_run(uint64_t address) const;

 private:
  Pin(const Cuda& cuda, CUdevice device) : cuda_(cuda), device_(device) {}
  Status add(uint64_t begin, uint64_t end, unsigned flags);
  void give_back();

  const Cuda& cuda_;
  const CUdevice device_;
  CUcontext context_ = nullptr;
  std::vector<uint64_t> starts_;      // of the counted ranges that it uses
  std::vector<uint64_t> boundaries_;  // between them, ascending
};

}  // namespace mooncake::nvlink
