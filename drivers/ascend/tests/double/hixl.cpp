// A test double of HIXL. A link carries what the peer had registered when it was made; bytes move by
// process_vm_readv and process_vm_writev between processes of one user.
#include <hixl/hixl.h>

#include <arpa/inet.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "acl_double.hpp"

namespace hixl {
namespace {

constexpr size_t kMostRegistrations = 256;
constexpr uint64_t kMostDeviceBytes = 50ull << 30, kMostHostBytes = 20ull << 30;
constexpr uint64_t kHugePage = 2 << 20;

struct Range {
  uint64_t begin, end;
  bool device;
  bool holds(uint64_t address, uint64_t length) const { return begin <= address && address + length <= end; }
};
struct Hello {
  int64_t pid;
  uint64_t count;
};

bool send_all(int fd, const void* bytes, size_t length) {
  return send(fd, bytes, length, MSG_NOSIGNAL) == static_cast<ssize_t>(length);
}
bool receive_all(int fd, void* bytes, size_t length, int timeout_ms) {
  auto* at = static_cast<char*>(bytes);
  while (length > 0) {
    pollfd ready{fd, POLLIN, 0};
    if (poll(&ready, 1, timeout_ms) != 1) return false;
    ssize_t got = recv(fd, at, length, 0);
    if (got <= 0) return false;
    at += got;
    length -= static_cast<size_t>(got);
  }
  return true;
}

// The peer learns it also where a forked child holds a copy.
void end(int socket) {
  shutdown(socket, SHUT_RDWR);
  close(socket);
}

bool parse(const std::string& engine, sockaddr_in& at) {
  size_t colon = engine.rfind(':');
  if (colon == std::string::npos) return false;
  at = {};
  at.sin_family = AF_INET;
  at.sin_port = htons(static_cast<uint16_t>(std::stoi(engine.substr(colon + 1))));
  return inet_pton(AF_INET, engine.substr(0, colon).c_str(), &at.sin_addr) == 1;
}

struct Link {
  int fd = -1;
  pid_t pid = 0;
  std::vector<Range> theirs, ours;  // when the link was made
};
struct Request {
  bool waiting = false;
  bool good = true;
};

// Bytes on their way over a link that has not ended: they may land at any time.
struct UnderWay {
  const void* engine;
  std::string remote;
  pid_t pid;
  TransferOp operation;
  TransferOpDesc desc;
};
std::vector<UnderWay>& under_way() {  // with the mutex of the state
  static auto* all = new std::vector<UnderWay>;
  return *all;
}

bool move(pid_t pid, TransferOp operation, const TransferOpDesc& desc) {
  iovec ours{reinterpret_cast<void*>(desc.local_addr), desc.len};
  iovec theirs{reinterpret_cast<void*>(desc.remote_addr), desc.len};
  auto call = operation == READ ? process_vm_readv : process_vm_writev;
  return call(pid, &ours, 1, &theirs, 1, 0) == static_cast<ssize_t>(desc.len);
}

bool holds(const std::vector<Range>& all, uint64_t address, uint64_t length) {
  return std::any_of(all.begin(), all.end(),
                     [&](const Range& range) { return range.holds(address, length); });
}

}  // namespace

class Hixl::HixlImpl {
 public:
  std::thread::id thread = std::this_thread::get_id();
  bool pool = true;
  bool rdma = false;  // HCCS, which leads to every NPU of a machine
  int listener = -1;
  int stop[2] = {-1, -1};
  std::thread server;
  std::mutex mutex;
  std::map<void*, Range> registered;
  std::vector<int> clients;
  std::map<std::string, Link> links;
  uint64_t next = 1;

  // Every call belongs to the thread, or rather the context, that initialised.
  bool here() const { return std::this_thread::get_id() == thread && acl_double::current_device() >= 0; }

  std::vector<Range> snapshot() {
    std::lock_guard lock(mutex);
    std::vector<Range> all;
    for (const auto& [handle, range] : registered) all.push_back(range);
    return all;
  }

