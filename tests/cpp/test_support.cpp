// The tests' own tools: guard pages fault, poison shows, tensors know their layout, problems say what they
// promise.
#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "compare.hpp"
#include "integers.hpp"
#include "problem.hpp"

namespace sft_test {
namespace {

volatile float g_sink = 0;

TEST(GuardedMemoryDeathTest, FaultsOneElementPastItsEnd) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const GuardedMemory memory(5 * sizeof(float), Edge::kEnd);
  const volatile float* data = reinterpret_cast<const float*>(memory.data());
  g_sink = data[4];
  EXPECT_DEATH(g_sink = data[5], "");
}

TEST(GuardedMemoryDeathTest, FaultsOneElementBeforeItsStart) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const GuardedMemory memory(5 * sizeof(float), Edge::kStart);
  const volatile float* data = reinterpret_cast<const float*>(memory.data());
  g_sink = data[0];
  EXPECT_DEATH(g_sink = *(data - 1), "");
}

TEST(GuardedMemoryDeathTest, HasNothingToReadWhereItIsEmpty) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const GuardedMemory memory(0, Edge::kEnd);
  ASSERT_NE(memory.data(), nullptr);
  const volatile std::byte* data = memory.data();
  EXPECT_DEATH(g_sink = static_cast<float>(data[0]), "");
}

TEST(Tensor, StartsAsNanAndSeesWritesIntoItsGaps) {
  Tensor tensor = Tensor::matrix(DType::kBf16, 2, 3, 2);
  for (double value : tensor.values()) EXPECT_TRUE(std::isnan(value));
  tensor.fill(1.5);
  EXPECT_TRUE(tensor.gaps_are_poison());
  EXPECT_EQ(tensor.matrix_view().row_stride(), 5);
  tensor.data<bf16>()[3] = bf16{0};
  EXPECT_FALSE(tensor.gaps_are_poison());
  // The last row's gap does not exist: the buffer ends with its last element.
  EXPECT_EQ(tensor.memory().bytes(), (5 + 3) * sizeof(bf16));
}

TEST(Tensor, StoresAndReadsAnyStrides) {
  const Extents extents{2, 3, 4};
  Tensor peft(DType::kFp32, extents, Strides{1, 8, 2});  // [3, 4 * 2] in memory
  std::vector<double> values;
  for (int n = 0; n < 24; ++n) values.push_back(n + 0.1);
  peft.store(values);
  EXPECT_EQ(peft.get(1, 2, 3), static_cast<float>(23.1));
  EXPECT_EQ(peft.data<float>()[1 + 2 * 8 + 3 * 2], 23.1F);
  Tensor plain(DType::kFp32, extents, Strides::rows(extents));
  plain.store(values);
  EXPECT_EQ(plain.bits(), peft.bits());
  Tensor backwards(DType::kFp32, extents, Strides{12, -4, -1});
  backwards.store(values);
  EXPECT_EQ(backwards.data<float>()[0], 0.1F);
  EXPECT_EQ(backwards.data<float>()[-11], 11.1F);
  EXPECT_EQ(plain.bits(), backwards.bits());
  EXPECT_EQ(backwards.memory().bytes(), 24 * sizeof(float));
}

TEST(Tensor, RoundsToItsType) {
  Tensor narrow = Tensor::matrix(DType::kBf16, 1, 1);
  narrow.set(0, 0, 0, 1.0 + 0x1.8p-8);
  EXPECT_EQ(narrow.get(0, 0, 0), 1.0 + 0x1p-7);
  EXPECT_EQ(narrow.bits().front(), 0x3f81U);
}

TEST(Problem, LayoutsHoldTheSameValues) {
  const Case c = with_biases({"c", 3, 2, 2, 5, 3, {2, 2, 2}});
  for (const Storage& storage : {kPlain, kWide, kPeftLike}) {
    const Problem problem = random_problem(c, storage, DType::kBf16);
    const auto base = problem.base<bf16>();
    for (index_t e = 0; e < 2; ++e) {
      for (index_t row = 0; row < 3; ++row) {
        for (index_t col = 0; col < 5; ++col) {
          const auto at = static_cast<std::size_t>((e * 3 + row) * 5 + col);
          const double gate = amx_sft_moe::to_float(base.gate[e].row(row)[col]);
          const double up = amx_sft_moe::to_float(base.up[e].row(row)[col]);
          EXPECT_EQ(gate, problem.layer().gate[at]) << storage.name;
          EXPECT_EQ(up, problem.layer().up[at]) << storage.name;
          const double down = amx_sft_moe::to_float(base.down[e].row(col)[row]);
          EXPECT_EQ(down, problem.layer().down[static_cast<std::size_t>((e * 5 + col) * 3 + row)])
              << storage.name;
        }
      }
    }
  }
}

