#include "pool.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>

namespace mooncake::nvmeof {
namespace {

constexpr uint64_t kBounceBytes = 256 << 10;
constexpr size_t kBounceAlign = 4096;

bool aligned(const std::byte* memory, uint64_t unit) {
  return reinterpret_cast<uintptr_t>(memory) % unit == 0;
}

}  // namespace

void Pool::work() {
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  std::unique_ptr<std::byte, Free> bounce(
      static_cast<std::byte*>(std::aligned_alloc(kBounceAlign, kBounceBytes)));
  while (Piece* piece = workers_.take()) {
    Status status = bounce ? move(*piece, bounce.get()) : failed(MC_NO_MEMORY, "no memory for a buffer");
    finished_(*piece, std::move(status));
  }
}

Status Pool::move(Piece& piece, std::byte* bounce) {
  uint64_t done = 0;
  while (done < piece.length) {
    if (piece.job->stopped) return failed(MC_CANCELLED, "the operation was cancelled");
    uint64_t moved = 0;
    if (Status status = step(piece, done, bounce, &moved); !status.ok()) return status;
    done += moved;
  }
  return {};
}

Status Pool::step(Piece& piece, uint64_t done, std::byte* bounce, uint64_t* moved) {
  Device& device = *piece.job->remote->device;
  uint64_t at = piece.offset + done, end = piece.offset + piece.length, unit = device.granule();
  std::byte* memory = piece.memory + done;
  if (unit == 1 || at >= device.direct_limit()) {  // through the page cache, as it comes
    *moved = end - at;
    return device.run(piece.job->opcode, memory, at, end - at, durable_);
  }
  end = std::min(end, device.direct_limit());
  uint64_t whole = down(end, unit) > at ? down(end, unit) - at : 0;
  if (at % unit == 0 && whole > 0 && aligned(memory, device.memory_align())) {
    *moved = whole;
    return device.run(piece.job->opcode, memory, at, whole, durable_);
  }
  return piece.job->opcode == MC_READ ? bounce_read(piece, done, bounce, moved)
                                      : bounce_write(piece, done, bounce, moved);
}

Status Pool::bounce_read(Piece& piece, uint64_t done, std::byte* bounce, uint64_t* moved) {
  Device& device = *piece.job->remote->device;
  uint64_t at = piece.offset + done, unit = device.granule();
  uint64_t end = std::min(piece.offset + piece.length, device.direct_limit());
  uint64_t begin = down(at, unit);
  uint64_t stop = std::min(up(end, unit), begin + std::max(down(kBounceBytes, unit), unit));
  Status status = device.run(MC_READ, bounce, begin, stop - begin, false);
  if (!status.ok()) return status;
  *moved = std::min(end, stop) - at;
  std::memcpy(piece.memory + done, bounce + (at - begin), *moved);
  return {};
}

// Whole granules are written as they are; of one that is not covered the rest is read first, and nobody else
// may change it until it is written.
Status Pool::bounce_write(Piece& piece, uint64_t done, std::byte* bounce, uint64_t* moved) {
  Device& device = *piece.job->remote->device;
  uint64_t at = piece.offset + done, unit = device.granule();
  uint64_t end = std::min(piece.offset + piece.length, device.direct_limit());
  uint64_t begin = down(at, unit);
  if (begin == at && end - at >= unit) {
    *moved = std::min(down(end - at, unit), down(kBounceBytes, unit));
    std::memcpy(bounce, piece.memory + done, *moved);
    return device.run(MC_WRITE, bounce, at, *moved, durable_);
  }
  *moved = std::min(end, begin + unit) - at;
  Status status = device.lock(begin);
  if (!status.ok()) return status;
  status = device.run(MC_READ, bounce, begin, unit, false);
  if (status.ok()) {
    std::memcpy(bounce + (at - begin), piece.memory + done, *moved);
    status = device.run(MC_WRITE, bounce, begin, unit, durable_);
  }
  device.unlock(begin);
  return status;
}

}  // namespace mooncake::nvmeof
