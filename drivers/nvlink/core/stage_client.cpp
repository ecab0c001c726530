// The initiator's half of staging.hpp.
#include <algorithm>
#include <utility>

#include "staging.hpp"

namespace mooncake::nvlink {
namespace {

constexpr uint64_t kLookNs = 1'000'000;

}  // namespace

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
  pump(link, state);
}

void StageClient::pump(const std::shared_ptr<driver::Link>& link, const StatePointer& state) {
  if (std::exchange(state->pumping, true)) return;
  for (uint32_t slot = 0; slot < StageBuffer::kSlots && !state->waiting.empty(); ++slot) {
    if (state->pieces[slot].op || state->pieces[slot].given_up) continue;
    OpPointer op = state->waiting.front();
    begin_piece(link, state, op, slot);
    bool all = op->begun == op->length && !state->waiting.empty() && state->waiting.front() == op;
    if (all) state->waiting.pop_front();
  }
  state->pumping = false;
}

void StageClient::begin_piece(const std::shared_ptr<driver::Link>& link, const StatePointer& state,
                              const OpPointer& op, uint32_t slot) {
  Piece& piece = state->pieces[slot];
  piece = {op, op->begun, std::min(StageBuffer::kSlotBytes, op->length - op->begun), false, false};
  op->begun += piece.length;
  ++op->pieces;
  if (op->opcode == MC_READ) return post(link, state, slot);
  piece.copying = true;
  copies_.run(kHost, state->buffer->data(slot), op->local.device, op->local.address + piece.at, piece.length,
              [this, link, state, slot, op](const Status& status) {
                if (status.ok() && op->failure.ok())
                  post(link, state, slot);
                else
                  end_piece(link, state, slot, status);
              });
}

void StageClient::post(const std::shared_ptr<driver::Link>& link, const StatePointer& state, uint32_t slot) {
  Piece& piece = state->pieces[slot];
  const StagedOp& op = *piece.op;
  piece.copying = false;
  state->buffer->turn(slot).store(StageBuffer::kPosted, std::memory_order_release);
  driver::Message message =
      stage_message({StageBody::kPiece, slot, op.opcode, 0, op.offset + piece.at, piece.length});
  message.grant = op.remote->grant;
  asker_->send(link, message);
}

bool StageClient::on_message(const std::shared_ptr<driver::Link>& link, const driver::Message& message) {
  StageBody body;
  auto state = std::static_pointer_cast<State>(link->state);
  if (!state || !get_body(message, body) || body.kind != StageBody::kAnswer ||
      body.slot >= StageBuffer::kSlots || state->pieces[body.slot].copying)
    return false;
  Piece& piece = state->pieces[body.slot];
  Status status = reason_of(message);
  bool brings = piece.op && piece.op->opcode == MC_READ && status.ok() && piece.op->failure.ok();
  if (!brings) {
    end_piece(link, state, body.slot, status);
    return true;
  }
  piece.copying = true;
  const Place& local = piece.op->local;
  copies_.run(
      local.device, local.address + piece.at, kHost, state->buffer->data(body.slot), piece.length,
      [this, link, state, slot = body.slot](const Status& status) { end_piece(link, state, slot, status); });
  return true;
}

void StageClient::end_piece(const std::shared_ptr<driver::Link>& link, const StatePointer& state,
                            uint32_t slot, const Status& status) {
  Piece piece = std::exchange(state->pieces[slot], Piece{});
  state->buffer->turn(slot).store(StageBuffer::kFree, std::memory_order_relaxed);
  if (piece.op) {
    --piece.op->pieces;
    if (status.ok())
      finish_if_over(piece.op);
    else
      give_up(*state, piece.op, status);
  }
  pump(link, state);
}

void StageClient::give_up(State& state, const OpPointer& op, const Status& why) {
  if (op->failure.ok()) op->failure = why;
  std::erase(state.waiting, op);
  for (uint32_t slot = 0; slot < StageBuffer::kSlots; ++slot) {
    Piece& piece = state.pieces[slot];
    if (piece.op != op || piece.copying) continue;  // its end comes when the copy's does
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
      if (state->ended.ok()) pump(link, state);
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
void StageClient::wait_for_owner(const std::shared_ptr<driver::Link>& link, const StatePointer& state) {
  bool dead = !link->peer.same_process && !link->check_alive().ok();
  bool waits = false;
  for (uint32_t slot = 0; slot < StageBuffer::kSlots; ++slot) {
    Piece& piece = state->pieces[slot];
    if (!piece.op || piece.copying) continue;
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
