#include "staging.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

namespace mooncake::nvlink {
namespace {

constexpr uint64_t kLookNs = 1'000'000;

driver::Message stage_message(const StageBody& body) {
  driver::Message message = driver::make_message(driver::MessageKind::kDriver);
  put_body(message, body);
  return message;
}

}  // namespace

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
  Status status = failed(MC_CANCELLED, "the piece was taken back");
  uint32_t posted = StageBuffer::kPosted;
  if (buffer->turn(body.slot).compare_exchange_strong(posted, StageBuffer::kTaken)) {
    status = carry_out(grantor, *session, message, body, *buffer);
    buffer->turn(body.slot).store(StageBuffer::kDone, std::memory_order_release);
  }
  driver::Message answer = stage_message({StageBody::kAnswer, body.slot, body.opcode, 0, 0, body.length});
  set_reason(answer, status);
  return grantor.send(session, answer);
}

Status StageServer::carry_out(driver::Grantor& grantor, const driver::Session& session,
                              const driver::Message& message, const StageBody& piece, StageBuffer& buffer) {
  uint32_t access = piece.opcode == MC_READ ? MC_ACCESS_READ : MC_ACCESS_WRITE;
  Status refusal;
  auto owned = grantor.check(session, message.grant, access, piece.offset, piece.length, refusal);
  if (!owned) return refusal;
  const Place& place = static_cast<const Region&>(*owned).place;
  uint64_t memory = place.address + piece.offset, slot = buffer.data(piece.slot);
  return piece.opcode == MC_READ ? copies_.run(kHost, slot, place.device, memory, piece.length)
                                 : copies_.run(place.device, memory, kHost, slot, piece.length);
}

// --------------------------------------------------------------------------------------------- the initiator

void StageClient::add(StagedOp op) {
  loop_.post([this, op = std::make_shared<StagedOp>(std::move(op))] { begin(op); });
}

void StageClient::begin(const OpPointer& op) {
  std::shared_ptr<driver::Link> link = op->remote->link;
  auto state = std::static_pointer_cast<State>(link->state);
  if (!state) {
    state = std::make_shared<State>();
    std::shared_ptr<const UniqueFd> fd;
    state->ended = StageBuffer::create(devices_, state->buffer, fd);
    if (state->ended.ok())
      asker_->send(link, stage_message({StageBody::kBuffer, 0, 0, 0, 0, 0}), std::move(fd));
    link->state = state;
    std::erase_if(links_, [](const auto& known) { return known.expired(); });
    links_.push_back(link);
  }
  if (link->ended && state->ended.ok()) state->ended = link->check_alive();
  if (link->ended && state->ended.ok())
    state->ended = failed(MC_CLOSED, "the connection was closed on this side");
  state->waiting.push_back(op);
  if (!state->ended.ok()) return give_up(*state, op, state->ended);
  pump(link, *state);
}

void StageClient::pump(const std::shared_ptr<driver::Link>& link, State& state) {
  for (uint32_t slot = 0; slot < StageBuffer::kSlots && !state.waiting.empty(); ++slot) {
    if (state.pieces[slot].op || state.pieces[slot].given_up) continue;
    OpPointer op = state.waiting.front();
    Status status = post(link, state, op, slot);
    if (!status.ok()) {
      give_up(state, op, status);
    } else if (op->begun == op->length) {
      state.waiting.pop_front();
    }
  }
}

Status StageClient::post(const std::shared_ptr<driver::Link>& link, State& state, const OpPointer& op,
                         uint32_t slot) {
  Piece piece{op, op->begun, std::min(StageBuffer::kSlotBytes, op->length - op->begun), false};
  if (op->opcode == MC_WRITE) {
    Status status = copies_.run(kHost, state.buffer->data(slot), op->local.device,
                                op->local.address + piece.at, piece.length);
    if (!status.ok()) return status;
  }
  op->begun += piece.length;
  ++op->pieces;
  state.pieces[slot] = piece;
  state.buffer->turn(slot).store(StageBuffer::kPosted, std::memory_order_release);
  driver::Message message =
      stage_message({StageBody::kPiece, slot, op->opcode, 0, op->offset + piece.at, piece.length});
  message.grant = op->remote->grant;
  asker_->send(link, message);
  return {};
}

