// An operator whose every call is checked: results against the float64 reference, refusals against the contract
// (an exception of the right kind, nothing changed).
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "batch.hpp"
#include "bytes.hpp"
#include "draws.hpp"
#include "fail.hpp"
#include "saved_buffers.hpp"
#include "spoil.hpp"

namespace sft_fuzz {

inline long long g_calls = 0;  // of any operator, over all inputs

// How a call ended. Every other exception ends the process.
struct Outcome {
  enum Kind { kAccepted, kArgumentError, kStateError } kind = kAccepted;
  std::string message = {};
};

template <class Call>
Outcome outcome_of(Call&& call) {
  ++g_calls;
  try {
    call();
    return {};
  } catch (const ArgumentError& error) {
    return {Outcome::kArgumentError, error.what()};
  } catch (const StateError& error) {
    return {Outcome::kStateError, error.what()};
  }
}

class CheckedOperator {
 public:
  // `workspace` may be null, or one that other operators use between this one's calls.
  CheckedOperator(Bytes& in, const std::shared_ptr<Workspace>& workspace)
      : in_(in), kernel_(draw_kernel(in)), cases_{draw_case(in)} {
    cases_[1] = draw_other_ranks(in, cases_[0]);
    problems_.push_back(draw_problem(in, cases_[0], kernel_.weights));
    problems_.push_back(draw_other_adapters(in, cases_[1], problems_[0]));
    config_ = draw_config(in, problems_[0], longest());
    moe_ = make_sft_moe(kernel_.name, config_, base(), problems_[0].lora(), workspace);
  }

  void step() {
    switch (in_.in(0, 12)) {
      case 0:
      case 1:
      case 2:
        return is_full() && mostly() ? backward() : forward_saving();
      case 3:
        return evaluate();
      case 4:
      case 5:
      case 6:
        return waiting_.empty() && mostly() ? forward_saving() : backward();
      case 7:
        return with_own_buffers();
      case 8:
        return refused_forward();
      case 9:
        return refused_backward();
      case 10:
        return refused_setting();
      case 11:
        return use_adapters(1 - adapters_);
      default:
        return change_something();
    }
  }

  // Whatever was refused before, what waits must still be right.
  void finish() {
    while (!waiting_.empty()) {
      use_adapters(waiting_.back()->adapters);
      const auto batch = waiting_.back();
      Outputs out(batch->problem);
      backward_of(*batch, out, out.gradients());
    }
  }

 private:
  // Calls that a full or an empty stack refuses are few enough.
  bool mostly() { return in_.in(0, 3) > 0; }
  bool is_full() const { return static_cast<index_t>(waiting_.size()) == config_.cache_depth; }

  int longest() const { return cases_[0].tokens + 3; }

  template <class Weight>
  BaseWeights<Weight> typed_base() const {
    return problems_[0].base<Weight>();
  }
  AnyBaseWeights base() const {
    if (kernel_.weights == DType::kBf16) return typed_base<bf16>();
    return typed_base<float>();
  }

  template <class Call>
  void must_accept(const char* what, Call&& call) {
    const Outcome outcome = outcome_of(call);
    if (outcome.kind != Outcome::kAccepted) fail(std::string(what) + " was refused: " + outcome.message);
  }

  // Calls with outputs of `problem`. Nothing may change: neither they, nor the records, nor the stack.
  template <class Call>
  std::string must_refuse(const char* what, Outcome::Kind kind, const Problem& problem, Call&& call) {
    Outputs out(problem);
    const std::int64_t forwards = moe_->last_forward().index;
    const std::int64_t backwards = moe_->last_backward().index;
    const Outcome outcome = outcome_of([&] { call(out); });
    if (outcome.kind == Outcome::kAccepted) fail(std::string(what) + " was accepted");
    if (outcome.kind != kind) fail(std::string(what) + " threw the other exception: " + outcome.message);
    if (out.bits() != Outputs(problem).bits()) fail(std::string(what) + " was refused, and wrote a result");
    if (!unused_.is_untouched())
      fail(std::string(what) + " was refused, and wrote where its argument points to");
    if (moe_->last_forward().index != forwards || moe_->last_backward().index != backwards) {
      fail(std::string(what) + " was refused, and recorded");
    }
    check_state();
    return outcome.message;
  }

  // One of a few: what a batch must give is the expensive part.
  std::shared_ptr<Batch> draw_batch() {
    auto& batches = batches_[adapters_];
    const auto which = static_cast<std::size_t>(in_.in(0, 3));
    if (which < batches.size()) return batches[which];
    const Case& c = cases_[adapters_];
    const int tokens = in_.in(0, longest());
    Problem made = another_batch(problems_[adapters_], c, tokens, in_.seed());
    batches.push_back(std::make_shared<Batch>(std::move(made), adapters_));
    return batches.back();
  }

  bool is_too_long(const Batch& batch) const {
    return config_.max_tokens && batch.tokens() > *config_.max_tokens;
  }

