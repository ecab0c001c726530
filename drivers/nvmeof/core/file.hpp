// A file or block device, opened past the page cache where the file system allows that.
#pragma once

#include <memory>

#include "device.hpp"

namespace mooncake::nvmeof {

class File : public Device {
 public:
  // `fd`: an open descriptor of it, which is duplicated; `bytes`: how much of it is used, from its beginning.
  // MC_INVALID when the descriptor is no file or block device, or the file is shorter.
  static Status open(int fd, uint64_t bytes, bool direct, std::shared_ptr<File>& file);

  Status run(mc_opcode opcode, std::byte* memory, uint64_t offset, uint64_t length, bool durable) override;
  int direct_fd() const override { return direct_.valid() ? direct_.get() : buffered_.get(); }
  Status lock(uint64_t block) override;
  void unlock(uint64_t block) override;
  bool is_direct() const { return direct_.valid(); }

 private:
  void open_direct(bool block_device, uint64_t size);
  void find_alignment(bool block_device);

  UniqueFd buffered_, direct_;
};

}  // namespace mooncake::nvmeof
