// Notices at the initiator: which writes are before which notice, and what became of them.
#include <cstring>
#include <utility>

#include "initiator.hpp"

namespace mooncake::efa {

Epoch& Initiator::open_epoch(Connection& connection) {
  if (connection.epochs.empty()) connection.epochs.emplace_back();
  return connection.epochs.back();
}

void Initiator::notify(Connection& connection, const void* data, size_t length, uint64_t cookie) {
  Epoch& epoch = open_epoch(connection);
  epoch.closed = true;
  epoch.cookie = cookie;
  epoch.awaited = true;
  std::memcpy(epoch.data.bytes.data(), data, length);
  epoch.data.length = static_cast<uint8_t>(length);
  Epoch& next = connection.epochs.emplace_back();
  next.number = epoch.number + 1;
  // From the first notice on writes are counted: who sends none, has no completions at the target.
  next.counted = shared_.fabric.carries_data();
  if (connection.state == Connection::State::kDown) {
    connection.state = Connection::State::kWanted;
    wanted_ = true;
  }
  send_notices(connection);
}

// In their order, as one stands for the writes before all of them: what waits here holds up those behind it.
void Initiator::send_notices(Connection& connection) {
  if (connection.state != Connection::State::kReady) return;
  for (Epoch& epoch : connection.epochs) {
    if (!epoch.closed) break;
    if (epoch.failure.ok() && !epoch.counted && epoch.unfinished > 0) break;
    bool failed_late = epoch.sent && !epoch.failure.ok() && epoch.awaited;
    if (epoch.sent && !failed_late) continue;
    Message message;
    message.kind = epoch.failure.ok() ? Kind::kNotice : Kind::kNoNotice;
    message.request = epoch.number;
    message.length = epoch.counted ? epoch.writes : 0;
    message.address = epoch.data.bytes;
    message.address_length = epoch.data.length;
    epoch.sent = true;
    send(connection, message);
    if (!epoch.failure.ok()) end_notice(epoch, &epoch.failure);
  }
  forget_epochs(connection);
}

// Once. Its epoch stays for as long as writes of it are under way.
void Initiator::end_notice(Epoch& epoch, const Status* failure) {
  if (std::exchange(epoch.awaited, false)) shared_.finish_notice(epoch.cookie, failure);
}

void Initiator::on_noticed(Connection& connection, const Message& message) {
  for (Epoch& epoch : connection.epochs) {
    if (epoch.number == message.request && epoch.closed) end_notice(epoch, nullptr);
  }
  forget_epochs(connection);
}

void Initiator::fail_notices(Connection& connection, const Status& failure) {
  for (Epoch& epoch : connection.epochs) {
    if (epoch.closed) end_notice(epoch, &failure);
  }
}

void Initiator::forget_epochs(Connection& connection) {
  while (!connection.epochs.empty() && connection.epochs.front().closed &&
         !connection.epochs.front().awaited && connection.epochs.front().unfinished == 0)
    connection.epochs.pop_front();
}

}  // namespace mooncake::efa
