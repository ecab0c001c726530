// The pieces of a host's share. Processes of one host change the table under the pool's file lock; one that
// dies in between leaves a block either as it was or free, because `state` changes in one step.
#include <algorithm>
#include <cstring>
#include <utility>

#include "pool.hpp"

namespace mooncake::cxl {
namespace {

std::string name_in(const Block& block) { return {block.name, strnlen(block.name, sizeof block.name)}; }

}  // namespace

uint32_t Pool::block_checksum(uint32_t index) const {
  const Block& block = blocks()[index];
  uint32_t crc = crc32c(uuid(), sizeof header().uuid);
  crc = crc32c(&index, sizeof index, crc);
  crc = crc32c(&block.offset, sizeof block.offset, crc);
  crc = crc32c(&block.length, sizeof block.length, crc);
  crc = crc32c(&block.to_keep, sizeof block.to_keep, crc);
  return crc32c(block.name, sizeof block.name, crc);
}

bool Pool::owned(const Block& block) const {
  uint64_t owner = block.owner.load();
  uint32_t member = static_cast<uint32_t>(owner & 0xffff);
  if (member == 0 || !knows(member - 1)) return false;
  return member_at(member - 1).word.load() == ((owner >> 16) << 1 | 1);
}

// A member that died, unless somebody who lives still copies from or to what it had.
void Pool::retire(uint32_t member) {
  Member& dead = member_at(member);
  Grant* table = grants(member);
  for (uint32_t i = 0; i < kGrants; ++i) {
    uint64_t word = table[i].word.load();
    if ((word & 1) != 0) table[i].word.store(word & ~uint64_t{1});
  }
  show(table, kGrants * sizeof(Grant));
  dead.word.store(dead.word.load() & ~uint64_t{1});
  show(&dead, sizeof dead);
}

void Pool::reclaim() {
  for (uint32_t i = 0; i < kMembers; ++i) {
    uint32_t number = request_.host * kMembers + i;
    if ((member_at(number).word.load() & 1) != 0 && has_died(number)) retire(number);
  }
  for (uint32_t i = 0; i < kBlocks; ++i) {
    Block& block = blocks()[i];
    uint64_t state = block.state.load();
    if (state == kFree || owned(block)) continue;
    if (state == kTaken) block.state.store(kFree);
    if (state == kKept) block.owner.store(0);
    show(&block, sizeof block);
  }
}

Status Pool::read_blocks(std::vector<BlockView>* taken) {
  for (uint32_t i = 0; i < kBlocks; ++i) {
    const Block& block = blocks()[i];
    uint64_t state = block.state.load();
    if (state == kFree) continue;
    uint64_t end = share_offset() + header().share_bytes;
    bool sound = (state == kTaken || state == kKept) && block.checksum == block_checksum(i) &&
                 block.offset >= share_offset() && block.offset <= end && block.length <= end - block.offset;
    if (!sound) {
      return failed(MC_IO, "block " + std::to_string(i) + " in the table of the pool " +
                               request_.backing.path +
                               " is damaged; save what you need and format the pool anew");
    }
    taken->push_back({i, block.offset, block.length, block.to_keep != 0, owned(block), name_in(block)});
  }
  std::sort(taken->begin(), taken->end(),
            [](const BlockView& left, const BlockView& right) { return left.offset < right.offset; });
  for (size_t i = 1; i < taken->size(); ++i) {
    const BlockView& before = (*taken)[i - 1];
    if (before.offset + before.length > (*taken)[i].offset) {
      return failed(MC_IO, "blocks " + std::to_string(before.index) + " and " +
                               std::to_string((*taken)[i].index) + " of the pool " + request_.backing.path +
                               " overlap: its table is damaged; format the pool anew");
    }
  }
  return {};
}

// A grant's offset and length stay readable after its end, until its slot is given again.
void Pool::busy_spans(std::vector<Span>* spans, std::vector<bool>* owners) {
  for (uint32_t number = 0; number < hosts() * kMembers; ++number) {
    Member& member = member_at(number);
    see(&member, sizeof member, number);
    uint64_t word = member.word.load();
    if ((word & 1) == 0 || !alive(number, word >> 1)) continue;
    Use* table = uses(number);
    see(table, kUses * sizeof(Use), number);
    for (uint32_t i = 0; i < kUses; ++i) {
      uint64_t name = table[i].grant.load();
      uint32_t owner = static_cast<uint32_t>(name >> 32), index = static_cast<uint32_t>(name);
      if (owner == 0 || !knows(owner - 1) || index >= kGrants) continue;
      const Grant& grant = grants(owner - 1)[index];
      spans->push_back({grant.offset, grant.length});
      (*owners)[owner - 1] = true;
    }
  }
}

Status Pool::find_room(uint64_t length, uint64_t* offset) {
  std::vector<BlockView> taken;
  if (Status status = read_blocks(&taken); !status.ok()) return status;
  std::vector<Span> spans;
  std::vector<bool> owners(hosts() * kMembers);
  busy_spans(&spans, &owners);
  uint64_t free = header().share_bytes;
  for (const BlockView& block : taken) {
    spans.push_back({block.offset, block.length});
    free -= block.length;
  }
  std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) { return a.offset < b.offset; });
  uint64_t at = share_offset(), end = share_offset() + header().share_bytes;
  for (const Span& span : spans) {
    if (span.offset >= end || span.offset + span.length <= at) continue;
    if (span.offset >= at && span.offset - at >= length) break;
    at = std::max(at, rounded_up(span.offset + span.length, kUnit));
  }
  if (at <= end && length <= end - at) {
    *offset = at;
    return {};
  }
  return failed(MC_NO_MEMORY, "the pool " + request_.backing.path + " has no piece of " +
                                  std::to_string(length) + " bytes left for host " +
                                  std::to_string(request_.host) + " (" + std::to_string(free) + " are free)");
}

