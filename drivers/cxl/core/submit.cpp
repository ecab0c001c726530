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
  Operands named(connections_, regions_, remotes_);
  Visit visit;
  Completion* next = finished;
  for (size_t i = 0; i < count; ++i) {
    const mc_op& op = ops[i];
    Status status;
    if (!named.resolve(op)) {
      status = named.status();
    } else {
      RemoteRegion* remote = named.remote().get();
      if (remote != visit.remote()) visit.prove(next);
      visit.at(remote, next);
      status = op.length < options_.streaming_bytes
                   ? visit.copy(op, *named.local(), Stores::kCached)
                   : copies_.tuned(
                         op.length, [&](Stores stores) { return visit.copy(op, *named.local(), stores); });
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
  Operands named(connections_, regions_, remotes_);
  std::shared_ptr<Job> job;
  std::vector<std::shared_ptr<Job>> jobs;
  Completion* next = finished;
  for (size_t i = 0; i < count; ++i) {
    const mc_op& op = ops[i];
    if (!named.resolve(op)) {
      next->cookie = op.cookie;
      next->opcode = static_cast<mc_opcode>(op.opcode);
      next->fail(named.status());
      ++next;
      continue;
    }
    if (!job || job->remote != named.remote() || job->local != named.local()) {
      job = jobs.emplace_back(std::make_shared<Job>());
      job->connection = named.connection();
      job->local = named.local();
      job->remote = named.remote();
      job->moves.reserve(count - i);
    }
    job->add(op);
  }
  for (const auto& whole : jobs) run(whole);
  return static_cast<size_t>(next - finished);
}

void Endpoint::run(const std::shared_ptr<Job>& job) {
  copies_.add(job);
  uint32_t use = 0;
  if (Status known = job->remote->enter(&use); !known.ok()) return copies_.end(job, known);
  job->remote->leave(use);  // what the grant allows is known now; each piece enters anew
  copies_.run(job);
}

}  // namespace mooncake::cxl
