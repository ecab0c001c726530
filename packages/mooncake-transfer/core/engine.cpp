#include "engine.hpp"

#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "channel.hpp"
#include "threads.hpp"

namespace mooncake {

namespace {

// Waits in a driver, which knows nothing of Ctrl-C: again and again, as it may be asked to. Each time is long
// enough for the patience that drivers have with peers before they cut them off.
template <typename Wait>
Status wait_in_driver(uint64_t deadline_ns, Wait&& wait) {
  constexpr uint64_t kSliceNs = 2'000'000'000;
  for (;;) {
    uint64_t until = slice_until(deadline_ns, kSliceNs);
    Status status = wait(until);
    if (status.code != Code::kTimeout || until >= deadline_ns || interrupted()) return status;
  }
}

Status watch(int epoll_fd, int fd) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.fd = fd;
  if (epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event) == 0) return {};
  return Status::error(Code::kIo, std::string("cannot watch an event descriptor: ") + strerror(errno));
}

void add_reason(std::string* reasons, const Status& status) {
  if (!status.ok()) *reasons += (reasons->empty() ? "" : "; ") + status.reason;
}

}  // namespace

Engine::Engine()
    : wake_fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      leader_fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      epoll_fd_(epoll_create1(EPOLL_CLOEXEC)),
      leader_epoll_fd_(epoll_create1(EPOLL_CLOEXEC)) {}

Engine::~Engine() {
  close();
  if (getpid() == owner_) delete notices_;
  // Not in close(): another thread may still be about to write to them.
  for (int fd : {wake_fd_, leader_fd_, epoll_fd_, leader_epoll_fd_}) {
    if (fd >= 0) ::close(fd);
  }
}

Status Engine::add_endpoint(const mc_driver_v1* table, const std::string& name, const std::string& device,
                            int numa_node, const Endpoint::Options& options) {
  Status usable = Endpoint::check(table);
  if (!usable.ok()) return usable;
  auto endpoint = std::make_unique<Endpoint>(table, name, device, numa_node);
  Status opened = endpoint->open(options);
  if (opened.ok()) endpoints_->push_back(std::move(endpoint));
  return opened;
}

Status Engine::start() {
  for (int fd : {wake_fd_, leader_fd_, epoll_fd_, leader_epoll_fd_}) {
    if (fd < 0)
      return Status::error(Code::kIo, "no descriptor left for the engine's event loop; raise `ulimit -n`");
  }
  Status status = watch(epoll_fd_, wake_fd_);
  if (status.ok()) status = watch(leader_epoll_fd_, leader_fd_);
  for (auto& endpoint : *endpoints_) {
    int fd = endpoint->event_fd();
    if (fd < 0) continue;
    if (status.ok()) status = watch(epoll_fd_, fd);
    if (status.ok()) status = watch(leader_epoll_fd_, fd);
  }
  for (auto& endpoint : *endpoints_) has_notices_ |= channel_ != nullptr && endpoint->has_notices();
  if (status.ok() && has_notices_) {
    channel_->expect_notices([this] {
      fetch_notices(true);
      if (asleep_) kick();  // it listens from the first token on
    });
  }
  return status.ok() ? start_thread(&progress_, "the engine", [this] { run(); }) : status;
}

