// HIXL's links to engines of peers, and the transfers on them.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "acl.hpp"
#include "batch.hpp"
#include "options.hpp"

namespace mooncake::ascend {

// Belongs to the worker thread. A batch is finished once nothing of it can land any more: when HIXL says that
// it is done, or has ended its link. Where Disconnect fails, it is asked again, until Finalize at the latest.
class Links {
 public:
  Links(const Options& options, const Acl& acl, Finish finish)
      : options_(options), acl_(acl), finish_(std::move(finish)) {}
  void open(void* engine) { engine_ = engine; }

  // `ours`: the generation of the registrations now.
  void begin(std::unique_ptr<Batch> batch, uint64_t ours);
  void look();
  bool busy() const;    // transfers are under way
  bool ending() const;  // HIXL has not ended a link yet

  // Ends every link, when its transfers are over. False: HIXL has not ended one of them; to be called again.
  bool end_all();
  // No region of the engine is used any more: its link ends, then `life`.
  void forget(const std::string& engine, std::shared_ptr<void> life);
  // Before Finalize, and after it.
  void close();
  void finalized();

 private:
  struct Peer {
    bool connected = false;
    bool ending = false;            // Disconnect was asked for, and has failed
    bool forgotten = false;         // goes when its link has ended
    uint64_t again_ns = 0;          // Disconnect: not before
    uint64_t theirs = 0, ours = 0;  // generations of the registrations when the link was made
    Batches running;
    Batches held;  // failed; over when the link has ended
    std::vector<std::shared_ptr<void>> lives;
  };

  Status connect(const std::string& engine, Peer& peer, uint64_t theirs, uint64_t ours);
  bool end(const std::string& engine, Peer& peer);
  void ended(Peer& peer);
  void drain(const std::string& engine, Peer& peer);
  // Whether any transfer is over.
  bool look(const std::string& engine, Peer& peer);

  const Options& options_;
  const Acl& acl_;
  const Finish finish_;
  void* engine_ = nullptr;
  std::map<std::string, Peer> peers_;
};

}  // namespace mooncake::ascend
