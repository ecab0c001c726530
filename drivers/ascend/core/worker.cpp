#include "worker.hpp"

#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <future>
#include <system_error>

#include "support/peers/address.hpp"

namespace mooncake::ascend {
namespace {

constexpr auto kLook = std::chrono::microseconds(20);
constexpr uint64_t kRestNs = 20'000;

// HIXL wants to be told its port. One that was free a moment ago.
Status free_port(const std::string& host, uint16_t& port) {
  driver::Address address{};
  if (Status status = driver::parse_host(host, address.host); !status.ok()) return status;
  sockaddr_storage at;
  socklen_t length = driver::socket_address(address, at);
  driver::UniqueFd socket(::socket(at.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!socket.valid() || bind(socket.get(), reinterpret_cast<sockaddr*>(&at), length) != 0 ||
      getsockname(socket.get(), reinterpret_cast<sockaddr*>(&at), &length) != 0)
    return driver::system_failure(MC_IO, "cannot find a free port at host " + host, errno);
  port = ntohs(at.ss_family == AF_INET ? reinterpret_cast<sockaddr_in&>(at).sin_port
                                       : reinterpret_cast<sockaddr_in6&>(at).sin6_port);
  return {};
}

Status closed() { return failed(MC_CLOSED, "the endpoint was closed"); }

int direction(bool from_device, bool to_device) {
  if (from_device) return to_device ? kDeviceToDevice : kDeviceToHost;
  return to_device ? kHostToDevice : kHostToHost;
}

}  // namespace

void Batch::clear() {
  remote.reset();
  descs.clear();
  done.clear();
  bytes = 0;
}

RemoteMemory::~RemoteMemory() {
  if (worker != nullptr && !engine.empty()) worker->forget(engine, life);
}

// -------------------------------------------------------------------------------------------------- any
// thread

Status Worker::start(std::string& engine) {
  auto opened = std::make_shared<std::promise<Status>>();  // whose setter may be at it after the getter
  auto result = opened->get_future();
  try {
    thread_ = std::thread([this, &engine, opened] {
      driver::prepare_thread("mc-ascend");
      Status status = open(engine);
      bool good = status.ok();
      opened->set_value(std::move(status));
      if (good) run();
      close();
    });
  } catch (const std::system_error& error) {
    return failed(MC_NO_MEMORY, std::string("cannot start the worker thread: ") + error.what());
  }
  Status status = result.get();
  if (!status.ok()) thread_.join();
  return status;
}

void Worker::stop() {
  if (!thread_.joinable()) return;
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

bool Worker::call(std::function<void()> task) {
  {
    std::lock_guard lock(mutex_);
    if (stopped_) return false;
    tasks_.push_back(std::move(task));
  }
  changed_.notify_all();
  return true;
}

Status Worker::add_memory(uint64_t address, uint64_t length) {
  auto done = std::make_shared<std::promise<Status>>();
  bool asked = call([this, done, address, length] {
    Status status = registrations_.add(acl_, engine_, address, length);
    generation_.store(registrations_.generation(), std::memory_order_release);
    done->set_value(std::move(status));
  });
  return asked ? done->get_future().get() : closed();
}

void Worker::remove_memory(uint64_t address, uint64_t length) {
  auto done = std::make_shared<std::promise<void>>();
  bool asked = call([this, done, address, length] {
    // HIXL gives memory back only when no link of ours may use it.
    if (!registrations_.shared(address, length)) {
      for (auto& [name, peer] : peers_) disconnect(name, peer);
    }
    registrations_.remove(acl_, engine_, address, length);
    done->set_value();
  });
  if (asked) done->get_future().get();  // else all was given back when the thread ended
}

void Worker::launch(std::unique_ptr<Batch> batch) {
  {
    std::lock_guard lock(mutex_);
    if (!stopped_) waiting_.push(std::move(batch));
  }
  if (batch) return finish(std::move(batch), closed());
  changed_.notify_all();
}

void Worker::cancel(uint64_t cookie, const Status& why) {
  std::vector<Completion> ended;
  Batches over;  // freed without the mutex: a region's end takes it
  {
    std::lock_guard lock(mutex_);
    Batches all(std::move(waiting_));
    while (auto batch = all.pop()) {
      for (size_t i = 0; i < batch->done.size();) {
        if (batch->done[i].cookie != cookie) {
          ++i;
          continue;
        }
        batch->done[i].bytes = 0;
        batch->done[i].fail(why);
        ended.push_back(std::move(batch->done[i]));
        auto at = static_cast<std::ptrdiff_t>(i);
        batch->done.erase(batch->done.begin() + at);
        batch->descs.erase(batch->descs.begin() + at);
      }
      (batch->done.empty() ? over : waiting_).push(std::move(batch));
    }
  }
  while (auto batch = over.pop()) spares_.give(std::move(batch));  // before the completions, as in finish()
  completions_.push(ended);
}

void Worker::forget(const std::string& engine, std::shared_ptr<void> life) {
  call([this, engine, life = std::move(life)] {
    auto found = peers_.find(engine);
    if (found == peers_.end()) return;
    disconnect(engine, found->second);
    peers_.erase(found);
  });
}

// -------------------------------------------------------------------------------------------------- its
// thread

Status Worker::open(std::string& engine) {
  if (Status status = Acl::load(options_.library, options_.shim, acl_); !status.ok()) return status;
  aclError initialised = acl_.aclInit(nullptr);
  if (initialised != kAclRepeatInitialize) {
    if (Status status = check_acl(initialised, "aclInit"); !status.ok()) return status;
  }
  uint32_t devices = 0;
  if (Status status = check_acl(acl_.aclrtGetDeviceCount(&devices), "aclrtGetDeviceCount"); !status.ok())
    return status;
  if (options_.device >= devices)
    return failed(MC_UNSUPPORTED, "there is no NPU " + std::to_string(options_.device) +
                                      "; this process sees " + std::to_string(devices) +
                                      " (ASCEND_RT_VISIBLE_DEVICES)");
  // HIXL is initialised for the device that is set before.
  Status status = check_acl(acl_.aclrtSetDevice(static_cast<int32_t>(options_.device)), "aclrtSetDevice");
  if (status.ok()) status = check_acl(acl_.aclrtCreateStream(&stream_), "aclrtCreateStream");
  uint16_t port = 0;
  if (status.ok()) status = free_port(options_.host, port);
  if (!status.ok()) return status;
  bool v6 = options_.host.find(':') != std::string::npos;
  engine = (v6 ? "[" + options_.host + "]" : options_.host) + ":" + std::to_string(port);
  std::vector<const char*> names{"BufferPool"}, values{options_.buffer_pool.c_str()};
  std::string traffic_class = std::to_string(options_.rdma_traffic_class);
  std::string service_level = std::to_string(options_.rdma_service_level);
  names.insert(names.end(), {"RdmaTrafficClass", "RdmaServiceLevel"});
  values.insert(values.end(), {traffic_class.c_str(), service_level.c_str()});
  return check_hixl(acl_.shim->create(engine.c_str(), names.data(), values.data(), names.size(), &engine_),
                    "Initialize");
}

void Worker::close() {
  for (auto& [name, peer] : peers_) disconnect(name, peer);
  peers_.clear();
  if (engine_ != nullptr) {
    registrations_.clear(acl_, engine_);
    acl_.shim->destroy(engine_);
    engine_ = nullptr;
  }
  if (stream_ != nullptr) acl_.aclrtDestroyStream(stream_);
  stream_ = nullptr;
}

void Worker::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    bool busy = std::any_of(peers_.begin(), peers_.end(),
                            [](const auto& item) { return !item.second.running.empty(); });
    auto something = [&] { return stopping_ || !tasks_.empty() || !waiting_.empty(); };
    if (busy)
      changed_.wait_for(lock, kLook, something);
    else
      changed_.wait(lock, something);
    if (!tasks_.empty()) {
      auto task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      task = nullptr;
      lock.lock();
      continue;
    }
    stopped_ = stopping_;
    if (stopped_) break;
    std::unique_ptr<Batch> batch = waiting_.pop();
    lock.unlock();
    if (batch) begin(std::move(batch));
    look_at_all();
    lock.lock();
  }
  Batches left(std::move(waiting_));
  lock.unlock();
  while (auto batch = left.pop()) finish(std::move(batch), closed());
}

void Worker::begin(std::unique_ptr<Batch> batch) {
  if (batch->remote->engine.empty()) {
    Status status = copy_here(*batch);
    return finish(std::move(batch), std::move(status));
  }
  const std::string& engine = batch->remote->engine;
  Peer& peer = peers_[engine];
  if (Status status = batch->remote->link->check_alive(); !status.ok())
    return finish(std::move(batch), std::move(status));
  if (Status status = connect(engine, peer, batch->remote->generation); !status.ok())
    return finish(std::move(batch), std::move(status));
  Status status = check_hixl(acl_.shim->transfer(engine_, engine.c_str(), batch->opcode == MC_WRITE,
                                                 batch->descs.data(), batch->descs.size(), &batch->request),
                             "TransferAsync");
  if (!status.ok()) {
    disconnect(engine, peer);
    return finish(std::move(batch), std::move(status));
  }
  batch->deadline_ns = driver::deadline_after(options_.transfer_timeout_s);
  peer.running.push(std::move(batch));
}

Status Worker::connect(const std::string& engine, Peer& peer, uint64_t generation) {
  uint64_t ours = registrations_.generation();
  // What was registered after the link was made is not known on it.
  if (peer.connected && (peer.theirs < generation || peer.ours < ours)) disconnect(engine, peer);
  if (peer.connected) return {};
  auto timeout_ms = static_cast<int32_t>(options_.answer_timeout_s * 1000);
  Status status = check_hixl(acl_.shim->connect(engine_, engine.c_str(), timeout_ms), "Connect");
  if (!status.ok()) return failed(MC_UNREACHABLE, status.reason + " to " + engine);
  peer.connected = true;
  peer.theirs = generation;
  peer.ours = ours;
  return {};
}

void Worker::disconnect(const std::string& engine, Peer& peer) {
  drain(engine, peer);
  if (!std::exchange(peer.connected, false)) return;
  auto timeout_ms = static_cast<int32_t>(options_.answer_timeout_s * 1000);
  (void)acl_.shim->disconnect(engine_, engine.c_str(), timeout_ms);
}

void Worker::drain(const std::string& engine, Peer& peer) {
  while (!peer.running.empty()) {
    if (!look(engine, peer)) std::this_thread::sleep_for(std::chrono::nanoseconds(kRestNs));
  }
}

bool Worker::look_at_all() {
  bool any = false;
  for (auto& [name, peer] : peers_) any = look(name, peer) || any;
  return any;
}

bool Worker::look(const std::string& engine, Peer& peer) {
  if (peer.running.empty()) return false;
  const Batch& first = *peer.running.first();
  mc_ascend_state state = MC_ASCEND_WAITING;
  Status status = check_hixl(acl_.shim->query(engine_, first.request, &state), "GetTransferStatus");
  bool late = status.ok() && state == MC_ASCEND_WAITING && driver::now_ns() > first.deadline_ns;
  if (status.ok() && state == MC_ASCEND_WAITING && !late) return false;
  if (status.ok() && state != MC_ASCEND_COMPLETED)
    status = failed(MC_UNREACHABLE, state == MC_ASCEND_TIMEOUT || late
                                        ? "the transfer did not end in time (transfer_timeout_s)"
                                        : "the transfer failed; the peer or the link to it has gone");
  if (status.ok()) {
    finish(peer.running.pop(), {});
    return true;
  }
  Batches running(std::move(peer.running));
  // The link ends before any completion of it: what it may carry yet does not land after that.
  if (std::exchange(peer.connected, false)) {
    auto timeout_ms = static_cast<int32_t>(options_.answer_timeout_s * 1000);
    (void)acl_.shim->disconnect(engine_, engine.c_str(), timeout_ms);
  }
  while (auto batch = running.pop()) finish(std::move(batch), status);
  return true;
}

Status Worker::copy_here(const Batch& batch) {
  bool write = batch.opcode == MC_WRITE;
  bool done = false;
  if (Status status = copy_by_batch(batch, done); done) return status;
  int kind = direction(write ? batch.local_on_device : batch.remote->on_device,
                       write ? batch.remote->on_device : batch.local_on_device);
  for (const mc_ascend_desc& desc : batch.descs) {
    auto* to = reinterpret_cast<void*>(write ? desc.remote : desc.local);
    auto* from = reinterpret_cast<const void*>(write ? desc.local : desc.remote);
    Status status;
    if (kind == kHostToHost)  // ACL has no such copy
      std::memcpy(to, from, desc.length);
    else if (kind == kDeviceToDevice)
      status = check_acl(acl_.aclrtMemcpyAsync(to, desc.length, from, desc.length, kind, stream_),
                         "aclrtMemcpyAsync");
    else  // the asynchronous one takes main memory of aclrtMallocHost only
      status = check_acl(acl_.aclrtMemcpy(to, desc.length, from, desc.length, kind), "aclrtMemcpy");
    if (!status.ok()) return status;
  }
  if (kind != kDeviceToDevice) return {};
  auto timeout_ms = static_cast<int32_t>(options_.transfer_timeout_s * 1000);
  return check_acl(acl_.aclrtSynchronizeStreamWithTimeout(stream_, timeout_ms),
                   "aclrtSynchronizeStreamWithTimeout");
}

Status Worker::copy_by_batch(const Batch& batch, bool& done) {
  // It copies between main and device memory only.
  if (acl_.aclrtMemcpyBatch == nullptr || batch.descs.size() < 2 ||
      batch.local_on_device == batch.remote->on_device)
    return {};
  bool write = batch.opcode == MC_WRITE;
  size_t count = batch.descs.size();
  to_.resize(count);
  from_.resize(count);
  sizes_.resize(count);
  for (size_t i = 0; i < count; ++i) {
    const mc_ascend_desc& desc = batch.descs[i];
    to_[i] = reinterpret_cast<void*>(write ? desc.remote : desc.local);
    from_[i] = reinterpret_cast<void*>(write ? desc.local : desc.remote);
    sizes_[i] = desc.length;
  }
  bool to_device = write ? batch.remote->on_device : batch.local_on_device;
  aclrtMemcpyBatchAttr attribute{};
  attribute.dstLoc = {to_device ? options_.device : 0, to_device ? kLocationDevice : kLocationHost};
  attribute.srcLoc = {to_device ? 0 : options_.device, to_device ? kLocationHost : kLocationDevice};
  size_t first = 0, bad = 0;
  aclError result = acl_.aclrtMemcpyBatch(to_.data(), sizes_.data(), from_.data(), sizes_.data(), count,
                                          &attribute, &first, 1, &bad);
  if (result == kAclNotSupported) {
    acl_.aclrtMemcpyBatch = nullptr;  // not on this product
    return {};
  }
  done = true;
  return check_acl(result, "aclrtMemcpyBatch");
}

void Worker::finish(std::unique_ptr<Batch> batch, Status status) {
  if (status.ok()) status = batch->remote->link->check_alive();
  if (!status.ok()) {
    for (Completion& item : batch->done) {
      item.bytes = 0;
      item.fail(status);
    }
  }
  batch->remote.reset();  // before the completions: who gets them may expect that nothing is held any more
  completions_.push(batch->done);
  spares_.give(std::move(batch));
}

}  // namespace mooncake::ascend
