// Views that few callers have: offsets that do not fit in 31 bits, strides below 0, and views of gate's A that
// are not quite gate's A. Each gives the bits that the ordinary layout of the same values gives.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "compare.hpp"
#include "far_apart.hpp"
#include "saved_buffers.hpp"
#include "step.hpp"

namespace sft_test {
namespace {

using amx_sft_moe::AnyConstExpertTensor;
using amx_sft_moe::AnyExpertTensor;
using amx_sft_moe::AnyMatrix;

template <class Kernel>
class OperatorViews : public KernelTest<Kernel> {};
TYPED_TEST_SUITE(OperatorViews, AllKernels, KernelLabels);

constexpr const char* kNoSpace = "the system does not give so much address space";

// Weights, a factor and two gradients.
TYPED_TEST(OperatorViews, ExpertsOrTheirRowsFarApart) {
  using Weight = typename TypeParam::Weight;
  constexpr index_t kE = 2, kH = 21, kI = 17, kRank = 7, kFar = FarApart<bf16>::kFar;
  const Case c = with_trained_base({"far_apart", 19, 2, kE, kH, kI, {kRank, 3, 5}});
  const Problem problem = random_problem(c, kPlain, kWeightDType<TypeParam>);
  const Outputs want = step_alone<TypeParam>(problem);
  for (const bool rows_apart : {false, true}) {
    SCOPED_TRACE(rows_apart ? "rows" : "experts");
    const auto pitch = [&](index_t rows, index_t cols) { return rows_apart ? cols : rows * cols; };
    const auto make = [&]<class T>(const T*, index_t rows, index_t cols) {
      return FarApart<T>::make(rows_apart ? kE * rows : kE, pitch(rows, cols));
    };
    const auto expert_stride = [&](index_t rows) { return rows_apart ? rows * kFar : kFar; };
    const auto row_stride = [&](index_t cols) { return rows_apart ? kFar : cols; };

    auto base = problem.base<Weight>();
    amx_sft_moe::LoraWeights lora = problem.lora();
    std::vector<FarApart<Weight>> weights;
    for (auto* m : {&base.gate, &base.up, &base.down}) {
      auto far = make(m->base, m->rows, m->cols);
      if (!far) GTEST_SKIP() << kNoSpace;
      far->load(m->base, pitch(m->rows, m->cols));
      m->base = far->data();
      m->expert_stride = expert_stride(m->rows);
      m->row_stride = row_stride(m->cols);
      weights.push_back(std::move(*far));
    }
    constexpr const bf16* kNarrow = nullptr;
    auto gate_a = make(kNarrow, kRank, kH);
    const auto grad_a = make(kNarrow, kRank, kH), grad_gate = make(kNarrow, kI, kH);
    if (!gate_a || !grad_a || !grad_gate) GTEST_SKIP() << kNoSpace;
    gate_a->load(reinterpret_cast<const bf16*>(lora.gate.a[0].visit([](const void* data) { return data; })),
                 pitch(kRank, kH));
    lora.gate.a = {gate_a->data(), kE, kRank, kH, expert_stride(kRank), row_stride(kH), 1};

    Outputs got(problem);
    amx_sft_moe::Gradients grads = got.gradients();
    grads.lora.gate_a = {grad_a->data(), kE, kRank, kH, expert_stride(kRank), row_stride(kH), 1};
    grads.weights.gate = {grad_gate->data(), kE, kI, kH, expert_stride(kI), row_stride(kH), 1};
    Moe<TypeParam> moe(problem.config(), base, lora);
    moe.forward_sft(problem.routing(), problem.x(), got.y());
    moe.backward(problem.grad_y(), grads);
    grad_a->store(got[reference::kGateA].template data<bf16>(), pitch(kRank, kH));
    grad_gate->store(got[reference::kGateWeight].template data<bf16>(), pitch(kI, kH));
    expect_same_bits(want, got);
  }
}

// Rows of activations: on the stack, where x is copied, and with the caller's buffers, where it is read twice.
TYPED_TEST(OperatorViews, TokensFarApart) {
  constexpr index_t kTokens = 5, kH = 37, kFar = FarApart<bf16>::kFar;
  Problem problem =
      random_problem({"far_apart", kTokens, 2, 3, kH, 33, {4, 3, 5}}, kPlain, kWeightDType<TypeParam>);
  const SavedBuffers<typename TypeParam::Stored> saved(problem);
  const auto rows = [&] { return FarApart<bf16>::make(kTokens, kH); };
  auto x = rows(), grad_y = rows();
  const auto y = rows(), grad_x = rows();
  if (!x || !grad_y || !y || !grad_x) GTEST_SKIP() << kNoSpace;
  const auto view = [&](const auto& far) { return AnyMatrix(far->data(), kTokens, kH, kFar); };
  const auto input = [&](const auto& far) {
    return amx_sft_moe::AnyConstMatrix(far->data(), kTokens, kH, kFar);
  };
  x->load(problem.x_tensor().data<bf16>(), kH);
  grad_y->load(problem.grad_y_tensor().data<bf16>(), kH);
  Moe<TypeParam> moe = make_moe<TypeParam>(problem);
  for (const bool on_stack : {true, false}) {
    SCOPED_TRACE(on_stack ? "stack" : "the caller's buffers");
    Outputs got(problem);
    amx_sft_moe::Gradients grads = got.gradients();
    grads.x = view(grad_x);
    if (on_stack) {
      moe.forward_sft(problem.routing(), input(x), view(y));
      moe.backward(input(grad_y), grads);
    } else {
      moe.forward_sft(problem.routing(), input(x), view(y), saved.view());
      moe.backward(problem.routing(), input(x), saved.view(), input(grad_y), grads);
    }
    y->store(got[reference::kY].template data<bf16>(), kH);
    grad_x->store(got[reference::kGradX].template data<bf16>(), kH);
    expect_same_bits(step_alone<TypeParam>(problem), got);
  }
}

// A tensor of these values, or of poison where there are none, that lies backwards in some dimensions.
Tensor backwards(DType dtype, const Extents& e, unsigned dimensions, const std::vector<double>& values = {}) {
  Tensor tensor(dtype, e, Strides::rows(e).backwards(dimensions));
  if (!values.empty()) tensor.store(values);
  return tensor;
}

// Whatever may have strides below 0, backwards in each of its dimensions and in all combinations; base weights
// in that of the experts, and routing weights in that of the slots: the rows of both ascend.
TYPED_TEST(OperatorViews, Backwards) {
  using Weight = typename TypeParam::Weight;
  constexpr index_t kT = 19, kK = 2, kE = 3, kH = 37, kI = 53;
  const Ranks ranks{7, 3, 5};
  const Problem problem =
      random_problem(with_trained_base(with_biases({"backwards", kT, kK, kE, kH, kI, ranks})), kPlain,
                     kWeightDType<TypeParam>);
  const reference::Layer& layer = problem.layer();
  const Outputs want = step_alone<TypeParam>(problem);
  for (unsigned dimensions = 1; dimensions < 8; ++dimensions) {
    SCOPED_TRACE("dimensions " + std::to_string(dimensions));
    const auto narrow = [&](const Extents& e, const std::vector<double>& values) {
      return backwards(DType::kBf16, e, dimensions, values);
    };
    const Tensor factors[] = {
        narrow({kE, ranks.gate, kH}, layer.lora_gate.a), narrow({kE, kI, ranks.gate}, layer.lora_gate.b),
        narrow({kE, ranks.up, kH}, layer.lora_up.a),     narrow({kE, kI, ranks.up}, layer.lora_up.b),
        narrow({kE, ranks.down, kI}, layer.lora_down.a), narrow({kE, kH, ranks.down}, layer.lora_down.b)};
    amx_sft_moe::LoraWeights lora = problem.lora();
    AnyConstExpertTensor* views[] = {&lora.gate.a, &lora.gate.b, &lora.up.a,
                                     &lora.up.b,   &lora.down.a, &lora.down.b};
    for (std::size_t f = 0; f < 6; ++f) *views[f] = factors[f].const_expert_view();

    const auto weight = [&](index_t rows, index_t cols, const std::vector<double>& values) {
      return backwards(kWeightDType<TypeParam>, {kE, rows, cols}, dimensions & 1, values);
    };
    const Tensor gate = weight(kI, kH, layer.gate), up = weight(kI, kH, layer.up);
    const Tensor down = weight(kH, kI, layer.down);
    const Tensor biases[] = {narrow({1, kE, kI}, layer.gate_bias), narrow({1, kE, kI}, layer.up_bias),
                             narrow({1, kE, kH}, layer.down_bias)};
    auto base = problem.base<Weight>();
    base.gate.base = gate.data<const Weight>();
    base.up.base = up.data<const Weight>();
    base.down.base = down.data<const Weight>();
    for (auto* matrices : {&base.gate, &base.up, &base.down}) {
      if ((dimensions & 1) != 0) matrices->expert_stride = -matrices->expert_stride;
    }
    base.biases = {biases[0].const_matrix_view(), biases[1].const_matrix_view(), biases[2].const_matrix_view()};

    const Tensor routing_weights =
        backwards(DType::kFp32, {1, kT, kK}, dimensions & 4, problem.batch().weights);
    amx_sft_moe::Routing routing = problem.routing();
    routing.weights = routing_weights.const_matrix_view();
    Outputs got(problem);
    for (std::size_t t = reference::kGradW; t < reference::kTensors; ++t) {
      Tensor& tensor = got[static_cast<reference::Tensor>(t)];
      tensor = backwards(tensor.dtype(), tensor.extents(), dimensions);
    }
    Moe<TypeParam> moe(problem.config(), base, lora);
    moe.forward_sft(routing, problem.x(), got.y());
    moe.backward(problem.grad_y(), got.gradients());
    expect_same_bits(want, got);
  }
}

// A view's elements at addresses of their own.
Tensor copy_of(const AnyConstExpertTensor& view) {
  const Extents extents{view.experts(), view.rows(), view.cols()};
  Tensor copy(view.dtype(), extents, Strides::rows(extents));
  for (index_t e = 0; e < view.experts(); ++e) {
    view[e].visit([&](const auto* data) {
      for (index_t row = 0; row < view.rows(); ++row) {
        for (index_t col = 0; col < view.cols(); ++col) {
          copy.set(e, row, col, amx_sft_moe::to_float(data[row * view.row_stride() + col * view.col_stride()]));
        }
      }
    });
  }
  return copy;
}

// Views of the memory of gate's A that differ from it in a stride or in their type are no shared A: up computes
// with what they show, and has a gradient of its own.
TYPED_TEST(OperatorViews, AlmostASharedA) {
  constexpr index_t kE = 3, kRank = 4, kH = 32;
  const Problem problem =
      random_problem({"almost", 9, 2, kE, kH, 17, {kRank, kRank, 5}}, kPlain, kWeightDType<TypeParam>);
  // Twice, since as fp32 it is twice as long; of a pair of bf16 the second is most of an fp32 number.
  std::vector<double> values = problem.layer().lora_gate.a;
  values.insert(values.end(), values.begin(), values.begin() + kE * kRank * kH);
  Tensor memory(DType::kBf16, {2 * kE, kRank, kH}, Strides::rows({2 * kE, kRank, kH}));
  memory.store(values);
  const bf16* data = memory.data<const bf16>();
  const AnyConstExpertTensor whole(data, kE, kRank, kH);
  struct Almost {
    const char* name;
    AnyConstExpertTensor view;
  };
  const Almost views[] = {{"expert_stride", {data, kE, kRank, kH, 0, kH, 1}},
                          {"row_stride", {data, kE, kRank, kH, kRank * kH, 0, 1}},
                          {"col_stride", {data, kE, kRank, kH, kRank * kH, kH, 0}},
                          {"dtype", {reinterpret_cast<const float*>(data), kE, kRank, kH}}};
  const auto step = [&](const AnyConstExpertTensor& up_a) {
    amx_sft_moe::LoraWeights lora = problem.lora();
    lora.gate.a = whole;
    lora.up.a = up_a;
    Outputs out(problem);
    Moe<TypeParam> moe(problem.config(), problem.base<typename TypeParam::Weight>(), lora);
    run_step(moe, problem, out);
    return out;
  };
  for (const Almost& almost : views) {
    SCOPED_TRACE(almost.name);
    const Tensor copy = copy_of(almost.view);
    expect_same_bits(step(copy.const_expert_view()), step(almost.view));
  }
}

}  // namespace
}  // namespace sft_test
