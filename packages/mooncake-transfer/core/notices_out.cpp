// Messages of this engine's writes: behind them in the queue of the driver that moves them, where that is
// possible; else over the channel, once the writes are done.
//
// A notice is one more slice of its transfer, so the transfer lasts until it has ended. It waits until a
// driver has accepted every write of the transfer, all on one rail.
#include <utility>

#include "channel.hpp"
#include "engine.hpp"

namespace mooncake {

void Engine::ask_for_notices(const Peer& peer) {
  if (!has_notices_ || !peer.ticket->ask()) return;
  bool any = false;
  for (const auto& rail : peer.rails()) any |= peer.endpoint(*rail).has_notices();
  if (!any) return;
  channel_->ask_later(peer.channel_connection(), kAskForNotices,
                      [ticket = peer.ticket](const std::string& token) { ticket->answer(token); });
}

// When a run begins: a notice of it keeps a place among its slices.
void Engine::reserve_notice(Transfer& t) {
  Message* message = t.options.message.get();
  if (message == nullptr || !has_notices_ || t.opcode != MC_WRITE || t.options.held != 0 ||
      t.options.stream != nullptr || !t.remote->peer()->ticket->given())
    return;
  Slice& slice = *new_slice(t);
  slice.notice = true;
  slice.op = {};
  message->transfer = &t;
  message->slice = &slice;
}

// A write of the transfer goes to this rail next.
void Engine::follow(const Slice& slice, Batch& batch) {
  Transfer& t = *slice.transfer;
  Message& message = *t.options.message;
  if (message.transfer == nullptr || message.slice->with_driver) return;
  Peer& peer = *t.remote->peer();
  if (message.rail == Message::kNoRail) {
    const Endpoint& endpoint = peer.endpoint(*peer.rails()[slice.rail]);
    message.rail = slice.rail;
    message.slice->rail = slice.rail;
    message.slice->op.connection = slice.op.connection;
    uint64_t bytes = kNoticeHeadBytes + message.method.size() + message.payload.size();
    if (!endpoint.has_notices() || bytes > endpoint.caps().notice_bytes) return (void)drop_notice(t);
  } else if (message.rail != slice.rail) {
    return (void)drop_notice(t);
  }
  batch.carried.emplace_back(batch.count, t.options.message);
}

// The message will go over the channel. True when a notice was waiting; the caller sees whether the transfer
// has ended with it.
bool Engine::drop_notice(Transfer& t) {
  Message* message = t.options.message.get();
  if (message == nullptr || message->transfer == nullptr || message->slice->with_driver) return false;
  free_slice(*message->slice);
  --t.live;
  return true;
}

// A write has failed; it is still one of the transfer's slices.
void Engine::break_notice(Transfer& t) {
  if (!t.options.message) return;
  t.options.message->broken = true;
  std::lock_guard lock(mutex_);
  drop_notice(t);
}

void Engine::note_accepted(Batch& batch, size_t begin, size_t end) {
  if (batch.carried.empty()) return;
  std::lock_guard lock(mutex_);
  for (auto& [at, message] : batch.carried) {
    if (at >= begin && at < end) --message->owed;
  }
}

void Engine::send_notices(Batch& batch) {
  const Message* last = nullptr;
  for (auto& [at, message] : batch.carried) {
    if (message.get() != last) send_notice(*message);
    last = message.get();
  }
}

void Engine::send_notice(Message& message) {
  Slice* slice = nullptr;
  Peer* peer = nullptr;
  {
    std::lock_guard lock(mutex_);
    Transfer* t = message.transfer;
    if (t == nullptr || message.slice->with_driver || message.owed != 0 || t->cutting) return;
    slice = message.slice;
    peer = t->remote->peer().get();
    slice->with_driver = true;  // from here it ends as other slices do
    slice->submitted_ns = now_ns();
    slices_.issue(*slice, peer->rails()[slice->rail]->endpoint);
  }
  Rail& way = *peer->rails()[slice->rail];
  way.begin(0);
  uint64_t before = 0;
  // What is told to a connection that has ended would reach nobody: then the channel says so.
  bool sent = channel_->notified(peer->channel_connection(), &before) &&
              peer->ticket->seal(before, message.method, message.payload, &message.bytes, &message.sequence);
  if (sent) {
    message.fate = Message::Fate::kDoubtful;  // before the call: it may complete during it
    sent = peer->endpoint(way).notify(slice->op.connection, message.bytes, slice->op.cookie, message.broken);
    if (sent) return;
    message.fate = Message::Fate::kUntold;
    peer->ticket->resolve(message.sequence);
  }
  SliceTable::withdraw(*slice);
  way.end(0);
  settle(&slice, 1, now_ns());
}

// Of a notice that has completed. Its failure is none of the transfer's: the channel has the message then.
void Engine::notice_ended(const Slice& slice, const mc_completion& completion) {
  Transfer& t = *slice.transfer;
  Peer& peer = *t.remote->peer();
  Rail& way = *peer.rails()[slice.rail];
  way.end(0);
  if (completion.status != MC_OK) return;
  if (completion.bytes != 0) {
    return accuse(way.endpoint, "says that a notice moved " + std::to_string(completion.bytes) + " bytes");
  }
  t.options.message->fate = Message::Fate::kDelivered;
  peer.endpoint(way).notices_sent.fetch_add(1, std::memory_order_relaxed);
}

// Every slice has ended.
Status Engine::tell(Transfer& t) {
  std::shared_ptr<Message> message = std::move(t.options.message);
  if (!message) return {};
  Peer& peer = *t.remote->peer();
  Status told;
  if (t.ok() && message->fate != Message::Fate::kDelivered) {
    bool again = message->fate == Message::Fate::kDoubtful;
    told = again ? channel_->try_notify(peer.channel_connection(), kNoticeAgain, message->bytes)
                 : channel_->try_notify(peer.channel_connection(), message->method, message->payload);
    if (!told.ok())
      told.reason = "every byte has moved, but " + peer.label() + " was not notified: " + told.reason;
  }
  if (message->sequence != 0) peer.ticket->resolve(message->sequence);
  return told;
}

}  // namespace mooncake
