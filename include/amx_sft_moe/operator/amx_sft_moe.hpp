// AMX_SFT_MOE<Kernel>: the expert part of one Mixture-of-Experts layer with LoRA, forward and backward.
//
//     amx_sft_moe::AMX_SFT_MOE<amx_sft_moe::kernels::Avx512Bf16> moe(config, weights, lora);
//     moe.forward_sft(routing, x, y);            // y [T, H]
//     moe.backward(grad_y, grads);               // grad_x, routing weights, LoRA factors, biases, base weights
//
// Threading: an object serves one caller at a time (a second one gets a StateError); different objects are
// independent unless they share a workspace, which is in use during passes and memory(). What config(), lora(),
// label() and last_*() return is to be read between calls. Inside, OpenMP threads. Errors: ArgumentError, StateError,
// KernelError, std::bad_alloc; the object stays usable and a refused call changes nothing. Results depend on inputs, kernel
// and the caller's modes of rounding and of denormals (MXCSR), which the threads take over: the same bits for every number
// of threads. Floating-point exceptions do not trap inside, whatever the caller has enabled.
#pragma once

#include <algorithm>
#include <memory>
#include <utility>

#include "amx_sft_moe/core/float_mode.hpp"
#include "amx_sft_moe/moe/backward.hpp"
#include "amx_sft_moe/operator/in_use.hpp"
#include "amx_sft_moe/operator/saved_stack.hpp"
#include "amx_sft_moe/operator/step_shape.hpp"
#include "amx_sft_moe/operator/validate.hpp"
#include "amx_sft_moe/operator/validate_apart.hpp"
#include "amx_sft_moe/profile/timer_output.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN

struct MemoryReport {
  index_t workspace_bytes = 0;  // shared by all who share the workspace
  index_t saved_bytes = 0;      // the stack of saved activations, in use or kept for reuse
};

template <class Kernel>
class AMX_SFT_MOE {
 public:
  using Weight = typename Kernel::Weight;
  using Stored = typename Kernel::Stored;

  // Views are kept, not what they point to: weights and factors must outlive their use. Layers that run one
  // after another may share a workspace. Throws KernelError where this CPU cannot run the kernel.
  AMX_SFT_MOE(Config config, BaseWeights<Weight> weights, LoraWeights lora = {},
              std::shared_ptr<Workspace> workspace = nullptr)
      : config_(std::move(config)),
        blocking_(gemm::Blocking::of_this_machine()),
        workspace_(workspace ? std::move(workspace) : std::make_shared<Workspace>()),
        stack_(config_.cache_depth) {
    validate::config(config_);
    if (const std::string why = Kernel::refusal(); !why.empty()) {
      throw KernelError(concat("kernel ", Kernel::kName, ": ", why));
    }
    set_base(weights);
    set_lora(lora);
    timer_output_ = TimerOutput::from_environment();  // last: it makes the files
    forward_record_.wants_spans = config_.record_spans || timer_output_.wants_spans();
    backward_record_.wants_spans = forward_record_.wants_spans;
  }

  void set_base(const BaseWeights<Weight>& weights) {
    const InUse own = own_use();
    validate::base_weights(weights, config_);
    weights_ = weights;
  }

  // Factors are read anew in each call: after an optimiser's step there is nothing to do.
  void set_lora(const LoraWeights& lora) {
    const InUse own = own_use();
    validate::lora_weights(lora, config_);
    lora_ = lora;
  }

  // y [T, H] = the experts' output; y may be x itself. With save_for_backward, what backward needs is pushed on the
  // operator's stack; x in the kernel's type: with fp32 x and a bf16 kernel gradients are rounded once more than with
  // the overload below, whose caller keeps x.
  void forward_sft(const Routing& routing, const AnyConstMatrix& x, const AnyMatrix& y,
                   bool save_for_backward = true) {
    const Call call = begin_call();
    check_forward(routing, x, y);
    if (!save_for_backward) return run_forward(routing, x, y, {});
    SavedForward<Stored>& entry = stack_.next();
    entry.reserve(routing, config_, lora_);
    entry.template keep_inputs<typename Kernel::Rows>(routing, x);  // y may be written over x
    run_forward(routing, x, y, entry.activations());
    stack_.push();
  }

