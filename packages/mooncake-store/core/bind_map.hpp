// The object map as Python holds it.
#pragma once

#include <nanobind/nanobind.h>

#include "object_map.hpp"
#include "support/gil.hpp"

namespace mooncake::store {

// The lock of the interpreter is given up in batches, unless a policy in Python is part of them.
class Map {
 public:
  Map(uint64_t granule_bytes, double evict_reserve_fraction, const nanobind::object& eviction,
      uint64_t first_version);

  template <typename F>
  auto batch(F&& work) {
    if (!compiled_) return work(map_);
    mooncake::GilReleased release;
    return work(map_);
  }

  ObjectMap& core() { return map_; }
  bool compiled() const { return compiled_; }

 private:
  const bool compiled_;
  ObjectMap map_;
};

}  // namespace mooncake::store
