// The way of an operation through submit() and poll(). Small ones are over when submit() returns, without
// a lock, an allocation or a system call on the way, except for the lock of the completion queue.
#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "endpoint.hpp"
#include "os.hpp"

namespace mooncake::shm {

class Endpoint::Visit {
 public:
  Visit() = default;
  ~Visit() { close(); }
  Visit(const Visit&) = delete;
  Visit& operator=(const Visit&) = delete;

  // False when the region is not open: then the operation has to wait, or to be told why it is not.
  bool at(RemoteRegion* remote, Completion* next) {
    if (remote == remote_) [[likely]]
      return access_ != nullptr;
    close();
    remote_ = remote;
    first_ = next;
    // In this order: who lets go of the region takes the pointer away first, and looks for users then.
    remote->users.fetch_add(1, std::memory_order_seq_cst);
    access_ = remote->open.load(std::memory_order_seq_cst);
    entered_ = access_ != nullptr && access_->enter();
    return access_ != nullptr;
  }

  Status copy(const mc_op& op, const Region& local, Stores stores) const {
    auto opcode = static_cast<mc_opcode>(op.opcode);
    if (Status allowed = access_->check(opcode, op.remote_offset, op.length); !allowed.ok()) return allowed;
    if (!entered_) return access_->denial();
    return access_->copy(opcode, local.base + op.local_offset, op.remote_offset, op.length, stores);
  }

  // Bytes copied from or to the memory of a dead process must not look like success: one look for all of the
  // copies of the visit, whose completions are [first, end).
  void prove(Completion* end) {
    if (access_ == nullptr) return;
    if (Status alive = access_->check_alive(); !alive.ok()) {
      for (Completion* item = first_; item != end; ++item) {
        if (item->code == MC_OK) item->fail(alive);
        item->bytes = 0;
      }
    }
    first_ = end;
  }

  // Otherwise the kernel copies.
  bool mapped() const { return access_->mapping() != nullptr; }
  RemoteRegion* remote() const { return remote_; }

 private:
  void close() {
    if (remote_ == nullptr) return;
    if (entered_) access_->leave();
    remote_->users.fetch_sub(1, std::memory_order_release);
    remote_ = nullptr;
  }

  RemoteRegion* remote_ = nullptr;
  const Access* access_ = nullptr;
  bool entered_ = false;
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
      if (!visit.at(remote, next)) {
        std::shared_ptr<Job> job;
        park(op, named, job);
        pool_.add(job);
        initiator_.place(job);
        continue;
      }
      status =
          op.length < options_.streaming_bytes || !visit.mapped()
              ? visit.copy(op, *named.local(), Stores::kCached)
              : pool_.tuned(op.length, [&](Stores stores) { return visit.copy(op, *named.local(), stores); });
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
    bool same = job && job->remote == named.remote() && job->local == named.local();
    if (!same && job) jobs.push_back(std::exchange(job, nullptr));
    if (!same) {
      job = std::make_shared<Job>();
      job->moves.reserve(count - i);
    }
    park(op, named, job);
  }
  if (job) jobs.push_back(std::move(job));
  for (const auto& whole : jobs) {
    pool_.add(whole);
    initiator_.place(whole);
  }
  return static_cast<size_t>(next - finished);
}

void Endpoint::park(const mc_op& op, const Operands& named, std::shared_ptr<Job>& job) {
  if (!job) job = std::make_shared<Job>();
  if (job->moves.empty()) {
    job->connection = named.connection();
    job->local = named.local();
    job->remote = named.remote();
  }
  job->add(op);
}

}  // namespace mooncake::shm
