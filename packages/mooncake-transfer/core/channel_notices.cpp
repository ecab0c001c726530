// What the channel does for messages that come by a driver: it says whose they are, delivers each once, and
// keeps them in order with what comes over its own connections.
#include <sys/socket.h>

#include <utility>

#include "channel.hpp"

namespace mooncake {

namespace {

constexpr size_t kMostEvents = 8192;  // that nobody has taken yet, at which no more are fetched
constexpr size_t kMostEarly = 65536;  // notices of one peer that wait for messages before them

}  // namespace

// ---- sending

void Channel::ask_later(uint64_t connection, const std::string& method,
                        std::function<void(const std::string& reply)> answered) {
  LinkPtr link = find(connection);
  if (!link) return;
  uint64_t request = next_id_++;
  auto call = std::make_shared<PendingCall>();
  call->then = std::move(answered);
  std::lock_guard lock(link->mutex);
  if (link->closed || link->waiting_bytes() > limits_.unsent_bytes) return;
  link->calls.emplace(request, std::move(call));
  // When the connection broke, the loop finds out and ends the call.
  (void)send_locked(*link, kTypeRequest, request, method, "");
}

bool Channel::notified(uint64_t connection, uint64_t* count) {
  LinkPtr link = find(connection);
  if (!link) return false;
  std::lock_guard lock(link->mutex);
  *count = link->notified;
  // One that ends may be there a while longer, until the loop drops it.
  return !link->closed && link->ended.empty() && link->waiting_bytes() == 0;
}

// ---- receiving

void Channel::expect_notices(std::function<void()> fetch) {
  std::lock_guard lock(fetch_mutex_);
  fetch_ = std::move(fetch);
  expects_notices_ = fetch_ != nullptr;
}

void Channel::fetch_notices() {
  if (closing_ || !tokens_.any()) return;
  std::lock_guard lock(fetch_mutex_);
  if (fetch_) fetch_();
}

bool Channel::backlogged() { return events_.size() > kMostEvents; }

bool Channel::give_token(const LinkPtr& link, const FrameHeader& header, const std::string& method) {
  if (!expects_notices_ || method != kAskForNotices) return false;
  {
    std::lock_guard lock(link->mutex);
    if (link->closed) return true;
    if (!link->window) {
      link->token = tokens_.give(link->id);
      link->window = std::make_unique<NoticeWindow>();
    }
  }
  fetch_notices();                                          // from here on they are listened to
  send(link, kTypeReply, header.request, "", link->token);  // when that fails, reading tells why
  return true;
}

bool Channel::take_notice(const char* data, size_t length) {
  NoticeView notice;
  uint64_t connection = notice.parse(data, length) ? tokens_.connection_of(notice.token) : 0;
  LinkPtr link = connection == 0 ? nullptr : find(connection);
  if (!link) return false;
  std::lock_guard lock(link->mutex);
  return !link->closed && deliver(*link, notice);
}

// With the link's mutex held, as all below.
bool Channel::deliver(Link& link, const NoticeView& notice) {
  if (!link.window || !link.window->first(notice.sequence)) return false;
  Event event{Event::Kind::kNotify,
              link.id,
              0,
              {notice.method, notice.method_length},
              {notice.payload, notice.payload_length}};
  if (notice.after > link.notified) {
    link.early.emplace(notice.after, std::pair{std::move(event.method), std::move(event.body)});
    if (link.early.size() > kMostEarly && link.ended.empty()) {
      link.ended = "it sent notices too far ahead of its messages";
      ::shutdown(link.fd, SHUT_RDWR);  // the loop sees the end of the stream and drops the link
    }
  } else {
    push_notification(link, std::move(event));
  }
  return true;
}

void Channel::push_notification(Link& link, Event event) {
  link.queued_messages += 1;
  link.queued_bytes += event.method.size() + event.body.size() + kEventOverhead;
  events_.push(std::move(event));
}

// A notification over the channel; what had to wait for it follows.
void Channel::take_notification(Link& link, std::string method, std::string body) {
  ++link.notified;
  NoticeView again;
  if (method == kNoticeAgain && link.window) {
    if (again.parse(body.data(), body.size()) && again.token == link.token) deliver(link, again);
  } else {
    push_notification(link, {Event::Kind::kNotify, link.id, 0, std::move(method), std::move(body)});
  }
  while (!link.early.empty() && link.early.begin()->first <= link.notified) {
    auto [method_before, body_before] = std::move(link.early.begin()->second);
    link.early.erase(link.early.begin());
    push_notification(link,
                      {Event::Kind::kNotify, link.id, 0, std::move(method_before), std::move(body_before)});
  }
}

}  // namespace mooncake