void Pool::take(uint32_t index, uint64_t offset, uint64_t length, const std::string& name, bool kept) {
  Block& block = blocks()[index];
  block.offset = offset;
  block.length = length;
  block.to_keep = kept;
  std::memset(block.name, 0, sizeof block.name);
  std::memcpy(block.name, name.data(), std::min<size_t>(name.size(), sizeof block.name - 1));
  block.checksum = block_checksum(index);
  block.owner.store(owner_word(member_, epoch_));
  write_back(&block, sizeof block);
  block.state.store(kTaken);
  write_back(&block, sizeof block);
}

Status Pool::allocate(uint64_t length, const std::string& name, bool kept, BlockView* block) {
  if (length == 0 || length > size()) {
    return failed(
        length == 0 ? MC_INVALID : MC_NO_MEMORY,
        "cannot allocate " + std::to_string(length) + " bytes in a pool of " + std::to_string(size()));
  }
  if (kept && (name.empty() || name.size() >= kNameBytes)) {
    return failed(MC_INVALID, "a block that is kept needs a name of 1 to " + std::to_string(kNameBytes - 1) +
                                  " bytes, not '" + name + "'");
  }
  uint64_t offset = 0, whole = rounded_up(length, kUnit);
  uint32_t index = 0;
  {
    LockedBacking locked(backing_);
    if (Status status = locked.lock(); !status.ok()) return status;
    reclaim();
    for (uint32_t i = 0; kept && i < kBlocks; ++i) {
      const Block& other = blocks()[i];
      if (other.state.load() != kFree && other.to_keep != 0 && name_in(other) == name)
        return failed(MC_INVALID, "the pool has a block named '" + name + "'; open it, or drop it first");
    }
    if (Status status = find_room(whole, &offset); !status.ok()) return status;
    while (index < kBlocks && blocks()[index].state.load() != kFree) ++index;
    if (index == kBlocks) {
      return failed(MC_NO_MEMORY, "the pool's table of " + std::to_string(kBlocks) +
                                      " blocks is full; make fewer, larger ones");
    }
    take(index, offset, whole, name, kept);
  }
  // Nobody else looks at it yet. One that is to be kept must not keep what was there before.
  std::memset(data() + offset, 0, whole);
  if (shows_ || kept) write_back(data() + offset, whole);
  if (kept) {
    blocks()[index].state.store(kKept);
    write_back(&blocks()[index], sizeof(Block));
  }
  *block = {index, offset, length, kept, true, name};
  return {};
}

Status Pool::adopt(const std::string& name, BlockView* found) {
  LockedBacking locked(backing_);
  if (Status status = locked.lock(); !status.ok()) return status;
  reclaim();
  std::vector<BlockView> taken;
  if (Status status = read_blocks(&taken); !status.ok()) return status;
  for (const BlockView& view : taken) {
    Block& block = blocks()[view.index];
    if (block.state.load() != kKept || view.name != name) continue;
    if (view.owned) {
      return failed(MC_INVALID, "block '" + name + "' has an owner that lives, process " +
                                    std::to_string(member_at((block.owner.load() & 0xffff) - 1).pid));
    }
    block.owner.store(owner_word(member_, epoch_));
    write_back(&block, sizeof block);
    *found = view;
    found->owned = true;
    return {};
  }
  return failed(MC_INVALID, "the pool has no block named '" + name + "' in the share of host " +
                                std::to_string(request_.host));
}

void Pool::release(uint32_t index) {
  LockedBacking locked(backing_);
  // Without the lock it stays ours until this process leaves the pool.
  if (forked() || !locked.lock().ok()) return;
  Block& block = blocks()[index];
  if (block.owner.load() != owner_word(member_, epoch_)) return;
  if (block.state.load() == kKept) {
    block.owner.store(0);
  } else {
    block.state.store(kFree);
  }
  write_back(&block, sizeof block);
}

Status Pool::drop(const std::string& name) {
  BlockView found{};
  if (Status status = adopt(name, &found); !status.ok()) return status;
  LockedBacking locked(backing_);
  if (Status status = locked.lock(); !status.ok()) return status;
  blocks()[found.index].state.store(kFree);
  write_back(&blocks()[found.index], sizeof(Block));
  return {};
}

Status Pool::list(std::vector<BlockView>* found) {
  LockedBacking locked(backing_);
  if (Status status = locked.lock(); !status.ok()) return status;
  reclaim();
  return read_blocks(found);
}

Status Pool::free_bytes(uint64_t* bytes) {
  std::vector<BlockView> taken;
  if (Status status = list(&taken); !status.ok()) return status;
  *bytes = header().share_bytes;
  for (const BlockView& block : taken) *bytes -= block.length;
  return {};
}

}  // namespace mooncake::cxl
