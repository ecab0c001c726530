// Copies between engines of one process, by the ACL runtime.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "acl.hpp"
#include "batch.hpp"
#include "options.hpp"

namespace mooncake::ascend {

// Belongs to the worker thread. What goes through a stream is over when the stream is idle, whatever failed.
class LocalCopies {
 public:
  LocalCopies(const Options& options, Acl& acl, Finish finish)
      : options_(options), acl_(acl), finish_(std::move(finish)) {}
  // Waits for what is under way, at most until the deadline.
  void close(uint64_t deadline_ns);

  void begin(std::unique_ptr<Batch> batch);
  void look();
  bool busy() const;

 private:
  struct Lane {
    aclrtStream stream = nullptr;
    std::unique_ptr<Batch> batch;  // null: it is idle
  };

  void begin_in(Lane& lane, std::unique_ptr<Batch> batch);
  // Through the stream; null: at once. `queued`: some of it may be in the stream.
  Status copy(const Batch& batch, aclrtStream stream, bool& queued);
  Status copy_each(const Batch& batch, int kind, aclrtStream stream, bool& queued);
  // MC_UNSUPPORTED: not on this product.
  Status copy_together(const Batch& batch, bool to_device, aclrtStream stream, bool& queued);

  const Options& options_;
  Acl& acl_;
  const Finish finish_;
  std::array<Lane, 4> lanes_;
  Batches waiting_;  // for a lane
  // As ACL wants the copies of a batch.
  std::vector<void*> to_, from_;
  std::vector<size_t> sizes_;
};

}  // namespace mooncake::ascend
