#include "io.hpp"

#include <poll.h>
#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>

#include "nvme_queue.hpp"

namespace mooncake::nvmeof {
namespace {

constexpr double kStopLimitS = 30;
// The kernel rings a device's bell once for each system call: the device begins with the first operations of
// a batch while the next ones are made. More in one call leave it idle meanwhile.
constexpr uint32_t kGroup = 8;
constexpr size_t kRounds = 1 << 16;  // completions taken with the mutex held

Status stopped_status(const Job& job) {
  return job.status.ok() ? failed(MC_CANCELLED, "the operation was cancelled") : job.status;
}

}  // namespace

Io::Io(const Options& options, Completions& completions)
    : options_(options),
      completions_(completions),
      pool_(options_.workers, options_.durable,
            [this](Piece& piece, Status status) { finished(piece, std::move(status)); }) {}

Io::~Io() { stop(); }

Status Io::start() {
  if (options_.gpudirect) {
    auto over = [this](Piece& piece, Status status) { finished(piece, std::move(status)); };
    if (Status status = Gds::open(options_.workers, options_.durable, over, gds_); !status.ok())
      return status;
  }
  if (options_.io == "threads") {
    why_no_ring_ = "option io is threads";
    return {};
  }
  auto entries = static_cast<uint32_t>(std::min<uint64_t>(options_.queue_depth, 4096));
  if (Status status = Ring::open(entries, 0, ring_); !status.ok()) {
    why_no_ring_ = status.reason;
    return options_.io == "auto" ? Status{} : status;
  }
  if (options_.polled) {
    if (Status status = Ring::open(entries, uapi::kSetupIopoll, polled_ring_); !status.ok()) return status;
  }
  if (options_.passthrough) {
    Status status = Ring::open(entries, uapi::kSetupSqe128 | uapi::kSetupCqe32, command_ring_);
    if (status.ok() && !command_ring_->supports(uapi::kUringCmd))
      status =
          failed(MC_UNSUPPORTED, "the io_uring of this kernel passes no NVMe commands (Linux 5.19 does)");
    if (!status.ok()) return status;
  }
  // The ring is its own event; what threads finish shows in the other descriptor.
  events_.reset(epoll_create1(EPOLL_CLOEXEC));
  for (int fd : {ring_->fd(), completions_.event_fd(), command_ring_ ? command_ring_->fd() : -1}) {
    if (fd < 0) continue;
    epoll_event event{};
    event.events = EPOLLIN;
    if (!events_.valid() || epoll_ctl(events_.get(), EPOLL_CTL_ADD, fd, &event) != 0)
      return system_failure(MC_IO, "cannot watch for completions", errno);
  }
  return {};
}

void Io::stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  cancel([](const Job&) { return true; }, MC_CLOSED);
  uint64_t deadline = deadline_after(kStopLimitS);
  for (;;) {
    reap(Reaper::kOther);
    bool idle;
    {
      std::lock_guard lock(mutex_);
      idle = in_kernel() == 0;
    }
    if (idle || now_ns() > deadline) break;
    pollfd waiting{events_.get(), POLLIN, 0};
    ::poll(&waiting, 1, polled_ring_ ? 0 : 20);
  }
  pool_.stop();
  if (gds_) gds_->stop();
}

// ---------------------------------------------------------------------------------------------- beginning

Job& Io::new_job() {
  std::lock_guard lock(mutex_);
  if (free_ == nullptr) {
    slab_.emplace_back();
    return slab_.back();
  }
  Job& job = *free_;
  free_ = job.next;
  job.next = nullptr;
  return job;
}

void Io::begin(std::vector<Job*>& jobs) {
  Ended ended;
  {
    std::lock_guard lock(mutex_);
    for (Job* job : jobs) {
      job->previous = nullptr;
      job->next = active_;
      if (active_ != nullptr) active_->previous = job;
      active_ = job;
      divide(*job);
      if (stopping_) {
        job->status = failed(MC_CLOSED, "the endpoint is closed");
        job->left = 0;
        end_job(*job, ended);
        continue;
      }
      for (Piece* piece : {&job->head, &job->body, &job->tail}) {
        if (piece->length > 0) launch(*piece, ended);
      }
    }
    for (Ring* ring : {ring_.get(), polled_ring_.get(), command_ring_.get()}) {
      if (ring != nullptr && ring->unsubmitted() > 0) ring->submit();
    }
  }
  ended.publish(completions_);
}

