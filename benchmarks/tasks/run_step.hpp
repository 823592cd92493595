// One forward and one backward of a layer with its task lists recorded.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "layer.hpp"
#include "step_tasks.hpp"

namespace bench {

// The kernels of bf16 weights for CPUs with AVX512, and the one that counts.
using CountedKernels = amx_sft_moe::kernels::KernelList<  //
    amx_sft_moe::kernels::AmxBf16,                        //
    amx_sft_moe::kernels::Avx512Bf16,                     //
    amx_sft_moe::kernels::Avx512<bf16>,                   //
    CountingAmx>;

struct StepRun {
  std::vector<ListedRegion> regions;
  amx_sft_moe::StepRecord forward, backward;
};

// An operator over a layer whose steps are observed.
class ObservedLayer {
 public:
  ObservedLayer(
      const Layer& layer, std::string_view kernel, int threads,
      StepTasks::ReadCounts read = [] { return CountingMicrokernel::counts(); })
      : layer_(layer),
        workspace_(std::make_shared<amx_sft_moe::Workspace>()),
        moe_(amx_sft_moe::make_sft_moe<CountedKernels>(kernel, layer.config(threads), layer.base(),
                                                       layer.adapters(), workspace_)),
        read_(std::move(read)) {}

  std::string_view kernel_name() const { return moe_->kernel_name(); }

  StepRun run(const amx_sft_moe::Gradients& grads) {
    StepTasks tasks(*workspace_, read_);
    moe_->set_observer(&tasks);
    StepRun step = run_alone(grads);
    moe_->set_observer(nullptr);
    step.regions = tasks.regions();
    return step;
  }
  StepRun run() { return run(layer_.gradients()); }
  // Without an observer, whose copying takes time of its own.
  StepRun run_alone(const amx_sft_moe::Gradients& grads) {
    moe_->forward_sft(layer_.routing(), layer_.const_rows(layer_.x), layer_.rows(layer_.y), true);
    moe_->backward(layer_.const_rows(layer_.grad_y), grads);
    return {{}, moe_->last_forward(), moe_->last_backward()};
  }

 private:
  const Layer& layer_;
  std::shared_ptr<amx_sft_moe::Workspace> workspace_;
  std::unique_ptr<amx_sft_moe::AnySftMoe> moe_;
  StepTasks::ReadCounts read_;
};

}  // namespace bench
