#include "endpoint.hpp"

#include <cstring>
#include <span>
#include <utility>

#include "support/calls.hpp"
#include "support/options.hpp"

namespace template_driver {

namespace {

Status unknown_memory() { return failed(MC_INVALID, "no memory is registered under this handle"); }
Status unknown_connection() { return failed(MC_INVALID, "no connection has this handle"); }

}  // namespace

Status Endpoint::open(const mc_option* options, size_t count, std::shared_ptr<Endpoint>& endpoint) {
  // options.py has the default, and renders every option.
  double timeout_s = 5.0;
  mooncake::driver::OptionReader reader("template", options, count);
  reader.number("timeout_s", &timeout_s, 0.001, 3600.0);
  if (Status status = reader.finish(); !status.ok()) return status;
  auto made = std::make_shared<Endpoint>(timeout_s);
  if (Status status = made->completions_.open(); !status.ok()) return status;
  if (Status status = made->target_.listen(); !status.ok()) return status;
  endpoint = std::move(made);
  return {};
}

// Members that are left alone are 0, and alignment is 1.
Status Endpoint::caps(mc_caps& caps) const {
  caps.flags = MC_CAP_SAME_HOST_ONLY;
  caps.memory_kinds = 1u << MC_DRAM;
  caps.bandwidth_bytes_per_s = 1'000'000'000;
  caps.latency_ns = 50'000;
  caps.inline_bytes = 0;  // nothing is ever done when submit() returns
  caps.in_flight_bytes = 8 << 20;
  caps.in_flight_ops = 64;
  return {};
}

Status Endpoint::stats(mc_stats& stats) const {
  completions_.add_to(stats);
  stats.refused = target_.refused();
  std::lock_guard lock(mutex_);
  stats.connections = static_cast<uint32_t>(open_.size());
  return {};
}

// ----------------------------------------------------------------------------------------------- peers

Status Endpoint::export_address(void* blob, size_t* length) const {
  const Address& address = target_.address();
  return mooncake::driver::copy_out(address.data(), address.size(), blob, length);
}

// Never waits for the peer: the connection dials when it has something to do.
Status Endpoint::connect(const void* address, size_t length, mc_handle* connection) {
  Address peer;
  // It comes from the network.
  if (length != peer.size()) return failed(MC_INVALID, "not an address of the template driver");
  std::memcpy(peer.data(), address, length);
  uint64_t session;
  if (Status status = mooncake::driver::fill_random(&session, sizeof session); !status.ok()) return status;
  auto made = std::make_shared<Connection>(peer, session, timeout_s_, completions_);
  if (Status status = connections_.add(made, connection); !status.ok()) return status;
  std::lock_guard lock(mutex_);
  open_.insert(std::move(made));
  return {};
}

void Endpoint::disconnect(mc_handle connection) {
  std::shared_ptr<Connection> last =
      connections_.take(connection);  // ends outside the lock: it joins a thread
  std::lock_guard lock(mutex_);
  open_.erase(last);
}

// ---------------------------------------------------------------------------------------------- memory

Status Endpoint::register_memory(const mc_memory& memory, mc_handle* registered) {
  std::shared_ptr<Region> region;
  if (Status status = regions_.add(memory, &region); !status.ok()) return status;
  return registered_.add(std::move(region), registered);
}

Status Endpoint::deregister_memory(mc_handle registered, uint64_t deadline_ns) {
  const std::shared_ptr<Region>* region = registered_.find(registered);
  if (region == nullptr) return unknown_memory();
  Status status = regions_.remove(*region, deadline_ns);
  if (status.ok()) registered_.take(registered);  // else the caller may try again
  return status;
}

// Region id and key travel with the descriptor and are all that a peer needs. Real hardware: also an rkey.
Status Endpoint::export_key(mc_handle registered, void*, size_t* length) const {
  if (registered_.find(registered) == nullptr) return unknown_memory();
  *length = 0;
  return {};
}

// What hardware adds to a lesser key goes into the blob, as in export_key.
Status Endpoint::grant(mc_handle registered, const uint8_t* key, uint32_t access, void*, size_t* length) {
  const std::shared_ptr<Region>* region = registered_.find(registered);
  if (region == nullptr) return unknown_memory();
  Status status = regions_.grant(**region, key, access);
  if (status.ok()) *length = 0;
  return status;
}

Status Endpoint::revoke(mc_handle registered, const uint8_t* key, uint64_t deadline_ns) {
  const std::shared_ptr<Region>* region = registered_.find(registered);
  return region == nullptr ? unknown_memory() : regions_.revoke(**region, key, deadline_ns);
}

// Only remembers: the target checks, and a wrong key shows as MC_REFUSED in the completions.
Status Endpoint::import_key(mc_handle connection, uint64_t region_id, const uint8_t* key, uint64_t,
                            const void*, size_t, mc_handle* remote) {
  if (connections_.find(connection) == nullptr) return unknown_connection();
  Remote named{connection, region_id, mooncake::driver::key_from(key)};
  return remotes_.add(std::make_shared<Remote>(named), remote);
}

// ------------------------------------------------------------------------------------------ operations

Status Endpoint::submit(const mc_op* ops, size_t count, size_t* accepted) {
  // Of what is taken each completes once; there is room for so many that have not been polled.
  *accepted = completions_.reserve(count);
  for (const mc_op& op : std::span(ops, *accepted)) {
    // What cannot even start is taken as well, and completes with its reason.
    if (Status status = start(op); !status.ok()) push(completions_, op, status);
  }
  if (*accepted < count) return failed(MC_AGAIN, "as many operations are under way as there can be: poll");
  return {};
}

Status Endpoint::start(const mc_op& op) {
  const std::shared_ptr<Connection>* connection = connections_.find(op.connection);
  const std::shared_ptr<Remote>* remote = remotes_.find(op.remote);
  const std::shared_ptr<Region>* local = registered_.find(op.local);
  if (connection == nullptr) return unknown_connection();
  if (local == nullptr) return unknown_memory();
  if (remote == nullptr || (*remote)->connection != op.connection)
    return failed(MC_INVALID, "the connection has no such remote region");
  Operation operation;
  operation.op = op;
  Status status = regions_.use(*local, op.local_offset, op.length, &operation.local);
  if (!status.ok()) return status;
  operation.request = {kMagic,    op.opcode, (*remote)->region_id,    op.remote_offset,
                       op.length, {},        (*connection)->session()};
  std::memcpy(operation.request.key, (*remote)->key.data(), (*remote)->key.size());
  (*connection)->submit(std::move(operation));
  return {};
}

void Endpoint::cancel(uint64_t cookie) {
  std::lock_guard lock(mutex_);
  for (const auto& connection : open_) connection->cancel(cookie);
}

// -------------------------------------------------------------------------------- writes that were left

// Names the connection's session to the target while a socket may hold bytes of a write that ended.
Status Endpoint::late_writes(mc_handle connection, void* token, size_t* length) const {
  const std::shared_ptr<Connection>* found = connections_.find(connection);
  if (found == nullptr) return unknown_connection();
  if (!(*found)->has_late_writes()) {
    *length = 0;
    return {};
  }
  uint64_t session = (*found)->session();
  return mooncake::driver::copy_out(&session, sizeof session, token, length);
}

Status Endpoint::fence(const void* token, size_t length, uint64_t deadline_ns) {
  uint64_t session;
  if (length != sizeof session) return failed(MC_INVALID, "not a token of the template driver");
  std::memcpy(&session, token, sizeof session);
  if (target_.end_session(session, deadline_ns)) return {};
  return failed(MC_TIMEOUT, "a peer's connection is still being served");
}

}  // namespace template_driver