  // Forwards `batch`, saved on the stack or not, and compares y.
  void forward_of(const Batch& batch, bool save) {
    const Problem& problem = batch.problem;
    Outputs out(problem);
    must_accept("a forward", [&] { moe_->forward_sft(problem.routing(), problem.x(), out.y(), save); });
    batch.expect_y(out);
    check_record(moe_->last_forward(), problem);
  }

  void forward_saving() {
    const auto batch = draw_batch();
    const Problem& problem = batch->problem;
    const auto forward = [&](Outputs& out) {
      moe_->forward_sft(problem.routing(), problem.x(), out.y(), true);
    };
    if (is_too_long(*batch)) {
      must_refuse("more than max_tokens", Outcome::kArgumentError, problem, forward);
    } else if (is_full()) {
      must_refuse("a forward beyond cache_depth", Outcome::kStateError, problem, forward);
    } else {
      forward_of(*batch, true);
      waiting_.push_back(batch);
    }
    check_state();
  }

  void evaluate() {
    const auto batch = draw_batch();
    const Problem& problem = batch->problem;
    if (is_too_long(*batch)) {
      must_refuse("more than max_tokens", Outcome::kArgumentError, problem,
                  [&](Outputs& out) { moe_->forward_sft(problem.routing(), problem.x(), out.y(), false); });
    } else {
      forward_of(*batch, false);
    }
    check_state();
  }

  // Asks for a random subset of the gradients.
  void backward() {
    if (waiting_.empty()) {
      must_refuse("an empty pop", Outcome::kStateError, problems_[0],
                  [&](Outputs& out) { moe_->backward(problems_[0].grad_y(), out.gradients()); });
      return;
    }
    const auto batch = waiting_.back();
    if (batch->adapters != adapters_) refused_for_its_ranks(*batch);
    use_adapters(batch->adapters);
    Outputs out(batch->problem);
    backward_of(*batch, out, draw_gradients(out));
  }

  void backward_of(const Batch& batch, const Outputs& out, const Gradients& grads) {
    must_accept("a backward", [&] { moe_->backward(batch.problem.grad_y(), grads); });
    waiting_.pop_back();
    batch.expect_gradients(out, grads);
    check_record(moe_->last_backward(), batch.problem);
    check_state();
  }

  // The adapters have other ranks than those of the forward. The entry stays, for when the old ones are back.
  void refused_for_its_ranks(const Batch& batch) {
    const std::string message =
        must_refuse("a backward with other ranks", Outcome::kStateError, batch.problem,
                    [&](Outputs& out) { moe_->backward(batch.problem.grad_y(), out.gradients()); });
    for (const Case& c : cases_) {
      const Ranks& r = c.ranks;
      if (message.find(concat("(", r.gate, ", ", r.up, ", ", r.down, ")")) == std::string::npos) {
        fail("a refusal for ranks does not name them: " + message);
      }
    }
  }

  void with_own_buffers() {
    const auto batch = draw_batch();
    if (kernel_.weights == DType::kBf16) {
      own_buffers_step<bf16>(*batch);
    } else {
      own_buffers_step<float>(*batch);
    }
    check_state();
  }

  template <class T>
  void own_buffers_step(const Batch& batch) {
    const Problem& problem = batch.problem;
    const index_t rows = routed_rows(problem);
    const int spare = in_.in(0, 2);
    const SavedBuffers<T> buffers(problem, rows + spare, in_.in(0, 2));
    const SavedActivations<T> v = buffers.view();
    const AnySavedActivations saved{v.gate, v.up, v.u_gate, v.u_up, v.u_down};
    const Routing routing = problem.routing();
    if (is_too_long(batch)) {
      must_refuse("more than max_tokens", Outcome::kArgumentError, problem,
                  [&](Outputs& out) { moe_->forward_sft(routing, problem.x(), out.y(), saved); });
      must_refuse("more than max_tokens", Outcome::kArgumentError, problem, [&](Outputs& out) {
        moe_->backward(routing, problem.x(), saved, problem.grad_y(), out.gradients());
      });
      return;
    }
    Outputs out(problem);
    if (in_.flag()) refused_buffers(problem, saved);
    must_accept("a forward with the caller's buffers",
                [&] { moe_->forward_sft(routing, problem.x(), out.y(), saved); });
    if (in_.flag()) refused_buffers(problem, saved);
    const Gradients grads = draw_gradients(out);
    must_accept("a backward with the caller's buffers",
                [&] { moe_->backward(routing, problem.x(), saved, problem.grad_y(), grads); });
    batch.expect_y(out);
    batch.expect_gradients(out, grads);
  }

  // A forward or a backward with spoilt buffers. Those of no routes are not looked at.
  void refused_buffers(const Problem& problem, AnySavedActivations saved) {
    const index_t rows = routed_rows(problem);
    if (rows == 0) return;
    spoil_saved(in_, cases_[adapters_], unused_, rows, saved);
    const bool forward = in_.flag();
    must_refuse("a spoilt buffer", Outcome::kArgumentError, problem, [&](Outputs& out) {
      if (forward) return moe_->forward_sft(problem.routing(), problem.x(), out.y(), saved);
      moe_->backward(problem.routing(), problem.x(), saved, problem.grad_y(), out.gradients());
    });
  }

