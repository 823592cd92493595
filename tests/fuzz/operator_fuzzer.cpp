// libFuzzer target of the public C++ API: random configurations, views and sizes, calls in any order, legal
// ones and refused ones. Results are compared with the float64 reference, refusals with the contract (an
// exception, nothing changed).
//
//     operator_fuzzer [libFuzzer's options] [corpus folder]
//
// With AMX_SFT_MOE_FUZZ_CALLS=n the process ends well after n calls of the operator. `make fuzz
// FUZZ_CALLS=1000000` runs a million.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <memory>
#include <vector>

#include "bytes.hpp"
#include "compare.hpp"
#include "problem.hpp"
#include "random.hpp"
#include "saved_buffers.hpp"

namespace {

using namespace amx_sft_moe;  // NOLINT(google-build-using-namespace)
using namespace sft_test;     // NOLINT(google-build-using-namespace)
using sft_fuzz::Bytes;

long long g_calls = 0;  // of the operator, over all inputs
constexpr float kUnused = -123.25F;

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "operator_fuzzer: %s\n", what);
  std::abort();
}

Case draw_case(Bytes& in) {
  const int largest = in.in(0, 3) == 0 ? 40 : 12;  // small ones mostly: the reference is most of the time
  Case c{"fuzz", 0, in.in(1, 4), in.in(1, 6), in.in(1, largest), in.in(1, largest), {0, 0, 0}};
  c.tokens = in.in(0, largest);
  c.ranks = {in.in(0, 9), in.in(0, 9), in.in(0, 20)};
  const RoutingPattern patterns[] = {kDistinct,  kDuplicates,  kSkipped, kAllSkipped,
                                     kOneExpert, kIdleExperts, kSkewed};
  const Form forms[] = {kSilu, kSilu, kClamped, kGelu, kGeluTanh};
  c.routing = in.one_of(patterns);
  c.form = in.one_of(forms);
  c.biases = in.flag();
  c.trains_base = in.flag();
  c.shared_a = in.flag() && c.ranks.gate > 0;
  if (c.shared_a) c.ranks.up = c.ranks.gate;
  return c;
}

Storage draw_storage(Bytes& in) {
  Storage s{.name = "fuzz"};
  const auto dtype = [&] { return in.flag() ? DType::kFp32 : DType::kBf16; };
  s.activations = dtype();
  s.factors = dtype();
  s.routing = dtype();
  s.narrow_ids = in.flag();
  const WeightLayout layouts[] = {WeightLayout::kStacked, WeightLayout::kFused, WeightLayout::kPerExpert};
  s.weights = in.one_of(layouts);
  s.lora = in.flag() ? LoraLayout::kPeft : LoraLayout::kContiguous;
  s.padding = in.in(0, 3);
  s.edge = in.flag() ? Edge::kStart : Edge::kEnd;
  return s;
}

KernelInfo draw_kernel(Bytes& in) {
  std::vector<KernelInfo> available;
  for (const KernelInfo& kernel : list_kernels()) {
    if (kernel.available) available.push_back(kernel);
  }
  return available[static_cast<std::size_t>(in.in(0, static_cast<int>(available.size()) - 1))];
}

// One batch with what its step must give.
struct Batch {
  Problem problem;
  Expected expected;

  explicit Batch(Problem made) : problem(std::move(made)), expected(expected_step(problem, 4)) {
    // Tolerances come from a few samples of rounding, and there are a million calls: seldom is not never.
    for (std::size_t t = 0; t < reference::kTensors; ++t) {
      expected.frobenius[t] = 8 * expected.frobenius[t] + 1e-30;
      expected.largest[t] = 8 * expected.largest[t] + 1e-30;
    }
  }
};

class Session {
 public:
  explicit Session(Bytes& in) : in_(in), case_(draw_case(in)), kernel_(draw_kernel(in)) {
    const Storage storage = draw_storage(in);
    first_ = std::make_unique<Batch>(random_problem(case_, storage, kernel_.weights, in.seed()));
    Config config = first_->problem.config();
    config.num_threads = in.in(1, 3);
    config.cache_depth = depth_ = in.in(1, 3);
    moe_ = make_sft_moe(kernel_.name, config, base(), first_->problem.lora());
  }

  void run() {
    for (int n = 0; n < 150 && !in_.empty(); ++n) step();
  }

 private:
  void step() {
    switch (in_.in(0, 7)) {
      case 0:
      case 1:
        return forward_saving();
      case 2:
        return evaluate();
      case 3:
      case 4:
        return backward();
      case 5:
        return with_own_buffers();
      case 6:
        return refused();
      default:
        return change_something();
    }
  }

