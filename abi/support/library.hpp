// A vendor's library, found on the machine at run time. A driver's wheel links and bundles none.
#pragma once

#include <dlfcn.h>

#include <initializer_list>
#include <string>

#include "status.hpp"

namespace mooncake::driver {

class Library {
 public:
  Library() = default;
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

  // Loads the first of `names` that the loader finds, privately. It is never unloaded: libraries of vendors
  // leave threads and exit handlers behind. MC_UNSUPPORTED with the loader's words and `remedy`.
  Status open(std::initializer_list<const char*> names, const char* remedy) {
    std::string said;
    for (const char* name : names) {
      handle_ = dlopen(name, RTLD_NOW | RTLD_LOCAL);
      if (handle_ != nullptr) {
        name_ = name;
        return {};
      }
      const char* error = dlerror();
      said += (said.empty() ? "" : "; ") + std::string(error == nullptr ? name : error);
    }
    return failed(MC_UNSUPPORTED, said + "; " + remedy);
  }
  bool loaded() const { return handle_ != nullptr; }
  const std::string& name() const { return name_; }

  // Null where the library has no such symbol, which is how newer functions are asked for.
  template <class Function>
  void find(const char* symbol, Function* function) const {
    *function = reinterpret_cast<Function>(dlsym(handle_, symbol));
  }
  // MC_UNSUPPORTED names what is missing.
  template <class Function>
  Status require(const char* symbol, Function* function) const {
    find(symbol, function);
    if (*function != nullptr) return {};
    return failed(MC_UNSUPPORTED, name_ + " has no " + symbol + "; install a newer version of it");
  }

 private:
  void* handle_ = nullptr;
  std::string name_;
};

}  // namespace mooncake::driver
