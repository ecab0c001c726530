#include "ledger.hpp"

#include <algorithm>
#include <cstring>

namespace mooncake::store {

namespace {

constexpr size_t kChunkBytes = 1u << 20;
constexpr uint64_t kSlackBytes = 16u << 20;  // dead records that are not worth moving others for

}  // namespace

bool Ledger::take(uint64_t first, std::string_view frames, std::vector<Departed>& departed) {
  RecordView record;
  for (uint64_t number = first; !frames.empty(); ++number) {
    if (!take_record(frames, record)) return false;
    if (number <= seen_) continue;
    seen_ = number;
    switch (static_cast<RecordKind>(record.head.kind)) {
      case RecordKind::kStored:
        put(record);
        break;
      case RecordKind::kGone: {
        Departed gone{record.head.digest, {}, {}};
        forget(record.head.version, &gone);
        if (record.head.flags & kTell) departed.push_back(std::move(gone));
        break;
      }
      case RecordKind::kChanged:
        change(record.head);
        break;
    }
  }
  if (held_ > 2 * live_ + kSlackBytes) compact();
  return true;
}

void Ledger::restart(bool keep) {
  seen_ = 0;
  if (keep) return;
  chunks_.clear();
  where_.clear();
  live_ = held_ = 0;
}

uint64_t Ledger::bytes() const {
  uint64_t sum = 0;
  for (const Chunk& chunk : chunks_) sum += chunk.frames.capacity();
  return sum;
}

std::optional<std::string> Ledger::part(uint64_t number) const {
  if (number >= chunks_.size()) return std::nullopt;
  std::string found;
  found.reserve(chunks_[number].live);
  each_live(number, [&](const RecordView& record) { found.append(record.frame); });
  return found;
}

std::optional<std::string> Ledger::find(uint64_t version) const {
  auto found = where_.find(version);
  if (found == where_.end()) return std::nullopt;
  auto [number, offset] = found->second;
  std::string_view rest = std::string_view(chunks_[number].frames).substr(offset);
  RecordView record;
  if (!take_record(rest, record)) return std::nullopt;
  return std::string(record.frame);
}

void Ledger::put(const RecordView& record) {
  forget(record.head.version, nullptr);
  last_version_ = std::max(last_version_, record.head.version);
  if (chunks_.empty() || chunks_.back().frames.size() + record.frame.size() > kChunkBytes) {
    chunks_.emplace_back();
    chunks_.back().frames.reserve(kChunkBytes);
  }
  Chunk& chunk = chunks_.back();
  where_[record.head.version] = {static_cast<uint32_t>(chunks_.size() - 1),
                                 static_cast<uint32_t>(chunk.frames.size())};
  chunk.frames.append(record.frame);
  chunk.live += record.frame.size();
  live_ += record.frame.size();
  held_ += record.frame.size();
}

void Ledger::forget(uint64_t version, Departed* departed) {
  auto found = where_.find(version);
  if (found == where_.end()) return;
  auto [number, offset] = found->second;
  where_.erase(found);
  Chunk& chunk = chunks_[number];
  std::string_view rest = std::string_view(chunk.frames).substr(offset);
  RecordView record;
  take_record(rest, record);
  if (departed != nullptr) departed->key = record.key, departed->tenant = record.tenant;
  chunk.live -= record.head.length;
  live_ -= record.head.length;
  if (chunk.live == 0 && number + 1 != chunks_.size()) {
    held_ -= chunk.frames.size();
    chunk.frames = {};
  }
}

void Ledger::change(const RecordHead& head) {
  auto found = where_.find(head.version);
  if (found == where_.end()) return;
  char* frame = chunks_[found->second.chunk].frames.data() + found->second.offset;
  RecordHead there;
  std::memcpy(&there, frame, sizeof(there));
  there.flags = head.flags;
  there.priority = head.priority;
  std::memcpy(frame, &there, sizeof(there));
}

template <typename F>
void Ledger::each_live(uint64_t number, F&& visit) const {
  std::string_view all = chunks_[number].frames, rest = all;
  RecordView record;
  while (!rest.empty()) {
    auto offset = static_cast<uint32_t>(all.size() - rest.size());
    if (!take_record(rest, record)) return;
    auto found = where_.find(record.head.version);
    if (found == where_.end()) continue;
    if (found->second.chunk == number && found->second.offset == offset) visit(record);
  }
}

void Ledger::compact() {
  size_t end = chunks_.size();
  for (size_t number = 0; number + 1 < end; ++number) {
    if (2 * chunks_[number].live > chunks_[number].frames.size()) continue;
    std::vector<std::string> moving;
    each_live(number, [&](const RecordView& record) { moving.emplace_back(record.frame); });
    RecordView record;
    for (std::string_view frame : moving) {
      take_record(frame, record);
      put(record);  // which frees this chunk with its last one
    }
  }
}

}  // namespace mooncake::store
