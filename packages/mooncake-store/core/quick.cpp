#include "quick.hpp"

#include <algorithm>
#include <ctime>
#include <utility>

#include "batches.hpp"
#include "digests.hpp"

namespace mooncake::store {

namespace {

// As link.OTHER_WAY_S, membership.SURE_LEASE, writer.DEADLINE_MARGIN and MOVE_ATTEMPTS, and
// time_budget.SLOWEST_BYTES_PER_S.
constexpr uint64_t kOtherWayNs = 20'000'000;
constexpr double kSureLease = 0.8, kDeadlineMargin = 0.9;
constexpr uint64_t kSlowestBytesPerS = 32u << 20;
constexpr size_t kRow = 5;

uint64_t to_ns(double seconds) { return static_cast<uint64_t>(seconds * 1e9); }

void append(void* reply, const void* bytes, size_t nbytes) {
  static_cast<std::string*>(reply)->append(static_cast<const char*>(bytes), nbytes);
}

AskHead head_of(Express kind, const Standing& standing) {
  return {.kind = kind,
          .flags = 0,
          .spare = 0,
          .keys = 0,
          .ended = 0,
          .sums = 0,
          .epoch = standing.epoch,
          .client = standing.client,
          .id = 0,
          .seen = 0};
}

uint64_t time_of(uint64_t nbytes) { return nbytes * 1'000'000'000ull / kSlowestBytesPerS; }

}  // namespace

uint64_t now_ns() {
  timespec ts{};
  clock_gettime(CLOCK_MONOTONIC, &ts);
  return static_cast<uint64_t>(ts.tv_sec) * 1'000'000'000ull + static_cast<uint64_t>(ts.tv_nsec);
}

void Quick::Calls::add(uint64_t ns, bool failed) {
  ++count;
  failures += failed;
  total_ns += ns;
  ++buckets[std::min<size_t>(static_cast<size_t>(std::bit_width(ns / 1000)), kBuckets - 1)];
}

// ---- what is known

void Quick::join(const Standing& standing) {
  std::lock_guard lock(mutex_);
  joined_ = true;
  standing_ = standing;
  pause_until_ns_ = 0;
  never_ = {};
  ended_.clear();
}

void Quick::leave() {
  std::lock_guard lock(mutex_);
  joined_ = false;
  ended_.clear();
}

bool Quick::joined() const {
  std::lock_guard lock(mutex_);
  return joined_;
}

void Quick::know(uint64_t segment, std::string descriptor, void* remote, bool checked) {
  auto fresh = std::make_shared<Remote>(calls_, remote, checked);
  std::lock_guard lock(mutex_);
  Reached& known = reached_[segment];
  known.descriptor = std::move(descriptor);
  known.remote.swap(fresh);
}

void Quick::forget(uint64_t segment) {
  std::shared_ptr<Remote> last;  // its end may take a while, and a lock of Python's
  std::lock_guard lock(mutex_);
  auto found = reached_.find(segment);
  if (found == reached_.end()) return;
  last = std::move(found->second.remote);
  reached_.erase(found);
}

void Quick::keep_only(const std::vector<uint64_t>& segments, uint64_t asked_ns) {
  auto gone = [&](uint64_t segment) {
    return std::find(segments.begin(), segments.end(), segment) == segments.end();
  };
  std::vector<std::shared_ptr<Remote>> last;
  std::vector<void*> in_vain;
  std::lock_guard cancelling(cancelling_);
  {
    std::lock_guard lock(mutex_);
    for (auto at = reached_.begin(); at != reached_.end();) {
      if (gone(at->first)) last.push_back(std::move(at->second.remote));
      at = gone(at->first) ? reached_.erase(at) : std::next(at);
    }
    for (Running* running : running_) {
      if (gone(running->segment) && running->began_ns < asked_ns) in_vain.push_back(running->run);
    }
  }
  for (void* run : in_vain) calls_->cancel(run);
}

void Quick::end(const std::vector<uint64_t>& leases) {
  if (leases.empty()) return;
  std::lock_guard lock(mutex_);
  if (ended_.empty()) ended_since_ns_ = now_ns();
  ended_.insert(ended_.end(), leases.begin(), leases.end());
}

std::vector<uint64_t> Quick::take_ended() {
  std::lock_guard lock(mutex_);
  return std::exchange(ended_, {});
}

uint64_t Quick::ended_for() const {
  std::lock_guard lock(mutex_);
  return ended_.empty() ? 0 : std::max<uint64_t>(1, now_ns() - ended_since_ns_);
}

std::vector<uint64_t> Quick::leases() const {
  std::lock_guard lock(mutex_);
  std::vector<uint64_t> found;
  for (const Running* running : running_) {
    if (running->lease != 0) found.push_back(running->lease);
  }
  return found;
}

Quick::Counts Quick::take_counts() {
  std::lock_guard lock(mutex_);
  return std::exchange(counts_, {});
}

// ---- steps

bool Quick::begin(QuickResult& result, Counted kind, std::vector<uint64_t>& ended) {
  result.asked_s = lease_clock_s();
  result.asked_ns = now_ns();
  std::lock_guard lock(mutex_);
  if (!joined_ || never_[kind] || result.asked_ns < pause_until_ns_) return false;
  result.standing = standing_;
  ended.swap(ended_);
  return true;
}

// With the lock held: the master wants to be asked the other way, for as long as it says.
void Quick::note_other_way(Counted kind, const std::string& answer) {
  uint8_t flags = answer.size() < sizeof(AnswerHead) ? 0 : static_cast<uint8_t>(answer[1]);
  if ((flags & kForGood) != 0) {
    never_[kind == kCommitCall ? kReserveCall : kind] = true;  // what is reserved is to be committed
  } else if ((flags & kThisOne) == 0) {
    pause_until_ns_ = now_ns() + kOtherWayNs;
  }
}

// False with the stage set when there is no answer to go on with.
bool Quick::ask(QuickResult& result, Counted kind, const std::string& request, std::string& answer) {
  uint64_t began_ns = now_ns();
  int outcome =
      calls_->call(calls_->context, result.standing.connection, method_.c_str(), request.data(),
                   request.size(), began_ns + to_ns(limits_.call_s), &answer, &append, &result.failure);
  bool other_way = outcome == MC_CALL_REFUSED;
  if (outcome == MC_CALL_DONE) {
    other_way = answer.size() < sizeof(AnswerHead) ||
                static_cast<Express>(static_cast<uint8_t>(answer[0])) == Express::kOtherWay;
  }
  bool failed = outcome == MC_CALL_FAILED || outcome == MC_CALL_INTERRUPTED;
  result.interrupted = outcome == MC_CALL_INTERRUPTED;
  if (failed) result.stage = Stage::kNotAsked;
  if (other_way) result.stage = Stage::kOtherWay;
  uint64_t now = now_ns();
  std::lock_guard lock(mutex_);
  if (!other_way) counts_.calls[kind].add(now - began_ns, failed);
  if (other_way) note_other_way(kind, answer);
  return !failed && !other_way;
}

// The whole value in one piece, of the nearest replica where there are several.
bool Quick::take_piece(Reader& rest, const AnswerHead& head, uint64_t nbytes, Piece& piece) {
  for (uint32_t list = 0; list < head.lists; ++list) {
    auto count = rest.number<uint32_t>();
    auto rows = rest.numbers<uint64_t>(uint64_t{count} * kRow);
    if (list != 0) continue;
    if (count != 1 || !rest.good()) return false;
    // Position, offset in the value, segment, offset there, bytes.
    if (rows[1] != 0 || rows[4] != nbytes) return false;
    piece = {rows[2], rows[3], rows[4], {}};
  }
  for (uint16_t i = 0; i < head.segments && rest.good(); ++i) {
    auto segment = rest.number<uint64_t>();
    auto descriptor = rest.block(rest.number<uint32_t>());
    if (segment == piece.segment) piece.descriptor = descriptor;
  }
  return rest.good() && !piece.descriptor.empty();
}

std::shared_ptr<Quick::Remote> Quick::reached(const Piece& piece) const {
  std::lock_guard lock(mutex_);
  auto found = reached_.find(piece.segment);
  bool same = found != reached_.end() && found->second.descriptor == piece.descriptor;
  return same ? found->second.remote : nullptr;
}

// False, with the stage set, when not all has moved.
bool Quick::move(QuickResult& result, Memory memory, uint64_t* sum, uint64_t offset, const Piece& piece,
                 uint64_t lease, uint64_t until_ns) {
  result.segment = piece.segment;
  std::shared_ptr<Remote> remote = reached(piece);
  if (!remote) {
    result.stage = Stage::kAnswered;
    return false;
  }
  uint64_t began_ns = now_ns();
  result.stage = Stage::kNotMoved;
  Running running{piece.segment, lease, began_ns, nullptr};
  running.run = calls_->begin(calls_->context, sum != nullptr, memory.region, remote->remote, offset,
                              piece.offset, piece.nbytes, &result.failure);
  if (running.run == nullptr) return false;
  {
    std::lock_guard lock(mutex_);
    running_.push_back(&running);
  }
  // While it moves.
  if (sum != nullptr && sums_ && memory.bytes != nullptr)
    *sum = value_sum(memory.bytes + offset, piece.nbytes);
  int outcome = calls_->finish(running.run, until_ns, &result.failure);
  {
    std::lock_guard cancelling(cancelling_);
    std::lock_guard lock(mutex_);
    std::erase(running_, &running);
  }
  calls_->end(running.run);
  uint64_t took_ns = now_ns() - began_ns, own_ns = time_of(piece.nbytes);
  result.late_ns = took_ns > own_ns ? took_ns - own_ns : 0;
  result.interrupted = outcome == MC_CALL_INTERRUPTED;
  if (outcome == MC_CALL_DONE) result.stage = Stage::kMoved;
  return outcome == MC_CALL_DONE;
}

// As Membership.let_go: whether the lease has held for sure.
bool Quick::let_go(QuickResult& result, uint64_t lease) {
  double now_s = lease_clock_s();
  std::lock_guard lock(mutex_);
  const Standing& then = result.standing;
  bool same = joined_ && standing_.connection == then.connection && standing_.epoch == then.epoch;
  bool young = now_s - result.asked_s < kSureLease * then.lease_ttl_s && result.asked_s >= standing_.joined_s;
  if (!same || !young) return false;
  if (ended_.empty()) ended_since_ns_ = now_ns();
  ended_.push_back(lease);
  result.wake = idle_.exchange(false);
  return true;
}

// ---- the calls

QuickResult Quick::get(std::string_view digest, Memory memory, uint64_t offset, uint64_t room) {
  QuickResult result;
  std::vector<uint64_t> ended;
  if (!begin(result, kLocateCall, ended)) return result;
  AskHead asked = head_of(Express::kLocate, result.standing);
  asked.keys = 1;
  if (sums_) asked.flags = kSums;
  asked.ended = static_cast<uint32_t>(ended.size());
  std::string request;
  request.reserve(sizeof(asked) + 8 * ended.size() + digest.size());
  add(request, asked);
  add_all(request, ended);
  request += digest;
  if (!ask(result, kLocateCall, request, result.answer)) {
    if (result.stage == Stage::kOtherWay) end(ended);
    return result;
  }

  result.stage = Stage::kAnswered;
  Reader rest(result.answer);
  auto head = rest.number<AnswerHead>();
  std::string_view found = rest.block(head.count);
  auto nbytes = rest.number<uint64_t>();
  uint64_t sum = (head.flags & kSummed) != 0 ? rest.number<uint64_t>() : 0;
  if (!rest.good() || head.kind != Express::kLocate || head.count != 1) return result;
  result.nbytes = nbytes;
  if (found[0] == 0) {
    result.stage = Stage::kMissing;
    uint64_t took_ns = now_ns() - result.asked_ns;
    std::lock_guard lock(mutex_);
    counts_.calls[kGet].add(took_ns, false);
    ++counts_.misses;
    return result;
  }
  Piece piece{};
  if (nbytes > room || nbytes == 0 || !take_piece(rest, head, nbytes, piece)) return result;
  std::shared_ptr<Remote> remote = reached(piece);
  bool checked = sums_ && remote && remote->checked;
  if (checked && (sum == 0 || memory.bytes == nullptr)) return result;
  uint64_t limit_ns = to_ns(limits_.transfer_s) / (head.lists > 1 ? 2 : 1);
  if (!move(result, memory, nullptr, offset, piece, head.id, now_ns() + time_of(nbytes) + limit_ns))
    return result;
  if (checked && value_sum(memory.bytes + offset, nbytes) != sum) {
    result.stage = Stage::kAnswered;  // for the other way to read and look again, and say whose fault it is
    return result;
  }
  if (!let_go(result, head.id)) return result;
  result.stage = Stage::kDone;
  uint64_t took_ns = now_ns() - result.asked_ns;
  std::lock_guard lock(mutex_);
  counts_.calls[kGet].add(took_ns, false);
  ++counts_.hits;
  counts_.read_bytes += nbytes;
  return result;
}

QuickResult Quick::put(std::string_view digest, std::string_view key, bool replace, Memory memory,
                       uint64_t offset, uint64_t nbytes, uint64_t seen_epoch, uint64_t seen) {
  QuickResult result;
  result.nbytes = nbytes;
  std::vector<uint64_t> ended;
  if (!begin(result, kReserveCall, ended)) return result;
  AskHead asked = head_of(Express::kReserve, result.standing);
  asked.flags = replace ? kReplace : uint8_t{0};
  asked.keys = 1;
  asked.ended = static_cast<uint32_t>(ended.size());
  std::string request;
  add(request, asked);
  add_all(request, ended);
  request += digest;
  add(request, nbytes);
  add(request, static_cast<uint32_t>(key.size()));
  request += key;
  if (!ask(result, kReserveCall, request, result.answer)) {
    if (result.stage == Stage::kOtherWay) end(ended);
    return result;
  }

  result.stage = Stage::kAnswered;
  Reader rest(result.answer);
  auto head = rest.number<AnswerHead>();
  std::string_view outcome = rest.block(head.count);
  if (!rest.good() || head.kind != Express::kReserve || head.count != 1 || nbytes == 0) return result;
  if (static_cast<Outcome>(outcome[0]) != Outcome::kPlaced) return result;
  Piece piece{};
  if (!take_piece(rest, head, nbytes, piece)) return result;
  uint64_t deadline_ns = result.asked_ns + to_ns(kDeadlineMargin * result.standing.reservation_ttl_s);
  uint64_t until_ns = now_ns() + time_of(nbytes) + to_ns(limits_.transfer_s) / 2;
  uint64_t sum = 0;
  if (!move(result, memory, &sum, offset, piece, 0, std::min(deadline_ns, until_ns))) return result;

  AskHead commit = head_of(Express::kCommit, result.standing);
  commit.flags = asked.flags;
  commit.id = head.id;
  commit.seen = seen_epoch == result.standing.epoch ? seen : 0;
  request.clear();
  commit.sums = sum != 0;
  add(request, commit);
  if (sum != 0) add(request, sum);
  std::string answer;
  // The other way, in which the reservation is still to be committed, or not at all.
  if (!ask(result, kCommitCall, request, answer)) {
    if (result.stage == Stage::kOtherWay) result.stage = Stage::kMoved;
    return result;
  }
  Reader told(answer);
  auto what = told.number<AnswerHead>();
  std::string_view stored = told.block(what.count);
  bool usual = told.good() && what.kind == Express::kCommit && what.count == 1 &&
               static_cast<Outcome>(stored[0]) == Outcome::kStored;
  bool quiet = usual && what.lists == 0;
  result.stage = Stage::kDone;
  if (!quiet) result.committed = std::move(answer);
  if (!usual) return result;
  uint64_t took_ns = now_ns() - result.asked_ns;
  std::lock_guard lock(mutex_);
  counts_.calls[kPut].add(took_ns, false);
  ++counts_.stored;
  counts_.written_bytes += nbytes;
  return result;
}

}  // namespace mooncake::store
