#include "bind.hpp"

NB_MODULE(_core, m) {
  m.doc() = "Compiled core of mooncake_ep: placement of experts.";
  mooncake::ep::bind_eplb(m);
}
