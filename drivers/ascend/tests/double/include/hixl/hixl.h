// The double's own declaration of what shim.cpp uses of HIXL: names, order and values as CANN's headers have
// them, so that the shim is compiled as it will be on a machine with CANN.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace ge {
class AscendString {
 public:
  AscendString() = default;
  AscendString(const char* text) : text_(std::make_shared<std::string>(text)) {}
  const char* GetString() const { return text_ ? text_->c_str() : ""; }
  bool operator<(const AscendString& other) const { return std::string(GetString()) < other.GetString(); }

 private:
  std::shared_ptr<std::string> text_;
};
}  // namespace ge

namespace hixl {
using AscendString = ge::AscendString;
using Status = uint32_t;
using MemHandle = void*;
using TransferReq = void*;

constexpr Status SUCCESS = 0U;
constexpr Status PARAM_INVALID = 103900U;
constexpr Status TIMEOUT = 103901U;
constexpr Status NOT_CONNECTED = 103902U;
constexpr Status ALREADY_CONNECTED = 103903U;
constexpr Status FAILED = 503900U;
constexpr Status RESOURCE_EXHAUSTED = 203900U;

enum MemType { MEM_DEVICE, MEM_HOST };
enum TransferOp { READ, WRITE };
struct MemDesc {
  uintptr_t addr;
  size_t len;
  uint8_t reserved[128] = {};
};
struct TransferOpDesc {
  uintptr_t local_addr;
  uintptr_t remote_addr;
  size_t len;
};
enum class TransferStatus { WAITING, COMPLETED, TIMEOUT, FAILED };
struct TransferArgs {
  uint8_t reserved[128] = {};
};

class __attribute__((visibility("default"))) Hixl {
 public:
  Hixl();
  ~Hixl();
  Status Initialize(const AscendString& local_engine, const std::map<AscendString, AscendString>& options);
  void Finalize();
  Status RegisterMem(const MemDesc& mem, MemType type, MemHandle& mem_handle);
  Status DeregisterMem(MemHandle mem_handle);
  Status Connect(const AscendString& remote_engine, int32_t timeout_in_millis = 1000);
  Status Disconnect(const AscendString& remote_engine, int32_t timeout_in_millis = 1000);
  Status TransferAsync(const AscendString& remote_engine, TransferOp operation,
                       const std::vector<TransferOpDesc>& op_descs, const TransferArgs& optional_args,
                       TransferReq& req);
  Status GetTransferStatus(const TransferReq& req, TransferStatus& status);

 private:
  class HixlImpl;
  std::unique_ptr<HixlImpl> impl_;
};
}  // namespace hixl
