#include "staging.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

namespace mooncake::nvlink {

driver::Message stage_message(const StageBody& body) {
  driver::Message message = driver::make_message(driver::MessageKind::kDriver);
  put_body(message, body);
  return message;
}

// ------------------------------------------------------------------------------------------------ the buffer

Status StageBuffer::create(Devices& devices, std::shared_ptr<StageBuffer>& buffer,
                           std::shared_ptr<const UniqueFd>& fd) {
  UniqueFd made(memfd_create("mooncake-nvlink-stage", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!made.valid() || ftruncate(made.get(), kBytes) != 0 ||
      fcntl(made.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
    return driver::system_failure(MC_NO_MEMORY, "cannot make the staging buffer", errno);
  if (Status status = map(devices, made.get(), buffer); !status.ok()) return status;
  fd = std::make_shared<const UniqueFd>(std::move(made));
  return {};
}

Status StageBuffer::open(Devices& devices, int fd, std::shared_ptr<StageBuffer>& buffer) {
  struct stat file{};
  if (fstat(fd, &file) != 0 || static_cast<uint64_t>(file.st_size) < kBytes ||
      !driver::sealed_against_shrinking(fd))
    return failed(MC_UNREACHABLE, "the peer passed a staging buffer that is too small or not sealed");
  return map(devices, fd, buffer);
}

Status StageBuffer::map(Devices& devices, int fd, std::shared_ptr<StageBuffer>& buffer) {
  void* base = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) return driver::system_failure(MC_NO_MEMORY, "cannot map the staging buffer", errno);
  madvise(base, kBytes, MADV_DONTFORK);
  auto made = std::make_shared<StageBuffer>();
  made->base_ = reinterpret_cast<uint64_t>(base);
  Status status = Pin::open(devices, made->base_, kBytes, false, made->pin_);
  if (status.ok()) buffer = std::move(made);
  return status;
}

StageBuffer::~StageBuffer() {
  pin_.reset();
  munmap(reinterpret_cast<void*>(base_), kBytes);
}

// ------------------------------------------------------------------------------------------------- the owner

bool StageServer::on_message(driver::Grantor& grantor, const std::shared_ptr<driver::Session>& session,
                             const driver::Message& message, const UniqueFd& passed) {
  StageBody body;
  if (!get_body(message, body)) return false;
  auto buffer = std::static_pointer_cast<StageBuffer>(session->state);
  if (body.kind == StageBody::kBuffer) {
    if (buffer || !passed.valid()) return false;
    if (!StageBuffer::open(devices_, passed.get(), buffer).ok()) return false;
    session->state = std::move(buffer);
    return true;
  }
  bool good = body.kind == StageBody::kPiece && buffer && body.slot < StageBuffer::kSlots &&
              body.length <= StageBuffer::kSlotBytes && body.opcode <= MC_WRITE;
  if (!good) return false;
  auto answer = [&grantor, session, body](const Status& status) {
    driver::Message words = stage_message({StageBody::kAnswer, body.slot, body.opcode, 0, 0, body.length});
    set_reason(words, status);
    return grantor.send(session, words);
  };
  uint32_t posted = StageBuffer::kPosted;
  if (!buffer->turn(body.slot).compare_exchange_strong(posted, StageBuffer::kTaken))
    return answer(failed(MC_CANCELLED, "the piece was taken back"));
  carry_out(grantor, *session, message.grant, body, *buffer, [buffer, body, answer](const Status& status) {
    buffer->turn(body.slot).store(StageBuffer::kDone, std::memory_order_release);
    answer(status);  // a connection that has ended is seen elsewhere
  });
  return true;
}

void StageServer::carry_out(driver::Grantor& grantor, const driver::Session& session, uint64_t grant,
                            const StageBody& piece, StageBuffer& buffer, PieceCopies::Over over) {
  uint32_t access = piece.opcode == MC_READ ? MC_ACCESS_READ : MC_ACCESS_WRITE;
  Status refusal;
  auto owned = grantor.check(session, grant, access, piece.offset, piece.length, refusal);
  if (!owned) return over(refusal);
  auto region = std::static_pointer_cast<Region>(owned);
  const Place& place = region->place;
  uint64_t memory = place.address + piece.offset, slot = buffer.data(piece.slot);
  region->pieces.fetch_add(1, std::memory_order_acq_rel);
  auto done = [region, over = std::move(over)](const Status& status) {
    region->pieces.fetch_sub(1, std::memory_order_acq_rel);
    over(status);
  };
  if (piece.opcode == MC_READ)
    copies_.run(kHost, slot, place.device, memory, piece.length, std::move(done));
  else
    copies_.run(place.device, memory, kHost, slot, piece.length, std::move(done));
}

}  // namespace mooncake::nvlink