void Engine::close() {
  if (getpid() != owner_) {
    // A forked child: its parent goes on with everything, and locks may be held for ever.
    closing_ = true;
    if (progress_.joinable()) progress_.detach();
    for (auto& endpoint : *endpoints_) endpoint->abandon();
    return;
  }
  std::call_once(closed_, [this] {
    {
      std::lock_guard lock(mutex_);  // from here post() refuses
      closing_ = true;
    }
    kick();
    if (has_notices_) channel_->expect_notices(nullptr);
    if (progress_.joinable()) progress_.join();
    for (auto& endpoint : *endpoints_) endpoint->close();
    // From here no driver touches memory any more, so transfers may end.
    std::vector<std::shared_ptr<Transfer>> orphans;
    std::vector<std::shared_ptr<Peer>> peers;
    std::vector<Waiting> waiting;
    {
      std::lock_guard lock(mutex_);
      for (const auto& known : peers_) {  // what waits for a peer keeps the peer, and the other way round
        auto peer = known.lock();
        if (!peer) continue;
        unready(*peer);
        peer->queue.retries.clear();
        for (Waiting& item : peer->queue.fenced) waiting.push_back(std::move(item));
        peer->queue.fenced.clear();
        for (auto& queue : peer->queue.waiting) {
          for (Waiting& item : queue) waiting.push_back(std::move(item));
          queue.clear();
        }
        peers.push_back(std::move(peer));
      }
      stalled_.clear();
      while (active_ != nullptr) {
        orphans.push_back(std::move(active_->self));  // it would keep itself alive for ever
        unlink(*active_);
      }
      // Threads in pump() or settle() may hold plain pointers to them for a moment longer.
      graveyard_ = orphans;
    }
    for (const auto& transfer : orphans) {
      transfer->note_failure(
          Status::error(Code::kClosed, transfer->label() + ": the engine was closed while it was running"));
      transfer->local->leave();
      transfer->complete(now_ns());
    }
    notices_->close();
  });
}

Status Engine::export_addresses(std::vector<DriverBlob>* addresses) {
  for (auto& endpoint : *endpoints_) {
    DriverBlob address{endpoint->name(), endpoint->device(), {}};
    Status status = endpoint->export_address(&address.blob);
    if (!status.ok()) return status;
    addresses->push_back(std::move(address));
  }
  return {};
}

// ---- regions

Status Engine::register_region(mc_memory memory, const std::string& name, std::shared_ptr<Region>* out) {
  auto region = std::make_shared<Region>(endpoints_->size());
  region->id = memory.region_id;
  region->address = memory.address;
  region->length = memory.length;
  region->numa_node = memory.numa_node;
  region->name = name;
  memory.struct_size = sizeof(memory);
  std::string reasons;
  bool taken = false;
  for (size_t i = 0; i < endpoints_->size(); ++i) {
    Endpoint& endpoint = *(*endpoints_)[i];
    if (!endpoint.takes(static_cast<mc_memory_kind>(memory.kind))) continue;
    mc_handle handle = 0;
    Status status = endpoint.register_memory(memory, &handle);
    if (status.ok()) region->handles[i] = handle;
    taken |= status.ok();
    add_reason(&reasons, status);
  }
  if (!taken) {
    return Status::error(closing_ ? Code::kClosed : Code::kUnsupported,
                         "no driver registers region '" + name +
                             "': " + (reasons.empty() ? "none takes this kind of memory" : reasons));
  }
  *out = std::move(region);
  return {};
}

Status Engine::export_keys(const Region& region, std::vector<DriverBlob>* keys) {
  for (size_t i = 0; i < endpoints_->size(); ++i) {
    if (region.handles[i] == 0) continue;
    Endpoint& endpoint = *(*endpoints_)[i];
    DriverBlob key{endpoint.name(), endpoint.device(), {}};
    Status status = endpoint.export_key(region.handles[i], &key.blob);
    if (!status.ok()) return status;
    keys->push_back(std::move(key));
  }
  return {};
}

Status Engine::grant(const Region& region, const uint8_t* key, uint32_t access,
                     std::vector<DriverBlob>* keys) {
  std::string reasons;
  for (size_t i = 0; i < endpoints_->size(); ++i) {
    if (region.handles[i] == 0) continue;
    Endpoint& endpoint = *(*endpoints_)[i];
    DriverBlob granted{endpoint.name(), endpoint.device(), {}};
    Status status = endpoint.grant(region.handles[i], key, access, &granted.blob);
    if (status.ok()) keys->push_back(std::move(granted));
    add_reason(&reasons, status);
  }
  if (!keys->empty()) return {};
  return Status::error(Code::kUnsupported,
                       "no driver of region '" + region.name + "' can limit what a key allows: " + reasons);
}

