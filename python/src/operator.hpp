// `_core.SftMoe`: one operator with everything around it that Python callers need. Tensors are read, results
// allocated and the library called under one guard, so that a second thread gets an error and never a mixture.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "call_tensors.hpp"
#include "kernels.hpp"
#include "ranges.hpp"

namespace amx_sft_moe::python {

// Scratch memory that operators of layers which run one after another may share.
class SharedWorkspace {
 public:
  SharedWorkspace() : workspace_(std::make_shared<Workspace>()) {}
  const std::shared_ptr<Workspace>& get() const { return workspace_; }

 private:
  std::shared_ptr<Workspace> workspace_;
};

// Whose turn it is. Held for the whole of a call, the part without the GIL included.
class Guard {
 public:
  Guard(std::atomic_flag& in_use, std::string_view call);
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;
  ~Guard() { in_use_.clear(std::memory_order_release); }

 private:
  std::atomic_flag& in_use_;
};

class Operator {
 public:
  Operator(const Config& config, KernelChoice kernel, const LoraOptions& lora,
           const std::optional<SharedWorkspace>& workspace);

  void set_base(py::handle gate_proj, py::handle up_proj, py::handle down_proj, py::handle gate_up_proj,
                const BiasObjects& biases);
  void set_lora(const LoraObjects& lora);

  // On the operator's own stack. `out` is None or y; returns y.
  py::object forward_sft(py::handle x, py::handle expert_ids, py::handle routing_weights,
                         bool save_for_backward, py::handle out);
  // `out` maps names to tensors, `skip` holds names that are not to be computed; gradients of biases and of base
  // weights are computed where `out` has them or where all are asked for. Returns a dict of names to tensors.
  py::dict backward(py::handle grad_y, bool accumulate, float scale, const py::dict& out, const py::set& skip,
                    bool bias_gradients, bool weight_gradients);

  // With activations that the caller owns, and parameters that live for this call. Returns (y, saved); `saved`
  // is one flat tensor, or None where nothing is to be saved.
  py::tuple forward_saved(py::handle x, py::handle expert_ids, py::handle routing_weights,
                          const LoraObjects& lora, const BiasObjects& biases, bool save);
  // `needs` says which gradients are wanted; returns them in that order, None where not wanted. They are new, but where
  // `given` has a tensor to be written, of memory that nobody else sees. grad_x has the element type of x.
  py::tuple backward_saved(py::handle x, py::handle expert_ids, py::handle routing_weights, py::handle saved,
                           py::handle grad_y, const LoraObjects& lora, const BiasObjects& biases,
                           const std::array<bool, kGradientCount>& needs,
                           const std::array<py::object, kGradientCount>& given);

  // target [cols, rows] = source [rows, cols] transposed, by as many threads as a call has; a new tensor of the same kind where
  // it is None. Returns it.
  py::object transpose(py::handle source, py::handle target) const;

  void clear();
  index_t saved_depth();
  py::dict last_times(bool backward);
  std::string last_dump(bool backward, bool json);
  // Sums over passes, kept from when they are first asked for: (forward, backward) since the last call.
  py::tuple take_totals();
  void collect_totals(bool wanted);
  // An object with enter(name) and leave(), told where a pass is, or None.
  py::object ranges() const { return ranges_ ? ranges_->object() : py::none(); }
  void set_ranges(const py::object& ranges);
  const std::string& name() const { return config_.name; }
  void set_name(const std::string& name);
  py::dict memory();
  std::string kernel() const;
  py::object weight_dtype() const;
  const Config& config() const { return config_; }

 private:
  AnySftMoe& ready();
  // Hands the parameters of one call to the library and runs a pass of it, without the GIL.
  template <class Pass>
  void run(const ParameterTensors& parameters, Pass&& pass);
  // After a pass of the library: its part in the totals.
  void count(StepKind kind);
  const StepRecord& last(StepKind kind) const {
    return kind == StepKind::kBackward ? moe_->last_backward() : moe_->last_forward();
  }

  Config config_;
  const KernelChoice kernel_;  // outlives moe_
  const LoraOptions lora_;
  const std::shared_ptr<Workspace> workspace_;
  std::unique_ptr<PythonRanges> ranges_;  // outlives moe_
  std::unique_ptr<AnySftMoe> moe_;
  bool collects_totals_ = false;
  StepTotals forward_totals_, backward_totals_;
  BaseTensors base_;
  ParameterObjects parameters_;
  std::vector<GradientTypes> entries_;  // of the stack: what the library does not know about its entries
  std::atomic_flag in_use_ = ATOMIC_FLAG_INIT;
};

}  // namespace amx_sft_moe::python
