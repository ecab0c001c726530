#include "link.hpp"

#include <poll.h>

namespace mooncake::shm {
namespace {

Status gone() { return failed(MC_UNREACHABLE, "the peer has closed its endpoint or its process has ended"); }

}  // namespace

Status Link::check_alive() const {
  LifeSign::Answer answer = life ? life->ask() : LifeSign::Answer::kUnknown;
  if (answer == LifeSign::Answer::kAlive) return {};
  return answer == LifeSign::Answer::kGone ? gone() : check_socket();
}

Status Link::check_socket() const {
  // poll() passes over a negative descriptor: a missing pidfd needs no case of its own.
  pollfd watched[2] = {{channel.fd(), POLLRDHUP, 0}, {pidfd.get(), POLLIN, 0}};
  if (::poll(watched, 2, 0) > 0 && (watched[0].revents != 0 || watched[1].revents != 0)) {
    return gone();
  }
  return {};
}

}  // namespace mooncake::shm
