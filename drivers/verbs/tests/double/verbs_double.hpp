// Objects of the double, each beginning with what a program sees of it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ibverbs_abi.hpp"
#include "shared.hpp"

namespace verbs_double {

namespace ibv = mooncake::verbs::ibv;

struct Qp;
struct Cq;

struct Device {
  std::string name;
  uint32_t number;
  bool null;  // completes at once and moves nothing
};

struct Pd {
  struct Context* context;
  uint32_t id;
  std::atomic<int> users{0};
};

struct Channel {
  ibv::CompChannel base;
  Cq* cq = nullptr;
};

struct Cq {
  ibv::Cq base;
  std::mutex mutex;
  struct Entry {
    ibv::Wc wc;
    Qp* qp;  // null when it is gone
    uint64_t position;
  };
  std::vector<Entry> ring;
  size_t head = 0, count = 0;
  bool armed = false, overflown = false;
  std::atomic<int> users{0};
  std::atomic<bool> receives{false};  // had any of the next
  std::vector<Qp*> receivers;         // guarded by the context's mutex
  unsigned reported = 0, acknowledged = 0;
};

struct Work {
  ibv::SendWr wr;
  ibv::Sge sge;
  std::vector<char> inlined;
  uint64_t position;
};

struct Qp {
  ibv::Qp base;
  uint32_t entry;
  ibv::QpInitAttr init;
  std::mutex mutex;
  int state = ibv::kReset;
  std::deque<Work> queue;
  uint64_t posted = 0, retired = 0;  // positions; `retired` moves when a completion is fetched
  uint32_t max_rd_atomic = 0;
  bool proven = false;  // the peer was found to match
  bool busy = false;    // the engine has a piece of work of it in hand
};

struct Context {
  ibv::Context base;
  Device* device;
  std::mutex mutex;
  std::condition_variable changed, idle;
  std::vector<Qp*> qps;
  std::vector<Cq*> cqs;
  bool stopping = false;
  std::atomic<int> users{0};
  std::atomic<uint32_t> work{0};  // changes with each post
  std::thread engine;
};

Fabric& fabric();
// A rule of verbs was broken: tests look at the count.
void violated(const char* what);

// engine.cpp
void run_engine(Context* context);
void flush(Qp& qp);  // with its mutex held

// queues.cpp
int poll_cq(ibv::Cq* cq, int capacity, ibv::Wc* wc);
int req_notify_cq(ibv::Cq* cq, int solicited_only);
int post_recv(ibv::Qp* qp, ibv::RecvWr* wr, ibv::RecvWr** bad);
void collect(Cq& cq);  // what peers have sent to its queue pairs; with the context's mutex held
int post_send(ibv::Qp* qp, ibv::SendWr* wr, ibv::SendWr** bad);
void complete(Qp& qp, const ibv::SendWr& wr, uint64_t position, int status, uint32_t bytes);

extern std::atomic<uint64_t> doorbells, requests, signalled, inlined;

}  // namespace verbs_double
