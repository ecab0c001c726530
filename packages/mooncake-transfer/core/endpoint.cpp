#include "endpoint.hpp"

namespace mooncake {

namespace {
constexpr size_t kPollBatch = 64;
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
  return {};
}

Status Endpoint::status_of(mc_status status) const {
  if (status == MC_OK) return {};
  const char* reason = table_->last_error();
  return Status::error(code_of(status), label() + ": " + (reason && *reason ? reason : "no reason given"));
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
  if (!opened.ok()) return opened;
  caps_.struct_size = sizeof(caps_);
  Status known = status_of(table_->caps(handle_, &caps_));
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
  char bytes[MC_BLOB_MAX];
  size_t length = sizeof(bytes);
  Status status = guarded([&] { return table_->export_address(handle_, bytes, &length); });
  if (status.ok()) blob->assign(bytes, length);
  return status;
}

Status Endpoint::connect(const std::string& address, mc_handle* connection) {
  return guarded([&] { return table_->connect(handle_, address.data(), address.size(), connection); });
}

void Endpoint::disconnect(mc_handle connection) {
  if (getpid() != owner_) return;  // before the lock: a forked child may have inherited it held for ever
  std::shared_lock life(life_);
  if (handle_ != 0) table_->disconnect(handle_, connection);
}

Status Endpoint::register_memory(const mc_memory& memory, mc_handle* registered) {
  return guarded([&] { return table_->register_memory(handle_, &memory, registered); });
}

Status Endpoint::deregister_memory(mc_handle registered, uint64_t deadline_ns) {
  return guarded([&] { return table_->deregister_memory(handle_, registered, deadline_ns); });
}

Status Endpoint::export_key(mc_handle registered, std::string* blob) {
  char bytes[MC_BLOB_MAX];
  size_t length = sizeof(bytes);
  Status status = guarded([&] { return table_->export_key(handle_, registered, bytes, &length); });
  if (status.ok()) blob->assign(bytes, length);
  return status;
}

Status Endpoint::import_key(mc_handle connection, uint64_t region_id, const uint8_t* key, uint64_t length,
                            const std::string& blob, mc_handle* remote) {
  return guarded([&] {
    return table_->import_key(handle_, connection, region_id, key, length, blob.data(), blob.size(), remote);
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
  char bytes[MC_BLOB_MAX];
  size_t length = sizeof(bytes);
  Status status = guarded([&] { return table_->grant(handle_, registered, key, access, bytes, &length); });
  if (status.ok()) blob->assign(bytes, length);
  return status;
}

Status Endpoint::revoke(mc_handle registered, const uint8_t* key, uint64_t deadline_ns) {
  if (!has(&mc_driver_v1::revoke)) {
    return Status::error(Code::kUnsupported, label() + ": this driver cannot revoke a key alone");
  }
  return guarded([&] { return table_->revoke(handle_, registered, key, deadline_ns); });
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
    outstanding -= count;
    // Outside `life_`: a completion may submit the operation again, elsewhere or here.
    if (count != 0) on_completions(polled_.data(), count);
    total += count;
  }
  return total;
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
