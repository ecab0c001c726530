// Messages between two ranks, matched by tag in the order of sending. Each direction is a ring of bytes in
// the sender's memory; receivers take them as they find room for them.
#pragma once

#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "group.hpp"

namespace mooncake::ep::pg {

class Messages {
 public:
  explicit Messages(Group& group);

  static constexpr int kAnySource = -1;
  // Memory stays the caller's until the message is done. Returns its number.
  uint64_t send(int to, const uint8_t* data, uint64_t nbytes, int64_t tag);
  uint64_t receive(int from, uint8_t* data, uint64_t nbytes, int64_t tag);
  // Moves what can be moved without waiting. True if anything moved.
  bool progress();
  // Ends what waits for ranks that are gone.
  void bury();
  bool idle();
  bool done(uint64_t number);
  // The end of a message that is done; forgets it.
  Result take(uint64_t number);
  // Takes a message back that is not done; of a send, what has left stays.
  void give_up(uint64_t number);
  // Forgets what was under way; for a rank that comes in anew.
  void reset();

 private:
  struct Header {
    uint64_t nbytes;
    int64_t tag;
  };
  struct Send {
    uint64_t number;
    const uint8_t* data;
    Header header;
    uint64_t moved = 0;  // with the header
  };
  struct Receive {
    uint64_t number;
    int from;
    uint8_t* data;
    uint64_t nbytes;
    int64_t tag;
  };
  struct Kept {  // arrived before anybody asked for it
    std::vector<uint8_t> bytes;
    int64_t tag;
    bool whole = false;
  };
  // The message that is coming in from a rank.
  struct Incoming {
    bool active = false;
    Header header{};
    uint64_t moved = 0;
    Receive receive{};  // whose memory it goes to, if `direct`
    bool direct = false;
    std::list<Kept>::iterator kept;
  };
  struct Pair {
    uint64_t mine = 0, theirs = 0;  // incarnations that the counts are of
    uint64_t produced = 0, consumed = 0;
    std::deque<Send> sends;
    Incoming incoming;
    std::list<Kept> kept;
  };

  bool push(int to);
  bool pull(int from);
  bool begin(int from, Pair& pair, uint64_t available);
  bool deliver_kept(Receive& receive);
  bool wanted(int from) const;
  std::list<Receive>::iterator find_receive(int from, int64_t tag);
  void accept(int from, const Receive& receive, const Header& header, Incoming& incoming);
  void finish(uint64_t number, Result result);
  void renew(int rank);
  Counter& produced_by(int from, int to);
  Counter& consumed_by(int to, int from);
  static uint64_t count(uint64_t value, uint64_t incarnation);
  uint8_t* ring(int from, int to);
  void copy_in(int to, uint64_t at, const void* data, uint64_t nbytes);
  void copy_out(int from, uint64_t at, void* data, uint64_t nbytes);

  Group& group_;
  std::mutex& mutex_;  // the group's: who is where must not change meanwhile
  std::vector<Pair> pairs_;
  std::list<Receive> receives_;
  std::unordered_map<uint64_t, Result> finished_;
  std::vector<int> busy_;  // ranks that messages are sent to
  uint64_t next_ = 1;
  size_t open_ = 0;
};

}  // namespace mooncake::ep::pg
