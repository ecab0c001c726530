// The functions of libibverbs, found on the machine at run time.
#pragma once

#include <string>

#include "ibverbs_abi.hpp"
#include "support/library.hpp"

namespace mooncake::verbs {

using driver::failed;
using driver::Status;
using driver::system_failure;

struct Verbs {
  // Loads the library once for each path (empty: the system's), for the life of the process.
  static Status get(const std::string& path, const Verbs** verbs);

  ibv::Device** (*get_device_list)(int* count) = nullptr;
  void (*free_device_list)(ibv::Device** list) = nullptr;
  const char* (*get_device_name)(ibv::Device* device) = nullptr;
  ibv::Context* (*open_device)(ibv::Device* device) = nullptr;
  int (*close_device)(ibv::Context* context) = nullptr;
  int (*query_device)(ibv::Context* context, ibv::DeviceAttr* attr) = nullptr;
  int (*query_port)(ibv::Context* context, uint8_t port, ibv::PortAttr* attr) = nullptr;
  int (*query_gid)(ibv::Context* context, uint8_t port, int index, ibv::Gid* gid) = nullptr;
  int (*get_async_event)(ibv::Context* context, ibv::AsyncEvent* event) = nullptr;
  void (*ack_async_event)(ibv::AsyncEvent* event) = nullptr;
  ibv::Pd* (*alloc_pd)(ibv::Context* context) = nullptr;
  int (*dealloc_pd)(ibv::Pd* pd) = nullptr;
  ibv::Mr* (*reg_mr)(ibv::Pd* pd, void* address, size_t length, int access) = nullptr;
  int (*dereg_mr)(ibv::Mr* mr) = nullptr;
  ibv::CompChannel* (*create_comp_channel)(ibv::Context* context) = nullptr;
  int (*destroy_comp_channel)(ibv::CompChannel* channel) = nullptr;
  ibv::Cq* (*create_cq)(ibv::Context* context, int cqe, void* cq_context, ibv::CompChannel* channel,
                        int vector) = nullptr;
  int (*destroy_cq)(ibv::Cq* cq) = nullptr;
  int (*get_cq_event)(ibv::CompChannel* channel, ibv::Cq** cq, void** cq_context) = nullptr;
  void (*ack_cq_events)(ibv::Cq* cq, unsigned count) = nullptr;
  ibv::Qp* (*create_qp)(ibv::Pd* pd, ibv::QpInitAttr* attr) = nullptr;
  int (*modify_qp)(ibv::Qp* qp, ibv::QpAttr* attr, int mask) = nullptr;
  int (*destroy_qp)(ibv::Qp* qp) = nullptr;
  const char* (*wc_status_str)(int status) = nullptr;

  // Newer functions; null where the library lacks them.
  int (*fork_init)() = nullptr;
  ssize_t (*query_gid_table)(ibv::Context* context, ibv::GidEntry* entries, size_t capacity, uint32_t flags,
                             size_t entry_size) = nullptr;
  ibv::Mr* (*reg_mr_iova2)(ibv::Pd* pd, void* address, size_t length, uint64_t iova,
                           unsigned access) = nullptr;
  ibv::Mr* (*reg_dmabuf_mr)(ibv::Pd* pd, uint64_t offset, size_t length, uint64_t iova, int fd,
                            int access) = nullptr;

  // What get() calls, once for each path.
  Status load(const std::string& path);

 private:
  driver::Library library_;
};

}  // namespace mooncake::verbs
