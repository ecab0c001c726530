// The way of an operation through submit() and poll(). Small ones are over when submit() returns, without
// a lock, an allocation or a system call on the way, except for the lock of the completion queue.
#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "endpoint.hpp"
#include "os.hpp"

namespace mooncake::shm {
namespace {

// As long as two pieces, and as it takes to be woken.
constexpr uint64_t kLastPiecesNs = 30'000;

}  // namespace

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
      if (!visit.at(remote, next)) {
        std::shared_ptr<Job> job;
        park(op, names, job);
        pool_.add(job);
        initiator_.place(job);
        continue;
      }
      status = op.length < options_.streaming_bytes || !visit.mapped()
                   ? visit.copy(op, **names.local, Stores::kCached)
                   : copy_tuned(op, names, visit);
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

Status Endpoint::copy_tuned(const mc_op& op, const Names& names, const Visit& visit) {
  StoreTuner::Choice choice = tuner_.choose(op.length);
  uint64_t started = now_ns();
  Status status = visit.copy(op, **names.local, choice.stores);
  if (status.ok()) tuner_.note(choice, op.length, now_ns() - started);
  return status;
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
    bool same = job && job->remote == *names.remote && job->local == *names.local;
    if (!same && job) jobs.push_back(std::exchange(job, nullptr));
    if (!same) {
      job = std::make_shared<Job>();
      job->moves.reserve(count - i);
    }
    park(op, names, job);
  }
  if (job) jobs.push_back(std::move(job));
  for (const auto& whole : jobs) {
    pool_.add(whole);
    initiator_.place(whole);
  }
  return static_cast<size_t>(next - finished);
}

void Endpoint::park(const mc_op& op, const Names& names, std::shared_ptr<Job>& job) {
  if (!job) job = std::make_shared<Job>();
  if (job->moves.empty()) {
    job->connection = *names.connection;
    job->local = *names.local;
    job->remote = *names.remote;
  }
  job->moves.push_back(
      {static_cast<mc_opcode>(op.opcode), op.local_offset, op.remote_offset, op.length, op.cookie});
  job->bytes += op.length;
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
  if (count > 0 || !pool_.wants_help()) return count;
  pool_.help();
  return completions_.poll(completions, capacity);
}

bool Endpoint::arm() {
  // The last pieces are over sooner than a thread that sleeps is awake again.
  for (uint64_t until = now_ns() + kLastPiecesNs;
       pool_.finishing() && !completions_.any() && now_ns() < until;)
    relax();
  return !pool_.wants_help() && completions_.arm();
}

}  // namespace mooncake::shm