  Gradients draw_gradients(Outputs& out) {
    Gradients grads = out.gradients();
    if (in_.flag()) grads.x = {};
    if (in_.flag()) grads.routing_weights = {};
    for (AnyExpertTensor* factor : {&grads.lora.gate_a, &grads.lora.gate_b, &grads.lora.up_a, &grads.lora.up_b,
                                    &grads.lora.down_a, &grads.lora.down_b}) {
      if (in_.in(0, 3) == 0) *factor = {};
    }
    for (AnyMatrix* bias : {&grads.biases.gate, &grads.biases.up, &grads.biases.down}) {
      if (in_.in(0, 3) == 0) *bias = {};
    }
    for (AnyExpertTensor* weight : {&grads.weights.gate, &grads.weights.up, &grads.weights.down}) {
      if (in_.in(0, 3) == 0) *weight = {};
    }
    grads.scale = draw_scale(in_);
    grads.accumulate = in_.flag();
    if (grads.accumulate) fill_sums(out);
    return grads;
  }

  void refused_forward() {
    const Problem& problem = problems_[adapters_];
    const bool save = in_.flag();
    must_refuse("a spoilt forward", Outcome::kArgumentError, problem, [&](Outputs& out) {
      Routing routing = problem.routing();
      AnyConstMatrix x = problem.x();
      AnyMatrix y = out.y();
      spoil_forward(in_, cases_[adapters_], unused_, routing, x, y);
      // A full stack is no excuse: arguments come first.
      moe_->forward_sft(routing, x, y, save);
    });
  }

  // Its entry stays.
  void refused_backward() {
    if (waiting_.empty()) forward_saving();
    if (waiting_.empty() || waiting_.back()->adapters != adapters_) return;
    const Problem& problem = waiting_.back()->problem;
    must_refuse("a spoilt backward", Outcome::kArgumentError, problem, [&](Outputs& out) {
      AnyConstMatrix grad_y = problem.grad_y();
      Gradients grads = out.gradients();
      spoil_backward(in_, cases_[adapters_], unused_, problems_[adapters_].lora(), grad_y, grads);
      moe_->backward(grad_y, grads);
    });
  }

  void refused_setting() {
    const Case& c = cases_[adapters_];
    const bool lora = in_.flag();
    must_refuse("a spoilt setting", Outcome::kArgumentError, problems_[adapters_], [&](Outputs&) {
      if (lora) {
        moe_->set_lora(spoilt_lora(in_, c, unused_, problems_[adapters_].lora()));
      } else if (kernel_.weights == DType::kBf16) {
        moe_->set_base(spoilt_base(in_, c, unused_, typed_base<bf16>()));
      } else {
        moe_->set_base(spoilt_base(in_, c, unused_, typed_base<float>()));
      }
    });
  }

  void use_adapters(std::size_t which) {
    must_accept("set_lora", [&] { moe_->set_lora(problems_[which].lora()); });
    adapters_ = which;
    check_state();
  }

  void change_something() {
    switch (in_.in(0, 3)) {
      case 0:
        must_accept("clear", [&] { moe_->clear(); });
        waiting_.clear();
        break;
      case 1:
        must_accept("set_base", [&] { moe_->set_base(base()); });
        break;
      case 2:
        must_accept("set_name", [&] { moe_->set_name(config_.name = in_.flag() ? "renamed" : ""); });
        break;
      default:
        use_adapters(adapters_);
    }
    check_state();
  }

  void check_record(const StepRecord& record, const Problem& problem) const {
    const index_t rows = routed_rows(problem);
    if (record.tokens != problem.batch().tokens || record.routed_rows != rows)
      fail("a record is of another call");
    bool has_spans = false;
    for (const RegionRecord& region : record.regions()) {
      for (const ThreadRecord& thread : region.threads) has_spans = has_spans || thread.spans > 0;
    }
    if (config_.record_spans && rows > 0 && !has_spans) fail("spans were wanted and not recorded");
  }

  void check_state() const {
    if (moe_->saved_depth() != static_cast<index_t>(waiting_.size())) {
      fail("the stack has another depth than expected");
    }
    if (moe_->label(StepKind::kForward).name != config_.name) fail("the layer has another name than expected");
    if (testing::Test::HasFailure()) fail("a result is wrong");
  }

  Bytes& in_;
  KernelInfo kernel_;
  Case cases_[2];                  // one layer with adapters of different ranks
  std::vector<Problem> problems_;  // the same; the first one's weights are the operator's
  Config config_;
  Unused unused_;
  std::unique_ptr<AnySftMoe> moe_;
  std::size_t adapters_ = 0;  // which are set
  std::vector<std::shared_ptr<Batch>> batches_[2];
  std::deque<std::shared_ptr<Batch>> waiting_;  // forwards on the operator's stack
};

}  // namespace sft_fuzz
