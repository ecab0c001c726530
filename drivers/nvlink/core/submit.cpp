// The way of an operation through submit().
#include <algorithm>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "endpoint.hpp"

namespace mooncake::nvlink {
namespace {

uint64_t end_of_run(const Place& place, uint64_t address) {
  return place.pin ? place.pin->end_of_run(address) : ~0ull;
}

}  // namespace

// ------------------------------------------------------------------------------------ what each GPU copies

class Endpoint::Plan {
 public:
  explicit Plan(Endpoint& endpoint) : endpoint_(endpoint) {}

  std::shared_ptr<RemoteMemory> opened(const std::shared_ptr<driver::Remote>& remote) const {
    return remote == remembered_ ? opened_ : nullptr;
  }
  void remember(const std::shared_ptr<driver::Remote>& remote, std::shared_ptr<RemoteMemory> opened) {
    remembered_ = remote;
    opened_ = std::move(opened);
  }

  // The operation was checked. Its completion comes through the batch, or at once.
  void add(const mc_op& op, const Region& region, const std::shared_ptr<RemoteMemory>& remote, bool stream) {
    Place local = region.place;
    local.address += op.local_offset;
    Status allowed = remote->check(static_cast<mc_opcode>(op.opcode), op.remote_offset, op.length);
    if (!allowed.ok()) return endpoint_.complete(op, allowed);
    int device = endpoint_.choose(local, *remote);
    if (device != kUnknown) return add_copy(op, local, region, remote, device);
    if (!remote->link->peer.same_host)
      return endpoint_.complete(op, failed(MC_UNSUPPORTED,
                                           "the GPU of the local memory does not reach the "
                                           "peer's, and hosts share no staging buffer"));
    if (stream)
      return endpoint_.complete(op, failed(MC_UNSUPPORTED,
                                           "the memory can only be staged, which does not "
                                           "follow a stream"));
    endpoint_.stage_client_.add(
        {op.cookie, static_cast<mc_opcode>(op.opcode), local, remote, op.remote_offset, op.length, 0, 0, {}});
  }

  void launch(CUstream stream) {
    while (auto batch = batches_.pop()) endpoint_.copies_.launch(std::move(batch), stream);
  }

 private:
  void add_copy(const mc_op& op, const Place& local, const Region& region,
                const std::shared_ptr<RemoteMemory>& remote, int device) {
    Batch& batch = batch_of(device, local, remote->place);
    bool same = last_region_ == &region && last_remote_ == remote.get() && last_batch_ == &batch &&
                last_opcode_ == op.opcode;
    if (batch.remotes.empty() || batch.remotes.back() != remote) batch.remotes.push_back(remote);
    Place there = remote->place;
    there.address += op.remote_offset;
    const Place& to = op.opcode == MC_READ ? local : there;
    const Place& from = op.opcode == MC_READ ? there : local;
    for (uint64_t done = 0; done < op.length;) {
      uint64_t to_end = end_of_run(to, to.address + done), from_end = end_of_run(from, from.address + done);
      uint64_t bytes =
          std::min({op.length - done, to_end - to.address - done, from_end - from.address - done});
      Copy next{to.address + done, from.address + done, bytes};
      // Neighbours become one copy, where both ends go on within one registration.
      if (same && batch.copies.back().to + batch.copies.back().bytes == next.to &&
          batch.copies.back().from + batch.copies.back().bytes == next.from && to_end == last_to_end_ &&
          from_end == last_from_end_) {
        batch.copies.back().bytes += bytes;
      } else {
        batch.copies.push_back(next);
      }
      same = false;
      last_to_end_ = to_end;
      last_from_end_ = from_end;
      done += bytes;
    }
    last_region_ = &region;
    last_remote_ = remote.get();
    last_batch_ = &batch;
    last_opcode_ = op.opcode;
    Completion done;
    done.cookie = op.cookie;
    done.opcode = static_cast<mc_opcode>(op.opcode);
    done.bytes = op.length;
    batch.done.push_back(std::move(done));
  }

