// Regions on files and devices between processes: when a peer asks with a key, the owner hands over what it
// opens for itself, and waits for it to let go when the key is revoked. Within a host that is a descriptor;
// another host gets the URL of a namespace, or what it finds the namespace by among its own block devices.
#pragma once

#include <memory>

#include "io.hpp"
#include "options.hpp"
#include "region.hpp"
#include "support/peers/asker.hpp"
#include "support/peers/grantor.hpp"

namespace mooncake::nvmeof {

// What the grantor knows of a region.
struct Lent : driver::Owned {
  Lent(const std::shared_ptr<Region>& region, const uint8_t* key)
      : Owned(region->id, region->length, key), region(region) {}
  const std::weak_ptr<Region> region;
};

// A region of another process, opened here.
struct Borrowed : driver::Opened {
  std::shared_ptr<Io> io;
  std::shared_ptr<Region> region;
  ~Borrowed() override;
};

Status lend(const driver::Session& peer, const driver::Owned& owned, uint32_t access, driver::Offer& offer);
Status borrow(const Options& options, const std::shared_ptr<Io>& io, const driver::Message& grant,
              const std::vector<driver::Offer::Part>& parts, std::shared_ptr<driver::Opened>& opened);

}  // namespace mooncake::nvmeof
