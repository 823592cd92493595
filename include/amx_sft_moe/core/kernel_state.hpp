// What some kernels keep on a thread from one parallel region to the next, such as compiled primitives.
#pragma once

#include <memory>
#include <typeinfo>
#include <utility>

#include "amx_sft_moe/core/element.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN

class KernelState {
 public:
  KernelState() = default;
  KernelState(const KernelState&) = delete;
  KernelState& operator=(const KernelState&) = delete;
  virtual ~KernelState() = default;

  virtual index_t bytes() const = 0;
  virtual std::unique_ptr<KernelState> make_empty() const = 0;  // of the same type
  // Takes over what `other`, of the same type, has and this one lacks.
  virtual void grow_to(const KernelState& other) = 0;
};

// The state of the kernel that used this thread last; most kernels have none.
class KernelStateSlot {
 public:
  template <class State>
  State& as() {
    auto* found = dynamic_cast<State*>(state_.get());
    if (found == nullptr) {
      auto made = std::make_unique<State>();
      found = made.get();
      state_ = std::move(made);
    }
    return *found;
  }
  index_t bytes() const { return state_ ? state_->bytes() : 0; }
  void grow_to(const KernelStateSlot& other) {
    if (!other.state_ || &other == this) return;
    const KernelState& theirs = *other.state_;
    const KernelState* ours = state_.get();
    if (ours == nullptr || typeid(*ours) != typeid(theirs)) state_ = theirs.make_empty();
    state_->grow_to(theirs);
  }

 private:
  std::unique_ptr<KernelState> state_;
};

AMX_SFT_MOE_NAMESPACE_END
