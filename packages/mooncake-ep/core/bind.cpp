#include "bind.hpp"

#include "pg/bind_pg.hpp"

NB_MODULE(_core, m) {
  m.doc() =
      "Compiled core of mooncake_ep: placement of experts, rows of activations, memory that ranks share, "
      "process groups.";
  mooncake::ep::bind_eplb(m);
  mooncake::ep::bind_rows(m);
  mooncake::ep::bind_window(m);
  mooncake::ep::pg::bind_pg(m);
}
