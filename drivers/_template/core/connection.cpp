#include "connection.hpp"

#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>

#include <cerrno>
#include <cmath>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

namespace template_driver {

void push(Completions& completions, const mc_op& op, const Status& status) {
  mooncake::driver::Completion ended;
  ended.cookie = op.cookie;
  ended.opcode = static_cast<mc_opcode>(op.opcode);
  if (status.ok())
    ended.bytes = op.length;
  else
    ended.fail(status);
  completions.push({&ended, 1});
}

Connection::Connection(const Address& peer, uint64_t session, double timeout_s, Completions& completions)
    : peer_(peer), session_(session), timeout_s_(timeout_s), completions_(completions), thread_([this] {
        work();
      }) {}

Connection::~Connection() {
  {
    std::lock_guard lock(mutex_);
    closing_ = true;
    if (socket_.valid()) shutdown(socket_.get(), SHUT_RDWR);
  }
  changed_.notify_all();
  thread_.join();
}

void Connection::submit(Operation operation) {
  std::lock_guard lock(mutex_);
  queue_.push_back(std::move(operation));
  changed_.notify_all();
}

void Connection::cancel(uint64_t cookie) {
  std::vector<Operation> cancelled;
  {
    std::lock_guard lock(mutex_);
    for (auto next = queue_.begin(); next != queue_.end();) {
      if (next->op.cookie == cookie) {
        cancelled.push_back(std::move(*next));
        next = queue_.erase(next);
      } else {
        ++next;
      }
    }
    if (busy_ && running_ == cookie) {
      // The only way out of a send or receive that the peer does not answer. The next operation dials again.
      interrupted_ = true;
      if (socket_.valid()) shutdown(socket_.get(), SHUT_RDWR);
    }
  }
  for (Operation& operation : cancelled) {
    operation.local = {};
    push(completions_, operation.op, failed(MC_CANCELLED, "the operation was cancelled"));
  }
}

void Connection::work() {
  mooncake::driver::prepare_thread("mc-connection");
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return closing_ || !queue_.empty(); });
    if (queue_.empty()) return;
    Operation operation = std::move(queue_.front());
    queue_.pop_front();
    busy_ = true;
    running_ = operation.op.cookie;
    const Status closed = failed(MC_CLOSED, "the connection was closed on this side");
    Status status = closed;
    if (!closing_) {
      lock.unlock();
      status = run(operation);
      lock.lock();
    }
    if (interrupted_ && !status.ok()) status = failed(MC_CANCELLED, "the operation was cancelled");
    if (closing_ && status.code == MC_UNREACHABLE) status = closed;
    // After a failure it is unknown how far the messages got; a new socket begins anew.
    if (interrupted_ || (!status.ok() && status.code != MC_REFUSED)) socket_.reset();
    busy_ = interrupted_ = false;
    lock.unlock();
    operation.local = {};  // before the completion is out
    push(completions_, operation.op, status);
    lock.lock();
  }
}

// The heart of the driver. Real hardware: post the operation, and push its completion when the device reports
// one.
Status Connection::run(const Operation& operation) {
  if (Status status = dial(); !status.ok()) return status;
  int socket = socket_.get();  // changed by this thread only
  const Status gone = failed(MC_UNREACHABLE, "the peer has gone away, or was silent for too long");
  Reply reply;
  Request request = operation.request;
  request.session = session_;
  if (!send_all(socket, &request, sizeof request)) return gone;
  if (!receive_all(socket, &reply, sizeof reply)) return gone;
  late_ = false;  // the target has ended the sockets before this one
  if (reply.status != MC_OK) return status_of(reply);
  char* local = operation.local.at(operation.op.local_offset);
  if (operation.op.opcode == MC_READ)
    return receive_all(socket, local, operation.op.length) ? Status{} : gone;
  late_ = true;  // until the target says that it has them all
  if (!send_all(socket, local, operation.op.length)) return gone;
  // A write is done when the target says that the bytes are in its memory, not when the socket took them.
  if (!receive_all(socket, &reply, sizeof reply)) return gone;
  late_ = false;
  return status_of(reply);
}

Status Connection::dial() {
  if (socket_.valid()) return {};
  UniqueFd made(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!made.valid()) return mooncake::driver::system_failure(MC_IO, "cannot create a socket", errno);
  // Every wait ends: a peer that neither sends nor receives for this long counts as gone.
  timeval limit{};
  limit.tv_sec = static_cast<time_t>(timeout_s_);
  limit.tv_usec = static_cast<suseconds_t>(std::fmod(timeout_s_, 1.0) * 1e6);
  setsockopt(made.get(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
  setsockopt(made.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  sockaddr_un name;
  unsigned length = fill_socket_address(peer_, &name);
  if (connect(made.get(), reinterpret_cast<sockaddr*>(&name), length) != 0)
    return mooncake::driver::system_failure(MC_UNREACHABLE, "no endpoint listens at the peer's address",
                                            errno);
  std::lock_guard lock(mutex_);
  socket_ = std::move(made);
  if (closing_ || interrupted_) shutdown(socket_.get(), SHUT_RDWR);
  return {};
}

}  // namespace template_driver