// The pool can do everything, in order. What is aligned in the middle, and is most of it, need not wait
// there.
void Io::divide(Job& job) {
  const Device& device = *job.remote->device;
  uint64_t begin = job.body.offset, end = begin + job.length, unit = device.granule();
  std::byte* memory = job.body.memory;
  uint64_t first = up(begin, unit), last = std::min(down(end, unit), down(device.direct_limit(), unit));
  bool whole = unit > 1 && !job.local->on_gpu && first < last &&
               reinterpret_cast<uintptr_t>(memory + (first - begin)) % device.memory_align() == 0;
  job.left = 0;
  job.body = job.head = job.tail = Piece{};
  auto cut = [&](Piece& piece, uint64_t from, uint64_t to) {
    piece.job = &job;
    piece.memory = memory + (from - begin);
    piece.offset = from;
    piece.length = to - from;
    job.left += to > from;
  };
  if (!whole) {
    cut(job.body, begin, end);
  } else {
    cut(job.head, begin, first);
    cut(job.body, first, last);
    cut(job.tail, last, end);
  }
}

void Io::launch(Piece& piece, Ended& ended) {
  Job& job = *piece.job;
  Device& device = *job.remote->device;
  if (job.local->on_gpu) {
    if (Status status = gds_->add(piece); !status.ok()) end_piece(piece, std::move(status), ended);
    return;
  }
  uint64_t unit = device.granule();
  bool direct = unit == 1 || (piece.offset % unit == 0 && piece.length % unit == 0 &&
                              piece.offset + piece.length <= device.direct_limit() &&
                              reinterpret_cast<uintptr_t>(piece.memory) % device.memory_align() == 0);
  if (direct && device.start(*this, piece)) return;
  Ring* ring = direct ? ring_for(piece) : nullptr;
  if (ring != nullptr && queue(*ring, piece)) {
    piece.ring = ring;
    ++in_rings_[ring];
    return;
  }
  to_pool(piece, ended);
}

void Io::to_pool(Piece& piece, Ended& ended) {
  piece.ring = nullptr;
  if (Status status = pool_.add(piece); !status.ok()) end_piece(piece, std::move(status), ended);
}

Ring* Io::ring_for(const Piece& piece) const {
  const Device& device = *piece.job->remote->device;
  if (!ring_ || device.direct_fd() < 0 || piece.length > (1u << 30)) return nullptr;
  if (command_ring_ && device.command_fd(piece.length) >= 0) return command_ring_.get();
  return polled_ring_ && polling_ && device.granule() > 1 ? polled_ring_.get() : ring_.get();
}

size_t Io::in_kernel() const {
  size_t all = 0;
  for (const auto& [ring, count] : in_rings_) all += count;
  return all;
}

void Io::fill_command(uapi::Sqe& sqe, const Piece& piece, bool durable) {
  const Job& job = *piece.job;
  const Device& device = *job.remote->device;
  sqe.opcode = uapi::kUringCmd;
  sqe.fd = device.command_fd(piece.length);
  sqe.offset = uapi::kNvmeIo;
  uint64_t block = piece.offset / device.granule();
  uapi::NvmeCommand command{};
  command.opcode = job.opcode == MC_READ ? nvme::kReadBlocks : nvme::kWriteBlocks;
  command.nsid = device.nsid();
  command.address = reinterpret_cast<uint64_t>(piece.memory);
  command.data_length = static_cast<uint32_t>(piece.length);
  command.cdw10 = static_cast<uint32_t>(block);
  command.cdw11 = static_cast<uint32_t>(block >> 32);
  command.cdw12 = static_cast<uint32_t>(piece.length / device.granule() - 1);
  if (job.opcode == MC_WRITE && durable) command.cdw12 |= nvme::kForceUnitAccess;
  std::memcpy(reinterpret_cast<std::byte*>(&sqe) + offsetof(uapi::Sqe, command), &command, sizeof command);
  sqe.user_data = reinterpret_cast<uint64_t>(&piece);
}

