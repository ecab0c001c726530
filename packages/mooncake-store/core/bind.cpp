#include "bind.hpp"

NB_MODULE(_core, m) {
  m.doc() =
      "Compiled core of mooncake_store: objects, free space of segments, order of eviction, records, "
      "digests.";
  mooncake::store::bind_space(m);
  mooncake::store::bind_map(m);
  mooncake::store::bind_records(m);
  mooncake::store::bind_tier_records(m);
  mooncake::store::bind_layout(m);
  mooncake::store::bind_desk(m);
  mooncake::store::bind_express(m);
  mooncake::store::bind_quick(m);
}
