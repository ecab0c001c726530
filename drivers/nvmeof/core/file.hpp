// A file or block device, opened past the page cache where the file system allows that.
#pragma once

#include <memory>

#include "device.hpp"
#include "options.hpp"

namespace mooncake::nvmeof {

class File : public Device {
 public:
  // `fd`: an open descriptor of it, which is duplicated; `bytes`: how much of it is used, from its beginning.
  // MC_INVALID when the descriptor is no file or block device, or the file is shorter.
  static Status open(int fd, uint64_t bytes, const Options& options, std::shared_ptr<File>& file);

  Status run(mc_opcode opcode, std::byte* memory, uint64_t offset, uint64_t length, bool durable) override;
  int direct_fd() const override { return direct_.valid() ? direct_.get() : buffered_.get(); }
  int buffered_fd() const override { return buffered_.get(); }
  Status identity(Identity& found) const override;
  Status lock(uint64_t block) override;
  void unlock(uint64_t block) override;
  int command_fd(uint64_t length) const override { return length <= most_in_command_ ? commands_.get() : -1; }
  uint32_t nsid() const override { return nsid_; }

 private:
  void open_direct(bool block_device, uint64_t size);
  void find_alignment(bool block_device);
  void open_commands(unsigned device);

  UniqueFd buffered_, direct_;
  UniqueFd commands_;  // the character device of an NVMe namespace
  uint32_t nsid_ = 0;
  uint64_t most_in_command_ = 0;
};

}  // namespace mooncake::nvmeof
