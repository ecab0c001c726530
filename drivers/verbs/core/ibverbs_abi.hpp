// The part of libibverbs' binary interface that this driver uses, declared here so that it builds anywhere.
//
// libibverbs.so.1 keeps this layout for ever (symbol versions IBVERBS_1.1 and later); tests/test_abi.py
// compares it with the header of the machine where there is one. Members that are not used keep their place
// only.
#pragma once

#include <pthread.h>
#include <sys/types.h>

#include <cstddef>
#include <cstdint>

namespace mooncake::verbs::ibv {

struct Device;
struct Pd;

enum PortState { kPortActive = 4 };
enum LinkLayer : uint8_t { kInfiniBand = 1, kEthernet = 2 };
enum GidType : uint32_t { kGidIb = 0, kGidRoceV1 = 1, kGidRoceV2 = 2 };
enum QpType { kReliableConnection = 2 };
enum QpState { kReset = 0, kInit = 1, kReadyToReceive = 2, kReadyToSend = 3, kError = 6 };
enum Access : unsigned {
  kLocalWrite = 1,
  kRemoteWrite = 2,
  kRemoteRead = 4,
  kRelaxedOrdering = 1u << 20,
};
enum QpAttrMask {
  kQpState = 1 << 0,
  kQpAccessFlags = 1 << 3,
  kQpPkeyIndex = 1 << 4,
  kQpPort = 1 << 5,
  kQpAv = 1 << 7,
  kQpPathMtu = 1 << 8,
  kQpTimeout = 1 << 9,
  kQpRetryCnt = 1 << 10,
  kQpRnrRetry = 1 << 11,
  kQpRqPsn = 1 << 12,
  kQpMaxQpRdAtomic = 1 << 13,
  kQpMinRnrTimer = 1 << 15,
  kQpSqPsn = 1 << 16,
  kQpMaxDestRdAtomic = 1 << 17,
  kQpDestQpn = 1 << 20,
};
enum WrOpcode { kWrite = 0, kWriteWithImm = 1, kSend = 2, kRead = 4 };
enum SendFlags : unsigned { kSignaled = 2, kInline = 8 };
enum WcOpcode { kWcRdmaWrite = 1, kWcRdmaRead = 2, kWcRecvRdmaWithImm = 129 };
enum WcStatus {
  kSuccess = 0,
  kLocLenErr = 1,
  kLocQpOpErr = 2,
  kLocProtErr = 4,
  kWrFlushErr = 5,
  kRemInvReqErr = 9,
  kRemAccessErr = 10,
  kRemOpErr = 11,
  kRetryExcErr = 12,
  kRnrRetryExcErr = 13,
};
enum EventType {
  kEventCqErr = 0,
  kEventQpFatal = 1,
  kEventDeviceFatal = 8,
  kEventPortActive = 9,
  kEventPortErr = 10,
  kEventGidChange = 18,
};

union Gid {
  uint8_t raw[16];
  struct {
    uint64_t subnet_prefix, interface_id;
  } global;
};

struct GidEntry {
  Gid gid;
  uint32_t gid_index, port_num, gid_type, ndev_ifindex;
};

struct DeviceAttr {
  char fw_ver[64];
  uint64_t node_guid, sys_image_guid, max_mr_size, page_size_cap;
  uint32_t vendor_id, vendor_part_id, hw_ver;
  int max_qp, max_qp_wr;
  unsigned device_cap_flags;
  int max_sge, max_sge_rd, max_cq, max_cqe, max_mr, max_pd;
  int max_qp_rd_atom, max_ee_rd_atom, max_res_rd_atom, max_qp_init_rd_atom, max_ee_init_rd_atom;
  int atomic_cap, max_ee, max_rdd, max_mw, max_raw_ipv6_qp, max_raw_ethy_qp, max_mcast_grp;
  int max_mcast_qp_attach, max_total_mcast_qp_attach, max_ah, max_fmr, max_map_per_fmr;
  int max_srq, max_srq_wr, max_srq_sge;
  uint16_t max_pkeys;
  uint8_t local_ca_ack_delay, phys_port_cnt;
};

struct PortAttr {
  int state, max_mtu, active_mtu, gid_tbl_len;
  uint32_t port_cap_flags, max_msg_sz, bad_pkey_cntr, qkey_viol_cntr;
  uint16_t pkey_tbl_len, lid, sm_lid;
  uint8_t lmc, max_vl_num, sm_sl, subnet_timeout, init_type_reply, active_width, active_speed, phys_state;
  uint8_t link_layer, flags;
  uint16_t port_cap_flags2;
};

struct GlobalRoute {
  Gid dgid;
  uint32_t flow_label;
  uint8_t sgid_index, hop_limit, traffic_class;
};

struct AhAttr {
  GlobalRoute grh;
  uint16_t dlid;
  uint8_t sl, src_path_bits, static_rate, is_global, port_num;
};

struct QpCap {
  uint32_t max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data;
};

struct QpAttr {
  int qp_state, cur_qp_state, path_mtu, path_mig_state;
  uint32_t qkey, rq_psn, sq_psn, dest_qp_num;
  unsigned qp_access_flags;
  QpCap cap;
  AhAttr ah_attr, alt_ah_attr;
  uint16_t pkey_index, alt_pkey_index;
  uint8_t en_sqd_async_notify, sq_draining, max_rd_atomic, max_dest_rd_atomic, min_rnr_timer, port_num;
  uint8_t timeout, retry_cnt, rnr_retry, alt_port_num, alt_timeout;
  uint32_t rate_limit;
};

struct Sge {
  uint64_t addr;
  uint32_t length, lkey;
};

struct SendWr {
  uint64_t wr_id;
  SendWr* next;
  Sge* sg_list;
  int num_sge;
  int opcode;
  unsigned send_flags;
  uint32_t imm_data;
  union {
    struct {
      uint64_t remote_addr;
      uint32_t rkey;
    } rdma;
    struct {
      uint64_t remote_addr, compare_add, swap;
      uint32_t rkey;
    } atomic;
  } wr;
  uint32_t xrc_srqn;
  union {
    struct {
      void* mw;
      uint32_t rkey;
      void* mr;
      uint64_t addr, length;
      unsigned mw_access_flags;
    } bind_mw;
  } rest;
};

struct RecvWr {
  uint64_t wr_id;
  RecvWr* next;
  Sge* sg_list;
  int num_sge;
};

struct Wc {
  uint64_t wr_id;
  int status, opcode;
  uint32_t vendor_err, byte_len, imm_data, qp_num, src_qp;
  unsigned wc_flags;
  uint16_t pkey_index, slid;
  uint8_t sl, dlid_path_bits;
};

struct Context;
struct Cq;
struct Qp;
struct Srq;

// The operations that a program calls without going through the library.
struct ContextOps {
  void* unused_before_poll[11];
  int (*poll_cq)(Cq* cq, int capacity, Wc* wc);
  int (*req_notify_cq)(Cq* cq, int solicited_only);
  void* unused_before_srq[7];
  int (*post_srq_recv)(Srq* srq, RecvWr* wr, RecvWr** bad);
  void* unused_before_send[4];
  int (*post_send)(Qp* qp, SendWr* wr, SendWr** bad);
  int (*post_recv)(Qp* qp, RecvWr* wr, RecvWr** bad);
  void* unused_after[5];
};

struct Context {
  Device* device;
  ContextOps ops;
  int cmd_fd, async_fd, num_comp_vectors;
  pthread_mutex_t mutex;
  void* abi_compat;
};

struct CompChannel {
  Context* context;
  int fd, refcnt;
};

struct Cq {
  Context* context;
  CompChannel* channel;
  void* cq_context;
  uint32_t handle;
  int cqe;
};

struct Srq {
  Context* context;
  void* srq_context;
  Pd* pd;
};

struct Qp {
  Context* context;
  void* qp_context;
  Pd* pd;
  Cq *send_cq, *recv_cq;
  Srq* srq;
  uint32_t handle, qp_num;
};

struct Mr {
  Context* context;
  Pd* pd;
  void* addr;
  size_t length;
  uint32_t handle, lkey, rkey;
};

struct QpInitAttr {
  void* qp_context;
  Cq *send_cq, *recv_cq;
  Srq* srq;
  QpCap cap;
  int qp_type, sq_sig_all;
};

struct SrqInitAttr {
  void* srq_context;
  uint32_t max_wr, max_sge, srq_limit;
};

struct AsyncEvent {
  union {
    void* object;
    int port_num;
  } element;
  int event_type;
};

}  // namespace mooncake::verbs::ibv