Status Engine::revoke(const Region& region, const uint8_t* key, uint64_t deadline_ns) {
  for (size_t i = 0; i < endpoints_->size(); ++i) {
    if (region.handles[i] == 0) continue;
    Status status = wait_in_driver(
        deadline_ns, [&](uint64_t until) { return (*endpoints_)[i]->revoke(region.handles[i], key, until); });
    // A driver that could not grant the key has nothing to revoke.
    if (status.ok() || status.code == Code::kUnsupported || status.code == Code::kInvalid) continue;
    if (status.code != Code::kTimeout) return status;
    return Status::error(Code::kRegionBusy, "the key of region '" + region.name +
                                                "' is revoked, but peers still use it: " + status.reason +
                                                "; revoke it again later");
  }
  return {};
}

// ", such as ...", for a message.
std::string Engine::one_that_uses(const Region& region) {
  std::shared_ptr<Transfer> found;
  {
    std::lock_guard lock(mutex_);
    for (Transfer* t = active_; t != nullptr && !found; t = t->next_active) {
      if (t->local.get() == &region) found = t->self;
    }
  }
  return found ? ", such as the " + found->label() + " (" + explain(*found) + ")" : "";
}

Status Engine::close_region(Region& region, uint64_t deadline_ns, bool refuse_when_used) {
  std::unique_lock closer(region.closer, std::defer_lock);
  if (!lock_until(closer, deadline_ns)) {
    return Status::error(Code::kRegionBusy,
                         "region '" + region.name + "' is being closed by another thread, which still waits");
  }
  auto in_use = [&] {
    return Status::error(Code::kRegionBusy, "region '" + region.name + "' is used by " +
                                                std::to_string(region.users()) + " transfers of this engine" +
                                                one_that_uses(region) +
                                                "; wait for or cancel them, then close again");
  };
  if (!region.begin_close(refuse_when_used)) return in_use();
  for (size_t i = 0; i < endpoints_->size(); ++i) {
    // Drivers without it refuse peers when the memory is given back below.
    if (region.handles[i] != 0) (*endpoints_)[i]->revoke(region.handles[i], nullptr, 0);
  }
  if (!region.wait_idle(deadline_ns)) return in_use();
  for (size_t i = 0; i < endpoints_->size(); ++i) {
    if (region.handles[i] == 0) continue;
    Status status = wait_in_driver(deadline_ns, [&](uint64_t until) {
      return (*endpoints_)[i]->deregister_memory(region.handles[i], until);
    });
    if (status.code == Code::kTimeout) {
      return Status::error(Code::kRegionBusy, "region '" + region.name +
                                                  "' is revoked, but peers still use it: " + status.reason +
                                                  "; close it again later");
    }
    region.handles[i] = 0;
    if (!status.ok() && status.code != Code::kClosed) return status;
  }
  return {};
}

// ---- peers

Status Engine::add_peer(const std::string& label, uint64_t channel_connection, uint64_t epoch,
                        const std::vector<DriverBlob>& addresses, std::shared_ptr<Peer>* out) {
  auto peer = std::make_shared<Peer>(endpoints_, label, channel_connection, addresses, policy_,
                                     late_writes_of(label, epoch));
  std::string reasons;
  bool reached = false;
  for (size_t rail = 0; rail < peer->rails().size(); ++rail) {
    if (peer->rails()[rail]->spare) continue;  // connected when it is needed
    if (interrupted != nullptr && interrupted()) return Status::error(Code::kCancelled, "interrupted");
    mc_handle connection = 0;
    Status status = peer->connection(rail, &connection);
    reached |= status.ok();
    add_reason(&reasons, status);
  }
  if (!reached) {
    return Status::error(Code::kNoRoute,
                         "no driver of this engine connects to " + label + ": " +
                             (reasons.empty() ? "the two have no driver in common" : reasons));
  }
  std::lock_guard lock(mutex_);
  std::erase_if(peers_, [](const auto& known) { return known.expired(); });
  peers_.push_back(peer);
  *out = std::move(peer);
  return {};
}

