#include "worker.hpp"

#include <cstddef>
#include <system_error>
#include <utility>

#include "support/os.hpp"

namespace mooncake::ascend {
namespace {

Status stopped() { return failed(MC_CLOSED, "the endpoint was closed"); }

}  // namespace

void Batch::clear() {
  remote.reset();
  descs.clear();
  done.clear();
  bytes = 0;
  failure = {};
}

RemoteMemory::~RemoteMemory() {
  if (worker != nullptr && !engine.empty()) worker->forget(engine, life);
}

Status Removal::wait(uint64_t deadline_ns) const {
  if (over_.wait_until(driver::time_point(deadline_ns)) == std::future_status::ready) return {};
  return failed(MC_TIMEOUT,
                "HIXL has not let go of the memory: a link that may use it does not end; it is asked again, "
                "and this call may be repeated");
}

// ------------------------------------------------------------------------------------------------ any thread

Worker::Worker(const Options& options, Completions& completions)
    : options_(options),
      completions_(completions),
      links_(options_, acl_,
             [this](std::unique_ptr<Batch> batch, Status status) {
               finish(std::move(batch), std::move(status));
             }),
      local_copies_(options_, acl_, [this](std::unique_ptr<Batch> batch, Status status) {
        finish(std::move(batch), std::move(status));
      }) {}

Status Worker::start(std::string& engine) {
  auto opened = std::make_shared<std::promise<Status>>();  // whose setter may be at it after the getter
  auto result = opened->get_future();
  try {
    thread_ = std::thread([this, &engine, opened] {
      driver::prepare_thread("mc-ascend");
      Status status = open(engine);
      bool good = status.ok();
      opened->set_value(std::move(status));
      if (good) run();
      close();
    });
  } catch (const std::system_error& error) {
    return failed(MC_NO_MEMORY, std::string("cannot start the worker thread: ") + error.what());
  }
  Status status = result.get();
  if (!status.ok()) thread_.join();
  return status;
}

void Worker::stop() {
  if (!thread_.joinable()) return;
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

bool Worker::call(std::function<void()> task) {
  {
    std::lock_guard lock(mutex_);
    if (stopped_) return false;
    tasks_.push_back(std::move(task));
  }
  changed_.notify_all();
  return true;
}

Status Worker::add_memory(Memory& memory) {
  struct Asked {
    std::promise<Status> done;
    std::atomic<bool> taken{false};  // by the thread, or by who has given up
    Memory memory;
  };
  auto asked = std::make_shared<Asked>();
  asked->memory = memory;
  bool running = call([this, asked] {
    if (asked->taken.exchange(true)) return;
    asked->done.set_value(register_memory(asked->memory));
  });
  if (!running) return stopped();
  auto result = asked->done.get_future();
  double wait_s = options_.answer_timeout_s + options_.transfer_timeout_s;
  bool late =
      result.wait_until(driver::time_point(driver::deadline_after(wait_s))) != std::future_status::ready;
  if (late && !asked->taken.exchange(true))
    return failed(MC_TIMEOUT, "HIXL is busy with a peer that does not answer; register the memory again");
  Status status = result.get();
  memory = asked->memory;
  return status;
}

std::shared_ptr<Removal> Worker::remove_memory(const Memory& memory) {
  auto removal = std::make_shared<Removal>(memory);
  bool asked = memory.registered && call([this, removal] {
                 removals_.push_back(removal);
                 remove_again_ns_ = 0;
               });
  if (!asked) removal->done();  // all was given back when the thread ended
  return removal;
}

void Worker::launch(std::unique_ptr<Batch> batch) {
  {
    std::lock_guard lock(mutex_);
    if (!stopped_) waiting_.push(std::move(batch));
  }
  if (batch) return finish(std::move(batch), stopped());
  changed_.notify_all();
}

void Worker::cancel(uint64_t cookie, const Status& why) {
  std::vector<Completion> ended;
  Batches over;  // freed without the mutex: a region's end takes it
  {
    std::lock_guard lock(mutex_);
    Batches all(std::move(waiting_));
    while (auto batch = all.pop()) {
      for (size_t i = 0; i < batch->done.size();) {
        if (batch->done[i].cookie != cookie) {
          ++i;
          continue;
        }
        batch->done[i].bytes = 0;
        batch->done[i].fail(why);
        ended.push_back(std::move(batch->done[i]));
        auto at = static_cast<std::ptrdiff_t>(i);
        batch->done.erase(batch->done.begin() + at);
        batch->descs.erase(batch->descs.begin() + at);
      }
      (batch->done.empty() ? over : waiting_).push(std::move(batch));
    }
  }
  while (auto batch = over.pop()) spares_.give(std::move(batch));  // before the completions, as in finish()
  completions_.push(ended);
}

void Worker::forget(const std::string& engine, std::shared_ptr<void> life) {
  call([this, engine, life = std::move(life)] { links_.forget(engine, life); });
}

}  // namespace mooncake::ascend
