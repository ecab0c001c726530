#include "gds.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

namespace mooncake::nvmeof {
namespace {

constexpr size_t kBatch = 32;        // cuFile takes 128 unless cufile.json says less
constexpr double kBatchLimitS = 60;  // beyond what a kernel gives a drive that does not answer
constexpr double kCancelLimitS = 10;
constexpr long kLookNs = 100'000'000;  // how soon a batch is found to be unwanted
constexpr uint64_t kGpuPage = 4096;    // what cuFile moves without buffers of its own

bool nobody_wants(const std::vector<Piece*>& pieces) {
  auto stopped = [](const Piece* piece) { return piece->job->stopped.load(); };
  return !pieces.empty() && std::all_of(pieces.begin(), pieces.end(), stopped);
}

}  // namespace

// A batch handle of one thread. Without one, pieces go one by one.
struct Gds::Batch {
  explicit Batch(const cufile::Library& library) : library(library) {
    if (library.batches() && library.cuFileBatchIOSetUp(&handle, kBatch).code != cufile::kSuccess)
      handle = nullptr;
  }
  ~Batch() {
    if (handle == nullptr) return;
    if (!waiting.empty()) library.cuFileBatchIOCancel(handle);
    library.cuFileBatchIODestroy(handle);
  }
  const cufile::Library& library;
  void* handle = nullptr;
  bool cancelled = false;       // then it is not used again
  std::vector<Piece*> waiting;  // that it was given and has not told of
};

Status Gds::open(uint32_t workers, bool durable, Finished finished, std::unique_ptr<Gds>& gds) {
  const cufile::Library* library = nullptr;
  if (Status status = driver::cuda::load("", library); !status.ok()) return status;
  gds.reset(new Gds(*library, workers, durable, std::move(finished)));
  return {};
}

// ---------------------------------------------------------------------------------------------- memory and
// files

Status Gds::add_memory(Region& region, int device) {
  int error = library_.cuDeviceGet(&region.gpu.device, device);
  if (error == 0) error = library_.cuDevicePrimaryCtxRetain(&region.gpu.context, region.gpu.device);
  if (error != 0)
    return failed(MC_UNSUPPORTED, "GPU " + std::to_string(device) + " cannot be used (CUDA error " +
                                      std::to_string(error) + ")");
  driver::cuda::Current in(library_, region.gpu.context);
  region.gpu.pinned =
      in.pushed() && library_.cuFileBufRegister(region.memory, region.length, 0).code == cufile::kSuccess;
  return {};
}

void Gds::remove_memory(Region& region) {
  if (region.gpu.context == nullptr) return;
  {
    driver::cuda::Current in(library_, region.gpu.context);
    if (std::exchange(region.gpu.pinned, false)) library_.cuFileBufDeregister(region.memory);
  }
  library_.cuDevicePrimaryCtxRelease(region.gpu.device);
  region.gpu.context = nullptr;
}

Status Gds::handle(const Device& device, bool direct, void** out) {
  int fd = direct ? device.direct_fd() : device.buffered_fd();
  if (fd < 0)
    return failed(MC_UNSUPPORTED, "cuFile needs a file or block device of the kernel, and " + device.name() +
                                      " is none; go through a buffer in main memory");
  std::lock_guard lock(handles_mutex_);
  void*& known = handles_[2 * device.serial() + direct];
  if (known == nullptr) {
    cufile::Description description{};
    description.type = cufile::kOpaqueFd;
    description.fd = fd;
    cufile::Error error = library_.cuFileHandleRegister(&known, &description);
    if (error.code != cufile::kSuccess) {
      known = nullptr;
      std::string remedy = error.code == cufile::kDirectNotSet
                               ? ": past the last whole block, cuFile 1.7 (CUDA 12.2) is needed"
                               : ": cuFile does not take this file system";
      return failed(MC_UNSUPPORTED,
                    device.name() + ": " + cufile::words("cuFileHandleRegister", error) + remedy);
    }
  }
  *out = known;
  return {};
}

void Gds::forget(const Device& device) {
  std::lock_guard lock(handles_mutex_);
  for (uint64_t key : {2 * device.serial(), 2 * device.serial() + 1}) {
    auto found = handles_.find(key);
    if (found == handles_.end()) continue;
    if (found->second != nullptr) library_.cuFileHandleDeregister(found->second);
    handles_.erase(found);
  }
}

// ---------------------------------------------------------------------------------------------- threads

// Aligned pieces are carried out together as long as they are of one GPU.
std::vector<Piece*> Gds::take() {
  std::vector<Piece*> taken;
  Piece* next = workers_.take();
  auto fits = [&](const Piece& piece) {
    return taken.size() < kBatch && may_batch(piece) && may_batch(*taken[0]) &&
           piece.job->local->gpu.context == taken[0]->job->local->gpu.context;
  };
  for (; next != nullptr; next = workers_.take_if(fits)) taken.push_back(next);
  return taken;
}

void Gds::work() {
  std::unique_ptr<Batch> batch;
  for (;;) {
    std::vector<Piece*> pieces = take();
    if (pieces.empty()) return;
    driver::cuda::Current in(library_, pieces[0]->job->local->gpu.context);
    if (pieces.size() > 1 && !batch) batch = std::make_unique<Batch>(library_);
    if (pieces.size() == 1 || batch->handle == nullptr) {
      for (Piece* piece : pieces) finished_(*piece, run(*piece));
      continue;
    }
    Status status = run_batch(*batch, pieces);
    if (status.ok() && !batch->cancelled) continue;
    // Nothing is under way any more when the batch is gone. What there was may have moved or not, and is not
    // tried again: the memory is the caller's from now on.
    std::vector<Piece*> lost = batch->waiting;
    batch.reset();
    for (Piece* piece : lost) finished_(*piece, told_of(*piece, status.reason));
  }
}

bool Gds::may_batch(const Piece& piece) const {
  const Job& job = *piece.job;
  const Device& device = *job.remote->device;
  uint64_t unit = std::max(device.granule(), kGpuPage);
  bool synced_after = durable_ && job.opcode == MC_WRITE;
  return !synced_after && piece.offset % unit == 0 && piece.length % unit == 0 &&
         reinterpret_cast<uintptr_t>(piece.memory) % kGpuPage == 0 && device.direct_fd() >= 0 &&
         piece.offset + piece.length <= device.direct_limit();
}

Status Gds::run_batch(Batch& batch, const std::vector<Piece*>& pieces) {
  std::vector<cufile::Request> requests;
  for (Piece* piece : pieces) {
    const Region& local = *piece->job->local;
    cufile::Request request{};
    Status status = handle(*piece->job->remote->device, true, &request.handle);
    if (status.ok() && piece->job->stopped) status = failed(MC_CANCELLED, "the operation was cancelled");
    if (!status.ok()) {
      finished_(*piece, std::move(status));
      continue;
    }
    request.mode = cufile::kBatchMode;
    request.base = local.memory;
    request.base_offset = piece->memory - local.memory;
    request.file_offset = static_cast<off_t>(piece->offset);
    request.size = piece->length;
    request.opcode = piece->job->opcode == MC_READ ? cufile::kRead : cufile::kWrite;
    request.cookie = piece;
    requests.push_back(request);
    batch.waiting.push_back(piece);
  }
  auto count = static_cast<unsigned>(requests.size());
  if (count == 0) return {};
  if (library_.cuFileBatchIOSubmit(batch.handle, count, requests.data(), 0).code != cufile::kSuccess) {
    for (Piece* piece : std::exchange(batch.waiting, {})) finished_(*piece, run(*piece));
    return {};
  }
  return wait_for(batch);
}

// Until nothing waits. A batch that nobody wants any more, or that takes too long, is cancelled, and what it
// does not give up then is lost: the error says why.
Status Gds::wait_for(Batch& batch) {
  uint64_t deadline_ns = deadline_after(kBatchLimitS);
  while (!batch.waiting.empty()) {
    cufile::Event events[kBatch];
    auto found = static_cast<unsigned>(batch.waiting.size());
    timespec limit{0, kLookNs};
    cufile::Error error = library_.cuFileBatchIOGetStatus(batch.handle, 1, &found, events, &limit);
    if (error.code != cufile::kSuccess) return failed(MC_IO, cufile::words("cuFileBatchIOGetStatus", error));
    for (unsigned i = 0; i < found; ++i) take_event(batch, events[i]);
    bool late = now_ns() >= deadline_ns;
    if (batch.cancelled && late) break;
    if (batch.cancelled || !(late || nobody_wants(batch.waiting))) continue;
    library_.cuFileBatchIOCancel(batch.handle);
    batch.cancelled = true;
    deadline_ns = deadline_after(kCancelLimitS);
  }
  return batch.waiting.empty() ? Status{} : failed(MC_IO, "cuFile neither finishes nor cancels it");
}

void Gds::take_event(Batch& batch, const cufile::Event& event) {
  if ((event.status & cufile::kOver) == 0) return;
  auto* piece = static_cast<Piece*>(event.cookie);
  auto place = std::find(batch.waiting.begin(), batch.waiting.end(), piece);
  if (place == batch.waiting.end()) return;
  batch.waiting.erase(place);
  bool done = event.status == cufile::kComplete && event.result == piece->length;
  if (event.status == cufile::kCancelled && !piece->job->stopped)
    return finished_(*piece, told_of(*piece, "cuFile does not finish it"));
  // Whatever else is over and not plainly done is done again by itself, which finds out why.
  finished_(*piece, done ? Status{} : run(*piece));
}

// ---------------------------------------------------------------------------------------------- one piece

// What covers a part of a block changes the whole of it: nobody else may meanwhile.
Status Gds::run(Piece& piece) {
  const Device& device = *piece.job->remote->device;
  uint64_t unit = device.granule();
  for (uint64_t done = 0; done < piece.length;) {
    if (piece.job->stopped) return failed(MC_CANCELLED, "the operation was cancelled");
    uint64_t at = piece.offset + done, left = piece.length - done;
    uint64_t length = at >= device.direct_limit() ? left : std::min(left, device.direct_limit() - at);
    if (unit > 1 && at < device.direct_limit() && (at % unit != 0 || length < unit))
      length = std::min(length, unit - at % unit);
    else if (unit > 1 && at < device.direct_limit())
      length = length / unit * unit;
    if (Status status = part(piece, done, length); !status.ok()) return status;
    done += length;
  }
  bool written = piece.job->opcode == MC_WRITE;
  if (durable_ && written && fdatasync(device.direct_fd()) != 0) return told(piece, 0, -1, errno);
  return {};
}

Status Gds::part(Piece& piece, uint64_t done, uint64_t length) {
  Device& device = *piece.job->remote->device;
  uint64_t at = piece.offset + done, unit = device.granule();
  bool partial =
      piece.job->opcode == MC_WRITE && at < device.direct_limit() && (at % unit != 0 || length < unit);
  if (!partial) return move(piece, done, length);
  uint64_t block = at / unit * unit;
  if (Status status = device.lock(block); !status.ok()) return status;
  Status status = move(piece, done, length);
  device.unlock(block);
  return status;
}

Status Gds::move(Piece& piece, uint64_t done, uint64_t length) {
  const Device& device = *piece.job->remote->device;
  std::byte* base = piece.job->local->memory;
  void* file = nullptr;
  Status status = handle(device, piece.offset + done < device.direct_limit(), &file);
  if (!status.ok()) return status;
  for (uint64_t end = done + length; done < end;) {
    auto at = static_cast<off_t>(piece.offset + done);
    auto within = static_cast<off_t>(piece.memory - base) + static_cast<off_t>(done);
    errno = 0;
    ssize_t moved = piece.job->opcode == MC_READ ? library_.cuFileRead(file, base, end - done, at, within)
                                                 : library_.cuFileWrite(file, base, end - done, at, within);
    if (moved <= 0) return told(piece, done, moved, errno);
    done += static_cast<uint64_t>(moved);
  }
  return {};
}

Status Gds::told(const Piece& piece, uint64_t done, ssize_t result, int error) const {
  std::string why = "the file ends before the region";
  if (result == -1) why = std::generic_category().message(error);
  if (result < -1) why = "cuFile error " + std::to_string(-result);
  return piece.job->remote->device->failure(piece.job->opcode, piece.offset + done, piece.length - done, why);
}

Status Gds::told_of(const Piece& piece, const std::string& why) const {
  return piece.job->remote->device->failure(piece.job->opcode, piece.offset, piece.length, why);
}

}  // namespace mooncake::nvmeof
