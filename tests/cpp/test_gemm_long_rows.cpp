// Weights whose rows are long: so long that gemm_nt has K in parts, with tiles, and rows of whole pages, which gemm_nn packs
// in an order of their own.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <span>
#include <vector>

#include "compare.hpp"
#include "step.hpp"

namespace {

using namespace amx_sft_moe;  // NOLINT(google-build-using-namespace)

// Multiples of 1/64 and 1/16 of few bits: bf16 holds them, and fp32 every sum of their products here.
float weight(index_t i) {
  return static_cast<float>(i * 37 % 101 - 50) / 64;
}
float activation(index_t i) {
  return static_cast<float>(i * 53 % 89 - 44) / 16;
}

// gemm_nt of gate and up as a pass has it, each with a second term as LoRA is one; tokens in panels.
class LongK : public testing::Test {
 protected:
  using Kernel = kernels::AmxBf16;

  void SetUp() override {
    if (!Kernel::available()) GTEST_SKIP() << Kernel::refusal();
  }

  // [2][tokens][outs], of tokens from `first` on. `factor` makes sums round.
  std::vector<float> gate_up(index_t first, index_t tokens, float factor = 1.0F) {
    const auto x = operand(first, tokens, kIn, 0, factor);
    const auto u = operand(first, tokens, kRank, kIn, factor);
    std::array<std::array<gemm::Term<bf16>, 2>, 2> terms;
    for (std::size_t o = 0; o < 2; ++o) {
      const bf16* rows = weights_.data() + static_cast<index_t>(o) * kOuts * kStride;
      terms[o][0] = {MatrixView<const bf16>{rows, kOuts, kIn, kStride}, kIn, panels(x, kIn)};
      terms[o][1] = {MatrixView<const bf16>{rows + kIn, kOuts, kRank, kStride}, kRank, panels(u, kRank)};
    }
    const std::array<std::span<const gemm::Term<bf16>>, 2> outputs{{terms[0], terms[1]}};
    std::vector<float> y(static_cast<std::size_t>(2 * tokens * kOuts), std::nanf(""));
    gemm::ThreadContext<Kernel> thread(scratch_);
    gemm::gemm_nt(thread, kOuts, tokens, gemm::TokenForm::kPanels, outputs,
                  [&](const std::array<gemm::TokenBlock, 2>& blocks) {
                    for (std::size_t o = 0; o < 2; ++o) {
                      const index_t at = (static_cast<index_t>(o) * tokens + blocks[o].token) * kOuts;
                      gemm::store_tokens<Kernel>(blocks[o], y.data() + at + blocks[o].out, kOuts, 1.0F,
                                                 nullptr);
                    }
                  });
    return y;
  }

  float reference(index_t o, index_t token, index_t out) const {
    double sum = 0;
    for (index_t k = 0; k < kStride; ++k) {
      const double w = to_float(weights_[(o * kOuts + out) * kStride + k]);
      sum += w * activation(token * kStride + k);
    }
    return static_cast<float>(sum);
  }

  // A tail of a tile, of rows and of both terms' K.
  static constexpr index_t kIn = 8261, kRank = 9, kStride = kIn + kRank, kOuts = 53;

 private:
  static gemm::Panels<const bf16> panels(const AlignedBuffer<bf16>& of, index_t k) {
    return {of.data(), gemm::token_stride<Kernel>(k) * arch::kPanelCols};
  }
  static AlignedBuffer<bf16> operand(index_t first, index_t tokens, index_t k, index_t from, float factor) {
    std::vector<float> x;
    for (index_t t = first; t < first + tokens; ++t) {
      for (index_t i = 0; i < k; ++i)
        x.push_back(activation(t * kStride + from + i) * (i % 7 == 0 ? factor : 1.0F));
    }
    const index_t stride = gemm::token_stride<Kernel>(k) * arch::kPanelCols;
    AlignedBuffer<bf16> packed(ceil_div(tokens, arch::kPanelCols) * stride);
    gemm::pack_operand<Kernel>(MatrixView<const float>{x.data(), tokens, k, k}, tokens, k,
                               gemm::TokenForm::kPanels, {packed.data(), stride});
    return packed;
  }
  static std::vector<bf16> some_weights() {
    std::vector<bf16> weights;
    for (index_t i = 0; i < 2 * kOuts * kStride; ++i) weights.push_back(to_bf16(weight(i)));
    return weights;
  }

