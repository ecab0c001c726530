#include "endpoint.hpp"

#include <algorithm>
#include <cstring>

namespace mooncake {

namespace {

constexpr size_t kPollBatch = 64;
constexpr size_t kLongestReason = 4096;

// How many of the leading bytes make whole, valid UTF-8 (RFC 3629).
size_t valid_utf8(const unsigned char* text, size_t length) {
  size_t i = 0;
  while (i < length) {
    unsigned char first = text[i];
    size_t more = first < 0x80 ? 0 : first >= 0xc2 && first < 0xe0 ? 1 : (first & 0xf0) == 0xe0 ? 2 : 3;
    if ((first >= 0x80 && first < 0xc2) || first > 0xf4 || more >= length - i) return i;
    uint32_t code = more == 0 ? first : first & (0x3fu >> more);
    for (size_t k = 1; k <= more; ++k) {
      if ((text[i + k] & 0xc0) != 0x80) return i;
      code = code << 6 | (text[i + k] & 0x3fu);
    }
    bool overlong = (more == 2 && code < 0x800) || (more == 3 && code < 0x10000);
    if (overlong || code > 0x10ffff || (code >= 0xd800 && code < 0xe000)) return i;
    i += more + 1;
  }
  return i;
}

// What the engine calls without asking whether it is there: all of minor 0.
const char* missing_function(const mc_driver_v1& table) {
  if (!table.open) return "open";
  if (!table.close) return "close";
  if (!table.caps) return "caps";
  if (!table.stats) return "stats";
  if (!table.last_error) return "last_error";
  if (!table.export_address) return "export_address";
  if (!table.connect) return "connect";
  if (!table.disconnect) return "disconnect";
  if (!table.register_memory) return "register_memory";
  if (!table.deregister_memory) return "deregister_memory";
  if (!table.export_key) return "export_key";
  if (!table.import_key) return "import_key";
  if (!table.release_key) return "release_key";
  if (!table.submit) return "submit";
  if (!table.poll) return "poll";
  if (!table.event_fd) return "event_fd";
  if (!table.arm) return "arm";
  if (!table.cancel) return "cancel";
  return nullptr;
}

std::string broken_promise(const mc_caps& caps) {
  if (caps.alignment == 0 || (caps.alignment & (caps.alignment - 1)) != 0)
    return "an alignment of " + std::to_string(caps.alignment) + ", which is no power of two";
  if (caps.max_op_bytes != 0 && caps.max_op_bytes < caps.alignment)
    return "operations of at most " + std::to_string(caps.max_op_bytes) + " bytes, less than its alignment";
  if (caps.notice_bytes > MC_NOTICE_MAX)
    return "notices of " + std::to_string(caps.notice_bytes) + " bytes, more than " +
           std::to_string(MC_NOTICE_MAX);
  if (caps.memory_kinds == 0) return "no kind of memory that it takes";
  return {};
}

}  // namespace

std::string readable(const char* said, size_t capacity) {
  if (said == nullptr) return {};
  std::string text(said, strnlen(said, capacity));
  size_t good = valid_utf8(reinterpret_cast<const unsigned char*>(text.data()), text.size());
  // A reason that was cut to fit may end in the middle of a character.
  if (good != text.size() && text.size() - good < 4 && text.size() + 1 >= capacity) text.resize(good);
  if (good < text.size()) std::erase_if(text, [](char c) { return static_cast<unsigned char>(c) >= 0x80; });
  return text;
}

Status Endpoint::check(const mc_driver_v1* table) {
  if (table == nullptr) return Status::error(Code::kInvalid, "the driver's capsule is empty");
  if (table->abi_major != MC_ABI_MAJOR) {
    return Status::error(Code::kUnsupported, "the driver speaks ABI version " +
                                                 std::to_string(table->abi_major) + ", this engine " +
                                                 std::to_string(MC_ABI_MAJOR) +
                                                 "; install versions of both that fit together");
  }
  constexpr size_t kMinor0 = offsetof(mc_driver_v1, grant);
  if (table->struct_size < kMinor0) {
    return Status::error(Code::kUnsupported,
                         "the driver's function table has " + std::to_string(table->struct_size) +
                             " bytes, " + std::to_string(kMinor0) + " are needed; install a newer driver");
  }
  if (const char* missing = missing_function(*table)) {
    return Status::error(Code::kUnsupported, std::string("the driver's function table has no ") + missing +
                                                 "(), which every driver must have");
  }
  auto whole = [&](auto member) {
    auto place = reinterpret_cast<const char*>(&(table->*member)) - reinterpret_cast<const char*>(table);
    return static_cast<size_t>(place) + sizeof(table->*member) <= table->struct_size && table->*member;
  };
  if (whole(&mc_driver_v1::late_writes) != whole(&mc_driver_v1::fence)) {
    return Status::error(Code::kUnsupported,
                         "the driver's function table has only one of late_writes and fence; it needs both "
                         "or neither: install another version of the driver");
  }
  return {};
}

Status Endpoint::status_of(mc_status status) const {
  if (status == MC_OK) return {};
  std::string reason = readable(table_->last_error(), kLongestReason);
  return Status::error(code_of(status), label() + ": " + (reason.empty() ? "no reason given" : reason));
}

std::string Endpoint::without_label(std::string reason) const {
  std::string prefix = label() + ": ";
  if (reason.starts_with(prefix)) reason.erase(0, prefix.size());
  return reason;
}

Status Endpoint::fault(const std::string& what) {
  ++faults;
  return Status::error(Code::kIo, label() + ": the driver is at fault: it " + what);
}

template <typename Call>
Status Endpoint::guarded_handle(const char* call, mc_handle* handle, Call&& make) {
  mc_handle made = 0;
  Status status = guarded([&] { return make(&made); });
  if (!status.ok()) return status;
  if (made == 0) return fault(std::string("returned no handle from ") + call + "()");
  *handle = made;
  return {};
}

template <typename Call>
Status Endpoint::guarded_blob(const char* call, std::string* blob, Call&& fill) {
  char bytes[MC_BLOB_MAX];
  size_t length = sizeof(bytes);
  Status status = guarded([&] { return fill(bytes, &length); });
  if (!status.ok()) return status;
  if (length > sizeof(bytes))
    return fault("claims " + std::to_string(length) + " bytes from " + call + "(), which has room for " +
                 std::to_string(sizeof(bytes)));
  blob->assign(bytes, length);
  return {};
}

template <typename Call>
Status Endpoint::guarded(Call&& call) {
  std::shared_lock life(life_);
  if (handle_ == 0) return Status::error(Code::kClosed, label() + ": the endpoint is closed");
  return status_of(call());
}

Status Endpoint::open(const Options& options) {
  std::vector<mc_option> plain;
  for (const auto& [name, value] : options) plain.push_back({name.c_str(), value.c_str()});
  Status opened = status_of(table_->open(plain.data(), plain.size(), &handle_));
  if (!opened.ok()) {
    handle_ = 0;
    return opened;
  }
  if (handle_ == 0) return fault("returned no handle from open()");
  caps_.struct_size = sizeof(caps_);
  Status known = status_of(table_->caps(handle_, &caps_));
  if (std::string broken = known.ok() ? broken_promise(caps_) : ""; !broken.empty())
    known = fault("announces " + broken);
  has_notices_ = caps_.notice_bytes != 0 && has(&mc_driver_v1::notify) && has(&mc_driver_v1::poll_notices);
  if (!known.ok()) close();
  return known;
}

void Endpoint::close() {
  if (getpid() != owner_) {  // before the lock, as in disconnect()
    handle_ = 0;
    return;
  }
  {
    std::unique_lock life(life_);
    if (handle_ == 0) return;
    table_->close(handle_);
    handle_ = 0;
  }
  // A thread may still be handing out what it polled before.
  std::lock_guard turn(turn_);
}

Status Endpoint::export_address(std::string* blob) {
  return guarded_blob("export_address", blob, [&](void* bytes, size_t* length) {
    return table_->export_address(handle_, bytes, length);
  });
}

Status Endpoint::connect(const std::string& address, mc_handle* connection) {
  return guarded_handle("connect", connection, [&](mc_handle* made) {
    return table_->connect(handle_, address.data(), address.size(), made);
  });
}

void Endpoint::disconnect(mc_handle connection) {
  if (getpid() != owner_) return;  // before the lock: a forked child may have inherited it held for ever
  std::shared_lock life(life_);
  if (handle_ != 0) table_->disconnect(handle_, connection);
}

Status Endpoint::register_memory(const mc_memory& memory, mc_handle* registered) {
  return guarded_handle("register_memory", registered,
                        [&](mc_handle* made) { return table_->register_memory(handle_, &memory, made); });
}

Status Endpoint::deregister_memory(mc_handle registered, uint64_t deadline_ns) {
  return guarded([&] { return table_->deregister_memory(handle_, registered, deadline_ns); });
}

Status Endpoint::export_key(mc_handle registered, std::string* blob) {
  return guarded_blob("export_key", blob, [&](void* bytes, size_t* length) {
    return table_->export_key(handle_, registered, bytes, length);
  });
}

Status Endpoint::import_key(mc_handle connection, uint64_t region_id, const uint8_t* key, uint64_t length,
                            const std::string& blob, mc_handle* remote) {
  return guarded_handle("import_key", remote, [&](mc_handle* made) {
    return table_->import_key(handle_, connection, region_id, key, length, blob.data(), blob.size(), made);
  });
}

void Endpoint::release_key(mc_handle remote) {
  if (getpid() != owner_) return;
  std::shared_lock life(life_);
  if (handle_ != 0) table_->release_key(handle_, remote);
}

Status Endpoint::grant(mc_handle registered, const uint8_t* key, uint32_t access, std::string* blob) {
  if (!has(&mc_driver_v1::grant)) {
    return Status::error(Code::kUnsupported, label() + ": this driver has no keys with lesser rights");
  }
  return guarded_blob("grant", blob, [&](void* bytes, size_t* length) {
    return table_->grant(handle_, registered, key, access, bytes, length);
  });
}

Status Endpoint::revoke(mc_handle registered, const uint8_t* key, uint64_t deadline_ns) {
  if (!has(&mc_driver_v1::revoke)) {
    return Status::error(Code::kUnsupported, label() + ": this driver cannot revoke a key alone");
  }
  return guarded([&] { return table_->revoke(handle_, registered, key, deadline_ns); });
}

Status Endpoint::late_writes(mc_handle connection, std::string* token) {
  return guarded_blob("late_writes", token, [&](void* bytes, size_t* length) {
    return table_->late_writes(handle_, connection, bytes, length);
  });
}

Status Endpoint::fence(const std::string& token, uint64_t deadline_ns) {
  if (!has(&mc_driver_v1::fence)) {
    return Status::error(Code::kUnsupported, label() + ": this driver cannot fence off writes of a peer");
  }
  return guarded([&] { return table_->fence(handle_, token.data(), token.size(), deadline_ns); });
}

Status Endpoint::stats(mc_stats* stats) {
  stats->struct_size = sizeof(*stats);
  return guarded([&] { return table_->stats(handle_, stats); });
}

Status Endpoint::submit(const mc_op* ops, size_t count, size_t* accepted, void* stream) {
  *accepted = 0;
  std::shared_lock life(life_);
  if (handle_ == 0) return Status::error(Code::kClosed, label() + ": the endpoint is closed");
  if (stream != nullptr && !has(&mc_driver_v1::submit_on_stream)) {
    return Status::error(Code::kUnsupported, label() + ": this driver does not follow device streams");
  }
  outstanding += count;  // before the call: a completion may arrive during it
  mc_status status = stream == nullptr ? table_->submit(handle_, ops, count, accepted)
                                       : table_->submit_on_stream(handle_, stream, ops, count, accepted);
  if (*accepted > count) {
    *accepted = count;
    return fault("accepted more operations than it was given");
  }
  outstanding -= count - *accepted;
  return status == MC_AGAIN ? Status{} : status_of(status);
}

void Endpoint::cancel(uint64_t cookie) {
  std::shared_lock life(life_);
  if (handle_ != 0) table_->cancel(handle_, cookie);
}

size_t Endpoint::poll(bool wait_for_turn, const OnCompletions& on_completions) {
  std::unique_lock turn(turn_, std::defer_lock);
  if (wait_for_turn) {
    turn.lock();
  } else if (!turn.try_lock()) {
    return 0;
  }
  if (polled_.empty()) polled_.resize(kPollBatch);
  size_t total = 0;
  for (size_t count = kPollBatch; count == kPollBatch;) {
    count = 0;
    {
      std::shared_lock life(life_);
      if (handle_ == 0 || table_->poll(handle_, polled_.data(), kPollBatch, &count) != MC_OK) break;
    }
    if (count > kPollBatch) {
      ++faults;
      count = kPollBatch;
    }
    // Not below 0, whatever the driver says.
    outstanding -= std::min<uint64_t>(count, outstanding);
    // Outside `life_`: a completion may submit the operation again, elsewhere or here.
    if (count != 0) on_completions(polled_.data(), count);
    total += count;
  }
  return total;
}

bool Endpoint::notify(mc_handle connection, const std::string& bytes, uint64_t cookie,
                      const std::atomic<bool>& broken) {
  // Who polls has the turn until all that was polled is dealt with.
  std::lock_guard turn(turn_);
  std::shared_lock life(life_);
  if (handle_ == 0 || broken) return false;
  ++outstanding;
  if (table_->notify(handle_, connection, bytes.data(), bytes.size(), cookie) == MC_OK) return true;
  --outstanding;
  return false;
}

void Endpoint::poll_notices(const std::function<void(const char*, size_t)>& on_notice) {
  constexpr size_t kCapacity = 32;
  constexpr int kRounds = 1024;  // a driver that always has more is not waited for
  if (notices_.empty()) notices_.resize(kCapacity);
  for (int round = 0; round < kRounds; ++round) {
    size_t count = 0;
    {
      std::shared_lock life(life_);
      if (handle_ == 0 || table_->poll_notices(handle_, notices_.data(), kCapacity, &count) != MC_OK) return;
    }
    if (count > kCapacity) {
      ++faults;
      count = kCapacity;
    }
    for (size_t i = 0; i < count; ++i) {
      const mc_notice& notice = notices_[i];
      if (notice.length == 0 || notice.length > MC_NOTICE_MAX) {
        ++faults;
      } else {
        on_notice(reinterpret_cast<const char*>(notice.data), notice.length);
      }
    }
    if (count < kCapacity) return;
  }
}

bool Endpoint::arm() {
  std::shared_lock life(life_);
  return handle_ == 0 || table_->arm(handle_) == MC_OK;
}

int Endpoint::event_fd() {
  std::shared_lock life(life_);
  return handle_ == 0 ? -1 : table_->event_fd(handle_);
}

}  // namespace mooncake
