// What an owner knows of the values in its segment: the records its master has sent, as far as they stand.
// It goes to the next master in pages. Not thread-safe.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "records.hpp"

namespace mooncake::store {

class Ledger {
 public:
  // Somebody whose value has gone is told by its key; by its digest where it lay in another's segment.
  struct Departed {
    Digest digest;
    std::string key;  // empty when it is not known here
    std::string tenant;
  };

  // Takes a page of frames whose first has this number, as far as they are new; those to be told of are
  // appended. False, and nothing more is taken, for bytes that are no frames.
  bool take(uint64_t first, std::string_view frames, std::vector<Departed>& departed);
  // A new master: numbers begin again. What it holds stays or not.
  void restart(bool keep);

  uint64_t seen() const { return seen_; }
  // The highest version that ever stood here.
  uint64_t last_version() const { return last_version_; }
  size_t size() const { return where_.size(); }
  uint64_t bytes() const;

  // The record of a version, as a frame.
  std::optional<std::string> find(uint64_t version) const;

  // The standing records of one part, as frames one after the other; parts are numbered from 0. Nothing
  // beyond the last. What is moved while somebody goes through the parts comes twice, but is not missed.
  std::optional<std::string> part(uint64_t number) const;

 private:
  struct Chunk {
    std::string frames;
    uint64_t live = 0;  // bytes of records that stand
  };
  struct Place {
    uint32_t chunk, offset;
  };

  void put(const RecordView& record);
  void forget(uint64_t version, Departed* departed);
  void change(const RecordHead& head);
  template <typename F>
  void each_live(uint64_t number, F&& visit) const;
  void compact();

  std::vector<Chunk> chunks_;
  std::unordered_map<uint64_t, Place> where_;  // by version
  uint64_t seen_ = 0;
  uint64_t last_version_ = 0;
  uint64_t live_ = 0, held_ = 0;  // bytes
};

}  // namespace mooncake::store
