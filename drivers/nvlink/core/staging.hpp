// Where neither side can map the other's memory: through a buffer of main memory that both map and pin. Each
// side copies its own half, so the owner checks every piece.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "memory.hpp"
#include "pieces.hpp"
#include "support/completions.hpp"
#include "support/peers/asker.hpp"
#include "support/peers/grantor.hpp"
#include "support/peers/loop.hpp"

namespace mooncake::nvlink {

using driver::Completion;
using driver::Completions;

// The buffer of one connection: slots, each with a word that tells whose turn it is.
class StageBuffer {
 public:
  static constexpr uint32_t kSlots = 8;
  static constexpr uint64_t kSlotBytes = 1 << 20;
  // The owner takes a slot from kPosted to kTaken; the initiator may take it back to kWithdrawn before. So a
  // piece that was given up is never copied later.
  enum Turn : uint32_t { kFree = 0, kPosted, kTaken, kDone, kWithdrawn };

  static Status create(Devices& devices, std::shared_ptr<StageBuffer>& buffer,
                       std::shared_ptr<const UniqueFd>& fd);
  static Status open(Devices& devices, int fd, std::shared_ptr<StageBuffer>& buffer);
  ~StageBuffer();

  std::atomic<uint32_t>& turn(uint32_t slot) { return reinterpret_cast<std::atomic<uint32_t>*>(base_)[slot]; }
  uint64_t data(uint32_t slot) const { return base_ + kHeadBytes + slot * kSlotBytes; }

 private:
  static constexpr uint64_t kHeadBytes = 4096;
  static constexpr uint64_t kBytes = kHeadBytes + kSlots * kSlotBytes;
  static Status map(Devices& devices, int fd, std::shared_ptr<StageBuffer>& buffer);

  uint64_t base_ = 0;
  std::shared_ptr<Pin> pin_;
};
static_assert(std::atomic<uint32_t>::is_always_lock_free, "the words are shared between processes");

// What goes over the control connection, as bodies of kDriver messages.
struct StageBody {
  enum Kind : uint32_t { kBuffer = 1, kPiece, kAnswer };
  uint32_t kind;
  uint32_t slot;
  uint32_t opcode;
  uint32_t reserved;
  uint64_t offset;
  uint64_t length;
};

// At the owner; service thread only.
class StageServer {
 public:
  StageServer(Devices& devices, PieceCopies& copies) : devices_(devices), copies_(copies) {}
  bool on_message(driver::Grantor& grantor, const std::shared_ptr<driver::Session>& session,
                  const driver::Message& message, const UniqueFd& passed);

 private:
  // `over` is called when nothing touches slot and region any more.
  void carry_out(driver::Grantor& grantor, const driver::Session& session, uint64_t grant,
                 const StageBody& piece, StageBuffer& buffer, PieceCopies::Over over);
  Devices& devices_;
  PieceCopies& copies_;
};

// One operation at the initiator.
struct StagedOp {
  uint64_t cookie;
  mc_opcode opcode;
  Place local;  // of its first byte
  std::shared_ptr<RemoteMemory> remote;
  uint64_t offset;
  uint64_t length;

  uint64_t begun = 0;   // bytes that were put into slots
  uint32_t pieces = 0;  // that are not over
  Status failure;
};

driver::Message stage_message(const StageBody& body);

// At the initiator. add() and cancel() from any thread, the rest on the service thread.
class StageClient {
 public:
  // The asker is made later than this, and before anything is added.
  StageClient(driver::Loop& loop, Devices& devices, PieceCopies& copies, Completions& completions,
              const std::unique_ptr<driver::Asker>& asker)
      : loop_(loop), devices_(devices), copies_(copies), completions_(completions), asker_(asker) {}

  void add(StagedOp op);
  void cancel(uint64_t cookie, const Status& why);
  bool on_message(const std::shared_ptr<driver::Link>& link, const driver::Message& message);
  void on_end(const std::shared_ptr<driver::Link>& link, const Status& why);

 private:
  using OpPointer = std::shared_ptr<StagedOp>;
  struct Piece {
    OpPointer op;  // null: the slot is free
    uint64_t at = 0;
    uint64_t length = 0;
    bool given_up = false;  // the op is over; the slot waits for the owner's answer
    bool copying = false;   // our half is under way
  };
  struct State {  // of a link
    std::shared_ptr<StageBuffer> buffer;
    Piece pieces[StageBuffer::kSlots];
    std::deque<OpPointer> waiting;
    Status ended;
    bool pumping = false;
  };
  using StatePointer = std::shared_ptr<State>;
  void begin(const OpPointer& op);
  // Fills free slots.
  void pump(const std::shared_ptr<driver::Link>& link, const StatePointer& state);
  void begin_piece(const std::shared_ptr<driver::Link>& link, const StatePointer& state, const OpPointer& op,
                   uint32_t slot);
  // The slot has what the owner needs.
  void post(const std::shared_ptr<driver::Link>& link, const StatePointer& state, uint32_t slot);
  // Nothing touches the slot any more.
  void end_piece(const std::shared_ptr<driver::Link>& link, const StatePointer& state, uint32_t slot,
                 const Status& status);
  void give_up(State& state, const OpPointer& op, const Status& why);
  void finish_if_over(const OpPointer& op);
  void wait_for_owner(const std::shared_ptr<driver::Link>& link, const StatePointer& state);

  driver::Loop& loop_;
  Devices& devices_;
  PieceCopies& copies_;
  Completions& completions_;
  const std::unique_ptr<driver::Asker>& asker_;
  std::vector<std::weak_ptr<driver::Link>> links_;  // that have a state
};

}  // namespace mooncake::nvlink
