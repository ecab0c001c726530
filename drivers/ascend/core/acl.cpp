#include "acl.hpp"

namespace mooncake::ascend {

Status Acl::load(const std::string& library, const std::string& shim, Acl& acl) {
  driver::Library runtime;
  Status status = runtime.open({library.empty() ? "libascendcl.so" : library.c_str()},
                               "install CANN, and source its set_env.sh in the shell that starts this");
  if (!status.ok()) return status;
#define MC_REQUIRE(name, parameters) \
  if (status = runtime.require(#name, &acl.name); !status.ok()) return status;
  MC_ACL_FUNCTIONS(MC_REQUIRE)
#undef MC_REQUIRE
#define MC_FIND(name, parameters) runtime.find(#name, &acl.name);
  MC_ACL_OPTIONAL_FUNCTIONS(MC_FIND)
#undef MC_FIND
  driver::Library bridge;
  status = bridge.open({shim.c_str()}, "run `mooncake-ascend build-shim` on this machine");
  if (!status.ok()) return status;
  const mc_ascend_shim* (*table)(void) = nullptr;
  if (status = bridge.require("mc_ascend_shim_table", &table); !status.ok()) return status;
  acl.shim = table();
  if (acl.shim->version != MC_ASCEND_SHIM_VERSION)
    return failed(MC_UNSUPPORTED, shim +
                                      " was built by another version of this driver; run "
                                      "`mooncake-ascend build-shim` again");
  return {};
}

Status check_acl(aclError result, const char* what) {
  if (result == kAclSuccess) return {};
  return failed(MC_IO, std::string(what) + " fails with ACL error " + std::to_string(result) +
                           "; the log under ~/ascend/log says more");
}

Status check_hixl(uint32_t result, const char* what) {
  const char* words = "failed";
  mc_status code = MC_IO;
  switch (result) {
    case 0:
      return {};
    case 103900:
      words = "PARAM_INVALID", code = MC_INVALID;
      break;
    case 103901:
      words = "TIMEOUT", code = MC_UNREACHABLE;
      break;
    case 103902:
      words = "NOT_CONNECTED", code = MC_UNREACHABLE;
      break;
    case 103905:
      words = "UNSUPPORTED", code = MC_UNSUPPORTED;
      break;
    case 203900:
      words = "RESOURCE_EXHAUSTED", code = MC_NO_MEMORY;
      break;
    case 503900:
      words = "FAILED", code = MC_UNREACHABLE;
      break;
    default:
      break;
  }
  return failed(code, std::string(what) + " of HIXL: " + words + " (" + std::to_string(result) + ")");
}

}  // namespace mooncake::ascend
