// libfabric, found at run time, and one domain of it: a NIC with its completion queue.
#pragma once

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "mooncake_driver.h"
#include "options.hpp"
#include "support/library.hpp"

namespace mooncake::efa {

// The functions of libfabric that are symbols; all others are reached through the objects they make.
struct Api {
  Status load(const std::string& path);

  driver::Library library;
  decltype(&::fi_getinfo) getinfo = nullptr;
  decltype(&::fi_dupinfo) dupinfo = nullptr;
  decltype(&::fi_freeinfo) freeinfo = nullptr;
  decltype(&::fi_fabric) fabric = nullptr;
  decltype(&::fi_strerror) strerror = nullptr;
  decltype(&::fi_version) version = nullptr;
};

// Owns an object of libfabric.
template <class Object>
struct Close {
  void operator()(Object* object) const { fi_close(&object->fid); }
};
template <class Object>
using Owned = std::unique_ptr<Object, Close<Object>>;

// An endpoint that is ready, and the table of the addresses it sends to.
struct Port {
  Owned<fid_av> addresses;  // closed after the endpoint
  Owned<fid_ep> endpoint;
};

struct MemoryRegion {
  Owned<fid_mr> handle;
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
  bool needs_local(uint32_t kind) const { return (mr_mode_ & FI_MR_LOCAL) != 0 || kind == MC_CUDA; }
  // What `offset` in memory at `base` is to a peer.
  uint64_t remote_address(uint64_t base) const { return (mr_mode_ & FI_MR_VIRT_ADDR) != 0 ? base : 0; }
  const fi_info& info() const { return *info_; }
  // Whether writes take data with them that shows at the target.
  bool carries_data() const { return info_->domain_attr->cq_data_size >= sizeof(uint32_t); }
  bool moves_cuda() const { return (info_->caps & FI_HMEM) != 0; }
  // Flags for a write whose completion means that the bytes are visible.
  uint64_t write_flags() const { return write_flags_; }
  uint64_t max_bytes() const { return max_bytes_; }
  size_t transmit_size() const { return info_->tx_attr->size; }
  fid_cq* queue() const { return queue_.get(); }
  std::string say(int error) const { return api_.strerror(error < 0 ? -error : error); }
  std::string name() const { return info_->fabric_attr->prov_name + std::string(" on ") + domain_name(); }
  std::string domain_name() const { return info_->domain_attr->name; }
  bool is_efa() const;

 private:
  struct FreeInfo {
    const Api* api;
    void operator()(fi_info* info) const { api->freeinfo(info); }
  };
  using Info = std::unique_ptr<fi_info, FreeInfo>;

  Status choose(const Options& options);
  Info ask(const Options& options, const char* fabric, bool cuda, bool delivery, int* error) const;
  Status open_domain();
  void set_options_of_efa(fid_ep* endpoint) const;
  void ask_for_limits(fid_ep* endpoint);
  Status fail(const char* what, int error) const;

  Api api_;
  Info info_{nullptr, {&api_}};
  Owned<fid_fabric> fabric_;
  Owned<fid_domain> domain_;
  Owned<fid_cq> queue_;
  std::mutex registering_;
  int mr_mode_ = 0;
  uint64_t write_flags_ = 0;
  uint64_t max_bytes_ = 0;
};

}  // namespace mooncake::efa