  Batch& batch_of(int device, const Place& local, const Place& remote) {
    CUcontext ours = nullptr, theirs = nullptr;
    bool apart = local.device >= 0 && remote.device >= 0 && local.device != remote.device &&
                 !endpoint_.devices_.reaches(device, device == local.device ? remote.device : local.device);
    if (!apart) {
      for (Batch* batch = batches_.first(); batch != nullptr; batch = batch->next.get()) {
        if (batch->device == device && batch->to_context == nullptr) return *batch;
      }
    }
    auto made = endpoint_.copies_.take();
    made->device = device;
    // Failures show when the batch is launched.
    if (apart && endpoint_.devices_.at(local.device).context(ours).ok() &&
        endpoint_.devices_.at(remote.device).context(theirs).ok()) {
      made->to_context = ours;
      made->from_context = theirs;
    }
    Batch& added = *made;
    batches_.push(std::move(made));
    return added;
  }

  Endpoint& endpoint_;
  std::shared_ptr<driver::Remote> remembered_;
  std::shared_ptr<RemoteMemory> opened_;
  Batches batches_;
  const Region* last_region_ = nullptr;
  const RemoteMemory* last_remote_ = nullptr;
  const Batch* last_batch_ = nullptr;
  uint32_t last_opcode_ = MC_READ;
  uint64_t last_to_end_ = 0, last_from_end_ = 0;
};

int Endpoint::choose(const Place& local, const RemoteMemory& remote) {
  if (remote.way == Way::kStaged) return kUnknown;
  const std::set<int>& may = remote.reachable;
  int there = remote.place.device;
  if (local.device == kHost) {
    if (there >= 0 && (may.empty() || may.contains(there))) return there;
    return may.empty() ? 0 : *may.begin();
  }
  if (there == kHost || may.contains(local.device)) return local.device;
  if (may.empty()) {  // both GPUs are of this process: where neither reaches the other, CUDA finds a way
    bool backwards = !devices_.reaches(local.device, there) && devices_.reaches(there, local.device);
    return backwards ? there : local.device;
  }
  for (int device : may) {
    if (devices_.reaches(device, local.device)) return device;
  }
  return kUnknown;
}

// ------------------------------------------------------------------------------------------------ submitting

Status Endpoint::submit(const mc_op* ops, size_t count, size_t* accepted) {
  return submit_all(nullptr, ops, count, accepted);
}

Status Endpoint::submit_on_stream(void* stream, const mc_op* ops, size_t count, size_t* accepted) {
  if (stream == nullptr) return failed(MC_INVALID, "the stream is null");
  return submit_all(static_cast<CUstream>(stream), ops, count, accepted);
}

Status Endpoint::submit_all(CUstream stream, const mc_op* ops, size_t count, size_t* accepted) {
  Plan plan(*this);
  Status status = begin_each(ops, count, accepted, [&](const mc_op& op, const Names& names) {
    submit_one(stream, op, names, plan);
  });
  plan.launch(stream);
  return status;
}

void Endpoint::submit_one(CUstream stream, const mc_op& op, const Names& names, Plan& plan) {
  // Looked up once for neighbours that name the same region.
  if (std::shared_ptr<RemoteMemory> open = plan.opened(names.remote))
    return plan.add(op, *names.region, open, stream != nullptr);
  if (auto open = std::static_pointer_cast<RemoteMemory>(asker_->opened(names.remote))) {
    plan.remember(names.remote, open);
    return plan.add(op, *names.region, open, stream != nullptr);
  }
  std::function<void(const std::shared_ptr<driver::Opened>&, const Status&)> later;
  if (stream == nullptr) {
    later = [this, op, region = names.region](const std::shared_ptr<driver::Opened>& open,
                                              const Status& why) { start_late(op, *region, open, why); };
  }
  Status status;
  auto opened = asker_->use(names.remote, status, op.cookie, std::move(later));
  if (opened) {
    plan.remember(names.remote, std::static_pointer_cast<RemoteMemory>(opened));
    plan.add(op, *names.region, std::static_pointer_cast<RemoteMemory>(opened), stream != nullptr);
  } else if (status.code != MC_AGAIN) {
    complete(op, status);
  } else if (stream != nullptr) {
    complete(op, failed(MC_UNSUPPORTED,
                        "the peer has not granted the region yet, and what is queued on a stream cannot "
                        "wait for it; read or write the region once without a stream"));
  }
}

void Endpoint::start_late(const mc_op& op, const Region& region,
                          const std::shared_ptr<driver::Opened>& opened, const Status& refusal) {
  if (!opened) return complete(op, refusal);
  Plan plan(*this);
  plan.add(op, region, std::static_pointer_cast<RemoteMemory>(opened), false);
  plan.launch(nullptr);
}

}  // namespace mooncake::nvlink
