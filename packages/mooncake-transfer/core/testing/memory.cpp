#include "memory.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <stdexcept>

namespace mooncake::fake {

namespace {

constexpr size_t kChunkBytes = 1 << 20;

}  // namespace

Memory::Memory(const mc_memory& memory, bool cuda_is_host) : memory_(memory), cuda_is_host_(cuda_is_host) {
  if (is_file()) {
    fd_ = fcntl(memory.fd, F_DUPFD_CLOEXEC, 0);
    if (fd_ < 0) throw std::runtime_error(std::string("cannot keep the file open: ") + strerror(errno));
  }
  grant(memory.key, MC_ACCESS_READ | MC_ACCESS_WRITE);
}

Memory::~Memory() {
  if (fd_ >= 0) close(fd_);
}

void Memory::grant(const uint8_t* bytes, uint32_t access) {
  Key key{};
  std::memcpy(key.bytes, bytes, sizeof key.bytes);
  key.access = access;
  keys_.push_back(key);
}

int Memory::find(const uint8_t* bytes) const {
  for (size_t i = 0; i < keys_.size(); ++i) {
    if (std::memcmp(keys_[i].bytes, bytes, MC_KEY_BYTES) == 0) return static_cast<int>(i);
  }
  return -1;
}

Result Memory::admit(const uint8_t* bytes, mc_opcode opcode, uint64_t offset, uint64_t length,
                     int* key) const {
  *key = find(bytes);
  if (closing || *key < 0) return {MC_REFUSED, "the region is not registered, or the access key is wrong"};
  const Key& used = keys_[static_cast<size_t>(*key)];
  if (used.revoked) return {MC_REFUSED, "the access key was revoked"};
  uint32_t needed = opcode == MC_READ ? MC_ACCESS_READ : MC_ACCESS_WRITE;
  if ((used.access & needed) == 0) {
    return {MC_REFUSED,
            std::string("the access key does not allow ") + (opcode == MC_READ ? "reading" : "writing")};
  }
  if (!contains(offset, length)) {
    return {MC_REFUSED, "[" + std::to_string(offset) + ", +" + std::to_string(length) +
                            ") is outside the region of " + std::to_string(memory_.length) + " bytes"};
  }
  return {};
}

uint32_t Memory::uses() const {
  uint32_t total = 0;
  for (const Key& key : keys_) total += key.uses;
  return total;
}

char* Memory::bytes(uint64_t offset) const {
  bool here = memory_.kind == MC_DRAM || (memory_.kind == MC_CUDA && cuda_is_host_);
  return here ? reinterpret_cast<char*>(memory_.address + offset) : nullptr;
}

bool Memory::load(uint64_t offset, char* to, size_t size) const {
  if (const char* from = bytes(offset)) {
    std::memcpy(to, from, size);
    return true;
  }
  while (is_file() && size > 0) {
    ssize_t got = pread(fd_, to, size, static_cast<off_t>(memory_.fd_offset + offset));
    if (got < 0 && errno == EINTR) continue;
    if (got == 0) errno = ENODATA;  // the file is shorter than the region
    if (got <= 0) return false;
    to += got;
    offset += static_cast<uint64_t>(got);
    size -= static_cast<size_t>(got);
  }
  return true;
}

bool Memory::store(uint64_t offset, const char* from, size_t size) const {
  if (char* to = bytes(offset)) {
    std::memcpy(to, from, size);
    return true;
  }
  while (is_file() && size > 0) {
    ssize_t put = pwrite(fd_, from, size, static_cast<off_t>(memory_.fd_offset + offset));
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) return false;
    from += put;
    offset += static_cast<uint64_t>(put);
    size -= static_cast<size_t>(put);
  }
  return true;
}

Result move_bytes(const Memory& to, uint64_t to_offset, const Memory& from, uint64_t from_offset,
                  uint64_t size) {
  char* target = to.bytes(to_offset);
  const char* source = from.bytes(from_offset);
  if (target != nullptr && source != nullptr) {
    std::memmove(target, source, size);  // the two may be the same memory
    return {};
  }
  std::vector<char> buffer(std::min<uint64_t>(size, kChunkBytes));
  for (uint64_t done = 0; done < size;) {
    size_t chunk = std::min<uint64_t>(buffer.size(), size - done);
    bool moved = from.load(from_offset + done, buffer.data(), chunk) &&
                 to.store(to_offset + done, buffer.data(), chunk);
    if (!moved) return {MC_IO, std::string("a file could not be read or written: ") + strerror(errno)};
    done += chunk;
  }
  return {};
}

}  // namespace mooncake::fake