bool StageClient::on_message(const std::shared_ptr<driver::Link>& link, const driver::Message& message) {
  StageBody body;
  auto state = std::static_pointer_cast<State>(link->state);
  if (!state || !get_body(message, body) || body.kind != StageBody::kAnswer ||
      body.slot >= StageBuffer::kSlots)
    return false;
  Piece piece = std::exchange(state->pieces[body.slot], Piece{});
  state->buffer->turn(body.slot).store(StageBuffer::kFree, std::memory_order_relaxed);
  if (piece.op) {
    --piece.op->pieces;
    Status status = reason_of(message);
    const StagedOp& op = *piece.op;
    if (status.ok() && op.failure.ok() && op.opcode == MC_READ)
      status = copies_.run(op.local.device, op.local.address + piece.at, kHost,
                           state->buffer->data(body.slot), piece.length);
    if (status.ok()) {
      finish_if_over(piece.op);
    } else {
      give_up(*state, piece.op, status);
    }
  }
  pump(link, *state);
  return true;
}

void StageClient::give_up(State& state, const OpPointer& op, const Status& why) {
  if (op->failure.ok()) op->failure = why;
  std::erase(state.waiting, op);
  for (uint32_t slot = 0; slot < StageBuffer::kSlots; ++slot) {
    Piece& piece = state.pieces[slot];
    if (piece.op != op) continue;
    uint32_t posted = StageBuffer::kPosted;
    bool back = state.buffer->turn(slot).compare_exchange_strong(posted, StageBuffer::kWithdrawn);
    // What the owner has begun is waited for: its bytes would land after the completion. Reads land in the
    // slot only.
    if (!back && op->opcode == MC_WRITE) continue;
    piece.op.reset();
    piece.given_up = true;
    --op->pieces;
  }
  finish_if_over(op);
}

void StageClient::finish_if_over(const OpPointer& op) {
  if (op->pieces > 0 || (op->failure.ok() && op->begun < op->length) || op->length == 0) return;
  Completion done;
  done.cookie = op->cookie;
  done.opcode = op->opcode;
  done.bytes = op->length;
  if (op->failure.ok()) op->failure = op->remote->link->check_alive();
  if (!op->failure.ok()) {
    done.bytes = 0;
    done.fail(op->failure);
  }
  op->remote.reset();
  op->local.pin.reset();
  op->length = 0;  // it is over once
  completions_.push({&done, 1});
}

void StageClient::cancel(uint64_t cookie, const Status& why) {
  loop_.post([this, cookie, why] {
    for (const auto& known : links_) {
      auto link = known.lock();
      if (!link || !link->state) continue;
      auto state = std::static_pointer_cast<State>(link->state);
      std::vector<OpPointer> found;
      auto take = [&](const OpPointer& op) {
        if (op && op->cookie == cookie && std::find(found.begin(), found.end(), op) == found.end())
          found.push_back(op);
      };
      for (const auto& op : state->waiting) take(op);
      for (const Piece& piece : state->pieces) take(piece.op);
      for (const auto& op : found) give_up(*state, op, why);
      if (state->ended.ok()) pump(link, *state);
    }
  });
}

void StageClient::on_end(const std::shared_ptr<driver::Link>& link, const Status& why) {
  auto state = std::static_pointer_cast<State>(link->state);
  if (!state) return;
  if (state->ended.ok()) state->ended = why;
  std::vector<OpPointer> all(state->waiting.begin(), state->waiting.end());
  for (const Piece& piece : state->pieces) {
    if (piece.op) all.push_back(piece.op);
  }
  for (const auto& op : all) {
    if (op->length > 0) give_up(*state, op, why);
  }
  wait_for_owner(link, state);
}

// Pieces that the owner had begun when the connection ended.
void StageClient::wait_for_owner(const std::shared_ptr<driver::Link>& link,
                                 const std::shared_ptr<State>& state) {
  bool dead = !link->peer.same_process && !link->check_alive().ok();
  bool waits = false;
  for (uint32_t slot = 0; slot < StageBuffer::kSlots; ++slot) {
    Piece& piece = state->pieces[slot];
    if (!piece.op) continue;
    if (!dead && state->buffer->turn(slot).load(std::memory_order_acquire) == StageBuffer::kTaken) {
      waits = true;
      continue;
    }
    OpPointer op = std::exchange(piece.op, nullptr);
    --op->pieces;
    finish_if_over(op);
  }
  if (waits) loop_.at(driver::now_ns() + kLookNs, [this, link, state] { wait_for_owner(link, state); });
}

}  // namespace mooncake::nvlink
