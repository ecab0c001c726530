#include "local_copies.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "support/os.hpp"

namespace mooncake::ascend {
namespace {

constexpr auto kCloseLook = std::chrono::milliseconds(1);
constexpr int32_t kIdleStreamMs = 1000;  // has nothing to wait for

int direction(bool from_device, bool to_device) {
  if (from_device) return to_device ? kDeviceToDevice : kDeviceToHost;
  return to_device ? kHostToDevice : kHostToHost;
}

struct Ends {
  bool from_device, to_device;
  bool pinned;  // all main memory is, which asynchronous copies ask for
};

Ends ends_of(const Batch& batch) {
  const RemoteMemory& remote = *batch.remote;
  bool local = batch.local_on_device || batch.local_pinned, there = remote.on_device || remote.pinned;
  bool write = batch.opcode == MC_WRITE;
  return {write ? batch.local_on_device : remote.on_device, write ? remote.on_device : batch.local_on_device,
          local && there};
}

// Others block: ACL has no asynchronous copies of main memory that it did not allocate, nor any within it.
bool goes_by_stream(const Ends& ends) { return ends.pinned && (ends.from_device || ends.to_device); }

}  // namespace

bool LocalCopies::busy() const {
  return std::any_of(lanes_.begin(), lanes_.end(), [](const Lane& lane) { return lane.batch != nullptr; });
}

void LocalCopies::begin(std::unique_ptr<Batch> batch) {
  if (!goes_by_stream(ends_of(*batch))) {
    bool queued = false;
    Status status = copy(*batch, nullptr, queued);
    return finish_(std::move(batch), std::move(status));
  }
  for (Lane& lane : lanes_) {
    if (!lane.batch) return begin_in(lane, std::move(batch));
  }
  waiting_.push(std::move(batch));
}

void LocalCopies::begin_in(Lane& lane, std::unique_ptr<Batch> batch) {
  Status status;
  if (lane.stream == nullptr) status = check_acl(acl_.aclrtCreateStream(&lane.stream), "aclrtCreateStream");
  bool queued = false;
  if (status.ok()) status = copy(*batch, lane.stream, queued);
  if (!queued) return finish_(std::move(batch), std::move(status));
  batch->failure = std::move(status);
  lane.batch = std::move(batch);
}

void LocalCopies::look() {
  for (Lane& lane : lanes_) {
    if (!lane.batch) continue;
    int state = kStreamComplete;
    aclError result = acl_.aclrtStreamQuery(lane.stream, &state);
    if (result == kAclSuccess && state != kStreamComplete) continue;
    // An idle stream tells only now how its copies ended.
    if (result == kAclSuccess) result = acl_.aclrtSynchronizeStreamWithTimeout(lane.stream, kIdleStreamMs);
    if (result != kAclSuccess) {  // the runtime has given its work up, and it takes no more
      acl_.aclrtDestroyStream(lane.stream);
      lane.stream = nullptr;
    }
    Status status = std::move(lane.batch->failure);
    if (status.ok()) status = check_acl(result, "the copy");
    finish_(std::move(lane.batch), std::move(status));
    if (auto next = waiting_.pop()) begin_in(lane, std::move(next));
  }
}

void LocalCopies::close(uint64_t deadline_ns) {
  while (busy() && driver::now_ns() < deadline_ns) {
    look();
    std::this_thread::sleep_for(kCloseLook);
  }
  for (Lane& lane : lanes_) {
    if (lane.stream != nullptr) acl_.aclrtDestroyStream(lane.stream);
    lane.stream = nullptr;
    if (lane.batch) finish_(std::move(lane.batch), failed(MC_CLOSED, "the endpoint was closed"));
  }
  while (auto batch = waiting_.pop()) finish_(std::move(batch), failed(MC_CLOSED, "the endpoint was closed"));
}

Status LocalCopies::copy(const Batch& batch, aclrtStream stream, bool& queued) {
  Ends ends = ends_of(batch);
  int kind = direction(ends.from_device, ends.to_device);
  // It copies between main and device memory only.
  if (batch.descs.size() > 1 && ends.from_device != ends.to_device) {
    Status status = copy_together(batch, ends.to_device, stream, queued);
    if (status.code != MC_UNSUPPORTED) return status;
  }
  return copy_each(batch, kind, stream, queued);
}

Status LocalCopies::copy_each(const Batch& batch, int kind, aclrtStream stream, bool& queued) {
  bool write = batch.opcode == MC_WRITE;
  for (const mc_ascend_desc& desc : batch.descs) {
    auto* to = reinterpret_cast<void*>(write ? desc.remote : desc.local);
    auto* from = reinterpret_cast<const void*>(write ? desc.local : desc.remote);
    Status status;
    if (kind == kHostToHost) {  // ACL has no such copy
      std::memcpy(to, from, desc.length);
    } else if (stream != nullptr) {
      queued = true;
      status = check_acl(acl_.aclrtMemcpyAsync(to, desc.length, from, desc.length, kind, stream),
                         "aclrtMemcpyAsync");
    } else {
      status = check_acl(acl_.aclrtMemcpy(to, desc.length, from, desc.length, kind), "aclrtMemcpy");
    }
    if (!status.ok()) return status;
  }
  return {};
}

Status LocalCopies::copy_together(const Batch& batch, bool to_device, aclrtStream stream, bool& queued) {
  bool async = stream != nullptr && acl_.aclrtMemcpyBatchAsync != nullptr;
  // Without the asynchronous one, single copies still go through the stream.
  if (!async && (stream != nullptr || acl_.aclrtMemcpyBatch == nullptr)) return failed(MC_UNSUPPORTED, "");
  bool write = batch.opcode == MC_WRITE;
  size_t count = batch.descs.size();
  to_.resize(count);
  from_.resize(count);
  sizes_.resize(count);
  for (size_t i = 0; i < count; ++i) {
    const mc_ascend_desc& desc = batch.descs[i];
    to_[i] = reinterpret_cast<void*>(write ? desc.remote : desc.local);
    from_[i] = reinterpret_cast<void*>(write ? desc.local : desc.remote);
    sizes_[i] = desc.length;
  }
  aclrtMemcpyBatchAttr attribute{};
  attribute.dstLoc = {to_device ? options_.device : 0, to_device ? kLocationDevice : kLocationHost};
  attribute.srcLoc = {to_device ? 0 : options_.device, to_device ? kLocationHost : kLocationDevice};
  size_t first = 0, bad = 0;
  aclError result = async ? acl_.aclrtMemcpyBatchAsync(to_.data(), sizes_.data(), from_.data(), sizes_.data(),
                                                       count, &attribute, &first, 1, &bad, stream)
                          : acl_.aclrtMemcpyBatch(to_.data(), sizes_.data(), from_.data(), sizes_.data(),
                                                  count, &attribute, &first, 1, &bad);
  if (result == kAclNotSupported) {
    if (async)
      acl_.aclrtMemcpyBatchAsync = nullptr;
    else
      acl_.aclrtMemcpyBatch = nullptr;
    return failed(MC_UNSUPPORTED, "");
  }
  queued = async;
  return check_acl(result, async ? "aclrtMemcpyBatchAsync" : "aclrtMemcpyBatch");
}

}  // namespace mooncake::ascend
