// The operator behind one non-template interface, for callers that choose kernel and weight type at run time.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <variant>

#include "amx_sft_moe/operator/amx_sft_moe.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN

using AnyBaseWeights = std::variant<BaseWeights<bf16>, BaseWeights<float>>;

// SavedActivations whose element type is known at run time; it must be stored_dtype().
struct AnySavedActivations {
  AnyMatrix gate, up;              // [S, I]
  AnyMatrix u_gate, u_up, u_down;  // [S, r]; empty without an adapter
};

class AnySftMoe {
 public:
  AnySftMoe() = default;
  AnySftMoe(const AnySftMoe&) = delete;
  AnySftMoe& operator=(const AnySftMoe&) = delete;
  virtual ~AnySftMoe() = default;

  virtual std::string_view kernel_name() const = 0;
  virtual DType weight_dtype() const = 0;
  virtual DType stored_dtype() const = 0;
  virtual const Config& config() const = 0;
  virtual const LoraWeights& lora() const = 0;

  virtual void set_base(const AnyBaseWeights& weights) = 0;
  virtual void set_lora(const LoraWeights& lora) = 0;

  virtual void forward_sft(const Routing& routing, const AnyConstMatrix& x, const AnyMatrix& y,
                           bool save_for_backward) = 0;
  void forward_sft(const Routing& routing, const AnyConstMatrix& x, const AnyMatrix& y) {
    forward_sft(routing, x, y, true);
  }
  virtual void backward(const AnyConstMatrix& grad_y, const Gradients& grads) = 0;

  virtual void forward_sft(const Routing& routing, const AnyConstMatrix& x, const AnyMatrix& y,
                           const AnySavedActivations& saved) = 0;
  virtual void backward(const Routing& routing, const AnyConstMatrix& x, const AnySavedActivations& saved,
                        const AnyConstMatrix& grad_y, const Gradients& grads) = 0;

  virtual void clear() = 0;
  virtual index_t saved_depth() const = 0;
  virtual const StepRecord& last_forward() const = 0;
  virtual const StepRecord& last_backward() const = 0;
  virtual StepLabel label(StepKind kind) const = 0;
  virtual std::string backward_text() const = 0;
  virtual void set_observer(StepObserver* observer) = 0;
  virtual void set_name(std::string name) = 0;
  virtual MemoryReport memory() const = 0;
  virtual void set_number(std::int64_t number) = 0;
};

AMX_SFT_MOE_NAMESPACE_END