TEST(Problem, WritingReadOnlyWeightsFaults) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  Problem problem = random_problem(Case{"c", 1, 1, 1, 2, 2, {1, 1, 1}}, kPlain, DType::kFp32);
  problem.base_store().protect_read_only();
  const float* gate = problem.base<float>().gate.base;
  EXPECT_DEATH(*const_cast<volatile float*>(gate) = 1, "");
}

Outputs rounded_values(const Problem& problem, const Expected& expected) {
  Outputs out(problem);
  for (std::size_t t = 0; t < reference::kTensors; ++t) {
    out[static_cast<reference::Tensor>(t)].store(expected.values[t]);
  }
  return out;
}

// The comparison must fail and say `what`, among other things.
void expect_finds(const Expected& expected, const Outputs& got, const std::string& what) {
  testing::TestPartResultArray failures;
  {
    const testing::ScopedFakeTestPartResultReporter reporter(
        testing::ScopedFakeTestPartResultReporter::INTERCEPT_ONLY_CURRENT_THREAD, &failures);
    expect_close(expected, got);
  }
  std::string messages;
  for (int n = 0; n < failures.size(); ++n) messages += failures.GetTestPartResult(n).message();
  EXPECT_NE(messages.find(what), std::string::npos) << what << " is not found in: " << messages;
}

TEST(ExpectClose, AllowsRoundingButNotALostElement) {
  const Case c = with_trained_base(with_biases({"c", 16, 2, 4, 64, 64, {8, 8, 8}}));
  const Problem problem = random_problem(c, kPlain, DType::kBf16);
  const Expected expected = expected_step(problem);
  for (std::size_t t = 0; t < reference::kTensors; ++t) {
    double norm = 0;
    for (double value : expected.values[t]) norm += value * value;
    EXPECT_GT(expected.frobenius[t], 0.002 * std::sqrt(norm)) << reference::kTensorNames[t];
    EXPECT_LT(expected.frobenius[t], 0.013 * std::sqrt(norm)) << reference::kTensorNames[t];
  }
  const Outputs out = rounded_values(problem, expected);
  expect_close(expected, out);
  // One element of the largest tensor swapped for its neighbour.
  const Tensor& y = out[reference::kY];
  Outputs swapped = rounded_values(problem, expected);
  swapped[reference::kY].set(0, 3, 7, y.get(0, 3, 8));
  expect_finds(expected, swapped, "y: largest error of an element");
}

TEST(ExpectClose, FindsALostElementAndANaNInEachTensor) {
  const Case c = with_trained_base(with_biases({"c", 16, 2, 4, 64, 64, {8, 8, 8}}));
  const Problem problem = random_problem(c, kPlain, DType::kBf16);
  const Expected expected = expected_step(problem);
  for (std::size_t t = 0; t < reference::kTensors; ++t) {
    const std::string name = reference::kTensorNames[t];
    const std::vector<double>& values = expected.values[t];
    const auto by_size = [](double a, double b) { return std::abs(a) < std::abs(b); };
    const auto largest = std::ranges::max_element(values, by_size) - values.begin();
    const auto with = [&](std::ptrdiff_t n, double value) {
      Outputs out = rounded_values(problem, expected);
      std::vector<double> changed = values;
      changed[static_cast<std::size_t>(n)] = value;
      out[static_cast<reference::Tensor>(t)].store(changed);
      return out;
    };
    expect_finds(expected, with(largest, 0), name + ": largest error of an element");
    constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
    for (const std::ptrdiff_t n : {std::ptrdiff_t{0}, std::ssize(values) - 1}) {
      expect_finds(expected, with(n, kNaN), name + ": largest error of an element");
      expect_finds(expected, with(n, kNaN), name + ": Frobenius norm");
    }
  }
}

TEST(ExpectClose, FindsWhatMustBeZero) {
  const Case c{"c", 16, 2, 4, 32, 32, {8, 8, 8}, kIdleExperts};
  const Problem problem = random_problem(c, kPlain, DType::kBf16);
  const Expected expected = expected_step(problem);
  Outputs out = rounded_values(problem, expected);
  expect_close(expected, out);
  out[reference::kUpA].set(1, 3, 5, 1e-30);  // of an expert without tokens
  expect_finds(expected, out, "up_a[");
}

TEST(IntegerProblem, HasLongSumsAndNonZeroGradients) {
  const Case c = with_trained_base(with_biases({"c", 17, 2, 3, 37, 53, {7, 7, 7}}));
  const Problem problem = integer_problem(c, kPlain, DType::kBf16);
  const reference::Results results = reference::step(problem.layer(), problem.batch());
  for (const auto& tensor : results) {
    std::size_t used = 0;
    for (double value : tensor) used += value != 0 ? 1 : 0;
    EXPECT_GT(used * 5, tensor.size()) << "almost everything is zero";
  }
}

}  // namespace
}  // namespace sft_test