  // The same with the caller's buffers, of T k rows (or as many as are routed), each with memory of its own. Nothing is
  // pushed; x, which backward needs too, is the caller's to keep.
  void forward_sft(const Routing& routing, const AnyConstMatrix& x, const AnyMatrix& y,
                   const SavedActivations<Stored>& saved) {
    const Call call = begin_call();
    check_forward(routing, x, y);
    run_forward(routing, x, y, saved, /*check_saved=*/true);
  }

  // Gradients of the last forward that waits on the stack. Its entry is popped when the call succeeds. grads.x may be
  // grad_y itself, or x; gradients of parameters have memory of their own, and grads.routing_weights none of grads.x.
  void backward(const AnyConstMatrix& grad_y, const Gradients& grads) {
    const Call call = begin_call();
    const SavedForward<Stored>& entry = stack_.top();
    entry.require_ranks(lora_);
    run_backward(entry.routing(), entry.x(), entry.activations(), grad_y, grads);
    stack_.pop();
  }

  // The same for a forward whose inputs and activations the caller kept.
  void backward(const Routing& routing, const AnyConstMatrix& x, const SavedActivations<Stored>& saved,
                const AnyConstMatrix& grad_y, const Gradients& grads) {
    const Call call = begin_call();
    validate::routing(routing, config_);
    validate::matrix("x", x, routing.tokens, config_.hidden_size, validate::Columns::kAdjacent);
    run_backward(routing, x, saved, grad_y, grads);
  }

  // Forgets all forwards that wait for their backward.
  void clear() {
    const InUse own = own_use();
    stack_.clear();
  }
  index_t saved_depth() const {
    const InUse own = own_use();
    return stack_.size();
  }

  const Config& config() const { return config_; }
  const LoraWeights& lora() const { return lora_; }
  // Of the last pass of the kind. A call that was refused leaves it as it was; it is empty() after a pass that an
  // exception left half way (std::bad_alloc; KernelError of kernel onednn), until the next one, and always with
  // AMX_SFT_MOE_NO_TIMER.
  const StepRecord& last_forward() const { return forward_record_; }
  const StepRecord& last_backward() const { return backward_record_; }
  // What dumps of this operator's records say about it; the name is the configuration's own.
  StepLabel label(StepKind kind) const { return {kind, config_.name, Kernel::kName, number_}; }
  // The last step as users of published profiles know it (profile/dump.hpp; json_dump.hpp, trace_dump.hpp).
  std::string backward_text() const {
    const InUse own = own_use();
    return text_dump(backward_record_, label(StepKind::kBackward));
  }
  // Told while a pass runs where it is; null: nobody. It must outlive its use. Never told with AMX_SFT_MOE_NO_TIMER.
  void set_observer(StepObserver* observer) {
    const InUse own = own_use();
    observer_ = observer;
  }
  // Of the layer, in dumps from now on.
  void set_name(std::string name) {
    const InUse own = own_use();
    config_.name = std::move(name);
  }
  // Of the operator, in dumps from now on. Each shared library counts the operators that it makes itself: who
  // makes some by several of them counts them all.
  void set_number(std::int64_t number) {
    const InUse own = own_use();
    number_ = number;
  }
  MemoryReport memory() const {
    const InUse own = own_use(), shared = workspace_use();
    return {workspace_->bytes(), stack_.bytes()};
  }

 private:
  InUse own_use() const {
    return {in_use_, "operator: expected one caller at a time, got a call while another thread is in it"};
  }
  InUse workspace_use() const {
    return {workspace_->in_use,
            "workspace: expected one caller at a time, got a call while another layer is using it"};
  }

  // A pass: operator and workspace are one caller's, and nothing traps, before and after its parallel regions neither.
  struct Call {
    InUse own, shared;
    FloatMode::Scope no_traps;
  };
  Call begin_call() const {
    return {own_use(), workspace_use(), FloatMode::Scope(FloatMode::of_this_thread())};
  }

  void check_forward(const Routing& routing, const AnyConstMatrix& x, const AnyMatrix& y) const {
    validate::routing(routing, config_);
    validate::matrix("x", x, routing.tokens, config_.hidden_size, validate::Columns::kAdjacent);
    validate::matrix("y", y, routing.tokens, config_.hidden_size, validate::Columns::kAdjacent);
    validate::room_for_routes(routing, config_, lora_);
  }