  void serve() {
    for (;;) {
      std::vector<pollfd> all{{listener, POLLIN, 0}, {stop[0], POLLIN, 0}};
      for (int client : clients) all.push_back({client, POLLIN, 0});
      poll(all.data(), all.size(), -1);
      if (all[1].revents != 0) return;
      if (all[0].revents != 0) {
        int client = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
        std::vector<Range> ranges = snapshot();
        Hello hello{getpid(), ranges.size()};
        if (client >= 0 && send_all(client, &hello, sizeof hello) &&
            (ranges.empty() || send_all(client, ranges.data(), ranges.size() * sizeof(Range)))) {
          clients.push_back(client);
        } else if (client >= 0) {
          close(client);
        }
      }
      for (size_t i = 2; i < all.size(); ++i) {
        if (all[i].revents == 0) continue;
        close(all[i].fd);
        std::erase(clients, all[i].fd);
      }
    }
  }
};

Hixl::Hixl() = default;
Hixl::~Hixl() = default;

Status Hixl::Initialize(const AscendString& local, const std::map<AscendString, AscendString>& options) {
  if (acl_double::current_device() < 0) return FAILED;  // aclrtSetDevice comes before
  sockaddr_in at;
  if (!parse(local.GetString(), at)) return PARAM_INVALID;
  auto made = std::make_unique<HixlImpl>();
  for (const auto& [name, value] : options) {
    std::string known = name.GetString(), given = value.GetString();
    if (known == "BufferPool") {
      made->pool = given != "0:0";
    } else if (known == "GlobalResourceConfig") {
      made->rdma = given.find("\"roce:device\"") != std::string::npos;
      bool path = made->rdma || given.find("\"hccs:device\"") != std::string::npos;
      if (!path || given.find("listen_port") == std::string::npos) return PARAM_INVALID;
    } else if (known != "RdmaTrafficClass" && known != "RdmaServiceLevel") {
      return PARAM_INVALID;
    }
  }
  made->listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  int on = 1;
  setsockopt(made->listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (bind(made->listener, reinterpret_cast<sockaddr*>(&at), sizeof at) != 0 ||
      listen(made->listener, 512) != 0 || pipe2(made->stop, O_CLOEXEC) != 0) {
    close(made->listener);
    return FAILED;
  }
  impl_ = std::move(made);
  impl_->server = std::thread([impl = impl_.get()] { impl->serve(); });
  return SUCCESS;
}

void Hixl::Finalize() {
  if (!impl_) return;
  [[maybe_unused]] ssize_t told = write(impl_->stop[1], "", 1);  // a forked child keeps its end open
  impl_->server.join();
  close(impl_->stop[1]);
  close(impl_->stop[0]);
  close(impl_->listener);
  for (int client : impl_->clients) end(client);
  for (auto& [name, link] : impl_->links) end(link.fd);
  {
    // Links that would not end, and with them what they use, end here at the latest.
    std::lock_guard lock(acl_double::state().mutex);
    std::erase_if(under_way(), [this](const UnderWay& piece) { return piece.engine == impl_.get(); });
    if (!impl_->registered.empty() && impl_->links.empty())
      acl_double::state().violations = "Finalize came before DeregisterMem";
    for (const auto& [handle, range] : impl_->registered)
      acl_double::state().registered.erase(acl_double::state().registered.find(range.begin));
  }
  impl_.reset();
}

Status Hixl::RegisterMem(const MemDesc& mem, MemType type, MemHandle& handle) {
  if (!impl_ || !impl_->here() || mem.len == 0) return PARAM_INVALID;
  bool device = type == MEM_DEVICE;
  Range range{mem.addr, mem.addr + mem.len, device};
  std::lock_guard lock(impl_->mutex);
  for (const auto& [known, other] : impl_->registered) {
    if (other.begin < range.end && range.begin < other.end) return PARAM_INVALID;
  }
  {
    std::lock_guard inside(acl_double::state().mutex);
    if (acl_double::on_device(mem.addr, mem.len) != device) return PARAM_INVALID;
    if (device && (mem.addr % kHugePage != 0 || mem.len % kHugePage != 0)) return PARAM_INVALID;
    if (!device && !acl_double::is_pinned(mem.addr, mem.len)) return PARAM_INVALID;
    // Of the process.
    auto& all = acl_double::state().registered;
    if (all.size() >= kMostRegistrations) return RESOURCE_EXHAUSTED;
    uint64_t total = mem.len;
    for (const auto& [begin, end] : all) {
      if (acl_double::on_device(begin, end - begin) == device) total += end - begin;
    }
    if (total > (device ? kMostDeviceBytes : kMostHostBytes)) return RESOURCE_EXHAUSTED;
    all.emplace(range.begin, range.end);
  }
  handle = reinterpret_cast<void*>(impl_->next++);
  impl_->registered[handle] = range;
  return SUCCESS;
}

Status Hixl::DeregisterMem(MemHandle handle) {
  if (!impl_ || !impl_->here()) return PARAM_INVALID;
  std::unique_lock lock(impl_->mutex);
  auto found = impl_->registered.find(handle);
  if (found == impl_->registered.end()) return PARAM_INVALID;
  Range range = found->second;
  for (const auto& [name, link] : impl_->links) {
    for (const Range& known : link.ours) {
      if (known.begin != range.begin) continue;
      std::lock_guard inside(acl_double::state().mutex);
      acl_double::state().violations = "DeregisterMem came before Disconnect";
    }
  }
  impl_->registered.erase(found);
  lock.unlock();
  std::lock_guard inside(acl_double::state().mutex);
  acl_double::state().registered.erase(acl_double::state().registered.find(range.begin));
  return SUCCESS;
}

Status Hixl::Connect(const AscendString& remote, int32_t timeout_ms) {
  if (!impl_ || !impl_->here()) return PARAM_INVALID;
  if (impl_->links.contains(remote.GetString())) return ALREADY_CONNECTED;
  sockaddr_in at;
  if (!parse(remote.GetString(), at)) return PARAM_INVALID;
  Link link;
  link.fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  Hello hello{};
  if (connect(link.fd, reinterpret_cast<sockaddr*>(&at), sizeof at) != 0) {
    close(link.fd);
    return FAILED;
  }
  bool heard = receive_all(link.fd, &hello, sizeof hello, timeout_ms);
  link.theirs.resize(hello.count);
  if (heard && hello.count > 0)
    heard = receive_all(link.fd, link.theirs.data(), hello.count * sizeof(Range), timeout_ms);
  if (!heard) {
    close(link.fd);
    return TIMEOUT;
  }
  link.pid = static_cast<pid_t>(hello.pid);
  link.ours = impl_->snapshot();
  impl_->links[remote.GetString()] = link;
  return SUCCESS;
}

Status Hixl::Disconnect(const AscendString& remote, int32_t) {
  if (!impl_ || !impl_->here()) return PARAM_INVALID;
  auto found = impl_->links.find(remote.GetString());
  if (found == impl_->links.end()) return NOT_CONNECTED;
  std::lock_guard lock(acl_double::state().mutex);
  if (long& left = acl_double::state().controls["fail disconnect"]; left > 0) {
    --left;
    return TIMEOUT;
  }
  std::erase_if(under_way(), [&](const UnderWay& piece) {
    return piece.engine == impl_.get() && piece.remote == remote.GetString();
  });
  end(found->second.fd);
  impl_->links.erase(found);
  return SUCCESS;
}

Status Hixl::TransferAsync(const AscendString& remote, TransferOp operation,
                           const std::vector<TransferOpDesc>& descs, const TransferArgs&, TransferReq& req) {
  if (!impl_ || !impl_->here() || descs.empty()) return PARAM_INVALID;
  auto found = impl_->links.find(remote.GetString());
  if (found == impl_->links.end()) return NOT_CONNECTED;
  Link& link = found->second;
  auto registered = [&](const TransferOpDesc& desc) {
    return holds(link.ours, desc.local_addr, desc.len) && holds(link.theirs, desc.remote_addr, desc.len);
  };
  bool direct = std::all_of(descs.begin(), descs.end(), registered), good = direct || impl_->pool;
  std::lock_guard lock(acl_double::state().mutex);
  bool fails = acl_double::due("fail transfer");
  bool held = acl_double::state().controls["hold transfers"] != 0;
  for (const TransferOpDesc& desc : descs) {
    bool device_here = acl_double::on_device(desc.local_addr, desc.len);
    bool device_there = std::any_of(link.theirs.begin(), link.theirs.end(), [&](const Range& range) {
      return range.device && range.holds(desc.remote_addr, desc.len);
    });
    // What is not registered on both sides goes through HIXL's buffers, as main memory. By HCCS only device
    // memory goes directly.
    if (!direct && device_here && !holds(link.ours, desc.local_addr, desc.len)) good = false;
    if (direct && !impl_->rdma && !(device_here && device_there)) good = false;
    if (!good) break;
    if (held || fails)
      under_way().push_back({impl_.get(), remote.GetString(), link.pid, operation, desc});
    else
      good = move(link.pid, operation, desc);
  }
  ++acl_double::state().counts[!direct ? "pool" : impl_->rdma ? "rdma" : "hccs"];
  if (fails) return FAILED;
  auto* request = new Request;
  request->waiting = held && good;
  request->good = good;
  req = request;
  return SUCCESS;
}

Status Hixl::GetTransferStatus(const TransferReq& req, TransferStatus& status) {
  if (!impl_ || !impl_->here()) return PARAM_INVALID;
  auto* request = static_cast<Request*>(req);
  status = request->good ? TransferStatus::COMPLETED : TransferStatus::FAILED;
  if (request->waiting)
    status = TransferStatus::WAITING;
  else
    delete request;
  return SUCCESS;
}

}  // namespace hixl

// Has what is under way arrive now; says how much that was.
extern "C" __attribute__((visibility("default"))) long hixl_double_land() {
  std::lock_guard lock(acl_double::state().mutex);
  long landed = 0;
  for (const hixl::UnderWay& piece : hixl::under_way())
    landed += hixl::move(piece.pid, piece.operation, piece.desc) ? 1 : 0;
  hixl::under_way().clear();
  return landed;
}
