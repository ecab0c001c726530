// The way of an operation through submit() and poll(). Small ones are over when submit() returns.
#include "support/copies/submit.hpp"

#include <memory>

#include "endpoint.hpp"

namespace mooncake::cxl {

class Endpoint::Visit {
 public:
  Visit() = default;
  ~Visit() { close(); }
  Visit(const Visit&) = delete;
  Visit& operator=(const Visit&) = delete;

  // What was proved before was told of: completions are counted from here on.
  void begin(Completion* first) { first_ = first; }

  // It need not be waited for; what is not allowed is refused by copy().
  bool at(RemoteRegion* remote, Completion* next) {
    if (remote == remote_) [[likely]]
      return true;
    close();
    remote_ = remote;
    first_ = next;
    entered_ = remote->enter(&use_);
    return true;
  }
  bool has_stores() const { return true; }

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
  Status status;
  auto taken = driver::take_operations(ops, count, completions_, accepted, status);
  Operands named(connections_, regions_, remotes_);
  if (driver::total_length(taken) <= options_.inline_bytes) {
    driver::copy_at_once<Visit>(taken, named, copies_, options_.streaming_bytes, completions_,
                                [](const mc_op&) {});
    return status;
  }
  for (const auto& job : driver::jobs_of<Job>(taken, named, completions_)) run(job);
  return status;
}

void Endpoint::run(const std::shared_ptr<Job>& job) {
  copies_.add(job);
  uint32_t use = 0;
  if (Status known = job->remote->enter(&use); !known.ok()) return copies_.end(job, known);
  job->remote->leave(use);  // what the grant allows is known now; each piece enters anew
  copies_.run(job);
}

}  // namespace mooncake::cxl
