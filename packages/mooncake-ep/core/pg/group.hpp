// Who is in the group, and rounds: the one step that every operation is made of.
//
// In a round each member puts what it has to say into its own memory and publishes; then it waits until every
// other member has published or is evicted. All members find the same outcome (words.hpp), so they agree on
// the members of the next round without a word. What a member put there stays readable until it has published
// the second round after, whoever dies.
#pragma once

#include <mutex>
#include <string>
#include <vector>

#include "control.hpp"
#include "faults.hpp"
#include "layout.hpp"
#include "peer.hpp"
#include "result.hpp"
#include "shared_memory.hpp"
#include "waiter.hpp"
#include "words.hpp"

namespace mooncake::ep::pg {

struct Wait {
  uint64_t deadline_ns = ~uint64_t{0};  // past it, whoever has not published is evicted
  Interrupted interrupted = nullptr;
};

class Group {
 public:
  // A new group for ranks below `capacity`, or the one whose block process `pid` holds open as `fd`.
  Group(uint32_t capacity, int rank, int pid, int fd);
  // For one thread at a time, but for what the words of the block say (waits, gone).

  int rank() const { return rank_; }
  int capacity() const { return static_cast<int>(layout_.capacity); }
  const std::vector<int>& members() const { return members_; }
  std::vector<int> copy_of_members();  // for any thread
  bool joined() const { return joined_; }
  // Where others find the block of the group, in this process.
  int control_fd() const { return block_.fd(); }

  // Says that this process holds the rank's place now; a former holder can no longer be activated.
  void claim();
  // Whether somebody newer than the known member of this rank waits to be let in.
  bool waits(int rank) const;
  // Whether the first processes of these ranks have all claimed their places.
  bool claimed(const std::vector<int>& ranks) const;
  // Bootstrap: these ranks are the first members. The first round; no data.
  void found(const std::vector<int>& ranks, const Wait& wait);
  // Lets in those of `ranks` whom every member sees waiting; returns them. Two rounds.
  std::vector<int> admit(const std::vector<int>& ranks, const Wait& wait);
  // Takes these ranks out at once, whether they answer or not. One round.
  void expel(const std::vector<int>& ranks, const Wait& wait);
  // Waits to be let in by the members. Raises kTimeout.
  void join(const Wait& wait);
  // Takes this rank out; the others notice at once.
  void leave() { fence(rank_); }

  // One round. Returns who published, which are the members from now on. Throws Stop when this rank is
  // evicted.
  const std::vector<int>& round(uint64_t signature, const Wait& wait);
  // Throws Stop(kEvicted) if the others may already reuse what this rank has read since its last round.
  void still_in() const;

  // The halves of inputs() and results() that the next operation uses; call once per operation.
  int next_half() { return static_cast<int>(operations_++ & 1); }
  uint8_t* input(int rank, int half) const { return peers_[rank].base() + layout_.inputs(half); }
  uint8_t* result(int rank, int half) const { return peers_[rank].base() + layout_.results(half); }
  const Layout& layout() const { return layout_; }
  const Control& control() const { return control_; }
  Peer& peer(int rank) { return peers_[rank]; }
  uint64_t incarnation(int rank) const { return incarnation_[rank]; }
  size_t rank_words() const { return rank_words_; }
  uint32_t spins() const { return spins_; }
  // Whether a rank can no longer answer: dead, evicted, or no member. Does not change anything.
  bool gone(int rank) const;
  FaultPlan& faults() { return faults_; }
  // Held while peer() and incarnation() change, for threads beside that of the collectives.
  std::mutex& places() { return places_; }

 private:
  template <typename Out>
  void drop(Out&& out) {
    std::lock_guard lock(places_);
    std::erase_if(members_, out);
  }
  void publish(uint64_t signature);
  bool collect(const Wait& wait);
  void wait_for(int member, const Wait& wait);
  void suspect(int rank);
  // Evicts a rank from its next round on, whichever that is. For what all members do at the same point.
  void fence(int rank);
  Arrival look(int rank) const {
    return arrival(control_.words(rank).state.load(std::memory_order_acquire), incarnation_[rank], seq_);
  }
  void check_signatures(uint64_t signature) const;
  void become_member(int rank, uint64_t incarnation);
  bool open_peer(int rank, uint64_t claim);
  void write_activations(const std::vector<int>& ranks);
  void read_snapshot();
  [[noreturn]] void evicted() const;

  int rank_;
  SharedMemory block_;
  Control control_;
  Layout layout_{};
  std::mutex places_;
  std::vector<Peer> peers_;
  std::vector<uint64_t> incarnation_;
  std::vector<int> members_;
  uint64_t seq_ = 0;
  uint64_t operations_ = 0;
  size_t rank_words_ = 1;
  uint32_t spins_ = 0;
  bool joined_ = false;
  FaultPlan faults_;
};

}  // namespace mooncake::ep::pg
