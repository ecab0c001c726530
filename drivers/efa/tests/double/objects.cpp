// The objects of the double: what libfabric's functions and operation tables do.
#include <cstdlib>
#include <cstring>

#include "double.hpp"

// A program that counts allocations has this: what happens between 1 and -1 is the double's.
extern "C" __attribute__((weak)) void double_at_work(int more);

namespace fabric_double {
namespace {

// Whoever uses a queue or what is bound to it, alone.
class Alone {
 public:
  explicit Alone(Queue& queue) : queue_(queue) {
    if (queue_.inside.fetch_add(1, std::memory_order_acquire) != 0)
      broken_rule("two threads at once: FI_THREAD_COMPLETION");
    if (double_at_work != nullptr) double_at_work(1);
  }
  ~Alone() {
    if (double_at_work != nullptr) double_at_work(-1);
    queue_.inside.fetch_sub(1, std::memory_order_release);
  }

 private:
  Queue& queue_;
};

template <class Object>
Object& of(void* handle) {
  return *reinterpret_cast<Object*>(handle);  // the handle is its first member
}

int no_bind(fi::Fid*, fi::Fid*, uint64_t) { return -ENOSYS; }
int no_control(fi::Fid*, int, void*) { return -ENOSYS; }

// ---- completion queues

ssize_t read_queue(fi::Queue* handle, void* buffer, size_t count) {
  Queue& queue = of<Queue>(handle);
  Network& network = Network::get();
  Alone alone(queue);
  auto* out = static_cast<fi::QueueEntry*>(buffer);
  size_t taken = 0;
  for (; taken < count && queue.count > 0; --queue.count) {
    out[taken++] = queue.at_once[queue.first];
    queue.first = (queue.first + 1) % queue.at_once.size();
  }
  if (taken > 0) return static_cast<ssize_t>(taken);
  std::lock_guard lock(network.mutex);
  network.advance();
  while (taken < count && !queue.ready.empty() && queue.ready.front().error == 0) {
    out[taken++] = queue.ready.front().entry;
    queue.ready.pop_front();
  }
  if (taken > 0) return static_cast<ssize_t>(taken);
  return queue.ready.empty() ? -EAGAIN : -fi::kErrorAvailable;
}

ssize_t read_error(fi::Queue* handle, fi::ErrorEntry* entry, uint64_t) {
  Queue& queue = of<Queue>(handle);
  Alone alone(queue);
  std::lock_guard lock(Network::get().mutex);
  if (queue.ready.empty() || queue.ready.front().error == 0) return -EAGAIN;
  entry->op_context = queue.ready.front().entry.op_context;
  entry->flags = queue.ready.front().entry.flags;
  entry->err = queue.ready.front().error;
  queue.ready.pop_front();
  return 1;
}

int close_queue(fi::Fid* handle) {
  delete &of<Queue>(handle);
  return 0;
}

fi::FidOps queue_fid_ops{sizeof(fi::FidOps), close_queue, no_bind, no_control, {}};
fi::QueueOps queue_ops{sizeof(fi::QueueOps), read_queue, nullptr, read_error};

int open_queue(fi::Domain*, fi::QueueAttr* wanted, fi::Queue** made, void*) {
  if (wanted->wait_obj != fi::kNoWait) return -ENOSYS;
  if (wanted->format != fi::kQueueData) return -EINVAL;
  auto* queue = new Queue;
  queue->at_once.resize(wanted->size);
  queue->handle.fid.ops = &queue_fid_ops;
  queue->handle.ops = &queue_ops;
  *made = &queue->handle;
  return 0;
}

// ---- address tables

int insert(fi::AddressTable* handle, const void* address, size_t count, fi::Address* out, uint64_t, void*) {
  if (count != 1) return -EINVAL;
  Addresses& table = of<Addresses>(handle);
  uint64_t number = 0;
  std::memcpy(&number, address, sizeof number);
  table.known.push_back(number);
  *out = table.known.size() - 1;
  return 1;
}

int close_addresses(fi::Fid* handle) {
  delete &of<Addresses>(handle);
  return 0;
}

fi::FidOps addresses_fid_ops{sizeof(fi::FidOps), close_addresses, no_bind, no_control, {}};
const char* write_address(fi::AddressTable*, const void* address, char* text, size_t* length) {
  uint64_t number = 0;
  std::memcpy(&number, address, sizeof number);
  *length = static_cast<size_t>(
                std::snprintf(text, *length, "double://%llu", static_cast<unsigned long long>(number))) +
            1;
  return text;
}

fi::AddressTableOps addresses_ops{sizeof(fi::AddressTableOps), insert, {}, write_address};

int open_addresses(fi::Domain*, fi::AddressTableAttr*, fi::AddressTable** made, void*) {
  auto* table = new Addresses;
  table->handle.fid.ops = &addresses_fid_ops;
  table->handle.ops = &addresses_ops;
  *made = &table->handle;
  return 0;
}

// ---- memory

int close_memory(fi::Fid* handle) {
  Network& network = Network::get();
  std::lock_guard lock(network.mutex);
  Memory& memory = of<Memory>(handle);
  network.memory.erase(memory.handle.key);
  delete &memory;
  return 0;
}

fi::FidOps memory_fid_ops{sizeof(fi::FidOps), close_memory, no_bind, no_control, {}};

int register_memory(fi::Fid*, const fi::MemoryAttr* wanted, uint64_t, fi::Memory** made) {
  if (wanted->requested_key != 0) return -EINVAL;  // FI_MR_PROV_KEY: not for the caller to choose
  Network& network = Network::get();
  std::lock_guard lock(network.mutex);
  int device = network.gpu_of(wanted->mr_iov->iov_base);
  if (wanted->iface != (device < 0 ? fi::kSystem : fi::kCuda))
    broken_rule("memory of a GPU is registered as main memory, or the other way round: FI_MR_HMEM");
  if (device >= 0 && wanted->device.cuda != device) broken_rule("memory is registered as of another GPU");
  network.gpu_registrations += device >= 0;
  auto* memory = new Memory;
  memory->handle.fid.ops = &memory_fid_ops;
  memory->start = reinterpret_cast<uint64_t>(wanted->mr_iov->iov_base);
  memory->length = wanted->mr_iov->iov_len;
  memory->access = wanted->access;
  memory->handle.key = network.next_key++;
  memory->handle.mem_desc = memory;
  network.memory[memory->handle.key] = memory;
  *made = &memory->handle;
  return 0;
}

void check_local(void* descriptor, const void* buffer, size_t length, uint64_t access) {
  const auto* memory = static_cast<const Memory*>(descriptor);
  auto address = reinterpret_cast<uint64_t>(buffer);
  Network& network = Network::get();
  if (memory == nullptr && network.needs_local) broken_rule("no descriptor of local memory: FI_MR_LOCAL");
  if (memory == nullptr && network.gpu_of(buffer) >= 0)
    broken_rule("no descriptor of local memory of a GPU: FI_MR_HMEM");
  if (memory == nullptr) return;
  if (address < memory->start || address + length > memory->start + memory->length)
    broken_rule("the local range is outside the memory of its descriptor");
  if ((memory->access & access) != access) broken_rule("local memory is used as it was not registered for");
}

// ---- endpoints

void begin(Port& port, Item&& item, uint64_t flags) {
  Network& network = Network::get();
  if (item.context == nullptr || !network.contexts.insert(item.context).second)
    broken_rule("a context is missing or in use: FI_CONTEXT2");
  ++port.under_way;
  ++network.posted;
  port.behind.push_back(std::move(item));
  if ((flags & fi::kMore) != 0) return;
  ++network.doorbells;
  for (Item& each : port.behind) network.items.push_back(std::move(each));
  port.behind.clear();
}

uint64_t target_of(const Port& port, fi::Address peer) {
  if (peer >= port.addresses->known.size()) broken_rule("an address that was never inserted");
  return port.addresses->known[peer];
}

ssize_t send(fi::Endpoint* handle, const void* buffer, size_t length, void* descriptor, fi::Address peer,
             void* context) {
  Port& port = of<Port>(handle);
  Alone alone(*port.queue);
  Network& network = Network::get();
  std::lock_guard lock(network.mutex);
  if (port.under_way >= port.limit) return -EAGAIN;
  check_local(descriptor, buffer, length, fi::kSend);
  Item item;
  item.source = &port;
  item.target = target_of(port, peer);
  item.context = context;
  item.bytes.assign(static_cast<const char*>(buffer), static_cast<const char*>(buffer) + length);
  begin(port, std::move(item), 0);
  if (network.at_once) {
    while (!network.items.empty()) network.advance();
  }
  return 0;
}

ssize_t receive(fi::Endpoint* handle, void* buffer, size_t length, void* descriptor, fi::Address,
                void* context) {
  Port& port = of<Port>(handle);
  Alone alone(*port.queue);
  Network& network = Network::get();
  std::lock_guard lock(network.mutex);
  check_local(descriptor, buffer, length, fi::kReceive);
  if (!network.contexts.insert(context).second)
    broken_rule("the context of a receive is in use: FI_CONTEXT2");
  port.receives.push_back({buffer, length, context});
  if (port.unread.empty()) return 0;
  Item item = std::move(port.unread.front());
  port.unread.pop_front();
  network.items.push_back(std::move(item));
  return 0;
}

ssize_t move(fi::Endpoint* handle, const fi::RmaMessage* message, uint64_t flags, Item::What what) {
  Port& port = of<Port>(handle);
  Alone alone(*port.queue);
  Network& network = Network::get();
  if (network.at_once) {
    Queue& queue = *port.queue;
    if (queue.count == queue.at_once.size()) return -EAGAIN;
    fi::QueueEntry& entry = queue.at_once[(queue.first + queue.count++) % queue.at_once.size()];
    entry.op_context = message->context;
    entry.flags = fi::kRma | (what == Item::What::kRead ? fi::kRead : fi::kWrite);
    ++network.posted;
    network.doorbells += (flags & fi::kMore) == 0;
    return 0;
  }
  std::lock_guard lock(network.mutex);
  if (port.under_way >= port.limit) return -EAGAIN;
  const iovec& local = *message->msg_iov;
  const fi::RemoteRange& remote = *message->rma_iov;
  if (message->iov_count != 1 || message->rma_iov_count != 1 || local.iov_len != remote.len ||
      local.iov_len > kMaxBytes)
    broken_rule("an operation longer than FI_OPT_MAX_RMA_SIZE, or of several pieces");
  bool reads = what == Item::What::kRead;
  check_local(*message->desc, local.iov_base, local.iov_len, reads ? fi::kRead : fi::kWrite);
  Item item;
  item.what = what;
  item.source = &port;
  item.target = target_of(port, message->addr);
  item.local = local.iov_base;
  item.length = local.iov_len;
  item.remote = remote.addr;
  item.key = remote.key;
  item.has_data = (flags & fi::kRemoteData) != 0;
  item.data = message->data;
  if (item.data >> 32 != 0) broken_rule("data of more than 32 bits goes with a write");
  item.context = message->context;
  begin(port, std::move(item), flags);
  return 0;
}

ssize_t read_memory(fi::Endpoint* handle, const fi::RmaMessage* message, uint64_t flags) {
  return move(handle, message, flags, Item::What::kRead);
}
ssize_t write_memory(fi::Endpoint* handle, const fi::RmaMessage* message, uint64_t flags) {
  return move(handle, message, flags, Item::What::kWrite);
}

int get_name(fi::Fid* handle, void* address, size_t* length) {
  uint64_t number = of<Port>(handle).address;
  if (*length < sizeof number) return -fi::kTooSmall;
  std::memcpy(address, &number, sizeof number);
  *length = sizeof number;
  return 0;
}

int get_option(fi::Fid*, int, int option, void* value, size_t* length) {
  constexpr int kMaxRmaSize = 14;
  if (option != kMaxRmaSize || *length < sizeof(size_t)) return -ENOPROTOOPT;
  std::memcpy(value, &kMaxBytes, sizeof kMaxBytes);
  return 0;
}
int set_option(fi::Fid*, int, int, const void*, size_t) { return -ENOPROTOOPT; }

int bind_port(fi::Fid* handle, fi::Fid* other, uint64_t flags) {
  Port& port = of<Port>(handle);
  if (flags == 0)
    port.addresses = &of<Addresses>(other);
  else
    port.queue = &of<Queue>(other);
  return 0;
}

int control_port(fi::Fid* handle, int command, void*) {
  Port& port = of<Port>(handle);
  if (command != fi::kEnable || port.queue == nullptr || port.addresses == nullptr) return -EINVAL;
  Network& network = Network::get();
  std::lock_guard lock(network.mutex);
  port.address = network.next_address++;
  network.ports[port.address] = &port;
  return 0;
}

// What it sent stays on its way and nobody learns of the end; what was not rung for is gone.
int close_port(fi::Fid* handle) {
  Port& port = of<Port>(handle);
  Network& network = Network::get();
  Alone alone(*port.queue);
  std::lock_guard lock(network.mutex);
  network.ports.erase(port.address);
  for (const Receive& each : port.receives) network.contexts.erase(each.context);
  for (const Item& each : port.behind) network.contexts.erase(each.context);
  for (Item& item : port.unread) network.finish(item, EHOSTUNREACH);
  for (Item& item : network.items) {
    if (item.source != &port) continue;
    network.contexts.erase(item.context);
    item.source = nullptr;
    if (item.what == Item::What::kWrite)
      item.bytes.assign(static_cast<char*>(item.local), static_cast<char*>(item.local) + item.length);
  }
  for (auto& [address, other] : network.ports) {
    for (Item& item : other->unread) item.source = item.source == &port ? nullptr : item.source;
  }
  delete &port;
  return 0;
}

fi::FidOps port_fid_ops{sizeof(fi::FidOps), close_port, bind_port, control_port, {}};
fi::EndpointOps port_ops{sizeof(fi::EndpointOps), nullptr, get_option, set_option};
fi::ConnectionOps port_cm_ops = [] {
  fi::ConnectionOps ops{};
  ops.size = sizeof ops;
  ops.getname = get_name;
  return ops;
}();
fi::MessageOps port_msg_ops = [] {
  fi::MessageOps ops{};
  ops.size = sizeof ops;
  ops.send = send;
  ops.recv = receive;
  return ops;
}();
fi::RmaOps port_rma_ops = [] {
  fi::RmaOps ops{};
  ops.size = sizeof ops;
  ops.readmsg = read_memory;
  ops.writemsg = write_memory;
  return ops;
}();

int open_port(fi::Domain*, fi::Info* info, fi::Endpoint** made, void*) {
  auto* port = new Port;
  port->limit = info->tx_attr->size;
  port->handle.fid.ops = &port_fid_ops;
  port->handle.ops = &port_ops;
  port->handle.cm = &port_cm_ops;
  port->handle.msg = &port_msg_ops;
  port->handle.rma = &port_rma_ops;
  *made = &port->handle;
  return 0;
}

// ---- domain and fabric

int close_domain(fi::Fid* handle) {
  delete &of<Domain>(handle);
  return 0;
}

fi::FidOps domain_fid_ops{sizeof(fi::FidOps), close_domain, no_bind, no_control, {}};
fi::DomainOps domain_ops = [] {
  fi::DomainOps ops{};
  ops.size = sizeof ops;
  ops.av_open = open_addresses;
  ops.cq_open = open_queue;
  ops.endpoint = open_port;
  return ops;
}();
fi::MemoryOps memory_ops{sizeof(fi::MemoryOps), {}, register_memory};

int open_domain(fi::Fabric*, fi::Info*, fi::Domain** made, void*) {
  auto* domain = new Domain;
  domain->handle.fid.ops = &domain_fid_ops;
  domain->handle.ops = &domain_ops;
  domain->handle.mr = &memory_ops;
  *made = &domain->handle;
  return 0;
}

int close_fabric(fi::Fid* handle) {
  delete &of<fi::Fabric>(handle);
  return 0;
}

fi::FidOps fabric_fid_ops{sizeof(fi::FidOps), close_fabric, no_bind, no_control, {}};
fi::FabricOps fabric_ops{sizeof(fi::FabricOps), open_domain};

char* copy(const char* text) { return text == nullptr ? nullptr : strdup(text); }

template <class Attributes>
Attributes* copy_of(const Attributes* from) {
  auto* made = static_cast<Attributes*>(std::calloc(1, sizeof(Attributes)));
  if (from != nullptr) std::memcpy(made, from, sizeof(Attributes));
  return made;
}

}  // namespace
}  // namespace fabric_double

