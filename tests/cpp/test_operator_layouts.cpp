// How things are stored does not change a bit of the result: weights, ids, strides, LoRA factors; and weights
// may be read-only memory maps. (That nothing outside a view is read or written is what guarded memory adds to
// each test.)
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <limits>
#include <vector>

#include "compare.hpp"
#include "saved_buffers.hpp"
#include "step.hpp"

namespace sft_test {
namespace {

inline constexpr Case kOdd{"odd", 19, 2, 3, 37, 53, {7, 3, 5}};
inline constexpr Case kEven{"even", 21, 2, 3, 64, 48, {16, 16, 16}};
inline constexpr Case kMany{"many", 70, 2, 3, 64, 48, {16, 16, 16}};  // rows of an expert

template <class Kernel>
class OperatorLayouts : public KernelTest<Kernel> {
 protected:
  static void expect_same(const Storage& one, const Storage& other) {
    for (const Case& c : {kOdd, kEven, kMany}) {
      SCOPED_TRACE(c.name);
      expect_same_bits(step_alone<Kernel>(random_problem(c, one, kWeightDType<Kernel>)),
                       step_alone<Kernel>(random_problem(c, other, kWeightDType<Kernel>)));
    }
  }
};
TYPED_TEST_SUITE(OperatorLayouts, AllKernels, KernelLabels);

TYPED_TEST(OperatorLayouts, FusedWeights) {
  this->expect_same(kPlain, {.name = "fused", .weights = WeightLayout::kFused});
}

TYPED_TEST(OperatorLayouts, OnePointerPerExpert) {
  this->expect_same(kPlain, {.name = "pointers", .weights = WeightLayout::kPerExpert});
}

TYPED_TEST(OperatorLayouts, BuffersThatStartAtAPage) {
  this->expect_same(kPlain, {.name = "start", .edge = Edge::kStart});
}

TYPED_TEST(OperatorLayouts, RowStridesOfActivationsAndRouting) {
  this->expect_same(kPlain, {.name = "strided", .padding = 5});
  this->expect_same(
      {.name = "wide", .activations = DType::kFp32, .routing = DType::kBf16},
      {.name = "wide_strided", .activations = DType::kFp32, .routing = DType::kBf16, .padding = 1});
}

// Routing weights and their gradient, stored [k, T].
TYPED_TEST(OperatorLayouts, ColumnStridesOfRoutingWeights) {
  const Problem problem = random_problem(kOdd, kPlain, kWeightDType<TypeParam>);
  const Outputs want = step_alone<TypeParam>(problem);
  const Extents extents{1, kOdd.tokens, kOdd.top_k};
  const Strides transposed{0, 1, kOdd.tokens + 2};
  Tensor weights(DType::kFp32, extents, transposed);
  weights.store(problem.batch().weights);
  amx_sft_moe::Routing routing = problem.routing();
  routing.weights = weights.const_matrix_view();
  const Tensor grad(DType::kFp32, extents, transposed);
  Outputs got(problem);
  amx_sft_moe::Gradients grads = got.gradients();
  grads.routing_weights = grad.matrix_view();

  Moe<TypeParam> moe = make_moe<TypeParam>(problem);
  moe.forward_sft(routing, problem.x(), got.y());
  moe.backward(problem.grad_y(), grads);
  EXPECT_TRUE(grad.gaps_are_poison());
  EXPECT_EQ(grad.bits(), want[reference::kGradW].bits());
  got[reference::kGradW].store(grad.values());
  expect_same_bits(want, got);
}

// A row stride of 0: all tokens have one row of x, of grad_y, of routing weights and of ids.
TYPED_TEST(OperatorLayouts, OneRowOfInputsForAllTokens) {
  using amx_sft_moe::AnyConstMatrix, amx_sft_moe::Routing;
  for (const Case& c : {kOdd, kMany}) {
    SCOPED_TRACE(c.name);
    Problem problem = random_problem(c, kPlain, kWeightDType<TypeParam>);
    const SavedBuffers<typename TypeParam::Stored> saved(problem);
    Moe<TypeParam> moe = make_moe<TypeParam>(problem);
    const auto first_row = [](const AnyConstMatrix& all) {
      return all.visit([&](const auto* data) { return AnyConstMatrix(data, all.rows(), all.cols(), 0); });
    };
    const Routing one_row{c.tokens, {problem.batch().ids.data(), 0}, first_row(problem.routing().weights)};
    const AnyConstMatrix x = first_row(problem.x()), grad_y = first_row(problem.grad_y());
    Outputs on_stack(problem), in_buffers(problem);
    moe.forward_sft(one_row, x, on_stack.y());
    moe.backward(grad_y, on_stack.gradients());
    moe.forward_sft(one_row, x, in_buffers.y(), saved.view());
    moe.backward(one_row, x, saved.view(), grad_y, in_buffers.gradients());

    for (Tensor* t : {&problem.x_tensor(), &problem.grad_y_tensor(), &problem.routing_weights()}) {
      for (index_t row = 1; row < t->extents().d1; ++row) {
        for (index_t col = 0; col < t->extents().d2; ++col) t->set(0, row, col, t->get(0, 0, col));
      }
    }
    Routing routing = problem.routing();
    std::vector<std::int64_t> ids;
    for (index_t n = 0; n < c.tokens * c.top_k; ++n) ids.push_back(one_row.expert_ids.at(0, n % c.top_k));
    routing.expert_ids = {ids.data(), c.top_k};
    Outputs want(problem);
    moe.forward_sft(routing, problem.x(), want.y());
    moe.backward(problem.grad_y(), want.gradients());
    expect_same_bits(want, on_stack);
    expect_same_bits(want, in_buffers);
  }
}

// Where there is one row, its stride is not looked at.
TYPED_TEST(OperatorLayouts, OneRowOfAnyStride) {
  const Problem problem = random_problem({"one", 1, 2, 3, 37, 53, {7, 3, 5}}, kPlain, kWeightDType<TypeParam>);
  Outputs got(problem);
  amx_sft_moe::Gradients grads = got.gradients();
  grads.x = {got[reference::kGradX].template data<bf16>(), 1, 37, 0};
  Moe<TypeParam> moe = make_moe<TypeParam>(problem);
  moe.forward_sft(problem.routing(), problem.x(), {got[reference::kY].template data<bf16>(), 1, 37, 0});
  moe.backward(problem.grad_y(), grads);
  expect_same_bits(step_alone<TypeParam>(problem), got);
}

// The same of weights: gate and up are one row each where I = 1. Of the largest stride the bytes are a few less than none, which
// no sanitizer minds; the other one's are more than there are numbers for.
TYPED_TEST(OperatorLayouts, OneRowOfWeightsOfAnyStride) {
  constexpr index_t kSize = sizeof(typename TypeParam::Weight);
  for (const index_t stride : {std::numeric_limits<index_t>::max(), (index_t{1} << 62) / kSize * 2}) {
    for (const int tokens :
         {5, 40, 60}) {  // in place, by blocks, and in panels or by strips, of which there is a next one
      const Problem problem =
          random_problem({"one", tokens, 1, 2, 600, 1, {1, 1, 1}}, kPlain, kWeightDType<TypeParam>);
      auto base = problem.base<typename TypeParam::Weight>();
      base.gate.row_stride = base.up.row_stride = stride;
      Outputs got(problem);
      Moe<TypeParam> moe(problem.config(), base, problem.lora());
      run_step(moe, problem, got);
      expect_same_bits(step_alone<TypeParam>(problem), got);
    }
  }
}

// And of their gradients.
TYPED_TEST(OperatorLayouts, OneRowOfAGradientOfAnyStride) {
  constexpr index_t kLargest = std::numeric_limits<index_t>::max(), kE = 2, kH = 600;
  const Problem problem =
      random_problem(with_trained_base({"one", 40, 1, kE, kH, 1, {1, 1, 1}}), kPlain, kWeightDType<TypeParam>);
  const Extents extents{kE, 1, kH};
  const Tensor gate(DType::kBf16, extents, Strides::rows(extents));
  const Tensor up(DType::kBf16, extents, Strides::rows(extents));
  const auto strided = [&](const Tensor& grad) {
    return amx_sft_moe::AnyExpertTensor(grad.data<bf16>(), kE, 1, kH, kH, kLargest, 1);
  };
  Outputs got(problem);
  amx_sft_moe::Gradients grads = got.gradients();
  grads.weights.gate = strided(gate);
  grads.weights.up = strided(up);
  Moe<TypeParam> moe = make_moe<TypeParam>(problem);
  moe.forward_sft(problem.routing(), problem.x(), got.y());
  moe.backward(problem.grad_y(), grads);
  const Outputs want = step_alone<TypeParam>(problem);
  EXPECT_EQ(want[reference::kGateWeight].bits(), gate.bits());
  EXPECT_EQ(want[reference::kUpWeight].bits(), up.bits());
}

// Gradients of base weights: halves of one fused tensor, rows by turns, rows apart, and transposed ones, each in
// one piece of memory. What belongs to none of them, as between the rows apart, is left as it was.
TYPED_TEST(OperatorLayouts, GradientsOfBaseWeights) {
  const Problem problem = random_problem(with_trained_base(kOdd), kPlain, kWeightDType<TypeParam>);
  const Outputs want = step_alone<TypeParam>(problem);
  constexpr index_t kE = kOdd.experts, kH = kOdd.hidden, kI = kOdd.intermediate;
  struct Layout {
    const char* name;
    Extents memory;                             // of gate and up together
    amx_sft_moe::index_t up, expert, row, col;  // where up begins, and strides
  };
  for (const Layout& l :
       {Layout{"fused", {kE, 2 * kI, kH}, kI * kH, 2 * kI * kH, kH, 1},
        Layout{"by_turns", {kE, 2 * kI, kH}, kH, 2 * kI * kH, 2 * kH, 1},
        Layout{"padded", {kE, kI + 1, 2 * kH + 3}, kH + 1, (kI + 1) * (2 * kH + 3), 2 * kH + 3, 1},
        Layout{"transposed_by_turns", {kE, kH, 2 * kI}, 1, 2 * kI * kH, 2, 2 * kI}}) {
    SCOPED_TRACE(l.name);
    const Tensor both(DType::kBf16, l.memory, Strides::rows(l.memory));
    const Tensor down(DType::kBf16, {kE, kH, kI}, {kH * kI, 1, kH});
    const auto part = [&](index_t begin) {
      return amx_sft_moe::AnyExpertTensor(both.data<bf16>() + begin, kE, kI, kH, l.expert, l.row, l.col);
    };
    Outputs got(problem);
    amx_sft_moe::Gradients grads = got.gradients();
    grads.weights = {part(0), part(l.up), down.expert_view()};
    Moe<TypeParam> moe = make_moe<TypeParam>(problem);
    moe.forward_sft(problem.routing(), problem.x(), got.y());
    moe.backward(problem.grad_y(), grads);
    Tensor expected(DType::kBf16, l.memory, Strides::rows(l.memory));  // of poison
    const auto put_part = [&](reference::Tensor which, index_t begin) {
      const std::vector<std::uint32_t> bits = want[which].bits();
      for (index_t n = 0; n < kE * kI * kH; ++n) {
        const index_t at = n / (kI * kH) * l.expert + n / kH % kI * l.row + n % kH * l.col;
        expected.data<bf16>()[begin + at].bits = static_cast<std::uint16_t>(bits[static_cast<std::size_t>(n)]);
      }
    };
    put_part(reference::kGateWeight, 0);
    put_part(reference::kUpWeight, l.up);
    EXPECT_EQ(both.bits(), expected.bits());
    EXPECT_EQ(down.bits(), want[reference::kDownWeight].bits());
  }
}

TYPED_TEST(OperatorLayouts, NarrowIds) {
  this->expect_same(kPlain, {.name = "int32", .narrow_ids = true});
}

TYPED_TEST(OperatorLayouts, PeftsPermutedFactors) {
  this->expect_same(kPlain, {.name = "peft", .lora = LoraLayout::kPeft});
  this->expect_same({.name = "fp32", .factors = DType::kFp32},
                    {.name = "fp32_peft", .factors = DType::kFp32, .lora = LoraLayout::kPeft});
}

// An adapter of rank 0 may come as tensors without elements instead of no tensors, and so may its gradients.
TYPED_TEST(OperatorLayouts, FactorsOfRankZero) {
  Case c = kOdd;
  c.ranks = {0, 0, 0};
  const Problem problem = random_problem(c, kPlain, kWeightDType<TypeParam>);
  bf16 nothing{};
  const auto a = [&](index_t in) { return amx_sft_moe::AnyExpertTensor(&nothing, c.experts, 0, in); };
  const auto b = [&](index_t out) { return amx_sft_moe::AnyExpertTensor(&nothing, c.experts, out, 0); };
  const amx_sft_moe::AnyConstExpertTensor read_a(&nothing, c.experts, 0, c.hidden);
  amx_sft_moe::LoraWeights lora;
  lora.gate = {read_a, {&nothing, c.experts, c.intermediate, 0}, 2.0F};
  lora.up = {read_a, {&nothing, c.experts, c.intermediate, 0}, 2.0F};
  lora.down = {{&nothing, c.experts, 0, c.intermediate}, {&nothing, c.experts, c.hidden, 0}, 2.0F};
  Moe<TypeParam> moe(problem.config(), problem.base<typename TypeParam::Weight>(), lora);
  Outputs got(problem);
  amx_sft_moe::Gradients grads = got.gradients();
  grads.lora = {a(c.hidden), b(c.intermediate), a(c.hidden), b(c.intermediate), a(c.intermediate), b(c.hidden)};
  moe.forward_sft(problem.routing(), problem.x(), got.y());
  moe.backward(problem.grad_y(), grads);
  expect_same_bits(step_alone<TypeParam>(problem), got);
}

// Gradients of all factors of an expert one behind the other, as flat buffers of optimisers have them.
TYPED_TEST(OperatorLayouts, GradientsInOneBufferPerExpert) {
  const Problem problem = random_problem(kOdd, kPlain, kWeightDType<TypeParam>);
  const Outputs want = step_alone<TypeParam>(problem);
  constexpr index_t kE = kOdd.experts;
  struct Part {
    reference::Tensor which;
    amx_sft_moe::AnyExpertTensor amx_sft_moe::LoraGradients::*grad;
  };
  using Lora = amx_sft_moe::LoraGradients;
  const Part parts[] = {{reference::kGateA, &Lora::gate_a}, {reference::kGateB, &Lora::gate_b},
                        {reference::kUpA, &Lora::up_a},     {reference::kUpB, &Lora::up_b},
                        {reference::kDownA, &Lora::down_a}, {reference::kDownB, &Lora::down_b}};
  index_t each = 0;
  for (const Part& part : parts) each += want[part.which].count() / kE;
  const Tensor buffer = Tensor::matrix(DType::kBf16, kE, each);
  Outputs got(problem);
  amx_sft_moe::Gradients grads = got.gradients();
  index_t begin = 0;
  for (const Part& part : parts) {
    const Extents& e = want[part.which].extents();
    grads.lora.*part.grad = {buffer.data<bf16>() + begin, kE, e.d1, e.d2, each, e.d2, 1};
    begin += e.d1 * e.d2;
  }
  Moe<TypeParam> moe = make_moe<TypeParam>(problem);
  moe.forward_sft(problem.routing(), problem.x(), got.y());
  moe.backward(problem.grad_y(), grads);
  begin = 0;
  for (const Part& part : parts) {
    const std::vector<std::uint32_t> bits = want[part.which].bits();
    const index_t size = want[part.which].count() / kE;
    for (index_t n = 0; n < kE * size; ++n) {
      const bf16 value = buffer.data<bf16>()[n / size * each + begin + n % size];
      ASSERT_EQ(value.bits, bits[static_cast<std::size_t>(n)]) << begin << " " << n;
    }
    begin += size;
  }
}

TYPED_TEST(OperatorLayouts, ReadOnlyWeights) {
  for (const WeightLayout layout : {WeightLayout::kStacked, WeightLayout::kFused, WeightLayout::kPerExpert}) {
    const Storage storage{.name = "read_only", .weights = layout};
    Problem problem = random_problem(kOdd, storage, kWeightDType<TypeParam>);
    const Outputs want = step_alone<TypeParam>(problem);
    problem.base_store().protect_read_only();
    expect_same_bits(want, step_alone<TypeParam>(problem));
  }
}

// Weights in a file, as a checkpoint's shards are, at an offset that is only a multiple of the element's size.
TYPED_TEST(OperatorLayouts, WeightsInAMappedFile) {
  using Weight = typename TypeParam::Weight;
  const Problem problem = random_problem(kOdd, kPlain, kWeightDType<TypeParam>);
  const amx_sft_moe::BaseWeights<Weight> base = problem.base<Weight>();
  const auto block = static_cast<std::size_t>(kOdd.experts * kOdd.hidden * kOdd.intermediate);
  const std::size_t bytes = (1 + 3 * block) * sizeof(Weight);

  std::FILE* file = std::tmpfile();
  ASSERT_NE(file, nullptr);
  const Weight header{};
  ASSERT_EQ(std::fwrite(&header, sizeof(Weight), 1, file), 1U);
  for (const Weight* matrices : {base.gate.base, base.up.base, base.down.base}) {
    ASSERT_EQ(std::fwrite(matrices, sizeof(Weight), block, file), block);
  }
  std::fflush(file);
  void* map = ::mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE, ::fileno(file), 0);
  ASSERT_NE(map, MAP_FAILED);
  const Weight* first = static_cast<const Weight*>(map) + 1;
  amx_sft_moe::BaseWeights<Weight> mapped = base;
  mapped.gate.base = first;
  mapped.up.base = first + block;
  mapped.down.base = first + 2 * block;
  {
    Moe<TypeParam> moe(problem.config(), mapped, problem.lora());
    Outputs got(problem);
    run_step(moe, problem, got);
    expect_same_bits(step_alone<TypeParam>(problem), got);
  }
  ::munmap(map, bytes);
  std::fclose(file);
}

// set_base and set_lora replace views and nothing else.
TYPED_TEST(OperatorLayouts, ReplacedViews) {
  const Problem first = random_problem(kOdd, kPlain, kWeightDType<TypeParam>, 1);
  const Problem second = random_problem(kOdd, kPlain, kWeightDType<TypeParam>, 2);
  Moe<TypeParam> moe = make_moe<TypeParam>(first);
  Outputs warm_up(first);
  run_step(moe, first, warm_up);
  moe.set_base(second.base<typename TypeParam::Weight>());
  moe.set_lora(second.lora());
  Outputs got(second);
  run_step(moe, second, got);
  expect_same_bits(step_alone<TypeParam>(second), got);
}

// Each factor has its own type; a wider one with the same values gives the same results (but where avx512 has dot products of
// long rows, which sum each type in an order of its own).
TYPED_TEST(OperatorLayouts, FactorsOfMixedTypes) {
  const Problem problem = random_problem(kOdd, kPlain, kWeightDType<TypeParam>);
  const auto widened = [](const Extents& extents, const std::vector<double>& values) {
    Tensor tensor(DType::kFp32, extents, Strides::rows(extents));
    tensor.store(values);
    return tensor;
  };
  const Tensor gate_b = widened({3, 53, 7}, problem.layer().lora_gate.b);
  const Tensor down_a = widened({3, 5, 53}, problem.layer().lora_down.a);
  amx_sft_moe::LoraWeights lora = problem.lora();
  lora.gate.b = gate_b.const_expert_view();
  lora.down.a = down_a.const_expert_view();
  Moe<TypeParam> moe(problem.config(), problem.base<typename TypeParam::Weight>(), lora);
  Outputs got(problem);
  run_step(moe, problem, got);
  expect_same_bits(step_alone<TypeParam>(problem), got);
}

}  // namespace
}  // namespace sft_test
