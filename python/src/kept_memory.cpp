#include "kept_memory.hpp"

#include <malloc.h>
#include <pthread.h>

#include <algorithm>
#include <bit>
#include <new>
#include <utility>

namespace amx_sft_moe::python {
namespace {

// Sizes come in eight steps between powers of two, so that results of nearly the same size can take each other's place: saved
// activations differ with the tokens of each step.
index_t rounded(index_t bytes) {
  const index_t least = std::max(bytes, KeptMemory::kLeastBytes);
  return round_up(least, static_cast<index_t>(std::bit_floor(static_cast<std::size_t>(least)) / 8));
}

}  // namespace

KeptMemory::Block::~Block() {
  if (memory_.capacity() > 0) home_->give_back(std::move(memory_));
}

std::unique_ptr<KeptMemory::Block> KeptMemory::take(index_t bytes) {
  const index_t size = rounded(bytes);
  auto block = std::make_unique<Block>(shared_from_this());
  const std::lock_guard lock(mutex_);
  const auto found = std::ranges::find(idle_, size, &AlignedBuffer<char>::bytes);
  if (found != idle_.end()) {
    block->memory_ = std::move(*found);
    idle_.erase(found);
    now_.idle_bytes -= size;
  } else {
    shrink_idle(std::max<index_t>(most_in_use_ - now_.in_use_bytes - size, 0));
    try {
      block->memory_.reserve(size);
    } catch (const std::bad_alloc&) {
      shrink_idle(0);
      block->memory_.reserve(size);
    }
  }
  now_.in_use_bytes += size;
  most_in_use_ = std::max(most_in_use_, now_.in_use_bytes);
  return block;
}

void KeptMemory::give_back(AlignedBuffer<char> memory) noexcept {
  const index_t size = memory.bytes();
  const std::lock_guard lock(mutex_);
  now_.in_use_bytes -= size;
  try {
    idle_.push_front(std::move(memory));
    now_.idle_bytes += size;
  } catch (const std::bad_alloc&) {  // no room for an entry of the list: the system has it
  }
}

KeptMemory::Usage KeptMemory::usage() {
  const std::lock_guard lock(mutex_);
  return now_;
}

index_t KeptMemory::release() {
  index_t idle = 0;
  {
    const std::lock_guard lock(mutex_);
    idle = now_.idle_bytes;
    shrink_idle(0);
    most_in_use_ = now_.in_use_bytes;
  }
#ifdef __GLIBC__
  malloc_trim(0);  // else what is not at its heap's end would stay with the C library
#endif
  return idle;
}

void KeptMemory::shrink_idle(index_t most) {
  while (now_.idle_bytes > most) {
    now_.idle_bytes -= idle_.back().bytes();
    idle_.pop_back();
  }
}

const std::shared_ptr<KeptMemory>& kept_memory() {
  // Never destroyed, for tensors may outlive everything else.
  static const auto& kept = *new std::shared_ptr<KeptMemory>(std::make_shared<KeptMemory>());
  static const int at_fork =
      pthread_atfork([] { kept->lock(); }, [] { kept->unlock(); }, [] { kept->unlock(); });
  (void)at_fork;
  return kept;
}

}  // namespace amx_sft_moe::python
