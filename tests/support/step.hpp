// One forward and its backward on a problem, the way most tests need it.
#pragma once

#include "moe.hpp"
#include "problem.hpp"

namespace sft_test {

template <class Kernel>
Moe<Kernel> make_moe(const Problem& problem, const amx_sft_moe::Config& config) {
  return Moe<Kernel>(config, problem.base<typename Kernel::Weight>(), problem.lora());
}
template <class Kernel>
Moe<Kernel> make_moe(const Problem& problem) {
  return make_moe<Kernel>(problem, problem.config());
}

template <class AnyMoe>
void run_step(AnyMoe& moe, const Problem& problem, const Outputs& out) {
  moe.forward_sft(problem.routing(), problem.x(), out.y());
  moe.backward(problem.grad_y(), out.gradients());
}

// With an operator of its own.
template <class Kernel>
Outputs step_alone(const Problem& problem, const amx_sft_moe::Config& config) {
  Outputs out(problem);
  Moe<Kernel> moe = make_moe<Kernel>(problem, config);
  run_step(moe, problem, out);
  return out;
}
template <class Kernel>
Outputs step_alone(const Problem& problem) {
  return step_alone<Kernel>(problem, problem.config());
}

}  // namespace sft_test
