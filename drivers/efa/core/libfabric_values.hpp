// Numbers of libfabric's interface; libfabric_abi.hpp has its structs.
#pragma once

#include <cerrno>
#include <cstdint>

namespace mooncake::efa::fi {

using Address = uint64_t;
constexpr Address kAddressUnspecified = ~uint64_t{0};

constexpr uint32_t version(uint32_t major, uint32_t minor) { return major << 16 | minor; }
constexpr uint32_t major_of(uint32_t version) { return version >> 16; }
constexpr uint32_t minor_of(uint32_t version) { return version & 0xffff; }

// Capabilities, rights of memory, flags of operations and of completions share one space of bits.
constexpr uint64_t kMessages = 1u << 1;
constexpr uint64_t kRma = 1u << 2;
constexpr uint64_t kRead = 1u << 8;
constexpr uint64_t kWrite = 1u << 9;
constexpr uint64_t kReceive = 1u << 10;
constexpr uint64_t kSend = 1u << 11;
constexpr uint64_t kTransmit = kSend;
constexpr uint64_t kRemoteRead = 1u << 12;
constexpr uint64_t kRemoteWrite = 1u << 13;
constexpr uint64_t kRemoteData = 1u << 17;  // FI_REMOTE_CQ_DATA
constexpr uint64_t kMore = 1u << 18;
constexpr uint64_t kCompletion = 1u << 24;
constexpr uint64_t kDeliveryComplete = 1u << 28;
constexpr uint64_t kHmem = uint64_t{1} << 47;

// Modes: what the application does for the provider.
constexpr uint64_t kContext2 = uint64_t{1} << 52;
constexpr uint64_t kReceiveData = uint64_t{1} << 56;  // FI_RX_CQ_DATA
constexpr uint64_t kContext = uint64_t{1} << 59;

enum MemoryMode : int {
  kMemoryLocal = 1 << 2,
  kMemoryVirtualAddress = 1 << 4,
  kMemoryAllocated = 1 << 5,
  kMemoryProviderKey = 1 << 6,
  kMemoryHmem = 1 << 10,
};
enum EndpointType : int { kReliableDatagram = 3 };
enum Threading : int { kThreadCompletion = 4 };
enum Progress : int { kProgressManual = 2 };
enum ResourceManagement : int { kManaged = 2 };
enum TableType : int { kTable = 2 };
enum QueueFormat : int { kQueueData = 3 };
enum WaitObject : int { kNoWait = 0 };
enum HmemInterface : int { kSystem = 0, kCuda = 1 };
enum AddressFormat : uint32_t { kAddressEfa = 12 };
enum Command : int { kEnable = 6 };
enum OptionLevel : int { kOptionEndpoint = 0 };

// Errors beside those of errno.
constexpr int kTooSmall = 257, kErrorAvailable = 259, kNoKey = 266;

}  // namespace mooncake::efa::fi
