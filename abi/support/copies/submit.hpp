// submit() of drivers that copy: what is short is copied at once, by the caller, without a lock, an
// allocation or a system call on the way but for the lock of the completion queue; the rest becomes jobs of
// the pool.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "../completions.hpp"
#include "../status.hpp"
#include "copy_pool.hpp"
#include "mooncake_driver.h"

namespace mooncake::driver {

// The operations for which there is room among the completions, and whether there is for all.
inline std::span<const mc_op> take_operations(const mc_op* ops, size_t count, Completions& completions,
                                              size_t* accepted, Status& status) {
  *accepted = completions.reserve(count);
  if (*accepted < count) status = failed(MC_AGAIN, "the queue is full; fetch completions first");
  return {ops, *accepted};
}

inline uint64_t total_length(std::span<const mc_op> ops) {
  uint64_t total = 0;
  for (const mc_op& op : ops) total = std::max(total, total + op.length);
  return total;
}

inline void tell(Completion& completion, const mc_op& op, const Status& status) {
  completion = {op.cookie, status.ok() ? op.length : 0, static_cast<mc_opcode>(op.opcode), MC_OK, nullptr};
  if (!status.ok()) completion.fail(status);
}

// Copies each operation, or leaves it to `later(op)` where its region cannot be used yet. A `Visit` of the
// driver goes from region to region: at() says whether this one can be used, prove() that what was copied
// meanwhile, whose completions end there, did not come from or go to the memory of the dead.
template <size_t kTogether, class Visit, class Operands, class Later>
void copy_together(std::span<const mc_op> ops, Operands& named, CopyPool& pool, uint64_t streaming_bytes,
                   Completions& completions, Later& later) {
  std::array<Completion, kTogether> finished;
  Visit visit;
  for (size_t at = 0; at < ops.size();) {
    Completion* next = finished.data();
    visit.begin(next);
    for (; at < ops.size() && next != finished.data() + kTogether; ++at) {
      const mc_op& op = ops[at];
      if (!named.resolve(op)) {
        tell(*next++, op, named.status());
        continue;
      }
      auto* remote = named.remote().get();
      if (remote != visit.remote()) visit.prove(next);
      if (!visit.at(remote, next)) {
        later(op);
        continue;
      }
      Status status =
          op.length < streaming_bytes || !visit.has_stores()
              ? visit.copy(op, *named.local(), Stores::kCached)
              : pool.tuned(op.length, [&](Stores stores) { return visit.copy(op, *named.local(), stores); });
      tell(*next++, op, status);
    }
    visit.prove(next);
    completions.push({finished.data(), next});
  }
}

template <class Visit, class Operands, class Later>
void copy_at_once(std::span<const mc_op> ops, Operands& named, CopyPool& pool, uint64_t streaming_bytes,
                  Completions& completions, Later&& later) {
  if (ops.size() == 1)
    copy_together<1, Visit>(ops, named, pool, streaming_bytes, completions, later);
  else
    copy_together<64, Visit>(ops, named, pool, streaming_bytes, completions, later);
}

// Without operations yet.
template <class Job, class Operands>
std::shared_ptr<Job> job_of(const Operands& named) {
  auto job = std::make_shared<Job>();
  job->connection = named.connection();
  job->local = named.local();
  job->remote = named.remote();
  return job;
}

// A job for each run of operations between the same two regions. What names nothing is told at once.
template <class Job, class Operands>
std::vector<std::shared_ptr<Job>> jobs_of(std::span<const mc_op> ops, Operands& named,
                                          Completions& completions) {
  std::vector<std::shared_ptr<Job>> jobs;
  for (size_t at = 0; at < ops.size(); ++at) {
    const mc_op& op = ops[at];
    if (!named.resolve(op)) {
      Completion refused;
      tell(refused, op, named.status());
      completions.push({&refused, 1});
      continue;
    }
    bool same = !jobs.empty() && jobs.back()->remote == named.remote() && jobs.back()->local == named.local();
    if (!same) {
      jobs.push_back(job_of<Job>(named));
      jobs.back()->moves.reserve(ops.size() - at);
    }
    jobs.back()->add(op);
  }
  return jobs;
}

}  // namespace mooncake::driver
