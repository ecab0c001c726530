// What the thread of worker.hpp does.
#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>
#include <chrono>
#include <utility>

#include "support/os.hpp"
#include "support/peers/address.hpp"
#include "worker.hpp"

namespace mooncake::ascend {
namespace {

constexpr auto kLook = std::chrono::microseconds(20);
// For what HIXL has refused, and is asked again.
constexpr auto kLookAgain = std::chrono::milliseconds(50);
constexpr uint64_t kRemoveAgainNs = 50'000'000;

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

}  // namespace

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
  uint16_t port = 0;
  if (status.ok()) status = free_port(options_.host, port);
  if (!status.ok()) return status;
  bool v6 = options_.host.find(':') != std::string::npos;
  engine = (v6 ? "[" + options_.host + "]" : options_.host) + ":" + std::to_string(port);
  return make_engine(engine, port);
}

Status Worker::make_engine(const std::string& engine, uint16_t port) {
  std::vector<std::pair<const char*, std::string>> given{
      {"BufferPool", options_.buffer_pool},
      {"RdmaTrafficClass", std::to_string(options_.rdma_traffic_class)},
      {"RdmaServiceLevel", std::to_string(options_.rdma_service_level)}};
  if (options_.path != Path::kAuto) {
    if (std::string(acl_.shim->library) != "hixl")
      return failed(MC_UNSUPPORTED,
                    "ADXL, HIXL's name before CANN 8.5, is not told the path; leave option path at auto, and "
                    "set HCCL_INTRA_ROCE_ENABLE=1 before this process starts to have RDMA within a server");
    std::string protocol = options_.path == Path::kRdma ? "roce:device" : "hccs:device";
    // The port on the NPU's own NIC: processes that share one need different ones.
    given.emplace_back("GlobalResourceConfig", R"({"comm_resource_config.protocol_desc": [")" + protocol +
                                                   R"("], "comm_resource_config.listen_port": )" +
                                                   std::to_string(port) + "}");
  }
  std::vector<const char*> names, values;
  for (const auto& [name, value] : given) {
    names.push_back(name);
    values.push_back(value.c_str());
  }
  Status status = check_hixl(
      acl_.shim->create(engine.c_str(), names.data(), values.data(), names.size(), &engine_), "Initialize");
  if (status.ok()) links_.open(engine_);
  if (!status.ok() && options_.path != Path::kAuto)
    status.reason += "; option path needs CANN 9.1 or newer, and what it names: leave it at auto otherwise";
  return status;
}

void Worker::close() {
  links_.close();
  if (engine_ != nullptr) {
    // What a link may still use ends with HIXL.
    if (links_.ending())
      registrations_.forget();
    else
      registrations_.clear(acl_, engine_);
    acl_.shim->destroy(engine_);
    engine_ = nullptr;
  }
  links_.finalized();
  local_copies_.close(driver::deadline_after(options_.transfer_timeout_s));
  for (const auto& removal : removals_) removal->done();
  removals_.clear();
}

void Worker::wait(std::unique_lock<std::mutex>& lock) {
  auto something = [this] { return stopping_ || !tasks_.empty() || !waiting_.empty(); };
  if (links_.busy() || local_copies_.busy())
    changed_.wait_for(lock, kLook, something);
  else if (links_.ending() || !removals_.empty())
    changed_.wait_for(lock, kLookAgain, something);
  else
    changed_.wait(lock, something);
}

void Worker::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    wait(lock);
    if (!tasks_.empty()) {
      auto task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      task = nullptr;
      go_on_removing();
      lock.lock();
      continue;
    }
    stopped_ = stopping_;
    if (stopped_) break;
    std::unique_ptr<Batch> batch = waiting_.pop();
    lock.unlock();
    if (batch) begin(std::move(batch));
    local_copies_.look();
    links_.look();
    go_on_removing();
    lock.lock();
  }
  Batches left(std::move(waiting_));
  lock.unlock();
  while (auto batch = left.pop()) finish(std::move(batch), failed(MC_CLOSED, "the endpoint was closed"));
}

Status Worker::register_memory(Memory& memory) {
  if (!memory.on_device) memory.pinned = is_pinned(memory);
  // By HCCS no main memory goes directly: HIXL takes its own buffers for what is not registered.
  bool wanted = memory.on_device || (memory.pinned && options_.path == Path::kRdma);
  if (!wanted) return {};
  Status status = registrations_.add(acl_, engine_, memory);
  generation_.store(registrations_.generation(), std::memory_order_release);
  memory.registered = status.ok();
  bool pooled = !memory.on_device && options_.buffer_pool != "0:0";
  return pooled ? Status{} : status;  // what is beyond HIXL's limits goes through its buffers
}

bool Worker::is_pinned(const Memory& memory) const {
  if (acl_.aclrtPointerGetAttributes == nullptr) return false;
  for (uint64_t address : {memory.address, memory.address + memory.length - 1}) {
    aclrtPtrAttributes about{};
    if (acl_.aclrtPointerGetAttributes(reinterpret_cast<const void*>(address), &about) != kAclSuccess ||
        about.location.type != kLocationHost)
      return false;
  }
  return true;
}

void Worker::go_on_removing() {
  if (removals_.empty() || driver::now_ns() < remove_again_ns_) return;
  bool ended = false;
  std::erase_if(removals_, [&](const auto& removal) {
    // HIXL gives memory back only when no link of ours may use it.
    if (!registrations_.shared(removal->memory)) {
      ended = ended || links_.end_all();
      if (!ended) return false;
    }
    bool gone = registrations_.remove(acl_, engine_, removal->memory).ok();
    if (gone) removal->done();
    return gone;
  });
  remove_again_ns_ = driver::now_ns() + kRemoveAgainNs;
}

void Worker::begin(std::unique_ptr<Batch> batch) {
  if (batch->remote->engine.empty())
    local_copies_.begin(std::move(batch));
  else
    links_.begin(std::move(batch), registrations_.generation());
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