std::vector<std::shared_ptr<Peer>> Engine::peers() {
  std::vector<std::shared_ptr<Peer>> found;
  std::lock_guard lock(mutex_);
  for (const auto& known : peers_) {
    if (auto peer = known.lock()) found.push_back(std::move(peer));
  }
  return found;
}

Status Engine::import_region(std::shared_ptr<Peer> peer, const std::string& name, uint64_t region_id,
                             const uint8_t* key, uint64_t length, const std::vector<DriverBlob>& keys,
                             std::shared_ptr<RemoteRegion>* out) {
  auto remote = std::make_shared<RemoteRegion>(std::move(peer), name, region_id, key, length, keys);
  std::string reasons;
  std::vector<std::pair<size_t, Status>> ruled_out;
  bool reached = false;
  for (size_t rail = 0; rail < remote->peer()->rails().size(); ++rail) {
    // Spare rails are imported when they are needed.
    if ((remote->rails() >> rail & 1u) == 0 || remote->peer()->rails()[rail]->spare) continue;
    if (interrupted != nullptr && interrupted()) return Status::error(Code::kCancelled, "interrupted");
    mc_handle connection = 0, handle = 0;
    Status status = remote->handle(rail, &connection, &handle);
    reached |= status.ok();
    if (!status.ok()) {
      remote->rule_out(rail);
      ruled_out.emplace_back(rail, status);
    }
    add_reason(&reasons, status);
  }
  if (!reached) {
    return Status::error(Code::kNoRoute,
                         "no driver leads to " + remote->label() + ": " +
                             (reasons.empty() ? "the two have no driver in common" : reasons));
  }
  for (const auto& [rail, status] : ruled_out) tell_unused(*remote, rail, status);
  *out = std::move(remote);
  return {};
}

// Transfers take other rails, and nobody would hear why: of a rail that never can lead there as a remark, of
// one that should as a failure.
void Engine::tell_unused(RemoteRegion& remote, size_t rail, const Status& status) {
  Peer& peer = *remote.peer();
  Rail& way = *peer.rails()[rail];
  std::string reason = (*endpoints_)[way.endpoint]->without_label(status.reason);
  if (!way.tell(reason)) return;
  auto kind = status.code == Code::kUnsupported ? Notice::Kind::kRailUnused : Notice::Kind::kRailFailed;
  notices_->push({kind, peer.label(), way.label, remote.name(), std::move(reason), nullptr});
}

Status Engine::prepare(mc_opcode opcode, std::shared_ptr<Region> local, std::shared_ptr<RemoteRegion> remote,
                       Plan plan, std::shared_ptr<Transfer>* out) {
  const Peer& peer = *remote->peer();
  uint64_t usable = 0;
  std::string reasons;
  for (size_t rail = 0; rail < peer.rails().size(); ++rail) {
    const Rail& way = *peer.rails()[rail];
    if ((remote->rails() >> rail & 1u) == 0) continue;
    uint32_t alignment = std::max<uint32_t>((*endpoints_)[way.endpoint]->caps().alignment, 1);
    if (local->handles[way.endpoint] == 0) {
      add_reason(&reasons, Status::error(Code::kNoRoute, way.label + ": it does not know the local region"));
    } else if ((plan.alignment_bits() & (alignment - 1)) != 0) {
      add_reason(&reasons,
                 Status::error(Code::kNoRoute, way.label + ": it needs offsets and lengths in multiples of " +
                                                   std::to_string(alignment)));
    } else {
      usable |= uint64_t{1} << rail;
    }
  }
  if (usable == 0) {
    if (local->users() == 0 && closing_) return Status::error(Code::kClosed, "the engine is closed");
    return Status::error(Code::kNoRoute, "no driver moves bytes between region '" + local->name + "' and " +
                                             remote->label() + (reasons.empty() ? "" : ": " + reasons));
  }
  *out = std::make_shared<Transfer>(opcode, std::move(plan), std::move(local), std::move(remote), usable);
  return {};
}

}  // namespace mooncake