  AnyBaseWeights base() const {
    if (kernel_.weights == DType::kBf16) return first_->problem.base<bf16>();
    return first_->problem.base<float>();
  }

  // Calls the operator; what it may throw is the contract's.
  template <class Call>
  static bool accepted(Call&& call) {
    ++g_calls;
    try {
      call();
      return true;
    } catch (const ArgumentError&) {
      return false;
    } catch (const StateError&) {
      return false;
    }
  }

  // One of a few: what a batch must give is the expensive part.
  std::shared_ptr<Batch> draw_batch() {
    const auto which = static_cast<std::size_t>(in_.in(0, 3));
    if (which < batches_.size()) return batches_[which];
    Case c = case_;
    c.tokens = in_.in(0, case_.tokens + 3);
    batches_.push_back(std::make_shared<Batch>(another_batch(first_->problem, c, c.tokens, in_.seed())));
    return batches_.back();
  }

  void forward_saving() {
    const auto batch = draw_batch();
    Outputs out(batch->problem);
    const bool full = static_cast<index_t>(waiting_.size()) == depth_;
    const bool ok =
        accepted([&] { moe_->forward_sft(batch->problem.routing(), batch->problem.x(), out.y(), true); });
    if (ok == full) fail("a full stack must refuse, another must not");
    if (ok) {
      expect_close(batch->expected, reference::kY, out[reference::kY]);
      waiting_.push_back(batch);
    } else if (!Outputs(batch->problem)[reference::kY].bits().empty() &&
               Outputs(batch->problem)[reference::kY].bits() != out[reference::kY].bits()) {
      fail("a refused forward wrote to y");
    }
    check_depth();
  }

  void evaluate() {
    const auto batch = draw_batch();
    Outputs out(batch->problem);
    if (!accepted([&] { moe_->forward_sft(batch->problem.routing(), batch->problem.x(), out.y(), false); })) {
      fail("an evaluation was refused");
    }
    expect_close(batch->expected, reference::kY, out[reference::kY]);
    check_depth();
  }

  // Asks for a random subset of the gradients.
  void backward() {
    if (waiting_.empty()) {
      Outputs out(first_->problem);
      if (accepted([&] { moe_->backward(first_->problem.grad_y(), out.gradients()); }))
        fail("an empty pop was accepted");
      return;
    }
    const auto batch = waiting_.back();
    Outputs out(batch->problem);
    const Gradients grads = draw_gradients(out);
    if (!accepted([&] { moe_->backward(batch->problem.grad_y(), grads); })) fail("a backward was refused");
    waiting_.pop_back();
    check_gradients(*batch, out, grads);
    check_depth();
  }

  void with_own_buffers() {
    const auto batch = draw_batch();
    const Problem& problem = batch->problem;
    Outputs out(problem);
    if (kernel_.weights == DType::kBf16) {
      own_buffers_step<bf16>(problem, out);
    } else {
      own_buffers_step<float>(problem, out);
    }
    expect_close(batch->expected, reference::kY, out[reference::kY]);
    check_gradients(*batch, out, out.gradients());
    check_depth();
  }

  template <class T>
  void own_buffers_step(const Problem& problem, Outputs& out) {
    const SavedBuffers<T> buffers(problem, routed_rows(problem) + in_.in(0, 2), in_.in(0, 2));
    const SavedActivations<T> v = buffers.view();
    const AnySavedActivations saved{v.gate, v.up, v.u_gate, v.u_up, v.u_down};
    const Gradients grads = out.gradients();
    if (!accepted([&] { moe_->forward_sft(problem.routing(), problem.x(), out.y(), saved); }) ||
        !accepted([&] { moe_->backward(problem.routing(), problem.x(), saved, problem.grad_y(), grads); })) {
      fail("a step with the caller's buffers was refused");
    }
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
    grads.accumulate = in_.flag();
    if (grads.accumulate) zero_sums(out);
    return grads;
  }

  // What a backward may add to; adding to zeros is overwriting.
  static void zero_sums(Outputs& out) {
    for (std::size_t t = reference::kGateA; t < reference::kTensors; ++t) {
      out[static_cast<reference::Tensor>(t)].fill(0);
    }
  }

