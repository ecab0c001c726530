#include "drivers.hpp"

#include <memory>

#include "failing.hpp"
#include "testing/driver.hpp"

// Their headers have names in common, so what is needed of them is declared here.
namespace mooncake_tcp {
const mc_driver_v1* driver_table();
}
namespace mooncake::shm {
const mc_driver_v1* driver_table();
}
namespace mooncake::verbs {
const mc_driver_v1* driver_table();
}
namespace mooncake::efa {
const mc_driver_v1* driver_table();
}
namespace mooncake::nvlink {
const mc_driver_v1* driver_table();
}
namespace mooncake::ascend {
const mc_driver_v1* driver_table();
}
namespace template_driver {
const mc_driver_v1* driver_table();
}

namespace sanitized {

namespace {

struct FakeFabric {
  uint64_t number = 0;
  std::shared_ptr<mooncake::fake::Fabric> fabric = mooncake::fake::make_fabric(1, false, &number);
};

Driver nvlink(MemoryType memory) {
  return {mooncake::nvlink::driver_table(), {{"library", CUDA_DOUBLE}}, memory};
}

Driver ascend(MemoryType memory) {
  return {mooncake::ascend::driver_table(), {{"library", ACL_DOUBLE}, {"shim", ASCEND_SHIM}}, memory};
}

}  // namespace

MemoryType memory_of(const std::string& name) { return find_driver(name, "").memory; }

Driver find_driver(const std::string& name, const std::string& device) {
  if (name == "tcp") return {mooncake_tcp::driver_table(), {}};
  if (name == "shm") return {mooncake::shm::driver_table(), {}};
  if (name == "verbs")
    return {mooncake::verbs::driver_table(), {{"library", VERBS_DOUBLE}, {"device", "double0"}}};
  if (name == "efa") return {mooncake::efa::driver_table(), {{"library", EFA_DOUBLE}, {"domain", "double0"}}};
  if (name == "nvlink") return nvlink(MemoryType::kMain);
  if (name == "nvlink-gpu") return nvlink(MemoryType::kCuda);
  if (name == "nvlink-managed") return nvlink(MemoryType::kCudaManaged);
  if (name == "ascend") return ascend(MemoryType::kMain);
  if (name == "ascend-npu") return ascend(MemoryType::kNpu);
  if (name == "template") return {template_driver::driver_table(), {}};
  static FakeFabric fabric;
  if (name == "fake") {
    return {mooncake::fake::driver_table("fake"),
            {{"fabric", std::to_string(fabric.number)}, {"device", device}, {"queue_ops", "64"}}};
  }
  fail("there is no driver " + name);
}

}  // namespace sanitized
