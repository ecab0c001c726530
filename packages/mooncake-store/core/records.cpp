#include "records.hpp"

#include <algorithm>
#include <cstring>

namespace mooncake::store {

namespace {

constexpr size_t kPageBytes = 256u << 10;
constexpr uint64_t kMany = 4096;  // records that are worth a bell, though nobody waits for them

template <typename T>
bool take(std::string_view& bytes, T& value) {
  if (bytes.size() < sizeof(T)) return false;
  std::memcpy(&value, bytes.data(), sizeof(T));
  bytes.remove_prefix(sizeof(T));
  return true;
}

bool take_text(std::string_view& bytes, size_t length, std::string_view& text) {
  if (bytes.size() < length) return false;
  text = bytes.substr(0, length);
  bytes.remove_prefix(length);
  return true;
}

bool take_body(std::string_view bytes, RecordView& record) {
  if (!take(bytes, record.body)) return false;
  record.extents.resize(record.head.extents);
  for (RecordExtent& extent : record.extents) {
    if (!take(bytes, extent)) return false;
  }
  return take_text(bytes, record.body.tenant_length, record.tenant) &&
         take_text(bytes, record.body.group_length, record.group) &&
         take_text(bytes, record.body.key_length, record.key) && bytes.size() < 8;
}

}  // namespace

bool take_record(std::string_view& bytes, RecordView& record) {
  std::string_view rest = bytes;
  if (!take(rest, record.head) || record.head.length % 8 != 0) return false;
  if (record.head.length < sizeof(RecordHead) || record.head.length > bytes.size()) return false;
  record.frame = bytes.substr(0, record.head.length);
  rest = record.frame.substr(sizeof(RecordHead));
  bool good = false;
  switch (static_cast<RecordKind>(record.head.kind)) {
    case RecordKind::kStored:
      good = take_body(rest, record);
      break;
    case RecordKind::kGone:
    case RecordKind::kChanged:
      record.body = {}, record.extents.clear();
      record.tenant = record.group = record.key = {};
      good = record.head.extents == 0 && rest.empty();
      break;
  }
  if (good) bytes.remove_prefix(record.head.length);
  return good;
}

void make_stored(std::string& frame, RecordHead head, const RecordBody& body, const RecordExtent* extents,
                 std::string_view tenant, std::string_view group, std::string_view key) {
  size_t length = sizeof(head) + sizeof(body) + head.extents * sizeof(RecordExtent) + tenant.size() +
                  group.size() + key.size();
  head.length = static_cast<uint32_t>((length + 7) / 8 * 8);
  frame.clear();
  frame.append(reinterpret_cast<const char*>(&head), sizeof(head));
  frame.append(reinterpret_cast<const char*>(&body), sizeof(body));
  frame.append(reinterpret_cast<const char*>(extents), head.extents * sizeof(RecordExtent));
  frame.append(tenant).append(group).append(key);
  frame.resize(head.length);
}

bool RecordStream::append(std::string_view frame) {
  if (sealed_ || pages_.empty() || pages_.back().frames.size() + frame.size() > kPageBytes) {
    pages_.push_back({last_ + 1, 0, {}});
    sealed_ = false;
  }
  pages_.back().frames.append(frame);
  ++pages_.back().count;
  ++last_;
  bool due = urgent_ || last_ - read_ > kMany;
  urgent_ |= static_cast<uint8_t>(frame[0]) != static_cast<uint8_t>(RecordKind::kStored);
  return !due && (urgent_ || last_ - read_ > kMany);
}

bool RecordStream::ring() {
  if (rung_ || !(urgent_ || last_ - read_ > kMany)) return false;
  rung_ = true;
  return true;
}

bool RecordStream::hurry() {
  bool due = urgent_;
  urgent_ = true;
  return !due;
}

void RecordStream::confirm(uint64_t seen) {
  seen_ = std::max(seen_, std::min(seen, last_));
  while (!pages_.empty() && pages_.front().first + pages_.front().count - 1 <= seen_) pages_.pop_front();
}

std::vector<const RecordPage*> RecordStream::read(uint64_t most_bytes) {
  std::vector<const RecordPage*> found;
  uint64_t bytes = 0;
  for (const RecordPage& page : pages_) {
    if (bytes != 0 && bytes + page.frames.size() > most_bytes) break;
    found.push_back(&page);
    bytes += page.frames.size();
  }
  sealed_ = true;
  rung_ = false;
  if (!found.empty()) read_ = found.back()->first + found.back()->count - 1;
  if (found.size() == pages_.size()) urgent_ = false;
  return found;
}

}  // namespace mooncake::store
