#include "nvme_queue.hpp"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "crc32c.hpp"
#include "support/names.hpp"

namespace mooncake::nvmeof::nvme {
namespace {

Status broken(std::string why) { return failed(MC_UNREACHABLE, std::move(why)); }
Status garbage(const std::string& what) { return broken("protocol error: " + what); }

// Waits until the socket is ready for `events`; false at the deadline.
bool wait_for(int fd, short events, uint64_t deadline_ns) {
  for (;;) {
    uint64_t now = now_ns();
    if (now >= deadline_ns) return false;
    pollfd item{fd, events, 0};
    int ready =
        ::poll(&item, 1, static_cast<int>(std::min<uint64_t>((deadline_ns - now) / 1'000'000 + 1, 1000)));
    if (ready > 0) return true;
  }
}

Status open_socket(const std::string& host, const std::string& port, uint64_t deadline_ns, UniqueFd& out) {
  driver::Addresses found;
  if (Status status = driver::look_up(host, port, deadline_ns, found); !status.ok()) return status;
  std::string where = host + ":" + port;
  Status why = broken("no address of " + where);
  for (addrinfo* item = found.get(); item != nullptr; item = item->ai_next) {
    UniqueFd fd(::socket(item->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    int error = 0;
    socklen_t size = sizeof error;
    if (::connect(fd.get(), item->ai_addr, item->ai_addrlen) != 0) {
      error = errno;
      if (error == EINPROGRESS) {
        error = ETIMEDOUT;
        if (wait_for(fd.get(), POLLOUT, deadline_ns))
          getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &size);
      }
    }
    if (error == 0) {
      int on = 1;
      setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
      out = std::move(fd);
      why = {};
      break;
    }
    why = broken("cannot connect to " + where + ": " + std::generic_category().message(error));
  }
  return why;
}

Status move_all(int fd, void* bytes, size_t length, bool sending, uint64_t deadline_ns) {
  auto* at = static_cast<std::byte*>(bytes);
  while (length > 0) {
    ssize_t moved = sending ? send(fd, at, length, MSG_NOSIGNAL) : recv(fd, at, length, 0);
    if (moved > 0) {
      at += moved;
      length -= static_cast<size_t>(moved);
    } else if (moved == 0) {
      return broken("the target closed the connection during its initialization");
    } else if (errno != EAGAIN && errno != EINTR) {
      return system_failure(MC_UNREACHABLE, "the connection to the target broke", errno);
    } else if (!wait_for(fd, sending ? POLLOUT : POLLIN, deadline_ns)) {
      return broken("the target did not answer the initialization of a connection in time");
    }
  }
  return {};
}

}  // namespace

// ---------------------------------------------------------------------------------------------- connecting

Status Queue::connect(const QueueSettings& settings, uint64_t deadline_ns) {
  UniqueFd socket;
  if (Status status = open_socket(settings.host, settings.port, deadline_ns, socket); !status.ok())
    return status;
  adopt(std::move(socket), settings.depth, 0, 4096);
  return exchange_initialize(settings, deadline_ns);
}

void Queue::adopt(UniqueFd socket, uint16_t depth, uint8_t digests, uint32_t most_data) {
  socket_ = std::move(socket);
  depth_ = depth;
  digests_ = digests;
  most_data_ = most_data;
  slots_.assign(depth, nullptr);
  free_.clear();
  for (uint16_t i = depth; i > 0; --i) free_.push_back(static_cast<uint16_t>(i - 1));
}

Status Queue::exchange_initialize(const QueueSettings& settings, uint64_t deadline_ns) {
  Initialize request{};
  request.header = {kIcReq, 0, sizeof request, 0, sizeof request};
  request.digests = static_cast<uint8_t>((settings.header_digest ? kHeaderDigest : 0) |
                                         (settings.data_digest ? kDataDigest : 0));
  Status status = move_all(fd(), &request, sizeof request, true, deadline_ns);
  if (!status.ok()) return status;
  Initialize answer{};
  status = move_all(fd(), &answer, sizeof answer, false, deadline_ns);
  if (!status.ok()) return status;
  const Header& header = answer.header;
  if (header.type != kIcResp || header.header_length != sizeof answer || header.length != sizeof answer)
    return garbage("its first PDU is no ICResp");
  if (answer.version != 0) return broken("the target speaks another version of NVMe/TCP");
  if (answer.digests != request.digests)
    return broken("the target does not agree to the digests asked for; change the options");
  if (answer.limit < 4096) return garbage("it takes less than 4096 bytes of data in a PDU");
  if (answer.alignment > 31) return garbage("its alignment of data is larger than 128");
  digests_ = answer.digests;
  most_data_ = answer.limit & ~3u;
  data_unit_ = 4u * (answer.alignment + 1u);
  return {};
}

// ---------------------------------------------------------------------------------------------- sending

Status Queue::start(Command& command) {
  uint16_t id = free_.back();
  free_.pop_back();
  slots_[id] = &command;
  ++running_;
  command.begun_ns = now_ns();
  command.moved = 0;
  Capsule capsule{};
  bool inside = command.to_target && command.length > 0 && command.length <= in_capsule_;
  command.entry.id = id;
  command.entry.flags = kSglFlags;
  command.entry.data_address = 0;
  command.entry.data_length = command.length;
  command.entry.data_kind = inside ? kSglInCapsule : kSglTransport;
  capsule.header.type = kCapsuleCmd;
  capsule.command = command.entry;
  enqueue(&capsule, sizeof capsule, 0, inside ? command.memory : nullptr, inside ? command.length : 0);
  if (inside) command.moved = command.length;
  return flush();
}

void Queue::enqueue(const void* pdu, uint32_t length, uint8_t flags, const std::byte* data,
                    uint32_t data_length) {
  Outgoing& out = outgoing_.emplace_back();
  std::memset(out.head.data(), 0, out.head.size());
  std::memcpy(out.head.data(), pdu, length);
  uint32_t head = length + ((digests_ & kHeaderDigest) != 0 ? 4 : 0);
  out.head_length = head;
  if (data_length > 0) {
    out.head_length = (head + data_unit_ - 1) / data_unit_ * data_unit_;
    if (out.head_length > out.head.size()) out.head_length = head;  // cannot be: 76 bytes and units of 128
    out.data = data;
    out.data_length = data_length;
    out.has_digest = (digests_ & kDataDigest) != 0;
    if (out.has_digest) out.data_digest = crc32c(0, data, data_length);
  }
  Header header;
  std::memcpy(&header, pdu, sizeof header);
  header.flags =
      static_cast<uint8_t>(flags | (digests_ & kHeaderDigest) | (out.has_digest ? kDataDigest : 0));
  header.header_length = static_cast<uint8_t>(length);
  header.data_offset = static_cast<uint8_t>(data_length > 0 ? out.head_length : 0);
  header.length = static_cast<uint32_t>(out.total());
  std::memcpy(out.head.data(), &header, sizeof header);
  if ((digests_ & kHeaderDigest) != 0) {
    uint32_t digest = crc32c(0, out.head.data(), length);
    std::memcpy(out.head.data() + length, &digest, sizeof digest);
  }
}

Status Queue::flush() {
  while (wants_write()) {
    iovec parts[48];
    size_t count = 0;
    for (size_t i = first_out_; i < outgoing_.size() && count + 3 <= 48; ++i) {
      Outgoing& out = outgoing_[i];
      size_t skip = out.sent;
      auto add = [&](const void* bytes, size_t length) {
        size_t gone = std::min(skip, length);
        skip -= gone;
        if (length > gone)
          parts[count++] = {const_cast<std::byte*>(static_cast<const std::byte*>(bytes)) + gone,
                            length - gone};
      };
      add(out.head.data(), out.head_length);
      add(out.data, out.data_length);
      if (out.has_digest) add(&out.data_digest, 4);
    }
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = count;
    ssize_t sent = sendmsg(fd(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return {};
    if (sent < 0) return system_failure(MC_UNREACHABLE, "the connection to the target broke", errno);
    auto left = static_cast<size_t>(sent);
    while (left > 0) {
      Outgoing& out = outgoing_[first_out_];
      size_t part = std::min(left, out.total() - out.sent);
      out.sent += part;
      left -= part;
      if (out.sent == out.total()) ++first_out_;
    }
    drop_sent();
  }
  return {};
}

void Queue::drop_sent() {
  if (first_out_ == outgoing_.size()) {
    outgoing_.clear();
    first_out_ = 0;
  } else if (first_out_ >= depth_) {  // a queue that is never empty must not grow for ever
    outgoing_.erase(outgoing_.begin(), outgoing_.begin() + static_cast<ptrdiff_t>(first_out_));
    first_out_ = 0;
  }
}

// ---------------------------------------------------------------------------------------------- receiving

// Data goes straight to its place; behind it in the same call comes the head of what follows.
Status Queue::receive(std::vector<Command*>& over) {
  for (;;) {
    iovec parts[2];
    size_t count = 0;
    if (data_left_ > 0)
      parts[count++] = {receiving_->memory + incoming_.offset + (incoming_.length - data_left_), data_left_};
    if (begin_ > 0) {
      std::memmove(buffer_.data(), buffer_.data() + begin_, end_ - begin_);
      end_ -= begin_;
      begin_ = 0;
    }
    parts[count++] = {buffer_.data() + end_, buffer_.size() - end_};
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = count;
    ssize_t got = recvmsg(fd(), &message, MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return {};
    if (got < 0) return system_failure(MC_UNREACHABLE, "the connection to the target broke", errno);
    if (got == 0) return broken("the target closed the connection");
    auto bytes = static_cast<uint32_t>(got);
    uint32_t placed = std::min(bytes, data_left_);
    if (placed > 0) {
      if (digest_due_) data_crc_ = crc32c(data_crc_, parts[0].iov_base, placed);
      data_left_ -= placed;
    }
    end_ += bytes - placed;
    if (Status status = on_bytes(over); !status.ok()) return status;
  }
}

Status Queue::on_bytes(std::vector<Command*>& over) {
  for (;;) {
    size_t have = end_ - begin_;
    const std::byte* at = buffer_.data() + begin_;
    if (receiving_ != nullptr) {  // in the middle of a C2HData
      auto placed = static_cast<uint32_t>(std::min<size_t>(have, data_left_));
      if (placed > 0) {
        std::memcpy(receiving_->memory + incoming_.offset + (incoming_.length - data_left_), at, placed);
        if (digest_due_) data_crc_ = crc32c(data_crc_, at, placed);
        data_left_ -= placed;
        begin_ += placed;
        continue;
      }
      if (data_left_ > 0) return {};
      if (digest_due_ && have < 4) return {};
      if (digest_due_) {
        if (number_at<uint32_t>(at, 0) != data_crc_)
          return broken("data from the target arrived with a wrong digest");
        begin_ += 4;
      }
      if (Status status = on_data_end(over); !status.ok()) return status;
      continue;
    }
    if (have < sizeof(Header)) return {};
    auto header = number_at<Header>(at, 0);
    if (Status status = check_header(header); !status.ok()) return status;
    size_t digest = (digests_ & kHeaderDigest) != 0 ? 4 : 0;
    bool with_data = header.type == kC2hData;
    size_t whole = with_data ? header.data_offset : header.header_length + digest;
    if (header.type == kC2hTermReq) whole = header.header_length;  // it has no digest
    if (have < whole) return {};
    if (digest > 0 && header.type != kC2hTermReq &&
        number_at<uint32_t>(at, header.header_length) != crc32c(0, at, header.header_length))
      return broken("a PDU of the target arrived with a wrong header digest");
    begin_ += whole;
    if (Status status = on_pdu(at, over); !status.ok()) return status;
  }
}

Status Queue::check_header(const Header& header) const {
  auto type = [&] { return "type " + std::to_string(header.type); };
  if (header.type == kC2hTermReq) return {};
  if (header.type != kCapsuleResp && header.type != kC2hData && header.type != kR2t)
    return garbage("a PDU of " + type());
  uint32_t digest = (digests_ & kHeaderDigest) != 0 ? 4 : 0;
  if (header.header_length != 24) return garbage("the header of a PDU of " + type() + " has a wrong length");
  if (((header.flags & kHeaderDigest) != 0) != (digest > 0))
    return garbage("a digest is missing or not agreed");
  if (header.type != kC2hData && header.length != 24 + digest)
    return garbage("a PDU of " + type() + " has a wrong length");
  if (header.type == kC2hData && (header.data_offset < 24 + digest || header.data_offset > 248))
    return garbage("the data of a PDU begins at a wrong place");
  return {};
}

Status Queue::on_pdu(const std::byte* pdu, std::vector<Command*>& over) {
  switch (static_cast<uint8_t>(pdu[0])) {
    case kCapsuleResp:
      return on_response(number_at<Response>(pdu, 0), over);
    case kC2hData:
      return on_data(number_at<Data>(pdu, 0));
    case kR2t:
      return on_r2t(number_at<Data>(pdu, 0));
    default:
      return broken("the target ended the connection: fatal error " +
                    std::to_string(number_at<uint16_t>(pdu, offsetof(Terminate, reason))));
  }
}

Status Queue::on_response(const Response& response, std::vector<Command*>& over) {
  Command* command = find(response.result.id);
  if (command == nullptr) return garbage("an answer to a command that is not under way");
  for (size_t i = first_out_; i < outgoing_.size(); ++i) {
    const Outgoing& out = outgoing_[i];
    if (out.data >= command->memory && out.data < command->memory + command->length && out.data != nullptr)
      return garbage("it answers a command whose data was not sent yet");
  }
  command->value = response.result.value;
  command->status = meaning(response.result.status);
  if (command->status.ok() && command->length > 0 && command->moved < command->length &&
      command->entry.opcode != kFabrics)
    return garbage("it reports success of a command whose data did not move");
  finish(*command, over);
  return {};
}

Status Queue::on_data(const Data& data) {
  Command* command = find(data.command);
  if (command == nullptr || command->to_target) return garbage("data for a command that reads nothing");
  if (data.length == 0 || data.offset > command->length || data.length > command->length - data.offset)
    return garbage("data beyond the length of its command");
  digest_due_ = (digests_ & kDataDigest) != 0;
  if (((data.header.flags & kDataDigest) != 0) != digest_due_)
    return garbage("a digest is missing or not agreed");
  if (data.header.length != data.header.data_offset + data.length + (digest_due_ ? 4u : 0u))
    return garbage("the length of a PDU is not that of its data");
  if ((data.header.flags & kSuccess) != 0 && (data.header.flags & kLastPdu) == 0)
    return garbage("success before the last data");
  incoming_ = data;
  receiving_ = command;
  data_left_ = data.length;
  data_crc_ = 0;
  return {};
}

Status Queue::on_data_end(std::vector<Command*>& over) {
  Command& command = *std::exchange(receiving_, nullptr);
  command.moved += incoming_.length;
  if (command.moved > command.length) return garbage("more data than its command asked for");
  if ((incoming_.header.flags & kSuccess) == 0) return {};
  if (command.moved != command.length) return garbage("success before all data came");
  command.status = {};
  finish(command, over);
  return {};
}

Status Queue::on_r2t(const Data& request) {
  Command* command = find(request.command);
  if (command == nullptr || !command->to_target)
    return garbage("it asks for data of a command that has none");
  if (request.length == 0 || request.offset != command->moved ||
      request.length > command->length - request.offset)
    return garbage("it asks for data out of order or beyond the length of its command");
  uint32_t sent = 0;
  while (sent < request.length) {
    uint32_t part = std::min(request.length - sent, most_data_);
    Data data{};
    data.header.type = kH2cData;
    data.command = request.command;
    data.tag = request.tag;
    data.offset = request.offset + sent;
    data.length = part;
    sent += part;
    enqueue(&data, sizeof data, sent == request.length ? kLastPdu : 0, command->memory + data.offset, part);
  }
  command->moved += request.length;
  return flush();
}

void Queue::finish(Command& command, std::vector<Command*>& over) {
  slots_[command.entry.id] = nullptr;
  free_.push_back(command.entry.id);
  --running_;
  over.push_back(&command);
}

void Queue::abandon(std::vector<Command*>& all) {
  outgoing_.clear();
  first_out_ = 0;
  receiving_ = nullptr;
  data_left_ = 0;
  for (Command*& command : slots_) {
    if (command != nullptr) all.push_back(std::exchange(command, nullptr));
  }
  running_ = 0;
  socket_.reset();
}

uint64_t Queue::oldest_ns() const {
  uint64_t oldest = 0;
  for (const Command* command : slots_) {
    if (command != nullptr && (oldest == 0 || command->begun_ns < oldest)) oldest = command->begun_ns;
  }
  return oldest;
}

}  // namespace mooncake::nvmeof::nvme
