#include "endpoint.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <utility>

namespace mooncake::shm {
namespace {

// Whether [offset, offset + length) lies in [0, size), for any values.
bool inside(uint64_t offset, uint64_t length, uint64_t size) {
  return offset <= size && length <= size - offset;
}

// A private copy of a memory's descriptor. Stays empty when peers could not map it safely: they use
// process_vm then.
Status adopt_descriptor(const mc_memory& memory, std::shared_ptr<const UniqueFd>& fd) {
  struct stat file{};
  if (fstat(memory.fd, &file) != 0) {
    return system_failure(MC_INVALID,
                          "the memory's descriptor " + std::to_string(memory.fd) + " cannot be used", errno);
  }
  if (!sealed_against_shrinking(memory.fd)) return {};
  if (!inside(memory.fd_offset, memory.length, static_cast<uint64_t>(file.st_size))) {
    return failed(MC_INVALID, "the memory's descriptor refers to a file that ends before the region does");
  }
  UniqueFd copy(fcntl(memory.fd, F_DUPFD_CLOEXEC, 0));
  if (!copy.valid()) return system_failure(MC_IO, "cannot duplicate the memory's descriptor", errno);
  fd = std::make_shared<const UniqueFd>(std::move(copy));
  return {};
}

}  // namespace

Endpoint::Endpoint(const Options& options)
    : options_(options),
      owner_(getpid()),
      completions_(options.queue_depth),
      pool_(options_, completions_),
      target_(loop_, options_, address_),
      initiator_(loop_, pool_, options_) {}

Status Endpoint::open(const mc_option* options, size_t count, std::shared_ptr<Endpoint>& endpoint) {
  Options parsed;
  if (Status status = parse_options(options, count, parsed); !status.ok()) return status;
  auto made = std::make_shared<Endpoint>(parsed);
  if (Status status = made->start(); !status.ok()) return status;
  endpoint = std::move(made);
  return {};
}

Status Endpoint::start() {
  if (Status status = make_address(address_); !status.ok()) return status;
  if (Status status = completions_.open(); !status.ok()) return status;
  if (Status status = loop_.start(); !status.ok()) return status;
  if (Status status = pool_.start(); !status.ok()) return status;
  return target_.listen();
}

void Endpoint::close() {
  if (forked()) return;
  initiator_.close();
  pool_.stop();
  target_.close();
  loop_.stop();
}

bool Endpoint::forked() const { return getpid() != owner_; }

Status Endpoint::stats(mc_stats& stats) const {
  completions_.add_to(stats);
  stats.connections = initiator_.open_connections();
  stats.refused = target_.refused();
  return {};
}

Status Endpoint::export_address(void* blob, size_t* length) const {
  if (*length < sizeof address_) {
    return failed(MC_INVALID, "the address has " + std::to_string(sizeof address_) +
                                  " bytes, and there is room for " + std::to_string(*length));
  }
  std::memcpy(blob, &address_, sizeof address_);
  *length = sizeof address_;
  return {};
}

Status Endpoint::connect(const void* address, size_t length, mc_handle* connection) {
  Address peer;
  if (Status status = read_address(address_, address, length, peer); !status.ok()) return status;
  *connection = connections_.add(initiator_.connect(peer));
  return {};
}

void Endpoint::disconnect(mc_handle connection) {
  if (auto taken = connections_.take(connection)) initiator_.disconnect(taken);
}

Status Endpoint::register_memory(const mc_memory& memory, mc_handle* registered) {
  if (memory.struct_size < sizeof memory)
    return failed(MC_INVALID, "the memory description is of an unknown version");
  if (memory.kind != MC_DRAM) return failed(MC_UNSUPPORTED, "the shm driver moves main memory only");
  if (memory.address == 0 || memory.length == 0 || memory.address + memory.length < memory.address) {
    return failed(MC_INVALID, "the memory is empty or wraps around the address space");
  }
  auto region = std::make_shared<Region>();
  region->id = memory.region_id;
  std::copy(std::begin(memory.key), std::end(memory.key), region->key.begin());
  region->base = reinterpret_cast<std::byte*>(memory.address);
  region->length = memory.length;
  region->fd_offset = memory.fd_offset;
  if (memory.fd >= 0) {
    if (Status status = adopt_descriptor(memory, region->fd); !status.ok()) return status;
  }
  if (Status status = target_.add(region); !status.ok()) return status;
  *registered = regions_.add(std::move(region));
  return {};
}

Status Endpoint::deregister_memory(mc_handle registered, uint64_t deadline_ns) {
  std::shared_ptr<Region> region = regions_.get(registered);
  if (!region) return failed(MC_INVALID, "no memory is registered under this handle");
  if (Status status = target_.withdraw(region, deadline_ns); !status.ok()) return status;
  regions_.take(registered);
  return {};
}

Status Endpoint::export_key(mc_handle registered, size_t* length) const {
  if (!regions_.get(registered)) return failed(MC_INVALID, "no memory is registered under this handle");
  *length = 0;  // the owner tells the rest when it is asked
  return {};
}

Status Endpoint::import_key(mc_handle connection, uint64_t region_id, const uint8_t* key, mc_handle* remote) {
  std::shared_ptr<Connection> peer = connections_.get(connection);
  if (!peer) return failed(MC_INVALID, "no connection has this handle");
  Key copied;
  std::copy(key, key + copied.size(), copied.begin());
  *remote = remotes_.add(initiator_.import(peer, region_id, copied));
  return {};
}

Status Endpoint::submit(const mc_op* ops, size_t count, size_t* accepted) {
  size_t taken = completions_.reserve(count);
  uint64_t total = 0;
  for (size_t i = 0; i < taken; ++i) total = std::max(total, total + ops[i].length);
  bool copy_inline = total <= options_.inline_bytes;
  Names names;
  Batch batch;
  for (size_t i = 0; i < taken; ++i) {
    Status status = resolve(ops[i], names);
    if (status.ok()) {
      place(ops[i], names, copy_inline, batch);
    } else {
      batch.finished.push_back({ops[i].cookie, static_cast<mc_opcode>(ops[i].opcode), 0, std::move(status)});
    }
  }
  batch.prove();
  completions_.push(batch.finished);
  *accepted = taken;
  return taken == count ? Status{} : failed(MC_AGAIN, "the queue is full; fetch completions first");
}

Status Endpoint::resolve(const mc_op& op, Names& names) const {
  if (op.connection != names.connection_handle) names.connection = connections_.get(op.connection);
  if (op.local != names.local_handle) names.local = regions_.get(op.local);
  if (op.remote != names.remote_handle) names.remote = remotes_.get(op.remote);
  names.connection_handle = op.connection;
  names.local_handle = op.local;
  names.remote_handle = op.remote;
  if (op.opcode != MC_READ && op.opcode != MC_WRITE) return failed(MC_INVALID, "unknown operation");
  if (!names.connection || !names.local || !names.remote) {
    return failed(MC_INVALID, "the operation names a connection, local or remote memory that does not exist");
  }
  if (names.remote->connection_id != names.connection->id) {
    return failed(MC_INVALID, "the remote memory belongs to another connection");
  }
  if (op.length == 0 || !inside(op.local_offset, op.length, names.local->length)) {
    return failed(MC_INVALID, "the range is empty or not inside the local region");
  }
  return {};
}

void Endpoint::place(const mc_op& op, const Names& names, bool copy_inline, Batch& batch) {
  auto opcode = static_cast<mc_opcode>(op.opcode);
  Status failure;
  std::shared_ptr<const Access> access = initiator_.look_up(*names.connection, *names.remote, failure);
  if (failure.ok() && access && copy_inline) {
    if (batch.access != access) batch.prove();
    Status status = access->check_range(op.remote_offset, op.length);
    if (status.ok()) {
      Stores stores = op.length >= options_.streaming_bytes ? Stores::kStreaming : Stores::kCached;
      status = access->move(opcode, *names.local, op.local_offset, op.remote_offset, op.length, stores);
    }
    batch.finished.push_back({op.cookie, opcode, status.ok() ? op.length : 0, std::move(status)});
    batch.access = std::move(access);
    return;
  }
  if (!failure.ok()) {
    batch.finished.push_back({op.cookie, opcode, 0, std::move(failure)});
    return;
  }
  auto operation = std::make_shared<Operation>();
  operation->opcode = opcode;
  operation->local_offset = op.local_offset;
  operation->remote_offset = op.remote_offset;
  operation->length = op.length;
  operation->cookie = op.cookie;
  operation->connection = names.connection;
  operation->local = names.local;
  operation->remote = names.remote;
  pool_.add(operation);
  initiator_.park(operation);
}

void Endpoint::Batch::prove() {
  Status alive = access ? access->check_alive() : Status{};
  for (; proven < finished.size(); ++proven) {
    if (finished[proven].status.ok()) finished[proven].status = alive;
  }
  access.reset();
}

void Endpoint::cancel(uint64_t cookie) {
  pool_.end_cookie(cookie, failed(MC_CANCELLED, "the operation was cancelled"));
}

}  // namespace mooncake::shm
