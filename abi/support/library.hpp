// A vendor's library, found on the machine at run time. A driver's wheel links and bundles none.
#pragma once

#include <dlfcn.h>

#include <initializer_list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "os.hpp"

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

// What was loaded from a path stays: once in a process for each. `Loaded` has `Status load(path)`; what it
// could not load is tried again by the next call.
template <class Loaded>
Status loaded_once(const std::string& path, const Loaded** out) {
  struct All {
    std::mutex mutex;
    std::map<std::string, std::unique_ptr<Loaded>> by_path;
  };
  All& all = of_this_process<All>();
  std::lock_guard lock(all.mutex);
  std::unique_ptr<Loaded>& known = all.by_path[path];
  if (!known) {
    auto made = std::make_unique<Loaded>();
    if (Status status = made->load(path); !status.ok()) return status;
    known = std::move(made);
  }
  *out = known.get();
  return {};
}

}  // namespace mooncake::driver
