#include "copies.hpp"

#include <algorithm>
#include <chrono>
#include <system_error>
#include <utility>

namespace mooncake::nvlink {
namespace {

constexpr size_t kMostInBatch = 1024;
constexpr auto kFirstLook = std::chrono::microseconds(10);
constexpr auto kLastLook = std::chrono::microseconds(200);

}  // namespace

void Batch::clear() {
  device = 0;
  copies.clear();
  done.clear();
  remotes.clear();
  to_context = from_context = nullptr;
  event = nullptr;
  failure = {};
}

Status Copies::start() {
  engines_.resize(static_cast<size_t>(devices_.count()));
  try {
    watcher_ = std::thread([this] { watch_until_stopped(); });
  } catch (const std::system_error& error) {
    return failed(MC_NO_MEMORY, std::string("cannot start the watching thread: ") + error.what());
  }
  return {};
}

void Copies::settle(uint64_t deadline_ns) {
  while (busy() && driver::now_ns() < deadline_ns) {
    reap();
    std::this_thread::sleep_for(kFirstLook);
  }
}

void Copies::close(uint64_t deadline_ns) {
  if (!watcher_.joinable()) return;
  settle(deadline_ns);
  {
    std::lock_guard lock(watch_mutex_);
    stopping_ = true;
  }
  watch_changed_.notify_all();
  watcher_.join();
  const Cuda& cuda = devices_.cuda();
  for (size_t i = 0; i < engines_.size(); ++i) {
    if (!engines_[i]) continue;
    CUcontext context = nullptr;
    if (!devices_.at(static_cast<int>(i)).context(context).ok()) continue;
    Current current(cuda, context);
    // What still runs goes on: CUDA frees a stream when its work is done.
    for (auto& lane : engines_[i]->lanes) {
      while (auto batch = lane->running.pop()) {
        if (batch->event != nullptr) cuda.cuEventDestroy(batch->event);
      }
      if (lane->stream != nullptr) cuda.cuStreamDestroy(lane->stream);
    }
  }
  engines_.clear();
}

Status Copies::prepare(int device, CUcontext& context) {
  if (Status status = devices_.at(device).context(context); !status.ok()) return status;
  std::lock_guard lock(engines_mutex_);
  auto& engine = engines_[static_cast<size_t>(device)];
  if (engine) return {};
  const Cuda& cuda = devices_.cuda();
  auto made = std::make_unique<Engine>();
  Current current(cuda, context);
  auto create = [&](CUstream* stream) {
    return cuda.check(cuda.cuStreamCreate(stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
  };
  Status status;
  while (status.ok() && made->lanes.size() < streams_) {
    auto lane = std::make_unique<Lane>();
    status = create(&lane->stream);
    if (status.ok()) made->lanes.push_back(std::move(lane));
  }
  if (status.ok()) {
    engine = std::move(made);
    return {};
  }
  for (auto& lane : made->lanes) cuda.cuStreamDestroy(lane->stream);
  return status;
}

void Copies::fail(Batch& batch, const Status& why) {
  for (Completion& item : batch.done) {
    item.bytes = 0;
    item.fail(why);
  }
}

void Copies::give_up(std::unique_ptr<Batch> batch, const Status& why) {
  fail(*batch, why);
  completions_.push(batch->done);
  spares_.give(std::move(batch));
}

void Copies::launch(std::unique_ptr<Batch> batch, CUstream user) {
  CUcontext context = nullptr;
  if (Status status = prepare(batch->device, context); !status.ok()) return give_up(std::move(batch), status);
  Device& device = devices_.at(batch->device);
  Engine& engine = *engines_[static_cast<size_t>(batch->device)];
  Lane& lane = *engine.lanes[engine.next.fetch_add(1, std::memory_order_relaxed) % engine.lanes.size()];
  const Cuda& cuda = devices_.cuda();
  Status refused;
  {
    std::lock_guard lock(lane.mutex);
    Current current(cuda, context);
    Status status = device.take_event(batch->event);
    if (status.ok() && user != nullptr) status = follow(user, lane.stream);
    if (status.ok()) {
      // Also after a failure: some of it may have been taken, and is over only when the lane gets there.
      batch->failure = enqueue(*batch, lane, user);
      running_.fetch_add(1, std::memory_order_acq_rel);
      lane.running.push(std::move(batch));
    } else {
      if (batch->event != nullptr) device.give_event(batch->event);
      refused = status;
    }
  }
  if (batch) {
    give_up(std::move(batch), refused);
  } else if (watched_.load(std::memory_order_acquire)) {
    {
      std::lock_guard lock(watch_mutex_);
    }
    watch_changed_.notify_all();
  }
}

Status Copies::follow(CUstream user, CUstream ours) {
  const Cuda& cuda = devices_.cuda();
  CUcontext theirs = nullptr;
  Status status =
      cuda.check(cuda.cuStreamGetCtx(user, &theirs), "cuStreamGetCtx of the stream that was given");
  if (!status.ok()) return status;
  // An event belongs to the context of the stream it is recorded in.
  Current current(cuda, theirs);
  CUevent reached = nullptr;
  status = cuda.check(cuda.cuEventCreate(&reached, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
  if (!status.ok()) return status;
  status = cuda.check(cuda.cuEventRecord(reached, user), "cuEventRecord in the stream that was given");
  if (status.ok()) status = cuda.check(cuda.cuStreamWaitEvent(ours, reached, 0), "cuStreamWaitEvent");
  cuda.cuEventDestroy(reached);  // CUDA keeps it until it was reached
  return status;
}

Status Copies::enqueue(Batch& batch, Lane& lane, CUstream user) {
  const Cuda& cuda = devices_.cuda();
  Status status = enqueue_copies(batch, lane.stream);
  Status recorded = cuda.check(cuda.cuEventRecord(batch.event, lane.stream), "cuEventRecord");
  if (!recorded.ok()) devices_.at(batch.device).give_event(std::exchange(batch.event, nullptr));
  if (recorded.ok() && user != nullptr)
    recorded = cuda.check(cuda.cuStreamWaitEvent(user, batch.event, 0), "cuStreamWaitEvent");
  return status.ok() ? recorded : status;
}

Status Copies::enqueue_copies(Batch& batch, CUstream stream) {
  const Cuda& cuda = devices_.cuda();
  bool by_peers = batch.to_context != nullptr;
  bool has_batch = cuda.cuMemcpyBatchAsync_12 != nullptr || cuda.cuMemcpyBatchAsync_13 != nullptr;
  if (batch.copies.size() > 1 && has_batch && !by_peers && batch_function_works_.load()) {
    Status status = enqueue_batch(batch, stream);
    if (status.code != MC_UNSUPPORTED) return status;
    batch_function_works_.store(false);  // a GPU or a driver that has the function but not for these
  }
  for (const Copy& copy : batch.copies) {
    CUresult result = by_peers ? cuda.cuMemcpyPeerAsync(copy.to, batch.to_context, copy.from,
                                                        batch.from_context, copy.bytes, stream)
                               : cuda.cuMemcpyAsync(copy.to, copy.from, copy.bytes, stream);
    if (Status status = cuda.check(result, by_peers ? "cuMemcpyPeerAsync" : "cuMemcpyAsync"); !status.ok())
      return status;
  }
  return {};
}

Status Copies::enqueue_batch(Batch& batch, CUstream stream) {
  const Cuda& cuda = devices_.cuda();
  size_t most = std::min(kMostInBatch, batch.copies.size());
  batch.to.resize(most);
  batch.from.resize(most);
  batch.sizes.resize(most);
  for (size_t begin = 0; begin < batch.copies.size(); begin += most) {
    size_t count = std::min(most, batch.copies.size() - begin);
    for (size_t i = 0; i < count; ++i) {
      const Copy& copy = batch.copies[begin + i];
      batch.to[i] = copy.to;
      batch.from[i] = copy.from;
      batch.sizes[i] = copy.bytes;
    }
    CUmemcpyAttributes attributes{};
    attributes.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
    size_t first = 0, bad = 0;
    CUresult result = cuda.cuMemcpyBatchAsync_13 != nullptr
                          ? cuda.cuMemcpyBatchAsync_13(batch.to.data(), batch.from.data(), batch.sizes.data(),
                                                       count, &attributes, &first, 1, stream)
                          : cuda.cuMemcpyBatchAsync_12(batch.to.data(), batch.from.data(), batch.sizes.data(),
                                                       count, &attributes, &first, 1, &bad, stream);
    if (Status status = cuda.check(result, "cuMemcpyBatchAsync"); !status.ok()) return status;
  }
  return {};
}

void Copies::reap() {
  if (!busy()) return;
  for (auto& engine : engines_) {
    {
      std::lock_guard lock(engines_mutex_);
      if (!engine) continue;
    }
    for (auto& lane : engine->lanes) reap_lane(*lane);
  }
}

CUresult Copies::query(const Batch& batch, const Lane& lane) {
  const Cuda& cuda = devices_.cuda();
  if (batch.event != nullptr) return cuda.cuEventQuery(batch.event);
  CUcontext context = nullptr;
  if (!devices_.at(batch.device).context(context).ok()) return CUDA_ERROR_INVALID_CONTEXT;
  Current current(cuda, context);
  return cuda.cuStreamQuery(lane.stream);
}

void Copies::reap_lane(Lane& lane) {
  Batches over;
  {
    std::unique_lock lock(lane.mutex, std::try_to_lock);
    if (!lock) return;  // somebody launches or looks
    while (!lane.running.empty()) {
      Batch& head = *lane.running.first();
      CUresult result = query(head, lane);
      if (result == CUDA_ERROR_NOT_READY) break;
      if (result != CUDA_SUCCESS && head.failure.ok()) head.failure = devices_.cuda().check(result, "copy");
      over.push(lane.running.pop());
    }
  }
  while (auto batch = over.pop()) finish(std::move(batch));
}

void Copies::finish(std::unique_ptr<Batch> batch) {
  if (batch->event != nullptr) devices_.at(batch->device).give_event(batch->event);
  Status status = batch->failure;
  // Bytes from or to the memory of a dead process must not look like success.
  for (const auto& remote : batch->remotes) {
    if (status.ok()) status = remote->link->check_alive();
  }
  if (!status.ok()) fail(*batch, status);
  batch->remotes.clear();  // before the completion: who gets it may expect that nothing is held any more
  completions_.push(batch->done);
  spares_.give(std::move(batch));
  running_.fetch_sub(1, std::memory_order_acq_rel);
}

void Copies::watch() {
  watched_.store(true, std::memory_order_release);
  if (!busy()) return;
  {
    std::lock_guard lock(watch_mutex_);
  }
  watch_changed_.notify_all();
}

void Copies::watch_until_stopped() {
  driver::prepare_thread("mc-nvlink-watch");
  std::unique_lock lock(watch_mutex_);
  while (!stopping_) {
    watch_changed_.wait(lock, [&] { return stopping_ || (watched_.load() && busy()); });
    auto pause = std::chrono::microseconds(kFirstLook);
    while (!stopping_ && watched_.load() && busy()) {
      uint64_t before = running_.load();
      lock.unlock();
      reap();
      lock.lock();
      if (running_.load() < before) {
        watched_.store(false);  // the engine was woken; it polls, and arms again when it goes to sleep
        break;
      }
      watch_changed_.wait_for(lock, pause, [&] { return stopping_; });
      pause = std::min(2 * pause, std::chrono::microseconds(kLastLook));
    }
  }
}

}  // namespace mooncake::nvlink
