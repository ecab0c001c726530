#include "registration.hpp"

#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <thread>

namespace mooncake::verbs {
namespace {

std::string remedy_for(int error) {
  rlimit limit{};
  if (error == ENOMEM && getrlimit(RLIMIT_MEMLOCK, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY)
    return "; this process may lock " + std::to_string(limit.rlim_cur) +
           " bytes: raise that (ulimit -l unlimited, or LimitMEMLOCK=infinity of its unit)";
  return "";
}

}  // namespace

int Registration::add(size_t chunk, unsigned access, bool relaxed) {
  const Verbs& verbs = device_.verbs();
  uint64_t offset = static_cast<uint64_t>(chunk) << chunk_shift_;
  uint64_t length = std::min<uint64_t>(range_.length - offset, 1ull << chunk_shift_);
  auto* address = reinterpret_cast<void*>(range_.address + offset);
  unsigned wanted = relaxed ? access | ibv::kRelaxedOrdering : access;
  ibv::Mr* made = nullptr;
  if (range_.kind == MC_CUDA) {
    made = verbs.reg_dmabuf_mr(device_.pd(), range_.fd_offset + offset, length, iova_ + offset, range_.fd,
                               static_cast<int>(wanted));
  } else if (verbs.reg_mr_iova2 != nullptr) {
    made = verbs.reg_mr_iova2(device_.pd(), address, length, iova_ + offset, wanted);
  } else {
    made = verbs.reg_mr(device_.pd(), address, length, static_cast<int>(access));
  }
  if (made == nullptr) return errno == 0 ? EIO : errno;
  regions_[chunk] = made;
  return 0;
}

Status Registration::make(Device& device, const Options& options, const MemoryRange& range, unsigned access,
                          std::shared_ptr<Registration>& made) {
  std::shared_ptr<Registration> fresh(new Registration(device, range));
  const Verbs& verbs = device.verbs();
  bool chosen = range.kind == MC_CUDA || verbs.reg_mr_iova2 != nullptr;
  fresh->iova_ = chosen ? device.take_iova(range.address, range.length) : range.address;
  uint64_t most =
      std::min<uint64_t>(options.chunk_bytes, std::max<uint64_t>(device.limits().max_mr_size, 4096));
  fresh->chunk_shift_ = static_cast<unsigned>(std::bit_width(most) - 1);
  size_t count = static_cast<size_t>(((range.length - 1) >> fresh->chunk_shift_) + 1);
  fresh->regions_.resize(count, nullptr);
  std::atomic<size_t> next{0};
  std::atomic<int> error{0};
  auto work = [&] {
    for (size_t chunk = next++; chunk < count && error == 0; chunk = next++) {
      if (int failure = fresh->add(chunk, access, options.relaxed_ordering); failure != 0) error = failure;
    }
  };
  std::vector<std::jthread> helpers;
  size_t threads = std::min<size_t>(options.registration_threads, count);
  for (size_t i = 1; i < threads; ++i) helpers.emplace_back(work);
  work();
  helpers.clear();  // joins
  if (error != 0)
    return system_failure(error == ENOMEM ? MC_NO_MEMORY : MC_IO,
                          "cannot register " + std::to_string(range.length) + " bytes with " + device.name() +
                              remedy_for(error),
                          error);
  made = std::move(fresh);
  return {};
}

Registration::~Registration() {
  for (ibv::Mr* region : regions_) {
    if (region != nullptr) device_.verbs().dereg_mr(region);
  }
  ended_->store(true, std::memory_order_release);
}

}  // namespace mooncake::verbs