bool Io::queue(Ring& ring, Piece& piece) {
  Job& job = *piece.job;
  if (ring.unsubmitted() >= kGroup) ring.submit();
  uapi::Sqe* sqe = ring.next();
  if (sqe == nullptr) return false;
  if (&ring == command_ring_.get()) {
    fill_command(*sqe, piece, options_.durable);
    return true;
  }
  Device& device = *job.remote->device;
  int buffer = &ring == ring_.get() ? buffer_slot(*job.local, piece) : -1;
  bool read = job.opcode == MC_READ;
  sqe->opcode =
      buffer >= 0 ? (read ? uapi::kReadFixed : uapi::kWriteFixed) : (read ? uapi::kRead : uapi::kWrite);
  sqe->fd = device.direct_fd();
  int file = &ring == ring_.get() ? file_slot(device) : -1;
  if (file >= 0) {
    sqe->fd = file;
    sqe->flags = uapi::kSqeFixedFile;
  }
  sqe->offset = piece.offset;
  sqe->address = reinterpret_cast<uint64_t>(piece.memory);
  sqe->length = static_cast<uint32_t>(piece.length);
  sqe->op_flags = !read && options_.durable ? kRwfDsync : 0;
  sqe->user_data = reinterpret_cast<uint64_t>(&piece);
  if (buffer >= 0) sqe->buffer_index = static_cast<uint16_t>(buffer);
  return true;
}

int Io::buffer_slot(Region& region, const Piece& piece) {
  if (!options_.register_buffers || region.memory == nullptr) return -1;
  auto begin = static_cast<uint64_t>(piece.memory - region.memory);
  uint64_t span = begin / BufferSlots::kSpan;
  if ((begin + piece.length - 1) / BufferSlots::kSpan != span) return -1;
  auto& slots = region.buffers.slots;
  if (slots.empty()) slots.assign(region.length / BufferSlots::kSpan + 1, BufferSlots::kUntried);
  int& slot = slots[span];
  if (slot == BufferSlots::kUntried) {
    uint64_t from = span * BufferSlots::kSpan;
    slot = ring_->add_buffer(region.memory + from, std::min(BufferSlots::kSpan, region.length - from));
    if (slot < 0) slot = BufferSlots::kNone;
  }
  return slot;
}

int Io::file_slot(Device& device) {
  auto [found, fresh] = files_.try_emplace(device.serial(), -1);
  if (fresh) found->second = ring_->add_file(device.direct_fd());
  return found->second;
}

Status Io::prepare(Region& region, int device) {
  if (gds_) return gds_->add_memory(region, device);
  return failed(MC_UNSUPPORTED, "the nvmeof driver moves GPU memory with the option gpudirect only");
}

void Io::forget(Region& region) {
  if (region.on_gpu) return gds_->remove_memory(region);
  std::lock_guard lock(mutex_);
  for (int slot : region.buffers.slots) {
    if (slot >= 0) ring_->remove_buffer(slot);
  }
  region.buffers.slots.clear();
}

void Io::forget(Device& device) {
  if (gds_) gds_->forget(device);
  std::lock_guard lock(mutex_);
  auto found = files_.find(device.serial());
  if (found == files_.end()) return;
  if (found->second >= 0) ring_->remove_file(found->second);
  files_.erase(found);
}

// ---------------------------------------------------------------------------------------------- ending

void Io::reap(Reaper reaper) {
  if (!ring_) return;
  Ended ended;
  {
    std::lock_guard lock(mutex_);
    for (const auto& [ring, count] : in_rings_) {
      if (count == 0) continue;
      if (ring == polled_ring_.get()) ring->look();
      take_all(*ring, ended);
    }
  }
  ended.publish(completions_, reaper);
}

void Io::take_all(Ring& ring, Ended& ended) {
  if (ring.overflown()) ring.look();
  uapi::Cqe cqe;
  for (size_t i = 0; i < kRounds && ring.take(cqe); ++i) {
    auto* piece = reinterpret_cast<Piece*>(cqe.user_data);
    --in_rings_[&ring];
    if (piece != &nobody_) on_result(*piece, cqe.result, ended);
  }
  if (ring.unsubmitted() > 0) ring.submit();
}

