#include "driver_endpoint.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include <chrono>

#include "device_memory.hpp"

namespace sanitized {

namespace {

constexpr int kPollMs = 20;  // how soon the poller sees that it shall stop
constexpr double kSubmitS = 30;

}  // namespace

Pages::Pages(size_t size, MemoryType type) : size(size) {
  memory.struct_size = sizeof memory;
  memory.length = size;
  memory.numa_node = -1;
  if (type != MemoryType::kMain) {
    DeviceMemory made = allocate_on_device(type, size);
    memory.kind = MC_CUDA;  // of any vendor
    memory.fd = -1;
    memory.address = made.address;
    bytes = made.bytes;
    free_ = std::move(made.free);
    return;
  }
  memory.kind = MC_DRAM;
  memory.fd = memfd_create("sanitized", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  bool whole = memory.fd >= 0 && ftruncate(memory.fd, static_cast<off_t>(size)) == 0 &&
               fcntl(memory.fd, F_ADD_SEALS, F_SEAL_SHRINK) == 0;  // as the engine's own memory is
  require(whole, "memory");
  void* mapped = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, memory.fd, 0);
  require(mapped != MAP_FAILED, "mapped memory");
  bytes = static_cast<char*>(mapped);
  memory.address = reinterpret_cast<uint64_t>(bytes);
  free_ = [this] {
    munmap(bytes, this->size);
    ::close(memory.fd);
  };
}

Pages::~Pages() { free_(); }

Key Key::random() {
  Key key;
  require(getrandom(key.bytes, sizeof key.bytes, 0) == sizeof key.bytes, "random bytes");
  return key;
}

Operations::Operations(size_t count) : slots(count), ops(count), left_(count) {
  for (size_t i = 0; i < count; ++i) {
    slots[i].owner = this;
    ops[i] = {};
    ops[i].cookie = reinterpret_cast<uint64_t>(&slots[i]);
  }
}

bool Operations::wait(double seconds) {
  // By the system's clock: the sanitizers of some compilers do not know the wait by the steady one.
  auto deadline =
      std::chrono::system_clock::now() + std::chrono::microseconds(static_cast<int64_t>(seconds * 1e6));
  std::unique_lock lock(mutex_);
  return done_.wait_until(lock, deadline, [&] { return left_ == 0; });
}

void Operations::finish(Slot& slot, const mc_completion& completion) {
  require(!slot.completed.exchange(true), "an operation completed twice");
  std::lock_guard lock(mutex_);
  slot.result = completion;
  if (--left_ == 0) done_.notify_all();  // with the lock: the waiter frees all of this
}

void check(mc_status status, const Endpoint& endpoint, const std::string& what) {
  if (status == MC_OK) return;
  const char* reason = endpoint.table().last_error();
  fail(what + ": " + std::to_string(status) + " " + (reason ? reason : ""));
}

Endpoint::Endpoint(const std::string& driver, const std::string& device)
    : driver_(find_driver(driver, device)) {
  std::vector<mc_option> options;
  for (const auto& [name, value] : driver_.options) options.push_back({name.c_str(), value.c_str()});
  check(table().open(options.data(), options.size(), &handle_), *this, "open");
  poller_ = std::thread([this] { poll_until_stopped(); });
}

void Endpoint::close() {
  if (handle_ == 0) return;
  stopping_ = true;
  poller_.join();
  table().close(handle_);
  handle_ = 0;
}

void Endpoint::poll_until_stopped() {
  std::vector<mc_completion> completions(16);
  while (!stopping_) {
    size_t count = 0;
    check(table().poll(handle_, completions.data(), completions.size(), &count), *this, "poll");
    for (size_t i = 0; i < count; ++i) {
      Slot& slot = *reinterpret_cast<Slot*>(completions[i].cookie);
      slot.owner->finish(slot, completions[i]);
    }
    if (count > 0 || table().arm(handle_) != MC_OK) continue;
    pollfd waiting{table().event_fd(handle_), POLLIN, 0};
    ::poll(&waiting, 1, kPollMs);
  }
}

std::string Endpoint::address() const {
  std::string blob(MC_BLOB_MAX, '\0');
  size_t length = blob.size();
  check(table().export_address(handle_, blob.data(), &length), *this, "export_address");
  blob.resize(length);
  return blob;
}

mc_handle Endpoint::add(const Pages& pages, Exported* exported) {
  static std::atomic<uint64_t> last_region{0};
  exported->region_id = ++last_region;
  exported->key = Key::random();
  exported->length = pages.size;
  mc_memory memory = pages.memory;
  memory.region_id = exported->region_id;
  std::memcpy(memory.key, exported->key.bytes, MC_KEY_BYTES);
  mc_handle handle = 0;
  check(table().register_memory(handle_, &memory, &handle), *this, "register_memory");
  exported->blob.resize(MC_BLOB_MAX);
  size_t length = exported->blob.size();
  check(table().export_key(handle_, handle, exported->blob.data(), &length), *this, "export_key");
  exported->blob.resize(length);
  return handle;
}

mc_handle Endpoint::connect(const std::string& address) {
  mc_handle connection = 0;
  check(table().connect(handle_, address.data(), address.size(), &connection), *this, "connect");
  return connection;
}

mc_handle Endpoint::import(mc_handle connection, const Exported& exported) {
  mc_handle remote = 0;
  check(table().import_key(handle_, connection, exported.region_id, exported.key.bytes, exported.length,
                           exported.blob.data(), exported.blob.size(), &remote),
        *this, "import_key");
  return remote;
}

void Endpoint::submit(Operations& operations) {
  uint64_t deadline = seconds_from_now(kSubmitS);
  size_t sent = 0;
  while (sent < operations.ops.size()) {
    size_t accepted = 0;
    mc_status status =
        table().submit(handle_, operations.ops.data() + sent, operations.ops.size() - sent, &accepted);
    sent += accepted;
    if (status == MC_OK) continue;
    if (status != MC_AGAIN) check(status, *this, "submit");
    require(now_ns() < deadline, "the driver's queue stays full");
    std::this_thread::yield();
  }
}

}  // namespace sanitized