using namespace fabric_double;

extern "C" __attribute__((visibility("default"))) fi::Info* fi_dupinfo(const fi::Info* from) {
  fi::Info* info = copy_of(from);
  info->next = nullptr;
  info->tx_attr = copy_of(from == nullptr ? nullptr : from->tx_attr);
  info->rx_attr = copy_of(from == nullptr ? nullptr : from->rx_attr);
  info->ep_attr = copy_of(from == nullptr ? nullptr : from->ep_attr);
  info->domain_attr = copy_of(from == nullptr ? nullptr : from->domain_attr);
  info->fabric_attr = copy_of(from == nullptr ? nullptr : from->fabric_attr);
  info->domain_attr->name = copy(info->domain_attr->name);
  info->fabric_attr->name = copy(info->fabric_attr->name);
  info->fabric_attr->prov_name = copy(info->fabric_attr->prov_name);
  return info;
}

extern "C" __attribute__((visibility("default"))) void fi_freeinfo(fi::Info* info) {
  while (info != nullptr) {
    fi::Info* next = info->next;
    std::free(info->domain_attr->name);
    std::free(info->fabric_attr->name);
    std::free(info->fabric_attr->prov_name);
    std::free(info->tx_attr);
    std::free(info->rx_attr);
    std::free(info->ep_attr);
    std::free(info->domain_attr);
    std::free(info->fabric_attr);
    std::free(info);
    info = next;
  }
}

extern "C" __attribute__((visibility("default"))) int fi_fabric(fi::FabricAttr* wanted, fi::Fabric** made,
                                                                void*) {
  Network::get().opened = wanted->name;
  Network::get().needs_local = Network::get().opened == "efa-direct";
  auto* fabric = new fi::Fabric{};
  fabric->fid.ops = &fabric_fid_ops;
  fabric->ops = &fabric_ops;
  *made = fabric;
  return 0;
}

extern "C" __attribute__((visibility("default"))) const char* fi_strerror(int error) {
  return error < 256 ? ::strerror(error) : "an error of the double";
}
extern "C" __attribute__((visibility("default"))) uint32_t fi_version() { return fi::version(2, 0); }