void Io::on_result(Piece& piece, int result, Ended& ended) {
  Job& job = *piece.job;
  const Device& device = *job.remote->device;
  if (piece.ring == command_ring_.get()) {
    if (result == 0) return end_piece(piece, {}, ended);
    if (result > 0) {
      Status told = nvme::meaning(static_cast<uint16_t>(result << 1));
      std::string why = device.failure(job.opcode, piece.offset, piece.length, told.reason).reason;
      return end_piece(piece, failed(told.code, std::move(why)), ended);
    }
  }
  if (piece.ring == polled_ring_.get() && result == -EOPNOTSUPP) polling_ = false;
  if (result > 0 && static_cast<uint64_t>(result) >= piece.length) return end_piece(piece, {}, ended);
  if (job.stopped) return end_piece(piece, stopped_status(job), ended);
  if (result > 0) {  // the rest, which may not be aligned any more
    piece.memory += result;
    piece.offset += static_cast<uint64_t>(result);
    piece.length -= static_cast<uint64_t>(result);
  }
  // Also when the thread that submitted it has ended since (ECANCELED), the device does no polled I/O
  // (EOPNOTSUPP), NVMe commands are for others (EACCES), or memory was not aligned well enough for it after
  // all (EINVAL): the pool finds out.
  bool again = result > 0 || result == -EAGAIN || result == -EINTR || result == -ECANCELED ||
               result == -EINVAL || result == -EOPNOTSUPP || result == -ENOMEM ||
               (piece.ring == command_ring_.get() && (result == -EACCES || result == -EPERM));
  if (again) return to_pool(piece, ended);
  std::string why =
      result == 0 ? "the file ends before the region" : std::generic_category().message(-result);
  end_piece(piece, device.failure(job.opcode, piece.offset, piece.length, why), ended);
}

void Io::finished(Piece& piece, Status status) {
  Ended ended;
  {
    std::lock_guard lock(mutex_);
    end_piece(piece, std::move(status), ended);
  }
  ended.publish(completions_);
}

void Io::end_piece(Piece& piece, Status status, Ended& ended) {
  Job& job = *piece.job;
  if (!status.ok() && job.status.ok()) job.status = std::move(status);
  if (--job.left == 0) end_job(job, ended);
}

void Io::end_job(Job& job, Ended& ended) {
  Completion& completion = ended.completions.emplace_back();
  completion.cookie = job.cookie;
  completion.opcode = job.opcode;
  // What a stop came too late for has moved all the same.
  bool stopped_late = job.stopped && job.status.code == MC_OK;
  if (job.status.ok() || stopped_late) {
    completion.bytes = job.length;
  } else {
    completion.fail(job.status);
  }
  if (job.uses) job.uses->leave();
  ended.released.push_back(std::move(job.local));
  ended.released.push_back(std::move(job.remote));
  ended.released.push_back(std::move(job.uses));
  ended.released.push_back(std::move(job.borrowed));
  unlink(job);
  job.status = {};
  job.stopped = false;
  job.next = free_;
  free_ = &job;
}

void Io::unlink(Job& job) {
  (job.previous == nullptr ? active_ : job.previous->next) = job.next;
  if (job.next != nullptr) job.next->previous = job.previous;
  job.previous = job.next = nullptr;
}

thread_local Io::Room Io::Ended::spare_;

Io::Ended::~Ended() {
  released.clear();  // which may end other operations on this thread
  completions.clear();
  spare_ = std::move(static_cast<Room&>(*this));
}

void Io::Ended::publish(Completions& to, Reaper reaper) {
  if (completions.empty()) return;
  // Waking whoever sleeps for what this thread fetches at once would cost four system calls a batch.
  reaper == Reaper::kPoller ? to.push_quietly(completions) : to.push(completions);
}

bool Io::can_sleep() {
  reap(Reaper::kPoller);
  std::lock_guard lock(mutex_);
  bool polling = false, unsubmitted = false;
  for (const auto& [ring, count] : in_rings_) {
    polling = polling || (count > 0 && ring == polled_ring_.get());
    unsubmitted = unsubmitted || ring->unsubmitted() > 0;
  }
  return !polling && !unsubmitted;
}

void Io::cancel(const std::function<bool(const Job&)>& which, mc_status code) {
  std::lock_guard lock(mutex_);
  bool any = false;
  for (Job* job = active_; job != nullptr; job = job->next) {
    if (job->stopped || !which(*job)) continue;
    job->stopped = true;
    if (code == MC_CLOSED && job->status.ok()) job->status = failed(code, "the connection was closed");
    for (Piece* piece : {&job->head, &job->body, &job->tail}) {
      uapi::Sqe* sqe = piece->length > 0 && piece->ring == ring_.get() && ring_ ? ring_->next() : nullptr;
      if (sqe == nullptr) continue;
      sqe->opcode = uapi::kAsyncCancel;
      sqe->fd = -1;
      sqe->address = reinterpret_cast<uint64_t>(piece);
      sqe->user_data = reinterpret_cast<uint64_t>(&nobody_);
      ++in_rings_[ring_.get()];
      any = true;
    }
  }
  if (any) ring_->submit();
}

}  // namespace mooncake::nvmeof
