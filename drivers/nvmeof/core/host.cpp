#include "host.hpp"

#include <map>
#include <mutex>
#include <vector>

#include "support/os.hpp"

namespace mooncake::nvmeof {
namespace {

struct Known {
  std::weak_ptr<Owner> owner;
  std::weak_ptr<Io> io;
};

struct Registry {
  std::mutex mutex;
  std::map<EndpointId, Known> known;
};

Registry& registry() { return driver::of_this_process<Registry>(); }

std::vector<std::shared_ptr<Io>> everyone() {
  std::vector<std::shared_ptr<Io>> all;
  std::lock_guard lock(registry().mutex);
  for (auto& [id, known] : registry().known) {
    if (auto io = known.io.lock()) all.push_back(std::move(io));
  }
  return all;
}

}  // namespace

void announce(const EndpointId& id, const std::shared_ptr<Owner>& owner, const std::shared_ptr<Io>& io) {
  std::lock_guard lock(registry().mutex);
  registry().known[id] = {owner, io};
}

void withdraw(const EndpointId& id) {
  std::lock_guard lock(registry().mutex);
  registry().known.erase(id);
}

std::shared_ptr<Owner> find_owner(const EndpointId& id) {
  std::lock_guard lock(registry().mutex);
  auto found = registry().known.find(id);
  return found == registry().known.end() ? nullptr : found->second.owner.lock();
}

void reap_all() {
  for (auto& io : everyone()) io->reap(Io::Reaper::kOther);
}

void forget_everywhere(Device& device) {
  for (auto& io : everyone()) io->forget(device);
}

}  // namespace mooncake::nvmeof
