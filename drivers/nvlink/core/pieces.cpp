#include "pieces.hpp"

#include <chrono>
#include <cstring>
#include <iterator>
#include <thread>
#include <utility>

#include "support/os.hpp"

namespace mooncake::nvlink {
namespace {

// A piece takes less than a millisecond. Other connections wait no longer than this for one that does not.
constexpr double kSoonS = 0.02;
constexpr uint64_t kSlowLookNs = 1'000'000;

}  // namespace

void PieceCopies::close(uint64_t deadline_ns) {
  while (!slow_.empty() && driver::now_ns() < deadline_ns) {
    std::erase_if(slow_, [this](Running& running) { return look(running); });
    std::this_thread::sleep_for(std::chrono::nanoseconds(kSlowLookNs));
  }
  for (auto& [device, stream] : streams_) {
    CUcontext context = nullptr;
    if (!devices_.at(device).context(context).ok()) continue;
    Current current(devices_.cuda(), context);
    for (Running& running : slow_) {
      if (running.device == device && running.event != nullptr) devices_.cuda().cuEventDestroy(running.event);
    }
    devices_.cuda().cuStreamDestroy(stream);  // CUDA frees it when its work is done
  }
  slow_.clear();
  streams_.clear();
}

Status PieceCopies::stream_of(int device, CUstream& stream) {
  if (auto found = streams_.find(device); found != streams_.end()) {
    stream = found->second;
    return {};
  }
  const Cuda& cuda = devices_.cuda();
  Status status = cuda.check(cuda.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
  if (status.ok()) streams_[device] = stream;
  return status;
}

void PieceCopies::run(int to_device, uint64_t to, int from_device, uint64_t from, uint64_t bytes, Over over) {
  if (to_device == kHost && from_device == kHost) {
    std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
    return over({});
  }
  const Cuda& cuda = devices_.cuda();
  Running running{to_device == kHost ? from_device : to_device, nullptr, nullptr, {}, std::move(over)};
  Device& device = devices_.at(running.device);
  CUcontext context = nullptr;
  Status status = device.context(context);
  Current current(cuda, context);
  if (status.ok()) status = stream_of(running.device, running.stream);
  if (status.ok()) status = device.take_event(running.event);
  if (status.ok()) {
    status = cuda.check(cuda.cuMemcpyAsync(to, from, bytes, running.stream), "cuMemcpyAsync");
    if (!status.ok()) device.give_event(running.event);
  }
  if (!status.ok()) return running.over(status);  // nothing was begun
  running.failure = cuda.check(cuda.cuEventRecord(running.event, running.stream), "cuEventRecord");
  if (!running.failure.ok()) device.give_event(std::exchange(running.event, nullptr));
  uint64_t deadline = slow_.empty() ? driver::deadline_after(kSoonS) : 0;
  do {
    if (look(running)) return running.over(running.failure);
    std::this_thread::yield();
  } while (driver::now_ns() < deadline);
  slow_.push_back(std::move(running));
  if (slow_.size() == 1) loop_.at(driver::now_ns() + kSlowLookNs, [this] { look_at_slow(); });
}

bool PieceCopies::look(Running& running) {
  const Cuda& cuda = devices_.cuda();
  CUcontext context = nullptr;
  (void)devices_.at(running.device).context(context);
  Current current(cuda, context);
  CUresult result =
      running.event != nullptr ? cuda.cuEventQuery(running.event) : cuda.cuStreamQuery(running.stream);
  if (result == CUDA_ERROR_NOT_READY) return false;
  if (running.failure.ok()) running.failure = cuda.check(result, "copy");
  if (running.event != nullptr) devices_.at(running.device).give_event(running.event);
  return true;
}

void PieceCopies::look_at_slow() {
  std::list<Running> over;
  for (auto at = slow_.begin(); at != slow_.end();) {
    auto next = std::next(at);
    if (look(*at)) over.splice(over.end(), slow_, at);
    at = next;
  }
  bool waits = !slow_.empty();  // what begins now asks for itself
  for (Running& running : over) running.over(running.failure);
  if (waits) loop_.at(driver::now_ns() + kSlowLookNs, [this] { look_at_slow(); });
}

}  // namespace mooncake::nvlink
