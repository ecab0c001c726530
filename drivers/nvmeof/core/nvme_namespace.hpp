// A namespace of an NVMe/TCP target as a device of regions.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "device.hpp"
#include "nvme_controller.hpp"
#include "options.hpp"
#include "support/chain.hpp"

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
  // The commands of one piece.
  struct Operation {
    void clear() { status = {}; }

    std::unique_ptr<Operation> next;  // of a chain
    Namespace* space = nullptr;
    Io* io = nullptr;
    Piece* piece = nullptr;
    std::vector<nvme::Command> commands;
    std::vector<nvme::Command*> all;  // of them
    std::atomic<uint32_t> left{0};
    std::mutex mutex;
    Status status;
  };

  void fill(nvme::Command& command, mc_opcode opcode, std::byte* memory, uint64_t offset, uint64_t length,
            bool durable) const;
  Status told(Status status, mc_opcode opcode, uint64_t offset, uint64_t length) const;
  static void on_over(nvme::Command& command);

  std::string location_;
  nvme::Url url_;
  bool durable_ = false;
  driver::Spares<Operation> spares_;
  uint64_t most_bytes_ = 0;
  std::shared_ptr<nvme::Controller> controller_;
};

}  // namespace mooncake::nvmeof
