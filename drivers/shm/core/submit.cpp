// The way of an operation through submit() and poll(). Small ones are over when submit() returns.
#include "support/copies/submit.hpp"

#include <memory>

#include "endpoint.hpp"
#include "os.hpp"

namespace mooncake::shm {

class Endpoint::Visit {
 public:
  Visit() = default;
  ~Visit() { close(); }
  Visit(const Visit&) = delete;
  Visit& operator=(const Visit&) = delete;

  // What was proved before was told of: completions are counted from here on.
  void begin(Completion* first) { first_ = first; }

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
  bool has_stores() const { return access_->mapping() != nullptr; }
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
  Status status;
  auto taken = driver::take_operations(ops, count, completions_, accepted, status);
  Operands named(connections_, regions_, remotes_);
  if (driver::total_length(taken) <= options_.inline_bytes) {
    driver::copy_at_once<Visit>(taken, named, pool_, options_.streaming_bytes, completions_,
                                [&](const mc_op& op) {
                                  auto job = driver::job_of<Job>(named);
                                  job->add(op);
                                  place(job);
                                });
    return status;
  }
  for (const auto& job : driver::jobs_of<Job>(taken, named, completions_)) place(job);
  return status;
}

void Endpoint::place(const std::shared_ptr<Job>& job) {
  pool_.add(job);
  initiator_.place(job);
}

}  // namespace mooncake::shm
