// What tests ask of the double, and tell it: none of it is CUDA's.
#include <algorithm>
#include <cstring>

#include "state.hpp"

using namespace cuda_double;

// Where the CPU may look at GPU memory; null for an unknown address.
extern "C" __attribute__((visibility("default"))) void* cuda_double_bytes(CUdeviceptr address) {
  std::lock_guard lock(state().mutex);
  auto range = find(address, 1);
  return range ? range->data + (address - range->base) : nullptr;
}

// How many rules were broken that CUDA itself does not check; `first` gets words for one.
extern "C" __attribute__((visibility("default"))) int cuda_double_violations(char* first, size_t capacity) {
  std::lock_guard lock(state().mutex);
  const auto& all = state().violations;
  if (!all.empty() && capacity > 0) {
    std::strncpy(first, all.front().c_str(), capacity - 1);
    first[capacity - 1] = 0;
  }
  return static_cast<int>(all.size());
}

// How the calls that follow go on: "hold" keeps streams from working, "hold closing" cuIpcCloseMemHandle from
// returning; "fail copy", "fail record" and "fail wait" have the call of this number fail, with nothing done.
extern "C" __attribute__((visibility("default"))) void cuda_double_set(const char* control, int value) {
  std::lock_guard lock(state().mutex);
  state().controls[control] = value;
  state().changed.notify_all();
}

// 0: copies, 1: batches, 2: registrations of main memory and mappings of a peer's, 3: streams, 4: events, 5:
// IPC handles open, 6: that are being closed.
extern "C" __attribute__((visibility("default"))) uint64_t cuda_double_count(int what) {
  std::lock_guard lock(state().mutex);
  State& all = state();
  uint64_t streams = 0, events = 0;
  for (auto& context : all.contexts) {
    streams += context->streams.size();
    events += context->events.size();
  }
  switch (what) {
    case 0:
      return all.copies;
    case 1:
      return all.batches;
    case 2:
      return static_cast<uint64_t>(std::count_if(all.ranges.begin(), all.ranges.end(), [](const auto& item) {
        const Range& range = *item.second;
        return range.kind == Kind::kHost || (range.physical && range.physical->imported);
      }));
    case 3:
      return streams;
    case 4:
      return events;
    case 5:
      return all.opened_ipc.size();
    default:
      return all.closing;
  }
}
