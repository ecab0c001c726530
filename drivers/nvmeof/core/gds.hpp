// Operations between GPU memory and files, by cuFile (GPUDirect Storage): threads that wait in it.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "cufile.hpp"
#include "job.hpp"

namespace mooncake::nvmeof {

// Thread-safe.
class Gds {
 public:
  using Finished = std::function<void(Piece&, Status)>;
  // `durable`: writes are over when they are on the medium.
  static Status open(uint32_t workers, bool durable, Finished finished, std::unique_ptr<Gds>& gds);
  ~Gds() { stop(); }

  // Finds the context of a region's device and pins the memory, as far as the GPU's window allows it: what is
  // not pinned goes through buffers of cuFile.
  Status add_memory(Region& region, int device);
  void remove_memory(Region& region);
  void forget(const Device& device);

  void add(Piece& piece);
  // Waits for what was added and joins every thread.
  void stop();

 private:
  struct Batch;
  Gds(const cufile::Library& library, uint32_t workers, bool durable, Finished finished)
      : library_(library), workers_(workers), durable_(durable), finished_(std::move(finished)) {}

  void work();
  std::vector<Piece*> take();
  bool may_batch(const Piece& piece) const;
  void run_batch(Batch& batch, const std::vector<Piece*>& pieces);
  Status run(Piece& piece);
  Status part(Piece& piece, uint64_t done, uint64_t length);
  Status move(Piece& piece, uint64_t done, uint64_t length);
  Status handle(const Device& device, bool direct, void** out);
  Status told(const Piece& piece, uint64_t done, ssize_t result, int error) const;

  const cufile::Library& library_;
  const uint32_t workers_;
  const bool durable_;
  const Finished finished_;
  std::mutex mutex_;
  std::condition_variable woken_;
  std::deque<Piece*> queue_;
  size_t idle_ = 0;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
  std::mutex handles_mutex_;
  std::unordered_map<uint64_t, void*> handles_;  // of cuFile, by the serial of the device and how it is open
};

}  // namespace mooncake::nvmeof
