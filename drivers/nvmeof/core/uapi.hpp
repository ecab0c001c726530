// The part of the kernel's io_uring interface that is used here. Headers of build machines are older than the
// kernels that the wheel meets, so these are our own; what a kernel can do is asked at run time.
#pragma once

#include <sys/syscall.h>

#include <cstdint>

namespace mooncake::nvmeof::uapi {

enum Opcode : uint8_t {
  kReadFixed = 4,
  kWriteFixed = 5,
  kAsyncCancel = 14,
  kRead = 22,
  kWrite = 23,
  kUringCmd = 46,
};

constexpr uint8_t kSqeFixedFile = 1u << 0;

constexpr uint32_t kSetupIopoll = 1u << 0;
constexpr uint32_t kSetupCqSize = 1u << 3;
constexpr uint32_t kSetupClamp = 1u << 4;
constexpr uint32_t kSetupSqe128 = 1u << 10;
constexpr uint32_t kSetupCqe32 = 1u << 11;
constexpr uint32_t kFeatureSingleMmap = 1u << 0;
constexpr uint32_t kFeatureNodrop = 1u << 1;
constexpr uint32_t kEnterGetEvents = 1u << 0;
constexpr uint32_t kSqCqOverflow = 1u << 1;

constexpr uint32_t kRegisterProbe = 8;
constexpr uint32_t kRegisterFiles2 = 13;
constexpr uint32_t kRegisterFilesUpdate2 = 14;
constexpr uint32_t kRegisterBuffers2 = 15;
constexpr uint32_t kRegisterBuffersUpdate = 16;
constexpr uint32_t kResourcesSparse = 1u << 0;

constexpr uint64_t kOffsetSqRing = 0;
constexpr uint64_t kOffsetCqRing = 0x8000000;
constexpr uint64_t kOffsetSqes = 0x10000000;

struct Sqe {
  uint8_t opcode;
  uint8_t flags;
  uint16_t ioprio;
  int32_t fd;
  uint64_t offset;  // of a command: its number in the lower half
  uint64_t address;
  uint32_t length;
  uint32_t op_flags;  // RWF_* of a read or write
  uint64_t user_data;
  uint16_t buffer_index;
  uint16_t personality;
  int32_t file_index;
  uint64_t command[2];  // of a ring with large entries the command goes on behind the entry
};
static_assert(sizeof(Sqe) == 64);

// What follows an entry of a ring with large entries, for an NVMe command: it overlays `command`.
struct NvmeCommand {
  uint8_t opcode;
  uint8_t flags;
  uint16_t reserved;
  uint32_t nsid, cdw2, cdw3;
  uint64_t metadata, address;
  uint32_t metadata_length, data_length;
  uint32_t cdw10, cdw11, cdw12, cdw13, cdw14, cdw15;
  uint32_t timeout_ms, reserved2;
};
static_assert(sizeof(NvmeCommand) == 72);
constexpr uint32_t kNvmeIo = 0xc0484e80;  // NVME_URING_CMD_IO

struct Cqe {
  uint64_t user_data;
  int32_t result;
  uint32_t flags;
};
static_assert(sizeof(Cqe) == 16);

struct SqOffsets {
  uint32_t head, tail, ring_mask, ring_entries, flags, dropped, array, reserved;
  uint64_t user_address;
};

struct CqOffsets {
  uint32_t head, tail, ring_mask, ring_entries, overflow, cqes, flags, reserved;
  uint64_t user_address;
};

struct Params {
  uint32_t sq_entries, cq_entries, flags, sq_thread_cpu, sq_thread_idle, features, wq_fd, reserved[3];
  SqOffsets sq;
  CqOffsets cq;
};
static_assert(sizeof(Params) == 120);

struct ProbeOp {
  uint8_t op;
  uint8_t reserved;
  uint16_t flags;  // bit 0: supported
  uint32_t reserved2;
};

struct Probe {
  uint8_t last_op;
  uint8_t count;
  uint16_t reserved;
  uint32_t reserved2[3];
  ProbeOp ops[256];
};

struct ResourceTable {
  uint32_t count;
  uint32_t flags;
  uint64_t reserved;
  uint64_t data;
  uint64_t tags;
};

struct ResourceUpdate {
  uint32_t offset;
  uint32_t reserved;
  uint64_t data;
  uint64_t tags;
  uint32_t count;
  uint32_t reserved2;
};
static_assert(sizeof(ResourceTable) == 32 && sizeof(ResourceUpdate) == 32);

}  // namespace mooncake::nvmeof::uapi
