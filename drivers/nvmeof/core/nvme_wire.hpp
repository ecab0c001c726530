// NVMe over TCP as it is on the wire, as far as it is used here. Numbers are little endian.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace mooncake::nvmeof::nvme {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the wire format is little endian");

enum PduType : uint8_t {
  kIcReq = 0x00,
  kIcResp = 0x01,
  kH2cTermReq = 0x02,
  kC2hTermReq = 0x03,
  kCapsuleCmd = 0x04,
  kCapsuleResp = 0x05,
  kH2cData = 0x06,
  kC2hData = 0x07,
  kR2t = 0x09,
};

constexpr uint8_t kHeaderDigest = 1u << 0;
constexpr uint8_t kDataDigest = 1u << 1;
constexpr uint8_t kLastPdu = 1u << 2;
constexpr uint8_t kSuccess = 1u << 3;

struct Header {
  uint8_t type;
  uint8_t flags;
  uint8_t header_length;
  uint8_t data_offset;
  uint32_t length;
};

// ICReq and ICResp.
struct Initialize {
  Header header;
  uint16_t version;
  uint8_t alignment;  // of data, in units of 4 bytes, less one
  uint8_t digests;
  uint32_t limit;  // request: R2Ts at a time, less one; response: most data in one H2CData
  uint8_t reserved[112];
};
static_assert(sizeof(Initialize) == 128);

struct Submission {
  uint8_t opcode;
  uint8_t flags;
  uint16_t id;
  uint32_t nsid;  // of a fabrics command: its type, in the first byte
  uint32_t cdw2, cdw3;
  uint64_t metadata;
  uint64_t data_address;
  uint32_t data_length;
  uint8_t reserved[3];
  uint8_t data_kind;
  uint32_t cdw10, cdw11, cdw12, cdw13, cdw14, cdw15;
};
static_assert(sizeof(Submission) == 64);

struct Result {
  uint64_t value;
  uint16_t head, queue, id, status;  // status: the lowest bit is not part of it
};
static_assert(sizeof(Result) == 16);

struct Capsule {
  Header header;
  Submission command;
};
static_assert(sizeof(Capsule) == 72);

struct Response {
  Header header;
  Result result;
};
static_assert(sizeof(Response) == 24);

// H2CData, C2HData, R2T.
struct Data {
  Header header;
  uint16_t command;
  uint16_t tag;  // of the transfer; C2HData: reserved
  uint32_t offset;
  uint32_t length;
  uint32_t reserved;
};
static_assert(sizeof(Data) == 24);

struct Terminate {
  Header header;
  uint16_t reason;
  uint32_t information __attribute__((packed));
  uint8_t reserved[10];
};
static_assert(sizeof(Terminate) == 24);

struct ConnectData {
  uint8_t host_id[16];
  uint16_t controller;
  uint8_t reserved[238];
  char subsystem[256];
  char host[256];
  uint8_t reserved2[256];
};
static_assert(sizeof(ConnectData) == 1024);

enum Opcode : uint8_t {
  kFlush = 0x00,
  kWriteBlocks = 0x01,
  kReadBlocks = 0x02,
  kIdentify = 0x06,
  kSetFeatures = 0x09,
  kKeepAlive = 0x18,
  kFabrics = 0x7f,
};

enum FabricsType : uint8_t { kPropertySet = 0x00, kConnect = 0x01, kPropertyGet = 0x04 };

constexpr uint8_t kSglFlags = 0x40;      // data is described by a scatter-gather descriptor
constexpr uint8_t kSglInCapsule = 0x01;  // at an offset of the capsule
constexpr uint8_t kSglTransport = 0x5a;  // the transport moves it
constexpr uint32_t kRegisterCapabilities = 0x00, kRegisterConfiguration = 0x14, kRegisterStatus = 0x1c;
constexpr uint32_t kEnable = 1u | 6u << 16 | 4u << 20;  // entries of 64 and 16 bytes, pages of 4 KiB
constexpr uint32_t kForceUnitAccess = 1u << 30;
constexpr uint32_t kIdentifyNamespace = 0, kIdentifyController = 1, kIdentifyDescriptors = 3;
constexpr uint32_t kNumberOfQueues = 7;
constexpr size_t kIdentifyBytes = 4096;

template <class Number>
Number number_at(const void* bytes, size_t offset) {
  Number value;
  std::memcpy(&value, static_cast<const std::byte*>(bytes) + offset, sizeof value);
  return value;
}

}  // namespace mooncake::nvmeof::nvme
