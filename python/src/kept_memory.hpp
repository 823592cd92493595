// Memory of large results that is kept for the next ones when nobody holds them any more. The system gives memory out in
// pages of zeros, so that gradients of all factors, tens of megabytes that are new in every step, would take 5 to 10 ms to be
// there at all (benchmarks/LOG.md, "Memory that is kept").
#pragma once

#include <list>
#include <memory>
#include <mutex>

#include "amx_sft_moe/amx_sft_moe.hpp"

namespace amx_sft_moe::python {

// Blocks in use and idle ones, which together are never more than what has been in use at one time. Calls of any threads may
// meet.
class KeptMemory : public std::enable_shared_from_this<KeptMemory> {
 public:
  struct Usage {
    index_t in_use_bytes = 0, idle_bytes = 0;
  };

  // Memory in use, until it is destroyed.
  class Block {
   public:
    explicit Block(std::shared_ptr<KeptMemory> home) : home_(std::move(home)) {}
    Block(const Block&) = delete;
    Block& operator=(const Block&) = delete;
    Block(Block&&) = delete;
    Block& operator=(Block&&) = delete;
    ~Block();
    char* data() const { return memory_.data(); }

   private:
    friend class KeptMemory;
    std::shared_ptr<KeptMemory> home_;
    AlignedBuffer<char> memory_;
  };

  // Fewer bytes the C library keeps by itself, and gives out faster.
  static constexpr index_t kLeastBytes = index_t{64} << 10;

  // At least so many bytes, uninitialised. Throws std::bad_alloc.
  std::unique_ptr<Block> take(index_t bytes);

  Usage usage();
  // Gives what is idle to the system: so many bytes.
  index_t release();

  // Around fork(): the child has all threads' blocks, and one thread.
  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  void give_back(AlignedBuffer<char> memory) noexcept;
  // The longest idle ones go to the system, until at most so many bytes are idle.
  void shrink_idle(index_t most);

  std::mutex mutex_;
  std::list<AlignedBuffer<char>> idle_;  // the last one given back first
  Usage now_;
  index_t most_in_use_ = 0;
};

// That of this process. As a cache it is shared by all operators: what one layer's gradients were may be another's next.
const std::shared_ptr<KeptMemory>& kept_memory();

}  // namespace amx_sft_moe::python
