// A namespace of an NVMe/TCP target as a device of regions.
#pragma once

#include <memory>

#include "device.hpp"
#include "nvme_controller.hpp"
#include "options.hpp"

namespace mooncake::nvmeof {

class Namespace : public Device {
 public:
  // Connects with the first operation. MC_INVALID for a URL that cannot work.
  static Status open(const std::string& location, const Options& options, std::shared_ptr<Device>& device);
  ~Namespace() override { close(); }

  Status run(mc_opcode opcode, std::byte* memory, uint64_t offset, uint64_t length, bool durable) override;
  std::string url() const override { return location_; }
  bool start(Io& io, Piece& piece) override;
  void close() override { controller_->stop(); }
  uint64_t late_ns() override { return controller_->late_ns(); }

 private:
  struct Operation;

  void fill(nvme::Command& command, mc_opcode opcode, std::byte* memory, uint64_t offset, uint64_t length,
            bool durable) const;
  Status told(Status status, mc_opcode opcode, uint64_t offset, uint64_t length) const;
  static void on_over(nvme::Command& command);

  std::string location_;
  nvme::Url url_;
  bool durable_ = false;
  uint64_t most_bytes_ = 0;
  std::shared_ptr<nvme::Controller> controller_;
};

}  // namespace mooncake::nvmeof
