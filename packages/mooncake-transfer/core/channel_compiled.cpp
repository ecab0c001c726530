// Requests that compiled handlers answer, on the thread that has read them: no other thread has to wake up.
#include "channel.hpp"

namespace mooncake {

namespace {

// For how long the loop looks out for the next request after it has answered one: somewhat longer than a
// client takes between two.
constexpr uint64_t kLookOutNs = 150'000;

void append(void* reply, const void* bytes, size_t nbytes) {
  static_cast<std::string*>(reply)->append(static_cast<const char*>(bytes), nbytes);
}

}  // namespace

bool Channel::serve_compiled(const std::string& method, const mc_handler_v1* handler) {
  std::lock_guard lock(compiled_mutex_);
  bool fresh = compiled_.emplace(method, handler).second;
  has_compiled_ = true;
  return fresh;
}

const mc_handler_v1* Channel::compiled(const std::string& method) {
  if (!has_compiled_) return nullptr;
  std::lock_guard lock(compiled_mutex_);
  auto found = compiled_.find(method);
  return found == compiled_.end() ? nullptr : found->second;
}

// Whether the link goes on being read.
bool Channel::answer_compiled(const mc_handler_v1& handler, const LinkPtr& link, uint64_t request,
                              const std::string& body) {
  std::string reply;
  handler.answer(handler.context, link->id, body.data(), body.size(), &reply, append);
  Status status = send(link, kTypeReply, request, "", reply);
  if (status.code == Code::kNoMemory || status.code == Code::kInvalid) lose(link, status);
  if (std::this_thread::get_id() == loop_id_) look_out();
  std::lock_guard lock(link->mutex);
  return !link->closed && !link->paused;
}

// ---- of the loop's thread only

void Channel::look_out() {
  if (look_until_ns_ != 0) spin_.hit();
  looked_ns_ = now_ns();
  look_until_ns_ = looked_ns_ + spin_.at_most(looked_ns_, kLookOutNs);
}

bool Channel::looks_out() {
  if (look_until_ns_ == 0) return false;
  uint64_t now = now_ns();
  bool lost_core = now - looked_ns_ > SpinBudget::kLostCoreNs;
  if (lost_core) spin_.lost_core(now);
  if (!lost_core && now >= look_until_ns_) spin_.miss();
  looked_ns_ = now;
  if (lost_core || now >= look_until_ns_) look_until_ns_ = 0;
  return look_until_ns_ != 0;
}

}  // namespace mooncake
