// The double's network, seen from a check.
#pragma once

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <string>

#include "shared.hpp"
#include "two_sides.hpp"

namespace checks {

constexpr size_t kBytes = 1 << 20;

inline std::string library;

inline void* symbol(const char* name) {
  void* loaded = dlopen(library.c_str(), RTLD_NOW | RTLD_NOLOAD);
  void* found = loaded == nullptr ? nullptr : dlsym(loaded, name);
  require(found != nullptr, name);
  return found;
}

inline verbs_double::Fabric& fabric() {
  static auto* mapped = [] {
    int fd = open((library + ".fabric").c_str(), O_RDWR);
    void* at = mmap(nullptr, sizeof(verbs_double::Fabric), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    require(fd >= 0 && at != MAP_FAILED, "the double's network is a file");
    return static_cast<verbs_double::Fabric*>(at);
  }();
  return *mapped;
}

inline Options on(const char* device) { return {{"library", library}, {"device", device}}; }

}  // namespace checks