  struct Weights {
    std::vector<bf16> values = some_weights();
    const bf16* data() const { return values.data(); }
    bf16 operator[](index_t i) const { return values[static_cast<std::size_t>(i)]; }
  } weights_;
  gemm::Scratch scratch_;
};

TEST_F(LongK, EachOutputIsExact) {
  for (const index_t tokens : {1, 70, 135, 150}) {  // in streams, in blocks, in three and in five parts of K
    const std::vector<float> y = gate_up(0, tokens);
    for (index_t o = 0; o < 2; ++o) {
      for (index_t t = 0; t < tokens; ++t) {
        for (index_t out = 0; out < kOuts; ++out) {
          const index_t at = (o * tokens + t) * kOuts + out;
          ASSERT_EQ(reference(o, t, out), y[static_cast<std::size_t>(at)])
              << tokens << " tokens, token " << t << ", output " << o << ", " << out;
        }
      }
    }
  }
}

// Parts of K and the whole of it.
TEST_F(LongK, PartsHaveTheBitsOfTheWhole) {
  constexpr index_t kTokens = 135, kFew = 16;
  static_assert(arch::streamed_depth<bf16>(kIn, kFew) == kIn);
  static_assert(arch::streamed_depth<bf16>(kIn, kTokens) == 4096);
  const std::vector<float> all = gate_up(0, kTokens, 1000.0F / 3);
  const std::vector<float> some = gate_up(64, kFew, 1000.0F / 3);
  for (index_t o = 0; o < 2; ++o) {
    EXPECT_EQ(0, std::memcmp(some.data() + o * kFew * kOuts, all.data() + (o * kTokens + 64) * kOuts,
                             kFew * kOuts * sizeof(float)))
        << "output " << o;
  }
}

// In a pass: tasks have all tokens, of gate and up and of down.
TEST_F(LongK, StepsAreRight) {
  using sft_test::Case;
  for (const Case& c :
       {Case{"gate_up", 140, 1, 1, 8231, 35, {4, 4, 4}}, Case{"down", 140, 1, 1, 35, 8231, {4, 4, 4}},
        Case{"whole_pages", 450, 1, 1, 4096, 35, {4, 4, 4}}}) {
    SCOPED_TRACE(c.name);
    const sft_test::Problem problem =
        sft_test::random_problem(c, sft_test::kPlain, sft_test::kWeightDType<Kernel>);
    expect_close(expected_step(problem), sft_test::step_alone<Kernel>(problem));
  }
}

// gemm_nn of 40 rows, K = k, of `cols` columns of rows of B that are `stride` elements long.
template <class Kernel>
void expect_exact_product(index_t k, index_t cols, index_t stride) {
  constexpr index_t kRows = 40;
  AlignedBuffer<bf16> a(kRows * k), b(k * stride);
  for (index_t i = 0; i < kRows * k; ++i) a[i] = to_bf16(activation(i));
  for (index_t i = 0; i < k * stride; ++i) b[i] = to_bf16(i % stride < cols ? weight(i) : std::nanf(""));
  const std::array<gemm::NnTerm, 1> terms{
      {{MatrixView<const bf16>{a.data(), kRows, k, k}, MatrixView<const bf16>{b.data(), k, cols, stride}, k}}};
  std::vector<float> c(static_cast<std::size_t>(kRows * cols), std::nanf(""));
  gemm::Scratch scratch;
  gemm::ThreadContext<Kernel> thread(scratch);
  gemm::gemm_nn<Kernel>(thread, kRows, cols, terms, [&](const gemm::Block& block) {
    const arch::BlockTarget<float> to{c.data() + block.row * cols + block.col, cols, 1, false, 1.0F, nullptr};
    Kernel::Rows::store(block.c, block.stride, block.rows, block.cols, to);
  });
  for (index_t row = 0; row < kRows; ++row) {
    for (index_t col = 0; col < cols; ++col) {
      float sum = 0;
      for (index_t i = 0; i < k; ++i) sum += to_float(a[row * k + i]) * to_float(b[i * stride + col]);
      ASSERT_EQ(sum, c[static_cast<std::size_t>(row * cols + col)])
          << "K = " << k << ", row " << row << ", column " << col << " of " << cols << ", " << stride
          << " apart";
    }
  }
}

template <class Kernel>
class RowsPacked : public testing::Test {};
using Kernels = testing::Types<kernels::Portable<bf16>, kernels::Avx2<bf16>, kernels::Avx512<bf16>,
                               kernels::Avx512Bf16, kernels::AmxBf16>;
TYPED_TEST_SUITE(RowsPacked, Kernels);

// Groups of sixteen rows, of eight, of two, and one that has no partner; rows of one page, of seven, and of no whole one.
TYPED_TEST(RowsPacked, WholePagesAndOthersAreExact) {
  if (!TypeParam::available()) GTEST_SKIP() << TypeParam::refusal();
  for (const index_t k : {1, 2, 8, 9, 15, 16, 17, 24, 25, 27, 32, 39, 64, 121}) {
    for (const index_t stride : {2048, 14336, 72}) expect_exact_product<TypeParam>(k, 70, stride);
  }
}

}  // namespace
