#include "peer.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

namespace mooncake {

namespace {

size_t common_prefix(const std::string& a, const std::string& b) {
  return static_cast<size_t>(std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin());
}

struct Pair {
  size_t local;     // index of the endpoint
  size_t remote;    // index into the peer's addresses
  size_t likeness;  // of the two devices' names: rails of a rack, or addresses of one subnet
};

// Pairs every endpoint of one side with a partner first, the likest devices together: those are the rails a
// transfer is spread over. The other combinations are kept for when such a rail fails.
void pair_devices(std::vector<Pair> pairs, size_t locals, size_t remotes, std::vector<Pair>* first,
                  std::vector<Pair>* spare) {
  std::stable_sort(pairs.begin(), pairs.end(),
                   [](const Pair& a, const Pair& b) { return a.likeness > b.likeness; });
  std::vector<std::pair<size_t, size_t>> used;  // endpoint or address index, how often
  auto uses = [&](size_t key) -> size_t& {
    for (auto& [known, count] : used) {
      if (known == key) return count;
    }
    return used.emplace_back(key, 0).second;
  };
  constexpr size_t kRemote = size_t{1} << 32;
  size_t local_share = (remotes + locals - 1) / locals, remote_share = (locals + remotes - 1) / remotes;
  for (const Pair& pair : pairs) {
    bool free = uses(pair.local) < local_share && uses(kRemote + pair.remote) < remote_share;
    if (free) {
      ++uses(pair.local);
      ++uses(kRemote + pair.remote);
    }
    (free ? first : spare)->push_back(pair);
  }
}

}  // namespace

Peer::Peer(std::shared_ptr<Endpoints> endpoints, std::string label, uint64_t channel_connection,
           const std::vector<DriverBlob>& addresses, const RailPolicy& policy,
           std::shared_ptr<LateWrites> late)
    : endpoints_(std::move(endpoints)),
      label_(std::move(label)),
      channel_connection_(channel_connection),
      policy_(policy),
      late_(std::move(late)),
      connections_(kMaxRails) {
  uint32_t tier = 0;
  // Endpoints of one driver lie side by side, the preferred driver first.
  for (size_t begin = 0, end = 0; begin < endpoints_->size(); begin = end) {
    const std::string& driver = (*endpoints_)[begin]->name();
    while (end < endpoints_->size() && (*endpoints_)[end]->name() == driver) ++end;
    std::vector<Pair> pairs, first, spare;
    size_t remotes = 0;
    for (size_t remote = 0; remote < addresses.size(); ++remote) {
      if (addresses[remote].driver != driver) continue;
      ++remotes;
      for (size_t local = begin; local < end; ++local)
        pairs.push_back(
            {local, remote, common_prefix((*endpoints_)[local]->device(), addresses[remote].device)});
    }
    if (remotes == 0) continue;
    pair_devices(std::move(pairs), end - begin, remotes, &first, &spare);
    for (const auto* group : {&first, &spare}) {
      for (const Pair& pair : *group) {
        if (rails_.size() == kMaxRails) return;
        const DriverBlob& remote = addresses[pair.remote];
        rails_.push_back(std::make_unique<Rail>(*(*endpoints_)[pair.local], pair.local, remote.device,
                                                remote.blob, tier, group == &spare));
      }
      ++tier;
    }
  }
}

Peer::~Peer() {
  late_->orphan(*this);
  for (size_t rail = 0; rail < rails_.size(); ++rail) {
    if (mc_handle connection = connections_[rail]) endpoint(*rails_[rail]).disconnect(connection);
  }
}

Status Peer::late_writes(size_t rail, std::string* token) {
  mc_handle connection = connections_[rail].load(std::memory_order_acquire);
  token->clear();
  return connection == 0 ? Status{} : endpoint(*rails_[rail]).late_writes(connection, token);
}

Status Peer::connection(size_t rail, mc_handle* out) {
  *out = connections_[rail].load(std::memory_order_acquire);
  if (*out != 0) return {};
  std::lock_guard lock(mutex_);
  if ((*out = connections_[rail]) != 0) return {};
  Status status = endpoint(*rails_[rail]).connect(rails_[rail]->address, out);
  if (status.ok()) connections_[rail].store(*out, std::memory_order_release);
  return status;
}

RemoteRegion::RemoteRegion(std::shared_ptr<Peer> peer, std::string name, uint64_t region_id,
                           const uint8_t* key, uint64_t length, const std::vector<DriverBlob>& keys)
    : peer_(std::move(peer)),
      name_(std::move(name)),
      region_id_(region_id),
      length_(length),
      blobs_(peer_->rails().size()),
      handles_(peer_->rails().size()) {
  memcpy(key_, key, MC_KEY_BYTES);
  for (size_t rail = 0; rail < peer_->rails().size(); ++rail) {
    const Rail& way = *peer_->rails()[rail];
    for (const DriverBlob& blob : keys) {
      if (blob.driver != peer_->endpoint(way).name() || blob.device != way.remote_device) continue;
      rails_ |= uint64_t{1} << rail;
      blobs_[rail] = blob.blob;
      break;
    }
  }
}

RemoteRegion::~RemoteRegion() {
  for (size_t rail = 0; rail < handles_.size(); ++rail) {
    if (mc_handle handle = handles_[rail]) peer_->endpoint(*peer_->rails()[rail]).release_key(handle);
  }
}

Status RemoteRegion::handle(size_t rail, mc_handle* connection, mc_handle* remote) {
  Status status = peer_->connection(rail, connection);
  if (!status.ok()) return status;
  *remote = handles_[rail].load(std::memory_order_acquire);
  if (*remote != 0) return {};
  std::lock_guard lock(mutex_);
  if ((*remote = handles_[rail]) != 0) return {};
  status = peer_->endpoint(*peer_->rails()[rail])
               .import_key(*connection, region_id_, key_, length_, blobs_[rail], remote);
  if (status.ok()) handles_[rail].store(*remote, std::memory_order_release);
  return status;
}

}  // namespace mooncake
