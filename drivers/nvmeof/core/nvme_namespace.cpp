#include "nvme_namespace.hpp"

#include <algorithm>
#include <utility>
#include <vector>

#include "io.hpp"

namespace mooncake::nvmeof {
namespace {

// Several commands share the queues, and a lost one has less to do again.
constexpr uint64_t kMostBytes = 256 << 10;
constexpr size_t kSpaceNameLength = 70;

}  // namespace

Status Namespace::open(const std::string& location, const Options& options, std::shared_ptr<Device>& device) {
  auto space = std::make_shared<Namespace>();
  if (Status status = nvme::parse_url(location, space->url_); !status.ok()) return status;
  space->location_ = location;
  uint32_t block = space->url_.block_bytes;
  if (block < 512 || (block & (block - 1)) != 0)
    return failed(MC_INVALID, "'" + location +
                                  "' does not tell the size of blocks (&block=BYTES), which "
                                  "mooncake_driver_nvmeof.namespace() finds out");
  std::string name = location.substr(0, location.find('?')) + "?nsid=" + std::to_string(space->url_.nsid);
  space->name_ = name.size() <= kSpaceNameLength ? name : "..." + name.substr(name.size() - kSpaceNameLength);
  space->granule_ = block;
  space->durable_ = options.durable;
  space->most_bytes_ =
      space->url_.most_bytes == 0 ? kMostBytes : std::min<uint64_t>(space->url_.most_bytes, kMostBytes);
  space->most_bytes_ = std::max<uint64_t>(space->most_bytes_ / block * block, block);
  space->controller_ = std::make_shared<nvme::Controller>(space->url_, options.nvme, on_over);
  if (Status status = space->controller_->start(); !status.ok()) return status;
  device = std::move(space);
  return {};
}

void Namespace::fill(nvme::Command& command, mc_opcode opcode, std::byte* memory, uint64_t offset,
                     uint64_t length, bool durable) const {
  uint64_t block = offset / granule_;
  command.entry.opcode = opcode == MC_READ ? nvme::kReadBlocks : nvme::kWriteBlocks;
  command.entry.nsid = url_.nsid;
  command.entry.cdw10 = static_cast<uint32_t>(block);
  command.entry.cdw11 = static_cast<uint32_t>(block >> 32);
  command.entry.cdw12 = static_cast<uint32_t>(length / granule_ - 1);
  if (opcode == MC_WRITE && durable) command.entry.cdw12 |= nvme::kForceUnitAccess;
  command.memory = memory;
  command.length = static_cast<uint32_t>(length);
  command.to_target = opcode == MC_WRITE;
}

Status Namespace::told(Status status, mc_opcode opcode, uint64_t offset, uint64_t length) const {
  if (status.ok() || status.code == MC_CLOSED) return status;
  return failed(status.code, failure(opcode, offset, length, status.reason).reason);
}

Status Namespace::run(mc_opcode opcode, std::byte* memory, uint64_t offset, uint64_t length, bool durable) {
  for (uint64_t done = 0; done < length;) {
    uint64_t part = std::min(length - done, most_bytes_);
    nvme::Command command;
    fill(command, opcode, memory + done, offset + done, part, durable);
    if (Status status = controller_->run(command); !status.ok())
      return told(status, opcode, offset + done, part);
    done += part;
  }
  return {};
}

bool Namespace::start(Io& io, Piece& piece) {
  auto operation = spares_.take();
  operation->space = this;
  operation->io = &io;
  operation->piece = &piece;
  size_t count = static_cast<size_t>((piece.length + most_bytes_ - 1) / most_bytes_);
  operation->commands.assign(count, {});
  operation->all.clear();
  operation->left = static_cast<uint32_t>(count);
  for (size_t i = 0; i < count; ++i) {
    uint64_t at = i * most_bytes_;
    nvme::Command& command = operation->commands[i];
    fill(command, piece.job->opcode, piece.memory + at, piece.offset + at,
         std::min(most_bytes_, piece.length - at), durable_);
    command.owner = operation.get();
    operation->all.push_back(&command);
  }
  Operation* begun = operation.release();  // on_over() takes it
  if (controller_->give(begun->all)) return true;
  spares_.give(std::unique_ptr<Operation>(begun));
  return false;
}

void Namespace::on_over(nvme::Command& command) {
  auto* operation = static_cast<Operation*>(command.owner);
  const Piece& piece = *operation->piece;
  if (!command.status.ok()) {
    uint64_t at = piece.offset + static_cast<uint64_t>(command.memory - piece.memory);
    std::lock_guard lock(operation->mutex);
    if (operation->status.ok())
      operation->status =
          operation->space->told(std::move(command.status), piece.job->opcode, at, command.length);
  }
  if (operation->left.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  Io& io = *operation->io;
  Piece& whole = *operation->piece;
  Status status = std::move(operation->status);
  operation->space->spares_.give(std::unique_ptr<Operation>(operation));
  io.finished(whole, std::move(status));  // with it the namespace may go
}

}  // namespace mooncake::nvmeof
