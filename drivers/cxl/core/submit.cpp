// The way of an operation through submit() and poll(). Small ones are over when submit() returns, without
// a lock, an allocation or a system call on the way, except for the lock of the completion queue.
#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "endpoint.hpp"

namespace mooncake::cxl {

class Endpoint::Visit {
 public:
  Visit() = default;
  ~Visit() { close(); }
  Visit(const Visit&) = delete;
  Visit& operator=(const Visit&) = delete;

  void at(RemoteRegion* remote, Completion* next) {
    if (remote == remote_) [[likely]]
      return;
    close();
    remote_ = remote;
    first_ = next;
    entered_ = remote->enter(&use_);
  }

  Status copy(const mc_op& op, const Region& local, Stores stores) const {
    if (!entered_.ok()) return entered_;
    auto opcode = static_cast<mc_opcode>(op.opcode);
    if (Status allowed = remote_->check(opcode, op.remote_offset, op.length); !allowed.ok()) return allowed;
    remote_->copy(opcode, local.base + op.local_offset, op.remote_offset, op.length, stores);
    return {};
  }

  // Bytes copied from or to the memory of the dead must not look like success: one look for all of the copies
  // of the visit, whose completions are [first, end).
  void prove(Completion* end) {
    if (remote_ == nullptr || !entered_.ok()) return;
    if (Status alive = remote_->check_alive(); !alive.ok()) {
      for (Completion* item = first_; item != end; ++item) {
        if (item->code == MC_OK) item->fail(alive);
        item->bytes = 0;
      }
    }
    first_ = end;
  }

  RemoteRegion* remote() const { return remote_; }

 private:
  void close() {
    if (remote_ != nullptr && entered_.ok()) remote_->leave(use_);
    remote_ = nullptr;
  }

  RemoteRegion* remote_ = nullptr;
  Status entered_;
  uint32_t use_ = 0;
  Completion* first_ = nullptr;
};

Status Endpoint::submit(const mc_op* ops, size_t count, size_t* accepted) {
  size_t taken = completions_.reserve(count);
  uint64_t total = 0;
  for (size_t i = 0; i < taken; ++i) total = std::max(total, total + ops[i].length);
  bool at_once = total <= options_.inline_bytes;
  Completion one;
  std::vector<Completion> many(taken > 1 ? taken : 0);
  Completion* finished = taken > 1 ? many.data() : &one;
  size_t done = at_once ? copy_now(ops, taken, finished) : hand_over(ops, taken, finished);
  completions_.push({finished, done});
  *accepted = taken;
  return taken == count ? Status{} : failed(MC_AGAIN, "the queue is full; fetch completions first");
}

size_t Endpoint::copy_now(const mc_op* ops, size_t count, Completion* finished) {
  Names names;
  Visit visit;
  Completion* next = finished;
  for (size_t i = 0; i < count; ++i) {
    const mc_op& op = ops[i];
    Status status;
    if (!resolve(op, names)) {
      status = names.status;
    } else {
      RemoteRegion* remote = names.remote->get();
      if (remote != visit.remote()) visit.prove(next);
      visit.at(remote, next);
      status =
          visit.copy(op, **names.local,
                     op.length >= options_.streaming_bytes ? Stores::kStreamingInTurns : Stores::kCached);
    }
    next->cookie = op.cookie;
    next->opcode = static_cast<mc_opcode>(op.opcode);
    if (status.ok()) {
      next->bytes = op.length;
    } else {
      next->fail(status);
    }
    ++next;
  }
  visit.prove(next);
  return static_cast<size_t>(next - finished);
}

size_t Endpoint::hand_over(const mc_op* ops, size_t count, Completion* finished) {
  Names names;
  std::shared_ptr<Job> job;
  std::vector<std::shared_ptr<Job>> jobs;
  Completion* next = finished;
  for (size_t i = 0; i < count; ++i) {
    const mc_op& op = ops[i];
    if (!resolve(op, names)) {
      next->cookie = op.cookie;
      next->opcode = static_cast<mc_opcode>(op.opcode);
      next->fail(names.status);
      ++next;
      continue;
    }
    if (!job || job->remote != *names.remote || job->local != *names.local) {
      job = jobs.emplace_back(std::make_shared<Job>());
      job->connection = *names.connection;
      job->local = *names.local;
      job->remote = *names.remote;
      job->moves.reserve(count - i);
    }
    job->moves.push_back(
        {static_cast<mc_opcode>(op.opcode), op.local_offset, op.remote_offset, op.length, op.cookie});
    job->bytes += op.length;
  }
  for (const auto& whole : jobs) copies_.run(whole);
  return static_cast<size_t>(next - finished);
}

// Whether [offset, offset + length) is not empty and lies in the region, for any values.
static bool inside(uint64_t offset, uint64_t length, const Region& region) {
  return length > 0 && offset <= region.length && length <= region.length - offset;
}

bool Endpoint::resolve(const mc_op& op, Names& names) const {
  bool same = op.connection == names.connection_handle && op.local == names.local_handle &&
              op.remote == names.remote_handle;
  if (!same) look_up(op, names);
  if (!names.connection || !names.local || !names.remote) return false;
  if ((op.opcode == MC_READ || op.opcode == MC_WRITE) && inside(op.local_offset, op.length, **names.local) &&
      (*names.remote)->connection_id == (*names.connection)->id) [[likely]] {
    return true;
  }
  if (op.opcode != MC_READ && op.opcode != MC_WRITE) {
    names.status = failed(MC_INVALID, "unknown operation");
  } else if (!inside(op.local_offset, op.length, **names.local)) {
    names.status = failed(MC_INVALID, "the range is empty or not inside the local region");
  } else {
    names.status = failed(MC_INVALID, "the remote memory belongs to another connection");
  }
  return false;
}

void Endpoint::look_up(const mc_op& op, Names& names) const {
  names.connection = connections_.find(op.connection);
  names.local = regions_.find(op.local);
  names.remote = remotes_.find(op.remote);
  names.connection_handle = op.connection;
  names.local_handle = op.local;
  names.remote_handle = op.remote;
  if (!names.connection || !names.local || !names.remote) {
    names.status =
        failed(MC_INVALID, "the operation names a connection, local or remote memory that does not exist");
  }
}

size_t Endpoint::poll(mc_completion* completions, size_t capacity) {
  size_t count = completions_.poll(completions, capacity);
  if (count > 0 || !copies_.wants_help()) return count;
  copies_.help();
  return completions_.poll(completions, capacity);
}

}  // namespace mooncake::cxl
