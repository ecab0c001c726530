// Operations between GPU memory and files, by cuFile (GPUDirect Storage): threads that wait in it.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "cufile.hpp"
#include "job.hpp"
#include "support/workers.hpp"

namespace mooncake::nvmeof {

// Thread-safe.
class Gds {
 public:
  using Finished = std::function<void(Piece&, Status)>;
  // `durable`: writes are over when they are on the medium.
  static Status open(uint32_t workers, bool durable, Finished finished, std::unique_ptr<Gds>& gds);
  // Finds the context of a region's device and pins the memory, as far as the GPU's window allows it: what is
  // not pinned goes through buffers of cuFile.
  Status add_memory(Region& region, int device);
  void remove_memory(Region& region);
  void forget(const Device& device);

  // As Workers::add(): the piece of an error is the caller's to end.
  Status add(Piece& piece) { return workers_.add(piece); }
  // Waits for what was added and joins every thread.
  void stop() { workers_.stop(); }

 private:
  struct Batch;
  Gds(const cufile::Library& library, uint32_t workers, bool durable, Finished finished)
      : library_(library),
        durable_(durable),
        finished_(std::move(finished)),
        workers_("mc-nvmeof-gds", workers, [this](auto&) { work(); }) {}

  void work();
  std::vector<Piece*> take();
  bool may_batch(const Piece& piece) const;
  // An error leaves pieces waiting in the batch, which is of no use any more.
  Status run_batch(Batch& batch, const std::vector<Piece*>& pieces);
  Status wait_for(Batch& batch);
  void take_event(Batch& batch, const cufile::Event& event);
  Status run(Piece& piece);
  Status part(Piece& piece, uint64_t done, uint64_t length);
  Status move(Piece& piece, uint64_t done, uint64_t length);
  Status handle(const Device& device, bool direct, void** out);
  Status told(const Piece& piece, uint64_t done, ssize_t result, int error) const;
  Status told_of(const Piece& piece, const std::string& why) const;

  const cufile::Library& library_;
  const bool durable_;
  const Finished finished_;
  std::mutex handles_mutex_;
  std::unordered_map<uint64_t, void*> handles_;  // of cuFile, by the serial of the device and how it is open
  driver::Workers<Piece> workers_;               // ends first
};

}  // namespace mooncake::nvmeof
