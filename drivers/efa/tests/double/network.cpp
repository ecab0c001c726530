#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>

#include "double.hpp"

namespace fabric_double {

Network& Network::get() {
  static auto* network = new Network;  // the driver never unloads its library
  return *network;
}

void broken_rule(const char* what) {
  std::fprintf(stderr, "fabric double: %s\n", what);
  std::abort();
}

// Some tenth of it, or all when little: long orders stay possible, and nothing waits for ever.
void Network::advance() {
  if (items.empty()) return;
  size_t count = 1 + random() % (items.size() / 4 + 1);
  if (pace.count() > 0) {
    auto now = std::chrono::steady_clock::now();
    if (now - last < pace) return;
    last = now;
    count = 1;
  }
  for (; count > 0 && !items.empty(); --count) {
    size_t at = random() % items.size();
    Item item = std::move(items[at]);
    items[at] = std::move(items.back());
    items.pop_back();
    deliver(item);
  }
}

Memory* Network::find(uint64_t key, uint64_t address, uint64_t length, uint64_t access) {
  auto found = memory.find(key);
  if (found == memory.end()) return nullptr;
  Memory* region = found->second;
  bool inside = address >= region->start && length <= region->length &&
                address - region->start <= region->length - length;
  return inside && (region->access & access) == access ? region : nullptr;
}

int Network::gpu_of(const void* address) const {
  auto at = reinterpret_cast<uint64_t>(address);
  auto after = gpus.upper_bound(at);
  if (after == gpus.begin()) return -1;
  auto [end, device] = std::prev(after)->second;
  return at < end ? device : -1;
}

void Network::deliver(Item& item) {
  auto found = ports.find(item.target);
  if (found == ports.end()) return finish(item, EHOSTUNREACH);
  Port& target = *found->second;
  if (item.what == Item::What::kSend) {
    if (target.receives.empty()) {
      target.unread.push_back(std::move(item));
      return;
    }
    Receive receive = target.receives.front();
    target.receives.pop_front();
    if (item.bytes.size() > receive.length) broken_rule("a message is longer than the receive");
    std::memcpy(receive.buffer, item.bytes.data(), item.bytes.size());
    contexts.erase(receive.context);
    Completion completion;
    completion.entry.op_context = receive.context;
    completion.entry.flags = fi::kReceive | fi::kMessages;
    completion.entry.len = item.bytes.size();
    target.queue->ready.push_back(completion);
    return finish(item, 0);
  }
  bool writes = item.what == Item::What::kWrite;
  if (find(item.key, item.remote, item.length, writes ? fi::kRemoteWrite : fi::kRemoteRead) == nullptr)
    return finish(item, EKEYREJECTED);
  void* remote = reinterpret_cast<void*>(item.remote);
  if (!writes) {
    if (item.source != nullptr) std::memmove(item.local, remote, item.length);
  } else {
    std::memmove(remote, item.bytes.empty() ? item.local : item.bytes.data(), item.length);
  }
  if (item.has_data) {
    Completion completion;
    completion.entry.flags = fi::kRemoteData | fi::kRma | fi::kRemoteWrite;
    completion.entry.op_context = &item;  // whose, is not said; shm's is the sender's
    completion.entry.data = item.data;
    target.queue->ready.push_back(completion);
  }
  finish(item, 0);
}

void Network::finish(const Item& item, int error) {
  if (item.source == nullptr) return;
  --item.source->under_way;
  contexts.erase(item.context);
  Completion completion;
  completion.entry.op_context = item.context;
  completion.entry.flags = item.what == Item::What::kSend    ? fi::kSend | fi::kMessages
                           : item.what == Item::What::kWrite ? fi::kWrite | fi::kRma
                                                             : fi::kRead | fi::kRma;
  completion.error = error;
  item.source->queue->ready.push_back(completion);
}

}  // namespace fabric_double
