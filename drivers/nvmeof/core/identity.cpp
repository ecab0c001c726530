#include "identity.hpp"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <system_error>

namespace mooncake::nvmeof {
namespace {

std::string line_of(const std::string& file) {
  std::ifstream input(file);
  std::string line;
  std::getline(input, line);
  line.erase(line.find_last_not_of(" \n") + 1);
  bool nothing = line.find_first_not_of("0- ") == std::string::npos;
  return nothing ? "" : line;
}

struct Field {
  const char* name;
  std::string Identity::* value;
};
constexpr Field kFields[] = {{"nqn", &Identity::nqn},
                             {"nsid", &Identity::nsid},
                             {"uuid", &Identity::uuid},
                             {"nguid", &Identity::nguid},
                             {"eui", &Identity::eui}};

bool same(const Identity& one, const Identity& other) {
  for (auto value : {&Identity::uuid, &Identity::nguid, &Identity::eui}) {
    if (!(one.*value).empty() && !(other.*value).empty()) return one.*value == other.*value;
  }
  return !one.nqn.empty() && one.nqn == other.nqn && one.nsid == other.nsid;
}

}  // namespace

std::string Identity::text() const {
  std::string all;
  for (const Field& field : kFields) {
    if (!(this->*field.value).empty()) all += std::string(field.name) + "=" + this->*field.value + "\n";
  }
  return all;
}

Identity Identity::parse(const std::string& text) {
  Identity found;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    for (const Field& field : kFields) {
      std::string key = std::string(field.name) + "=";
      if (line.starts_with(key)) found.*field.value = line.substr(key.size());
    }
  }
  return found;
}

Status read_identity(const std::string& folder, Identity& identity) {
  identity.nqn = line_of(folder + "/device/subsysnqn");
  identity.nsid = line_of(folder + "/nsid");
  identity.uuid = line_of(folder + "/uuid");
  identity.nguid = line_of(folder + "/nguid");
  identity.eui = line_of(folder + "/eui");
  if (!identity.nsid.empty() && !identity.nqn.empty()) return {};
  return failed(MC_UNSUPPORTED,
                "it is no whole NVMe namespace, and other hosts know nothing of this host's other devices");
}

Status find_namespace(const std::string& folder, const Identity& wanted, std::string& name) {
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(folder, ignored)) {
    std::string here = entry.path().filename();
    Identity found;
    if (!here.starts_with("nvme") || !read_identity(entry.path(), found).ok() || !same(wanted, found))
      continue;
    name = here;
    return {};
  }
  std::string what = !wanted.uuid.empty()    ? "UUID " + wanted.uuid
                     : !wanted.nguid.empty() ? "NGUID " + wanted.nguid
                     : !wanted.eui.empty()   ? "EUI-64 " + wanted.eui
                                             : "number " + wanted.nsid;
  return failed(MC_UNREACHABLE, "this host has no namespace with " + what +
                                    "; connect it: mooncake nvmeof connect " + wanted.nqn);
}

}  // namespace mooncake::nvmeof
