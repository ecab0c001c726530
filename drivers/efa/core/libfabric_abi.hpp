// The part of libfabric's binary interface that this driver uses, declared here so that it builds anywhere.
//
// libfabric.so.1 only ever appends to these structs; tests/test_abi.py compares them with the header of the
// machine where there is one. Members keep libfabric's names; what is not used keeps its place only.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <cstddef>
#include <cstdint>

#include "libfabric_values.hpp"

namespace mooncake::efa::fi {

struct Fid;
struct Fabric;
struct Domain;
struct Endpoint;
struct AddressTable;
struct Queue;
struct Memory;

struct FidOps {
  size_t size;
  int (*close)(Fid* fid);
  int (*bind)(Fid* fid, Fid* other, uint64_t flags);
  int (*control)(Fid* fid, int command, void* argument);
  void* unused[3];
};

struct Fid {
  size_t fclass;
  void* context;
  FidOps* ops;
};

// ---- what there is

struct TransmitAttr {
  uint64_t caps, mode, op_flags, msg_order, comp_order;
  size_t inject_size, size, iov_limit, rma_iov_limit;
  uint32_t tclass;
};

struct ReceiveAttr {
  uint64_t caps, mode, op_flags, msg_order, comp_order;
  size_t total_buffered_recv, size, iov_limit;
};

struct EndpointAttr {
  EndpointType type;
  uint32_t protocol, protocol_version;
  size_t max_msg_size;
  size_t msg_prefix_size, max_order_raw_size, max_order_war_size, max_order_waw_size;
  uint64_t mem_tag_format;
  size_t tx_ctx_cnt, rx_ctx_cnt, auth_key_size;
  uint8_t* auth_key;
};

struct DomainAttr {
  Domain* domain;
  char* name;
  Threading threading;
  Progress control_progress, data_progress;
  ResourceManagement resource_mgmt;
  TableType av_type;
  int mr_mode;
  size_t mr_key_size, cq_data_size;
  size_t cq_cnt, ep_cnt, tx_ctx_cnt, rx_ctx_cnt, max_ep_tx_ctx, max_ep_rx_ctx, max_ep_stx_ctx, max_ep_srx_ctx,
      cntr_cnt, mr_iov_limit;
  uint64_t caps, mode;
  uint8_t* auth_key;
  size_t auth_key_size, max_err_data, mr_cnt;
  uint32_t tclass;
};

struct FabricAttr {
  Fabric* fabric;
  char* name;
  char* prov_name;
  uint32_t prov_version, api_version;
};

struct DeviceAttr {
  char* name;
};

struct LinkAttr {
  char* address;
  size_t mtu, speed;  // bits a second
};

struct Nic {
  Fid fid;
  DeviceAttr* device_attr;
  void* bus_attr;
  LinkAttr* link_attr;
};

struct Info {
  Info* next;
  uint64_t caps, mode;
  uint32_t addr_format;
  size_t src_addrlen, dest_addrlen;
  void *src_addr, *dest_addr;
  Fid* handle;
  TransmitAttr* tx_attr;
  ReceiveAttr* rx_attr;
  EndpointAttr* ep_attr;
  DomainAttr* domain_attr;
  FabricAttr* fabric_attr;
  Nic* nic;
};

// ---- fabric and domain

struct FabricOps {
  size_t size;
  int (*domain)(Fabric* fabric, Info* info, Domain** domain, void* context);
};

struct Fabric {
  Fid fid;
  FabricOps* ops;
  uint32_t api_version;
};

struct AddressTableAttr {
  TableType type;
  int rx_ctx_bits;
  size_t count, ep_per_node;
  const char* name;
  void* map_addr;
  uint64_t flags;
};

struct QueueAttr {
  size_t size;
  uint64_t flags;
  QueueFormat format;
  WaitObject wait_obj;
  int signaling_vector;
  int wait_cond;
  void* wait_set;
};

struct DomainOps {
  size_t size;
  int (*av_open)(Domain* domain, AddressTableAttr* wanted, AddressTable** made, void* context);
  int (*cq_open)(Domain* domain, QueueAttr* wanted, Queue** made, void* context);
  int (*endpoint)(Domain* domain, Info* info, Endpoint** made, void* context);
};

// The last four came after 1.17: none, for newer libraries.
struct MemoryAttr {
  const iovec* mr_iov;
  size_t iov_count;
  uint64_t access, offset, requested_key;
  void* context;
  size_t auth_key_size;
  uint8_t* auth_key;
  HmemInterface iface;
  union {
    uint64_t reserved;
    int cuda;
  } device;
  void* since_1_20[4];
};

struct MemoryOps {
  size_t size;
  void* unused[2];
  int (*regattr)(Fid* domain, const MemoryAttr* wanted, uint64_t flags, Memory** made);
};

struct Domain {
  Fid fid;
  DomainOps* ops;
  MemoryOps* mr;
};

struct Memory {
  Fid fid;
  void* mem_desc;
  uint64_t key;
};

// ---- address tables and completion queues

struct AddressTableOps {
  size_t size;
  int (*insert)(AddressTable* table, const void* addresses, size_t count, Address* out, uint64_t flags,
                void* context);
  void* unused[4];
  const char* (*straddr)(AddressTable* table, const void* address, char* text, size_t* length);
};

struct AddressTable {
  Fid fid;
  AddressTableOps* ops;
};

struct QueueEntry {
  void* op_context;
  uint64_t flags;
  size_t len;
  void* buf;
  uint64_t data;
};

struct ErrorEntry {
  void* op_context;
  uint64_t flags;
  size_t len;
  void* buf;
  uint64_t data, tag;
  size_t olen;
  int err, prov_errno;
  void* err_data;
  size_t err_data_size;
  Address since_1_20;  // room for what newer libraries may write
};

struct QueueOps {
  size_t size;
  ssize_t (*read)(Queue* queue, void* entries, size_t count);
  void* unused;
  ssize_t (*readerr)(Queue* queue, ErrorEntry* entry, uint64_t flags);
};

struct Queue {
  Fid fid;
  QueueOps* ops;
};

// ---- endpoints

// Goes with each operation, for the provider to write into.
struct Context2 {
  void* internal[8];
};

struct EndpointOps {
  size_t size;
  void* unused;
  int (*getopt)(Fid* endpoint, int level, int option, void* value, size_t* length);
  int (*setopt)(Fid* endpoint, int level, int option, const void* value, size_t length);
};

struct ConnectionOps {
  size_t size;
  void* unused;
  int (*getname)(Fid* endpoint, void* address, size_t* length);
};

struct MessageOps {
  size_t size;
  ssize_t (*recv)(Endpoint* endpoint, void* buffer, size_t length, void* descriptor, Address from,
                  void* context);
  void* unused[2];
  ssize_t (*send)(Endpoint* endpoint, const void* buffer, size_t length, void* descriptor, Address to,
                  void* context);
};

struct RemoteRange {
  uint64_t addr;
  size_t len;
  uint64_t key;
};

struct RmaMessage {
  const iovec* msg_iov;
  void** desc;
  size_t iov_count;
  Address addr;
  const RemoteRange* rma_iov;
  size_t rma_iov_count;
  void* context;
  uint64_t data;
};

struct RmaOps {
  size_t size;
  void* unused[2];
  ssize_t (*readmsg)(Endpoint* endpoint, const RmaMessage* message, uint64_t flags);
  void* unused_writes[2];
  ssize_t (*writemsg)(Endpoint* endpoint, const RmaMessage* message, uint64_t flags);
};

struct Endpoint {
  Fid fid;
  EndpointOps* ops;
  ConnectionOps* cm;
  MessageOps* msg;
  RmaOps* rma;
};

}  // namespace mooncake::efa::fi
