// libfabric, found at run time, and one domain of it: a NIC with its completion queue.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "libfabric_abi.hpp"
#include "mooncake_driver.h"
#include "options.hpp"
#include "support/library.hpp"

namespace mooncake::efa {

// The functions of libfabric that are symbols; all others are reached through the objects they make.
struct Api {
  Status load(const std::string& path);

  driver::Library library;
  int (*getinfo)(uint32_t version, const char* node, const char* service, uint64_t flags,
                 const fi::Info* hints, fi::Info** found) = nullptr;
  fi::Info* (*dupinfo)(const fi::Info* info) = nullptr;
  void (*freeinfo)(fi::Info* info) = nullptr;
  int (*fabric)(fi::FabricAttr* wanted, fi::Fabric** made, void* context) = nullptr;
  const char* (*strerror)(int error) = nullptr;
  uint32_t (*version)() = nullptr;
};

// Owns an object of libfabric.
template <class Object>
struct Close {
  void operator()(Object* object) const { object->fid.ops->close(&object->fid); }
};
template <class Object>
using Owned = std::unique_ptr<Object, Close<Object>>;

// An endpoint that is ready, and the table of the addresses it sends to.
struct Port {
  Owned<fi::AddressTable> addresses;  // closed after the endpoint
  Owned<fi::Endpoint> endpoint;
};

struct MemoryRegion {
  Owned<fi::Memory> handle;
  uint64_t key = 0;
  void* descriptor = nullptr;
};

// Opened once, then constant but for its queue. Whoever uses endpoints or the queue holds the driver's lock:
// FI_THREAD_COMPLETION.
class Fabric {
 public:
  ~Fabric() { close(); }
  // MC_UNSUPPORTED when there is no library, or it has no such provider or domain here.
  Status open(const Options& options);
  void close();

  Status open_port(size_t sends, size_t receives, Port& port) const;
  // access: FI_READ ... FI_REMOTE_WRITE. The key is new for each registration.
  Status register_memory(const mc_memory& memory, uint64_t access, MemoryRegion& region);
  void deregister(MemoryRegion& region);

  // Whether local memory has to be registered, too.
  bool needs_local(uint32_t kind) const { return (mr_mode_ & fi::kMemoryLocal) != 0 || kind == MC_CUDA; }
  // What `offset` in memory at `base` is to a peer.
  uint64_t remote_address(uint64_t base) const {
    return (mr_mode_ & fi::kMemoryVirtualAddress) != 0 ? base : 0;
  }
  const fi::Info& info() const { return *info_; }
  // Whether writes take data with them that shows at the target.
  bool carries_data() const { return info_->domain_attr->cq_data_size >= sizeof(uint32_t); }
  // Whether such a write may use up a receive at the target.
  bool data_takes_receives() const { return (info_->mode & fi::kReceiveData) != 0; }
  bool moves_cuda() const { return (info_->caps & fi::kHmem) != 0; }
  // Flags for a write whose completion means that the bytes are visible.
  uint64_t write_flags() const { return write_flags_; }
  uint64_t max_bytes() const { return max_bytes_; }
  size_t transmit_size() const { return info_->tx_attr->size; }
  fi::Queue* queue() const { return queue_.get(); }
  std::string say(int error) const { return api_.strerror(error < 0 ? -error : error); }
  std::string name() const { return info_->fabric_attr->prov_name + std::string(" on ") + domain_name(); }
  std::string domain_name() const { return info_->domain_attr->name; }
  bool is_efa() const;
  // How often the queue has to be asked in a row for connections that peers begin to come about soon.
  size_t looks() const { return looks_; }

 private:
  struct FreeInfo {
    const Api* api;
    void operator()(fi::Info* info) const { api->freeinfo(info); }
  };
  using Info = std::unique_ptr<fi::Info, FreeInfo>;

  Status choose(const Options& options);
  Info ask(const Options& options, const char* fabric, bool cuda, bool delivery, int* error) const;
  Status open_domain();
  void set_options_of_efa(fi::Endpoint* endpoint) const;
  void ask_for_limits(fi::Endpoint* endpoint);
  Status fail(const char* what, int error) const;

  Api api_;
  Info info_{nullptr, {&api_}};
  Owned<fi::Fabric> fabric_;
  Owned<fi::Domain> domain_;
  Owned<fi::Queue> queue_;
  std::mutex registering_;
  int mr_mode_ = 0;
  uint64_t write_flags_ = 0;
  uint64_t max_bytes_ = 0;
  size_t looks_ = 1;
};

}  // namespace mooncake::efa
