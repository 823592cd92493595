// Definitions of Moe's members. Included only by the files that instantiate it.
#pragma once

#include <string>
#include <utility>

#include "moe.hpp"

namespace sft_test {

template <class Kernel>
Moe<Kernel>::Moe(const amx_sft_moe::Config& config, const amx_sft_moe::BaseWeights<Weight>& weights,
                 const amx_sft_moe::LoraWeights& lora, std::shared_ptr<amx_sft_moe::Workspace> workspace)
    : moe_(std::make_unique<amx_sft_moe::AMX_SFT_MOE<Kernel>>(config, weights, lora, std::move(workspace))) {}

template <class Kernel>
Moe<Kernel>::~Moe() = default;

template <class Kernel>
Moe<Kernel>::Moe(Moe&&) noexcept = default;

template <class Kernel>
void Moe<Kernel>::set_base(const amx_sft_moe::BaseWeights<Weight>& weights) {
  moe_->set_base(weights);
}

template <class Kernel>
void Moe<Kernel>::set_lora(const amx_sft_moe::LoraWeights& lora) {
  moe_->set_lora(lora);
}

template <class Kernel>
void Moe<Kernel>::forward_sft(const amx_sft_moe::Routing& routing, const amx_sft_moe::AnyConstMatrix& x,
                              const amx_sft_moe::AnyMatrix& y, bool save_for_backward) {
  moe_->forward_sft(routing, x, y, save_for_backward);
}

template <class Kernel>
void Moe<Kernel>::backward(const amx_sft_moe::AnyConstMatrix& grad_y, const amx_sft_moe::Gradients& grads) {
  moe_->backward(grad_y, grads);
}

template <class Kernel>
void Moe<Kernel>::forward_sft(const amx_sft_moe::Routing& routing, const amx_sft_moe::AnyConstMatrix& x,
                              const amx_sft_moe::AnyMatrix& y, const Saved& saved) {
  moe_->forward_sft(routing, x, y, saved);
}

template <class Kernel>
void Moe<Kernel>::backward(const amx_sft_moe::Routing& routing, const amx_sft_moe::AnyConstMatrix& x,
                           const Saved& saved, const amx_sft_moe::AnyConstMatrix& grad_y,
                           const amx_sft_moe::Gradients& grads) {
  moe_->backward(routing, x, saved, grad_y, grads);
}

template <class Kernel>
void Moe<Kernel>::clear() {
  moe_->clear();
}

template <class Kernel>
amx_sft_moe::index_t Moe<Kernel>::saved_depth() const {
  return moe_->saved_depth();
}

template <class Kernel>
const amx_sft_moe::Config& Moe<Kernel>::config() const {
  return moe_->config();
}

template <class Kernel>
const amx_sft_moe::LoraWeights& Moe<Kernel>::lora() const {
  return moe_->lora();
}

template <class Kernel>
const amx_sft_moe::StepRecord& Moe<Kernel>::last_forward() const {
  return moe_->last_forward();
}

template <class Kernel>
const amx_sft_moe::StepRecord& Moe<Kernel>::last_backward() const {
  return moe_->last_backward();
}

template <class Kernel>
std::string Moe<Kernel>::backward_text() const {
  return moe_->backward_text();
}

template <class Kernel>
void Moe<Kernel>::set_observer(amx_sft_moe::StepObserver* observer) {
  moe_->set_observer(observer);
}

template <class Kernel>
void Moe<Kernel>::set_name(const std::string& name) {
  moe_->set_name(name);
}

template <class Kernel>
void Moe<Kernel>::set_number(std::int64_t number) {
  moe_->set_number(number);
}

template <class Kernel>
amx_sft_moe::MemoryReport Moe<Kernel>::memory() const {
  return moe_->memory();
}

}  // namespace sft_test
