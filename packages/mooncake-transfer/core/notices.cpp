#include "notices.hpp"

#include <sys/random.h>

#include <algorithm>

namespace mooncake {

namespace {

template <typename Number>
void append(std::string* bytes, Number number) {
  bytes->append(reinterpret_cast<const char*>(&number), sizeof number);
}

}  // namespace

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "notices are little endian");

bool NoticeView::parse(const char* data, size_t length) {
  if (length < kNoticeHeadBytes) return false;
  uint16_t method_bytes = 0;
  token.assign(data, kNoticeTokenBytes);
  std::memcpy(&sequence, data + kNoticeTokenBytes, sizeof sequence);
  std::memcpy(&after, data + kNoticeTokenBytes + 8, sizeof after);
  std::memcpy(&method_bytes, data + kNoticeTokenBytes + 16, sizeof method_bytes);
  method_length = method_bytes;
  if (method_length > length - kNoticeHeadBytes) return false;
  method = data + kNoticeHeadBytes;
  payload = method + method_length;
  payload_length = length - kNoticeHeadBytes - method_length;
  return true;
}

void NoticeTicket::answer(const std::string& token) {
  if (token.size() != kNoticeTokenBytes) return;
  std::lock_guard lock(mutex_);
  token_ = token;
  given_.store(true, std::memory_order_release);
}

bool NoticeTicket::seal(uint64_t after, const std::string& method, const std::string& payload,
                        std::string* bytes, uint64_t* sequence) {
  std::lock_guard lock(mutex_);
  if (!open_.empty() && next_ - *open_.begin() >= kNoticeWindow) return false;
  *sequence = next_++;
  open_.insert(*sequence);
  *bytes = token_;
  append(bytes, *sequence);
  append(bytes, after);
  append(bytes, static_cast<uint16_t>(method.size()));
  *bytes += method;
  *bytes += payload;
  return true;
}

void NoticeTicket::resolve(uint64_t sequence) {
  std::lock_guard lock(mutex_);
  open_.erase(sequence);
}

bool NoticeWindow::first(uint64_t sequence) {
  if (sequence + kNoticeWindow <= highest_ || sequence == 0 || sequence > ~kNoticeWindow) return false;
  if (sequence > highest_) {
    if (sequence - highest_ >= kNoticeWindow) {
      seen_.reset();
    } else {
      for (uint64_t s = highest_ + 1; s <= sequence; ++s) seen_.reset(s % kNoticeWindow);
    }
    highest_ = sequence;
  }
  if (seen_.test(sequence % kNoticeWindow)) return false;
  seen_.set(sequence % kNoticeWindow);
  return true;
}

std::string NoticeTokens::give(uint64_t connection) {
  std::string token(kNoticeTokenBytes, '\0');
  if (getrandom(token.data(), token.size(), 0) != static_cast<ssize_t>(token.size())) return {};
  std::lock_guard lock(mutex_);
  connections_.emplace(token, connection);
  count_ = connections_.size();
  return token;
}

void NoticeTokens::take_back(uint64_t connection) {
  std::lock_guard lock(mutex_);
  std::erase_if(connections_, [&](const auto& given) { return given.second == connection; });
  count_ = connections_.size();
}

uint64_t NoticeTokens::connection_of(const std::string& token) {
  std::lock_guard lock(mutex_);
  auto found = connections_.find(token);
  return found == connections_.end() ? 0 : found->second;
}

}  // namespace mooncake
