#include "fabric.hpp"

#include <sys/uio.h>

#include <algorithm>
#include <cstring>
#include <string_view>

namespace mooncake::efa {
namespace {

// The oldest interface that has what is used here; newer libraries speak it, too.
constexpr uint32_t kInterface = fi::version(1, 17);
constexpr size_t kQueueSize = 8192;
constexpr size_t kAddresses = 64;  // first size of an address table; it grows
constexpr int kKeyAttempts = 16;
// ofi_rxm looks for connections that peers begin at every 128th look into the queue only.
constexpr size_t kLooksOfRxm = 16;

// Numbers of options that came after 1.17; older libraries refuse them.
constexpr int kMaxRmaSize = 14;                               // FI_OPT_MAX_RMA_SIZE
constexpr int kRnrRetry = -(0xefa << 16);                     // FI_OPT_EFA_RNR_RETRY
constexpr int kUnsolicitedWriteReceive = -(0xefa << 16) + 8;  // FI_OPT_EFA_USE_UNSOLICITED_WRITE_RECV

bool fits(const fi::Info& info, const std::string& wanted) {
  if (wanted.empty()) return true;
  std::string_view name = info.domain_attr->name;
  if (name == wanted || (name.starts_with(wanted) && name[wanted.size()] == '-')) return true;
  const fi::Nic* nic = info.nic;
  return nic != nullptr && nic->device_attr != nullptr && nic->device_attr->name != nullptr &&
         wanted == nic->device_attr->name;
}

}  // namespace

Status Api::load(const std::string& path) {
  constexpr const char* kRemedy =
      "install libfabric (Debian: libfabric1; for EFA the installer of AWS), or name the file with option "
      "library";
  Status loaded = path.empty() ? library.open({"libfabric.so.1", "/opt/amazon/efa/lib64/libfabric.so.1",
                                               "/opt/amazon/efa/lib/libfabric.so.1"},
                                              kRemedy)
                               : library.open({path.c_str()}, kRemedy);
  if (!loaded.ok()) return loaded;
  for (Status found : {library.require("fi_getinfo", &getinfo), library.require("fi_dupinfo", &dupinfo),
                       library.require("fi_freeinfo", &freeinfo), library.require("fi_fabric", &fabric),
                       library.require("fi_strerror", &strerror), library.require("fi_version", &version)}) {
    if (!found.ok()) return found;
  }
  if (version() >= kInterface) return {};
  return failed(MC_UNSUPPORTED, library.name() + " is version " + std::to_string(fi::major_of(version())) +
                                    "." + std::to_string(fi::minor_of(version())) +
                                    "; 1.17 or newer is needed");
}

Status Fabric::fail(const char* what, int error) const {
  mc_status code = error == -ENOMEM ? MC_NO_MEMORY : MC_IO;
  return failed(code, std::string("libfabric cannot ") + what + " (" + name() + "): " + say(error));
}

bool Fabric::is_efa() const { return std::string_view(info_->fabric_attr->prov_name) == "efa"; }

Status Fabric::open(const Options& options) {
  if (Status status = api_.load(options.library); !status.ok()) return status;
  if (Status status = choose(options); !status.ok()) return status;
  return open_domain();
}

void Fabric::close() {
  queue_.reset();
  domain_.reset();
  fabric_.reset();
}

// What there is in order of preference: without a wire protocol of libfabric's own, with memory of GPUs, with
// completions that say that bytes are visible.
Status Fabric::choose(const Options& options) {
  int error = -ENODATA;
  for (const char* fabric : {"efa-direct", static_cast<const char*>(nullptr)}) {
    if (fabric != nullptr && options.provider != "efa") continue;
    for (bool cuda : {true, false}) {
      for (bool delivery : {true, false}) {
        info_ = ask(options, fabric, cuda, delivery, &error);
        if (info_ == nullptr) continue;
        mr_mode_ = info_->domain_attr->mr_mode;
        write_flags_ = delivery ? fi::kDeliveryComplete : 0;
        max_bytes_ = info_->ep_attr->max_msg_size;
        looks_ = std::strstr(info_->fabric_attr->prov_name, "ofi_rxm") != nullptr ? kLooksOfRxm : 1;
        return {};
      }
    }
  }
  return failed(MC_UNSUPPORTED, "libfabric's provider '" + options.provider + "' has no domain" +
                                    (options.domain.empty() ? "" : " '" + options.domain + "'") +
                                    " with reliable RMA here: " + say(error) + "; `fi_info -p '" +
                                    options.provider + "'` shows what it has");
}

Fabric::Info Fabric::ask(const Options& options, const char* fabric, bool cuda, bool delivery,
                         int* error) const {
  Info hints(api_.dupinfo(nullptr), {&api_});
  if (hints == nullptr) return hints;
  hints->caps = fi::kMessages | fi::kRma | (cuda ? fi::kHmem : 0);
  hints->mode = fi::kContext | fi::kContext2 | fi::kReceiveData;
  hints->ep_attr->type = fi::kReliableDatagram;
  hints->fabric_attr->prov_name = strdup(options.provider.c_str());
  if (fabric != nullptr) hints->fabric_attr->name = strdup(fabric);
  fi::DomainAttr& domain = *hints->domain_attr;
  domain.mr_mode = fi::kMemoryLocal | fi::kMemoryVirtualAddress | fi::kMemoryAllocated |
                   fi::kMemoryProviderKey | fi::kMemoryHmem;
  domain.threading = fi::kThreadCompletion;
  domain.control_progress = domain.data_progress = fi::kProgressManual;
  domain.resource_mgmt = fi::kManaged;
  domain.av_type = fi::kTable;
  if (delivery) hints->tx_attr->op_flags = fi::kDeliveryComplete;
  fi::Info* found = nullptr;
  if (int rc = api_.getinfo(kInterface, nullptr, nullptr, 0, hints.get(), &found); rc != 0) {
    *error = rc;
    return {nullptr, {&api_}};
  }
  Info all(found, {&api_});
  for (const fi::Info* info = all.get(); info != nullptr; info = info->next) {
    if (fits(*info, options.domain)) return {api_.dupinfo(info), {&api_}};
  }
  *error = -ENODATA;
  return {nullptr, {&api_}};
}

Status Fabric::open_domain() {
  fi::Fabric* fabric = nullptr;
  if (int rc = api_.fabric(info_->fabric_attr, &fabric, nullptr); rc != 0) return fail("open the fabric", rc);
  fabric_.reset(fabric);
  fi::Domain* domain = nullptr;
  if (int rc = fabric->ops->domain(fabric, info_.get(), &domain, nullptr); rc != 0)
    return fail("open the domain", rc);
  domain_.reset(domain);
  fi::QueueAttr wanted{};
  wanted.size = std::min<size_t>(kQueueSize, 16 * info_->tx_attr->size);
  wanted.format = fi::kQueueData;
  // No descriptor to wait for: efa and shm have none, and ofi_rxm 1.17 looks at endpoints that were closed
  // when it is asked whether one may wait.
  wanted.wait_obj = fi::kNoWait;
  fi::Queue* queue = nullptr;
  if (int rc = domain->ops->cq_open(domain, &wanted, &queue, nullptr); rc != 0)
    return fail("open a completion queue", rc);
  queue_.reset(queue);
  Port port;
  if (Status status = open_port(1, 1, port); !status.ok()) return status;
  ask_for_limits(port.endpoint.get());
  return {};
}

void Fabric::ask_for_limits(fi::Endpoint* endpoint) {
  size_t most = 0, length = sizeof most;
  if (endpoint->ops->getopt(&endpoint->fid, fi::kOptionEndpoint, kMaxRmaSize, &most, &length) == 0 &&
      most > 0)
    max_bytes_ = std::min<uint64_t>(max_bytes_, most);
}

// Refusals are fine: what the library or the device does not know stays as it is.
void Fabric::set_options_of_efa(fi::Endpoint* endpoint) const {
  size_t forever = 7;  // retries of a target without a posted receive; 7: until it has one
  endpoint->ops->setopt(&endpoint->fid, fi::kOptionEndpoint, kRnrRetry, &forever, sizeof forever);
  // Writes with data take no receive of the mailbox where the device can do without.
  bool unsolicited = true;
  endpoint->ops->setopt(&endpoint->fid, fi::kOptionEndpoint, kUnsolicitedWriteReceive, &unsolicited,
                        sizeof unsolicited);
}

Status Fabric::open_port(size_t sends, size_t receives, Port& port) const {
  Info info(api_.dupinfo(info_.get()), {&api_});
  if (info == nullptr) return failed(MC_NO_MEMORY, "no memory for an endpoint's description");
  // Asked for with each write. Of messages, shm would report to a sender by memory of a receiver that may go.
  info->tx_attr->op_flags = 0;
  info->tx_attr->size = std::min(info->tx_attr->size, sends);
  info->rx_attr->size = std::min(info->rx_attr->size, receives);
  fi::AddressTableAttr table{};
  table.type = fi::kTable;
  table.count = kAddresses;
  fi::AddressTable* addresses = nullptr;
  if (int rc = domain_->ops->av_open(domain_.get(), &table, &addresses, nullptr); rc != 0)
    return fail("open an address table", rc);
  Port made;
  made.addresses.reset(addresses);
  fi::Endpoint* endpoint = nullptr;
  if (int rc = domain_->ops->endpoint(domain_.get(), info.get(), &endpoint, nullptr); rc != 0)
    return fail("make an endpoint", rc);
  made.endpoint.reset(endpoint);
  if (is_efa()) set_options_of_efa(endpoint);
  int rc = endpoint->fid.ops->bind(&endpoint->fid, &addresses->fid, 0);
  if (rc == 0) rc = endpoint->fid.ops->bind(&endpoint->fid, &queue_->fid, fi::kTransmit | fi::kReceive);
  if (rc == 0) rc = endpoint->fid.ops->control(&endpoint->fid, fi::kEnable, nullptr);
  if (rc != 0) return fail("enable an endpoint", rc);
  port = std::move(made);
  return {};
}

Status Fabric::register_memory(const mc_memory& memory, uint64_t access, MemoryRegion& region) {
  iovec range{reinterpret_cast<void*>(memory.address), memory.length};
  fi::MemoryAttr wanted{};
  wanted.mr_iov = &range;
  wanted.iov_count = 1;
  wanted.access = access;
  if (memory.kind == MC_CUDA) {
    wanted.iface = fi::kCuda;
    wanted.device.cuda = memory.device;
  }
  size_t key_bytes = std::min<size_t>(info_->domain_attr->mr_key_size, sizeof wanted.requested_key);
  fi::Memory* made = nullptr;
  int rc = -fi::kNoKey;
  std::lock_guard lock(registering_);
  // Chosen keys are random, so a key that was taken back names nothing that comes later.
  for (int attempt = 0; rc == -fi::kNoKey && attempt < kKeyAttempts; ++attempt) {
    if ((mr_mode_ & fi::kMemoryProviderKey) == 0) {
      if (Status status = driver::fill_random(&wanted.requested_key, key_bytes); !status.ok()) return status;
    }
    rc = domain_->mr->regattr(&domain_->fid, &wanted, 0, &made);
  }
  if (rc != 0) return fail("register memory", rc);
  region.handle.reset(made);
  region.key = made->key;
  region.descriptor = made->mem_desc;
  return {};
}

void Fabric::deregister(MemoryRegion& region) {
  std::lock_guard lock(registering_);
  region.handle.reset();
}

}  // namespace mooncake::efa
