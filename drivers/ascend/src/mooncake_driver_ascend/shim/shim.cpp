// Compiled against an installed CANN by `mooncake-ascend build-shim`. HIXL where it is, ADXL (its name before
// CANN 8.5) where not: the same functions in another namespace.
#include "shim.h"

#include <map>
#include <new>
#include <vector>

#if __has_include(<hixl/hixl.h>)
#include <hixl/hixl.h>
namespace library = hixl;
using Engine = hixl::Hixl;
#define MC_ASCEND_LIBRARY "hixl"
#else
#include <adxl/adxl_engine.h>
namespace library = adxl;
using Engine = adxl::AdxlEngine;
#define MC_ASCEND_LIBRARY "adxl"
#endif

namespace {

using library::AscendString;

// No exception may cross into C.
template <class Body>
uint32_t guarded(Body&& body) noexcept {
  try {
    return body();
  } catch (...) {  // HIXL documents none; what the standard library throws is lack of memory
    return library::RESOURCE_EXHAUSTED;
  }
}

uint32_t create(const char* local_engine, const char* const* names, const char* const* values, size_t count,
                void** engine) {
  return guarded([&] {
    std::map<AscendString, AscendString> options;
    for (size_t i = 0; i < count; ++i) options[AscendString(names[i])] = AscendString(values[i]);
    auto* made = new Engine;
    library::Status status = made->Initialize(AscendString(local_engine), options);
    if (status == library::SUCCESS) {
      *engine = made;
    } else {
      delete made;
    }
    return status;
  });
}

void destroy(void* engine) {
  auto* made = static_cast<Engine*>(engine);
  made->Finalize();
  delete made;
}

uint32_t register_memory(void* engine, uint64_t address, uint64_t length, int on_device, void** handle) {
  return guarded([&] {
    library::MemDesc memory{};
    memory.addr = address;
    memory.len = length;
    return static_cast<Engine*>(engine)->RegisterMem(
        memory, on_device != 0 ? library::MemType::MEM_DEVICE : library::MemType::MEM_HOST, *handle);
  });
}

uint32_t deregister_memory(void* engine, void* handle) {
  return guarded([&] { return static_cast<Engine*>(engine)->DeregisterMem(handle); });
}

uint32_t connect(void* engine, const char* remote, int32_t timeout_ms) {
  return guarded([&] { return static_cast<Engine*>(engine)->Connect(AscendString(remote), timeout_ms); });
}

uint32_t disconnect(void* engine, const char* remote, int32_t timeout_ms) {
  return guarded([&] { return static_cast<Engine*>(engine)->Disconnect(AscendString(remote), timeout_ms); });
}

uint32_t transfer(void* engine, const char* remote, int is_write, const mc_ascend_desc* descs, size_t count,
                  void** request) {
  return guarded([&] {
    std::vector<library::TransferOpDesc> all(count);
    for (size_t i = 0; i < count; ++i) {
      all[i].local_addr = descs[i].local;
      all[i].remote_addr = descs[i].remote;
      all[i].len = descs[i].length;
    }
    return static_cast<Engine*>(engine)->TransferAsync(
        AscendString(remote), is_write != 0 ? library::TransferOp::WRITE : library::TransferOp::READ, all,
        library::TransferArgs{}, *request);
  });
}

uint32_t query(void* engine, void* request, mc_ascend_state* state) {
  return guarded([&] {
    library::TransferStatus found = library::TransferStatus::WAITING;
    library::Status status = static_cast<Engine*>(engine)->GetTransferStatus(request, found);
    *state = found == library::TransferStatus::WAITING     ? MC_ASCEND_WAITING
             : found == library::TransferStatus::COMPLETED ? MC_ASCEND_COMPLETED
             : found == library::TransferStatus::TIMEOUT   ? MC_ASCEND_TIMEOUT
                                                           : MC_ASCEND_FAILED;
    return status;
  });
}

}  // namespace

extern "C" __attribute__((visibility("default"))) const mc_ascend_shim* mc_ascend_shim_table(void) {
  static const mc_ascend_shim table{
      MC_ASCEND_SHIM_VERSION, MC_ASCEND_LIBRARY, create,     destroy,  register_memory,
      deregister_memory,      connect,           disconnect, transfer, query,
  };
  return &table;
}
