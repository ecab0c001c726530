#include "engine.hpp"

#include <chrono>
#include <string>

#include "support/os.hpp"

namespace mooncake::ep::pg {

namespace {

constexpr auto kSignalsEvery = std::chrono::milliseconds(20);
constexpr auto kLookEvery = std::chrono::milliseconds(1);
constexpr int kQuietLooks = 20;

bool is_over(const Wait& wait) { return driver::now_ns() > wait.deadline_ns; }

// Of the engine whose worker this thread is.
thread_local const std::atomic<bool>* worker_closed = nullptr;
bool is_closed() { return worker_closed->load(); }

}  // namespace

Engine::Engine(uint32_t capacity, int rank, int pid, int fd) : group_(capacity, rank, pid, fd) {}

Engine::~Engine() { close(); }

void Engine::check_open() const {
  if (closed_) throw Stop(Code::kInvalid, "this process group was destroyed");
}

Result Engine::guarded(const Work& work, const Wait& wait) {
  Result result;
  try {
    check_open();
    size_t before = group_.members().size();
    result.contributors = work(collectives_, wait);
    bool everyone = result.contributors.size() == before && group_.members().size() == before;
    result.code = everyone ? Code::kDone : Code::kPartial;
  } catch (const Stop& stop) {
    result.code = stop.code;
    result.reason = stop.what();
  } catch (const std::runtime_error& error) {
    result.code = Code::kSystem;
    result.reason = error.what();
  }
  return result;
}

Result Engine::run(const Work& work, const Wait& wait) {
  if (unfinished_.load() != 0) {
    uint64_t now = driver::now_ns();
    uint64_t ticket = queue(work, wait.deadline_ns > now ? wait.deadline_ns - now : 0);
    return finish(ticket, {~uint64_t{0}, wait.interrupted});
  }
  std::lock_guard lock(running_);
  return guarded(work, wait);
}

uint64_t Engine::queue(Work work, uint64_t timeout_ns) {
  std::lock_guard lock(queue_mutex_);
  if (!worker_.joinable()) worker_ = std::thread([this] { run_queued(); });
  uint64_t ticket = next_ticket_++;
  tasks_.push_back({ticket, std::move(work), timeout_ns});
  unfinished_.fetch_add(1);
  changed_.notify_all();
  return ticket;
}

// Takes the next task only when no other runs, so that they run in order whoever runs them.
bool Engine::run_next(Interrupted interrupted) {
  Task task;
  {
    std::lock_guard lock(queue_mutex_);
    if (tasks_.empty()) return false;
    task = std::move(tasks_.front());
    tasks_.pop_front();
  }
  uint64_t now = driver::now_ns();
  uint64_t deadline = task.timeout_ns > ~uint64_t{0} - now ? ~uint64_t{0} : now + task.timeout_ns;
  Result result = guarded(task.work, {deadline, interrupted});
  std::lock_guard lock(queue_mutex_);
  results_.emplace(task.ticket, std::move(result));
  unfinished_.fetch_sub(1);
  changed_.notify_all();
  return true;
}

void Engine::run_queued() {
  driver::prepare_thread("mooncake-pg");
  worker_closed = &closed_;
  while (!closed_) {
    {
      std::unique_lock lock(queue_mutex_);
      changed_.wait(lock, [this] { return closed_ || !tasks_.empty(); });
    }
    std::lock_guard lock(running_);
    if (!closed_) run_next(is_closed);
  }
}

bool Engine::done(uint64_t ticket) {
  std::lock_guard lock(queue_mutex_);
  return results_.count(ticket) != 0;
}

Result Engine::finish(uint64_t ticket, const Wait& wait) {
  for (;;) {
    {
      std::unique_lock lock(queue_mutex_);
      auto ended = [&] { return results_.count(ticket) != 0; };
      bool queued = !tasks_.empty() && tasks_.front().ticket <= ticket;
      if (!ended() && !queued) changed_.wait_for(lock, kSignalsEvery, ended);
      if (auto found = results_.find(ticket); found != results_.end()) {
        Result result = std::move(found->second);
        results_.erase(found);
        return result;
      }
    }
    if (wait.deadline_ns == ~uint64_t{0}) {
      if (std::unique_lock lock(running_, std::try_to_lock); lock.owns_lock()) run_next(wait.interrupted);
    }
    if (is_over(wait)) return {Code::kTimeout, "the collective has not ended in time; it goes on", {}};
    if (closed_) return {Code::kInvalid, "this process group was destroyed", {}};
    if (wait.interrupted != nullptr && wait.interrupted()) {
      return {Code::kInterrupted, "a signal ended the wait; the collective goes on", {}};
    }
  }
}

Result Engine::change(const std::function<std::vector<int>(Group&)>& change) {
  return run([&](Collectives&, const Wait&) { return change(group_); }, {});
}

Result Engine::join(const Wait& wait) {
  return change([&](Group& group) {
    messages_.reset();
    group.join(wait);
    return group.members();
  });
}

uint64_t Engine::send(int to, const uint8_t* data, uint64_t nbytes, int64_t tag) {
  uint64_t number = messages_.send(to, data, nbytes, tag);
  ring_sleepers(group_.control(), group_.rank_words());
  return number;
}

uint64_t Engine::receive(int from, uint8_t* data, uint64_t nbytes, int64_t tag) {
  uint64_t number = messages_.receive(from, data, nbytes, tag);
  messages_.progress();
  return number;
}

bool Engine::message_done(uint64_t number) {
  messages_.progress();
  return messages_.done(number);
}

Result Engine::finish_message(uint64_t number, const Wait& wait) {
  Waiter waiter(group_.control(), group_.rank(), group_.spins(), wait.interrupted);
  auto ready = [&] { return messages_.progress() || messages_.done(number); };
  waiting_.fetch_add(1);
  Result given_up;
  try {
    while (!messages_.done(number)) {
      check_open();
      if (ready() || !waiter.pause(ready)) continue;
      messages_.bury();
      if (is_over(wait) && !messages_.done(number))
        throw Stop(Code::kTimeout, "no message came through in time");
    }
  } catch (const Stop& stop) {
    messages_.give_up(number);
    given_up = {stop.code, stop.what(), {}};
  }
  waiting_.fetch_sub(1);
  return given_up.code == Code::kDone ? messages_.take(number) : given_up;
}

void Engine::move_messages_aside() {
  if (messages_.idle() || moving_.exchange(true)) return;
  std::lock_guard lock(mover_mutex_);
  if (!mover_.joinable()) mover_ = std::thread([this] { run_messages(); });
  to_move_.notify_all();
}

void Engine::run_messages() {
  driver::prepare_thread("mooncake-pg-p2p");
  std::unique_lock lock(mover_mutex_);
  while (!closed_) {
    to_move_.wait(lock, [this] { return closed_ || moving_ || !messages_.idle(); });
    // Looks now and then for a while, so that a stream of short messages need not wake this thread for each.
    for (int quiet = 0; quiet < kQuietLooks && !closed_; ++quiet) {
      to_move_.wait_for(lock, kLookEvery, [this] { return closed_.load(); });
      if (messages_.idle()) continue;
      quiet = 0;
      move_until_idle();
    }
    moving_ = false;
  }
}

// Unless a caller that waits for a message does it, who is sooner awake.
void Engine::move_until_idle() {
  Waiter waiter(group_.control(), group_.rank(), 0, nullptr);
  auto ready = [this] { return messages_.progress() || closed_ || waiting_ != 0; };
  while (!closed_ && waiting_ == 0 && !messages_.idle()) {
    if (!ready() && waiter.pause(ready)) messages_.bury();
  }
}

void Engine::close() {
  if (closed_.exchange(true)) return;
  if (generation_ != driver::fork_generation()) {
    // In a forked child: the rank is the parent's, and its threads are not here.
    if (worker_.joinable()) worker_.detach();
    if (mover_.joinable()) mover_.detach();
    return;
  }
  if (group_.joined()) group_.leave();
  {
    std::lock_guard lock(queue_mutex_);
    changed_.notify_all();
  }
  {
    std::lock_guard lock(mover_mutex_);
    to_move_.notify_all();
  }
  if (worker_.joinable()) worker_.join();
  if (mover_.joinable()) mover_.join();
}

}  // namespace mooncake::ep::pg
