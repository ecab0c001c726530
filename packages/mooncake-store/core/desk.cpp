#include "desk.hpp"

#include <algorithm>
#include <chrono>

#include "digests.hpp"

namespace mooncake::store {

namespace {

using Clock = std::chrono::steady_clock;

// For how long the reading thread of an engine waits for the lock: more than a batch takes. Who has it may
// wait for the interpreter's, which may take long.
constexpr uint64_t kPatienceNs = 100'000;
constexpr size_t kSamples = 8, kMostSamples = 4096;
// Between two looks of the master. More are forgotten: they only say what might be worth a place in a tier.
constexpr size_t kMostTouches = 1 << 14;
// Of one request. More would hold up all that the engine's thread reads.
constexpr uint32_t kMostKeys = 1 << 16;

// Gives back what try_acquire() got.
class Held {
 public:
  explicit Held(DeskLock& lock) : lock_(lock) {}
  ~Held() { lock_.release(); }
  Held(const Held&) = delete;

 private:
  DeskLock& lock_;
};

double seconds() { return std::chrono::duration<double>(Clock::now().time_since_epoch()).count(); }

std::vector<std::string_view> keys_of(Reader& rest, uint32_t count) {
  std::vector<uint32_t> lengths = rest.numbers<uint32_t>(count);
  std::vector<std::string_view> keys;
  keys.reserve(lengths.size());
  for (uint32_t length : lengths) keys.push_back(rest.block(length));
  return keys;
}

// Whether these are the digests of the keys, of whose prefix they are.
bool are_digests_of(const std::vector<Digest>& digests, const std::string& prefix,
                    const std::vector<std::string_view>& keys) {
  std::string bytes;
  for (size_t i = 0; i < keys.size(); ++i) {
    bytes = prefix;
    bytes += keys[i];
    Digest digest;
    xxh3_128(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size(),
             reinterpret_cast<uint8_t*>(&digest));
    if (std::memcmp(&digest, &digests[i], sizeof(digest)) != 0) return false;
  }
  return true;
}

void add_rows(std::string& reply, const Rows& rows) {
  add(reply, static_cast<uint32_t>(rows.size() / 5));
  add_all(reply, rows);
}

void put_head(std::string& reply, const AnswerHead& head) { std::memcpy(reply.data(), &head, sizeof(head)); }

}  // namespace

// ---- the lock

void DeskLock::acquire() {
  mutex_.lock();
  owner_ = std::this_thread::get_id();
}

bool DeskLock::try_acquire(uint64_t for_ns) {
  Clock::time_point until{};
  while (!mutex_.try_lock()) {
    Clock::time_point now = Clock::now();
    if (until == Clock::time_point{}) until = now + std::chrono::nanoseconds(for_ns);
    if (now >= until) return false;
    std::this_thread::yield();
  }
  owner_ = std::this_thread::get_id();
  return true;
}

void DeskLock::release() {
  owner_ = std::thread::id();
  mutex_.unlock();
}

bool DeskLock::wait(double timeout_s) {
  std::unique_lock lock(mutex_, std::adopt_lock);
  owner_ = std::thread::id();
  uint64_t before = notified_;
  bool told =
      changed_.wait_for(lock, std::chrono::duration<double>(timeout_s), [&] { return notified_ != before; });
  owner_ = std::this_thread::get_id();
  lock.release();
  return told;
}

void DeskLock::notify() {
  ++notified_;
  changed_.notify_all();
}

// ---- what is known

double Desk::heard_s(uint64_t client) const {
  auto found = clients_.find(client);
  return found == clients_.end() ? 0 : found->second.heard_s;
}

void Desk::count(uint16_t tenant, uint64_t hits, uint64_t misses) {
  if (reads_.size() <= tenant) reads_.resize(tenant + 1);
  reads_[tenant].hits += hits;
  reads_[tenant].misses += misses;
}

// Of a batch a few keys stand for all, others each time.
void Desk::sample(const std::vector<Digest>& digests) {
  size_t stride = std::max<size_t>(1, (digests.size() + kSamples - 1) / kSamples);
  for (size_t at = ++turn_ % stride; at < digests.size(); at += stride) {
    if (samples_.size() < kMostSamples) samples_.push_back({digests[at], static_cast<uint32_t>(stride)});
  }
}

void Desk::end_leases(const std::vector<uint64_t>& ended, uint64_t client) {
  for (uint64_t lease : ended) {
    if (auto grant = leases_.take(lease, client)) map_.release(grant->slots);
  }
}

void Desk::ring() {
  std::vector<uint32_t> members = map_.take_rings();
  if (members.empty()) return;
  rings_.insert(rings_.end(), members.begin(), members.end());
  lock_.notify();
}

// ---- answering

std::string Desk::answer(uint64_t connection, std::string_view body) {
  std::string reply(sizeof(AnswerHead), '\0');  // of kOtherWay
  Reader reader(body);
  auto head = reader.number<AskHead>();
  bool usual = reader.good() && head.epoch == epoch_ && head.keys <= kMostKeys && head.ended <= kMostKeys;
  if (!usual || !lock_.try_acquire(kPatienceNs)) return reply;
  Held held(lock_);
  double began_s = seconds();
  auto client = clients_.find(head.client);
  bool known = client != clients_.end() && client->second.connection == connection;
  Done done = known && in_office() ? Done::kNever : Done::kNotNow;
  if (done == Done::kNever && open_ && client->second.express) {
    Asked asked{head, reader, client->second, began_s};
    done = answer(asked, reply);
    if (done == Done::kYes) {
      client->second.heard_s = began_s;
      Calls& calls = calls_[static_cast<size_t>(head.kind)];
      double took_s = seconds() - began_s;
      ++calls.count;
      calls.total_s += took_s;
      size_t bucket = std::bit_width(static_cast<uint64_t>(took_s * 1e6));
      ++calls.buckets[std::min(bucket, Calls::kBuckets - 1)];
    }
    if (map_.may_ring()) ring();
  }
  // Last of all, because it may have been decided too late to count.
  if (done == Done::kYes && !in_office()) done = Done::kNotNow;
  if (done != Done::kYes) {
    reply.assign(sizeof(AnswerHead), '\0');
    AnswerHead other{};
    if (done == Done::kNotThis) other.flags = kThisOne;
    if (done == Done::kNever) other.flags = kForGood;
    put_head(reply, other);
  }
  return reply;
}

Desk::Done Desk::answer(Asked& asked, std::string& reply) {
  switch (asked.head.kind) {
    case Express::kLocate:
      return locate(asked, reply);
    case Express::kRelease:
      return release(asked, reply);
    case Express::kExist:
      return exist(asked, reply);
    case Express::kReserve:
      return reserve(asked, reply);
    case Express::kCommit:
      return commit(asked, reply);
    default:
      return Done::kNotThis;
  }
}

// What there is for this client of what it names.
std::vector<Digest> Desk::visible(const Client& client, std::vector<Digest> digests) const {
  return client.own_prefix.empty() ? digests : map_.own(digests, client.tenant);
}

bool Desk::all_in_memory(const std::vector<Digest>& digests) const {
  std::vector<uint8_t> there = map_.exist(digests);
  return std::find(there.begin(), there.end(), uint8_t{0}) == there.end();
}

void Desk::touch(const std::vector<Digest>& digests, const std::vector<Rows>& replicas) {
  if (replicas.empty()) return;
  const Rows& rows = replicas.front();
  for (size_t at = 0; at + 5 <= rows.size() && touches_.size() < kMostTouches; at += 5) {
    if (rows[at + 1] == 0) touches_.push_back({digests[rows[at]], rows[at + 2]});
  }
}

uint16_t Desk::add_segments(std::string& reply, const std::vector<Rows>& lists) {
  std::vector<uint64_t> added;
  for (const Rows& rows : lists) {
    for (size_t i = 2; i < rows.size(); i += 5) {
      if (std::find(added.begin(), added.end(), rows[i]) != added.end()) continue;
      added.push_back(rows[i]);
      const std::string& descriptor = descriptors_[rows[i]];
      add(reply, rows[i]);
      add(reply, static_cast<uint32_t>(descriptor.size()));
      reply += descriptor;
    }
  }
  return static_cast<uint16_t>(added.size());
}

Desk::Done Desk::locate(Asked& asked, std::string& reply) {
  auto ended = asked.rest.numbers<uint64_t>(asked.head.ended);
  auto digests = visible(asked.client, asked.rest.numbers<Digest>(asked.head.keys));
  if (!asked.rest.ended() || (tiered_ && !all_in_memory(digests))) return Done::kNotThis;
  end_leases(ended, asked.head.client);
  Located located = map_.locate(digests, asked.client.number, asked.client.node);
  sample(digests);
  if (tiered_) touch(digests, located.replicas);
  size_t hits = located.slots.size();
  count(asked.client.tenant, hits, digests.size() - hits);
  AnswerHead head{.kind = Express::kLocate,
                  .flags = 0,
                  .segments = 0,
                  .count = asked.head.keys,
                  .lists = static_cast<uint32_t>(located.replicas.size()),
                  .spare = 0,
                  .id = 0};
  add_all(reply, located.found);
  add_all(reply, located.sizes);
  if ((asked.head.flags & kSums) != 0) {
    head.flags |= kSummed;
    size_t next = 0;
    for (uint8_t found : located.found) add(reply, found ? map_.sum_at(located.slots[next++]) : uint64_t{0});
  }
  for (const Rows& rows : located.replicas) add_rows(reply, rows);
  head.segments = add_segments(reply, located.replicas);
  if (hits != 0) head.id = leases_.grant(asked.head.client, std::move(located.slots), asked.now_s).id;
  put_head(reply, head);
  return Done::kYes;
}

Desk::Done Desk::release(Asked& asked, std::string& reply) {
  if (!asked.rest.ended()) return Done::kNotThis;
  AnswerHead head{
      .kind = Express::kRelease, .flags = 0, .segments = 0, .count = 0, .lists = 0, .spare = 0, .id = 0};
  if (auto grant = leases_.take(asked.head.id, asked.head.client)) {
    std::vector<uint32_t> broken = map_.release(grant->slots);
    head.count = static_cast<uint32_t>(broken.size());
    add_all(reply, broken);
  } else {
    head.flags = kExpired;
  }
  put_head(reply, head);
  return Done::kYes;
}

Desk::Done Desk::exist(Asked& asked, std::string& reply) {
  auto digests = visible(asked.client, asked.rest.numbers<Digest>(asked.head.keys));
  if (!asked.rest.ended() || (tiered_ && !all_in_memory(digests))) return Done::kNotThis;
  add_all(reply, map_.exist(digests));
  put_head(reply, {.kind = Express::kExist,
                   .flags = 0,
                   .segments = 0,
                   .count = asked.head.keys,
                   .lists = 0,
                   .spare = 0,
                   .id = 0});
  return Done::kYes;
}

Desk::Done Desk::reserve(Asked& asked, std::string& reply) {
  const AskHead& ask = asked.head;
  auto ended = asked.rest.numbers<uint64_t>(ask.ended);
  auto digests = asked.rest.numbers<Digest>(ask.keys);
  auto sizes = asked.rest.numbers<uint64_t>(ask.keys);
  std::vector<std::string_view> keys = keys_of(asked.rest, ask.keys);
  if (tiered_) return Done::kNever;
  if (!asked.rest.ended()) return Done::kNotThis;
  const std::string& prefix = asked.client.own_prefix;
  if (!prefix.empty() && !are_digests_of(digests, prefix, keys)) return Done::kNotThis;
  end_leases(ended, ask.client);
  PutOptions put;
  put.wish.writer = asked.client.number;
  put.wish.node = asked.client.node;
  put.tenant = asked.client.tenant;
  put.replace = (ask.flags & kReplace) != 0;
  put.now_s = asked.now_s;
  Reserved reserved = map_.reserve(digests, sizes, put);
  AnswerHead head{.kind = Express::kReserve,
                  .flags = 0,
                  .segments = 0,
                  .count = ask.keys,
                  .lists = 1,
                  .spare = 0,
                  .id = 0};
  if (reserved.wait) head.flags |= kWait;
  add_all(reply, reserved.outcomes);
  add_rows(reply, reserved.rows);
  head.segments = add_segments(reply, {reserved.rows});
  if (std::find(reserved.outcomes.begin(), reserved.outcomes.end(), Outcome::kFull) !=
      reserved.outcomes.end()) {
    head.flags |= kRoom;
    const Segments& all = map_.segments();
    add(reply, all.capacity_bytes());
    add(reply, all.free_bytes());
    for (Use use : {Use::kEvictable, Use::kLeased, Use::kReserved}) add(reply, all.used_bytes(use));
  }
  if (!reserved.slots.empty()) {
    std::vector<std::string> placed;
    placed.reserve(reserved.slots.size());
    for (size_t i = 0; i < keys.size(); ++i) {
      if (reserved.outcomes[i] == Outcome::kPlaced) placed.emplace_back(keys[i]);
    }
    head.id = reservations_.grant(ask.client, std::move(reserved.slots), asked.now_s, std::move(placed)).id;
  }
  put_head(reply, head);
  return Done::kYes;
}

Desk::Done Desk::commit(Asked& asked, std::string& reply) {
  if (tiered_) return Done::kNever;
  auto sums = asked.rest.numbers<uint64_t>(asked.head.sums);
  if (!asked.rest.ended()) return Done::kNotThis;
  AnswerHead head{
      .kind = Express::kCommit, .flags = 0, .segments = 0, .count = 0, .lists = 0, .spare = 0, .id = 0};
  auto grant = reservations_.take(asked.head.id, asked.head.client);
  if (grant && grant->keys.size() != grant->slots.size()) {  // reserved the other way, without all keys
    map_.abandon(grant->slots);
  } else if (grant) {
    std::vector<uint8_t> failed(grant->slots.size());
    std::vector<std::string_view> keys(grant->keys.begin(), grant->keys.end());
    bool replace = (asked.head.flags & kReplace) != 0;
    map_.set_sums(grant->slots, sums);
    std::vector<Outcome> outcomes = map_.commit(grant->slots, failed, keys, replace, asked.now_s);
    head.count = static_cast<uint32_t>(outcomes.size());
    add_all(reply, outcomes);
  }
  map_.confirm(asked.client.number, asked.head.seen);
  if (RecordStream* stream = map_.stream(asked.client.number)) {
    for (const RecordPage* page : stream->read(most_record_bytes_)) {
      ++head.lists;
      add(reply, page->first);
      add(reply, static_cast<uint32_t>(page->frames.size()));
      reply += page->frames;
    }
  }
  put_head(reply, head);
  return Done::kYes;
}

}  // namespace mooncake::store