  void check_gradients(const Batch& batch, const Outputs& out, const Gradients& grads) const {
    const LoraGradients& lora = grads.lora;
    const bool wanted[] = {true,
                           !grads.x.empty(),
                           !grads.routing_weights.empty(),
                           !lora.gate_a.empty(),
                           !lora.gate_b.empty(),
                           !lora.up_a.empty(),
                           !lora.up_b.empty(),
                           !lora.down_a.empty(),
                           !lora.down_b.empty(),
                           !grads.biases.gate.empty(),
                           !grads.biases.up.empty(),
                           !grads.biases.down.empty(),
                           !grads.weights.gate.empty(),
                           !grads.weights.up.empty(),
                           !grads.weights.down.empty()};
    Outputs untouched(batch.problem);
    if (grads.accumulate) zero_sums(untouched);
    for (std::size_t t = reference::kGradX; t < reference::kTensors; ++t) {
      const auto which = static_cast<reference::Tensor>(t);
      if (!wanted[t]) {
        if (out[which].bits() != untouched[which].bits()) fail("a gradient that is not wanted was written");
      } else if (case_.form == kClamped) {
        // A clamp's gradient jumps where rounding moves a value across its bound.
        expect_written(batch.expected.values[t], out[which].values());
      } else {
        expect_close(batch.expected, which, out[which]);
      }
    }
    if (!out.gaps_are_poison()) fail("something was written between the rows of a result");
  }

  // What is not written is still poison, a NaN.
  static void expect_written(const std::vector<double>& wanted, const std::vector<double>& got) {
    if (got.size() != wanted.size()) fail("a gradient has another size than the reference's");
    for (std::size_t n = 0; n < got.size(); ++n) {
      if (std::isfinite(wanted[n]) && !std::isfinite(got[n])) fail("a gradient is not finite, or not written");
    }
  }

  // A call with one argument spoilt; nothing may change.
  void refused() {
    const Problem& problem = first_->problem;
    Outputs out(problem);
    Routing routing = problem.routing();
    AnyConstMatrix x = problem.x();
    AnyMatrix y = out.y();
    const int tokens = case_.tokens;
    const int hidden = case_.hidden;
    switch (in_.in(0, 5)) {
      case 0:
        routing.tokens = -1 - in_.in(0, 9);
        break;
      case 1:
        routing.tokens += 1 + in_.in(0, 9);  // x, y and the weights have fewer
        break;
      case 2:
        x = AnyConstMatrix(static_cast<const float*>(nullptr), tokens + 1, hidden, hidden);
        break;
      case 3:
        y = AnyMatrix(unused_.data(), tokens, hidden + 1, hidden + 1);
        break;
      case 4:
        x = AnyConstMatrix(unused_.data(), tokens, hidden - 1, hidden);
        break;
      default:
        routing.weights = AnyConstMatrix(unused_.data(), tokens, case_.top_k + 1, case_.top_k + 1);
    }
    if (accepted([&] { moe_->forward_sft(routing, x, y, in_.flag()); })) fail("a spoilt forward was accepted");
    if (out.bits() != Outputs(problem).bits()) fail("a refused call wrote");
    if (std::ranges::any_of(unused_, [](float value) { return value != kUnused; })) {
      fail("a refused call wrote where its argument points to");
    }
    check_depth();
  }

  void change_something() {
    switch (in_.in(0, 3)) {
      case 0:
        ++g_calls;
        moe_->clear();
        waiting_.clear();
        break;
      case 1:
        ++g_calls;
        moe_->set_base(base());
        break;
      case 2:
        ++g_calls;
        moe_->set_lora(first_->problem.lora());
        break;
      default: {
        LoraWeights lora = first_->problem.lora();
        lora.down.scaling = std::numeric_limits<float>::infinity();
        if (lora.down.rank() > 0 && accepted([&] { moe_->set_lora(lora); }))
          fail("an infinite scaling was accepted");
      }
    }
    check_depth();
  }

  void check_depth() const {
    if (moe_->saved_depth() != static_cast<index_t>(waiting_.size()))
      fail("the stack has another depth than expected");
    if (testing::Test::HasFailure()) fail("a result is wrong");
  }

  Bytes& in_;
  Case case_;
  KernelInfo kernel_;
  // A refused call must not touch it. As large as the largest view of refused().
  std::vector<float> unused_ = std::vector<float>(2048, kUnused);
  index_t depth_ = 1;
  std::unique_ptr<Batch> first_;  // whose weights and factors the operator uses
  std::unique_ptr<AnySftMoe> moe_;
  std::vector<std::shared_ptr<Batch>> batches_;
  std::deque<std::shared_ptr<Batch>> waiting_;  // forwards on the operator's stack
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const char* const limit = std::getenv("AMX_SFT_MOE_FUZZ_CALLS");
  static const long long most = limit == nullptr ? -1 : std::atoll(limit);
  Bytes in(data, size);
  Session(in).run();
  if (most >= 0 && g_calls >= most) {
    std::printf("operator_fuzzer: %lld calls without a finding\n", g_calls);
    std::fflush(stdout);
    std::_Exit(0);
  }
  return 0;
}