  // Sorts the routes, into the workspace only: a call can still be refused afterwards.
  void route(const Routing& routing) {
    workspace_->routing.build(routing.expert_ids, routing.weights, routing.tokens, config_.top_k,
                              config_.num_experts);
  }

  moe::Step<Kernel> begin_step(const Routing& routing, const SavedActivations<Stored>& saved,
                               StepTimer& timer) {
    const int threads = threads_of(config_);
    workspace_->reserve_threads(threads);
    return {config_.hidden_size,
            config_.intermediate_size,
            config_.top_k,
            routing.tokens,
            config_.activation,
            weights_,
            lora_,
            blocking_,
            threads,
            *workspace_,
            timer,
            saved};
  }

  void run_forward(const Routing& routing, const AnyConstMatrix& x, const AnyMatrix& y,
                   const SavedActivations<Stored>& saved, bool check_saved = false) {
    const std::int64_t begin_ns = now_ns();
    route(routing);
    const index_t rows_routed = workspace_->routing.routed_rows();
    if (check_saved) validate::saved_activations(saved, rows_routed, config_, lora_);
    validate::outputs_apart(y, saved.first_rows(rows_routed), config_, weights_, lora_, routing, x);
    {
      StepTimer timer(forward_record_, routing.tokens, rows_routed, begin_ns, Phase::kRoute, observer_);
      auto step = begin_step(routing, saved, timer);
      forward_record_.threads = step.threads;
      const moe::ForwardRows<Kernel> rows(step);
      // Behind what memory refuses: of ranks that none holds the counts would overflow.
      forward_record_.work = forward_work(forward_shape(step, routing, config_.num_experts, x, y));
      moe::forward_gather(step, rows, x);
      moe::forward_gate_up(step, rows);
      moe::forward_down(step, rows);
      moe::forward_sum_tokens(step, rows, y);
      workspace_->level_threads();
    }
    timer_output_.write(forward_record_, label(StepKind::kForward));
  }

  void run_backward(const Routing& routing, const AnyConstMatrix& x, const SavedActivations<Stored>& saved,
                    const AnyConstMatrix& grad_y, const Gradients& grads) {
    validate::matrix("grad_y", grad_y, routing.tokens, config_.hidden_size, validate::Columns::kAdjacent);
    validate::gradients(grads, routing.tokens, config_, lora_, weights_.biases);
    validate::room_for_routes(routing, config_, lora_);
    const std::int64_t begin_ns = now_ns();
    route(routing);
    const index_t rows_routed = workspace_->routing.routed_rows();
    validate::saved_activations(saved, rows_routed, config_, lora_);
    validate::gradients_apart(grads, config_, weights_, lora_, routing, x, saved.first_rows(rows_routed),
                              grad_y);
    {
      StepTimer timer(backward_record_, routing.tokens, rows_routed, begin_ns, Phase::kD1Scatter, observer_);
      auto step = begin_step(routing, saved, timer);
      backward_record_.threads = step.threads;
      const moe::BackwardRows<Kernel> rows(step, grads);
      backward_record_.work =
          backward_work(backward_shape(step, routing, config_.num_experts, x, grad_y, grads));
      moe::backward_scatter(step, rows, grad_y);
      moe::backward_down(step, rows, grads);
      moe::backward_activation(step, rows);
      moe::backward_gate_up(step, rows, x, grads);
      moe::backward_sum_tokens(step, rows, grads);
      workspace_->level_threads();
    }
    timer_output_.write(backward_record_, label(StepKind::kBackward));
  }

  Config config_;
  gemm::Blocking blocking_;
  std::shared_ptr<Workspace> workspace_;
  SavedStack<Stored> stack_;
  BaseWeights<Weight> weights_;
  LoraWeights lora_;
  StepRecord forward_record_, backward_record_;
  TimerOutput timer_output_;
  StepObserver* observer_ = nullptr;
  std::int64_t number_ = next_operator_number();
  mutable std::atomic<bool> in_use_{false};
};

AMX_SFT_MOE_NAMESPACE_END
