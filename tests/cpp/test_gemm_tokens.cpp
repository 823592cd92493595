// gemm_nt must not let the cut of an expert's tokens into tasks show: a task of few tokens gives the bits that the
// same tokens have in a task with all of them, also where few tokens of an expert take another path.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <numeric>
#include <type_traits>
#include <utility>
#include <vector>

#include "amx_sft_moe/amx_sft_moe.hpp"

namespace {

using namespace amx_sft_moe;  // NOLINT(google-build-using-namespace)

constexpr index_t kOut = 264;  // whole strips, and a part of one

template <class Kernel>
class GemmTokens : public testing::Test {
 protected:
  using E = typename Kernel::Compute;
  using W = typename Kernel::Weight;

  GemmTokens() : weights_(kOut * kMostIn), x_(kMostTokens * kMostIn) {
    if (!Kernel::available()) return;
    for (index_t i = 0; i < kOut * kMostIn; ++i)
      weights_[i] = from_float<W>(static_cast<float>(i * 37 % 101 - 50) / 64);
    for (index_t i = 0; i < kMostTokens * kMostIn; ++i) x_[i] = static_cast<float>(i * 53 % 89 - 44) / 16;
  }
  void SetUp() override {
    if (!Kernel::available()) GTEST_SKIP() << Kernel::refusal();
  }

  // Rows [first, first + tokens) of x W^T, of an expert with all_tokens; K = in, W's first `outs` rows.
  std::vector<float> product(index_t in, index_t first, index_t tokens, index_t all_tokens,
                             index_t outs = kOut) {
    return product(MatrixView<const W>{weights_.data(), outs, in, kMostIn}, in, first, tokens, all_tokens,
                   outs);
  }
  std::vector<float> product(const gemm::AnyRows& weights, index_t in, index_t first, index_t tokens,
                             index_t all_tokens, index_t outs = kOut) {
    const gemm::TokenForm form = gemm::token_form<Kernel>(all_tokens);
    AlignedBuffer<E> packed;
    return sum<1>({{{weights, in, operand(packed, in, first, tokens, form)}}}, tokens, outs, form);
  }
  // The first `tokens` of x W^T, of K = in and of K = second.
  std::vector<float> product_of_two(index_t in, index_t second, index_t tokens) {
    return product_of_two(MatrixView<const W>{weights_.data(), kTermOuts, in, kMostIn}, in, second, tokens);
  }
  std::vector<float> product_of_two(const gemm::AnyRows& weights, index_t in, index_t second, index_t tokens) {
    const gemm::TokenForm form = gemm::token_form<Kernel>(tokens);
    AlignedBuffer<E> packed, more;
    return sum<2>({{{weights, in, operand(packed, in, 0, tokens, form)},
                    {weights, second, operand(more, second, 0, tokens, form)}}},
                  tokens, kTermOuts, form);
  }

  // Rows [first, first + tokens) of x as an operand of K = in, in `packed`.
  gemm::Panels<const E> operand(AlignedBuffer<E>& packed, index_t in, index_t first, index_t tokens,
                                gemm::TokenForm form) {
    const index_t stride = gemm::token_stride<Kernel>(in) * arch::kPanelCols;
    packed.reserve(ceil_div(tokens, arch::kPanelCols) * stride);
    // What lies behind a token's K must not be used, not even times zero.
    std::fill_n(packed.data(), packed.capacity(), from_float<E>(std::nanf("")));
    const MatrixView<const float> x{x_.data() + first * kMostIn, tokens, in, kMostIn};
    gemm::pack_operand<Kernel>(x, tokens, in, form, {packed.data(), stride});
    return {packed.data(), stride};
  }

  template <std::size_t N>
  std::vector<float> sum(const std::array<gemm::Term<E>, N>& terms, index_t tokens, index_t outs,
                         gemm::TokenForm form) {
    const std::array<std::span<const gemm::Term<E>>, 1> outputs{{terms}};
    std::vector<float> y(static_cast<std::size_t>(tokens * outs), std::nanf(""));
    gemm::ThreadContext<Kernel> thread(scratch_);
    gemm::gemm_nt<Kernel>(
        thread, outs, tokens, form, outputs, [&](const std::array<gemm::TokenBlock, 1>& blocks) {
          const gemm::TokenBlock& block = blocks[0];
          gemm::store_tokens<Kernel>(block, y.data() + block.token * outs + block.out, outs, 1.0F, nullptr);
        });
    return y;
  }

  // Multiples of 1/64 and 1/16 of few bits: bf16 holds them, and fp32 every sum of their products.
  float reference(index_t in, index_t token, index_t out) const {
    double sum = 0;
    for (index_t k = 0; k < in; ++k) {
      sum += double{x_[token * kMostIn + k]} * to_float(weights_[out * kMostIn + k]);
    }
    return static_cast<float>(sum);
  }

  // So that the order of summation shows, also where x is rounded to bf16: terms of a sum differ widely.
  void make_sums_round() {
    for (index_t i = 0; i < kMostTokens * kMostIn; ++i) x_[i] *= i % 7 == 0 ? 1000.0F / 3 : 1.0F / 3;
  }

  // All zeros but the last step of K = in, whose product is too small for a float.
  void make_last_products_tiny(index_t in) {
    std::fill_n(weights_.data(), kOut * kMostIn, W{});
    std::fill_n(x_.data(), kMostTokens * kMostIn, 0.0F);
    for (index_t o = 0; o < kOut; ++o) weights_[o * kMostIn + in - 1] = from_float<W>(-1e-30F);
    for (index_t t = 0; t < kMostTokens; ++t) x_[t * kMostIn + in - 1] = 1e-30F;
  }

  void expect_exact(index_t in, index_t tokens, index_t outs = kOut) {
    const std::vector<float> y = product(in, 0, tokens, tokens, outs);
    for (index_t t = 0; t < tokens; ++t) {
      for (index_t o = 0; o < outs; ++o) {
        ASSERT_EQ(reference(in, t, o), y[static_cast<std::size_t>(t * outs + o)])
            << tokens << " tokens, token " << t << ", output " << o << " of " << outs << ", K = " << in;
      }
    }
  }

  // Of W^T in memory, in S, as of W.
  template <class S>
  void expect_bits_of_adjacent_weights() {
    constexpr index_t kIn = 608;
    AlignedBuffer<S> transposed(kIn * kTermOuts);
    for (index_t o = 0; o < kTermOuts; ++o) {
      for (index_t k = 0; k < kIn; ++k)
        transposed[k * kTermOuts + o] = from_float<S>(to_float(weights_[o * kMostIn + k]));
    }
    const arch::RowSource<S> strided{transposed.data(), 1, kTermOuts, nullptr};
    for (const index_t tokens : {1, 13, 17, 24, 70}) {
      for (const index_t in : {608, 531, 529}) {
        EXPECT_EQ(product(in, 0, tokens, tokens, kTermOuts), product(strided, in, 0, tokens, tokens, kTermOuts))
            << tokens << " tokens, K = " << in;
        for (const index_t second : {63, 7, 65}) {
          EXPECT_EQ(product_of_two(in, second, tokens), product_of_two(strided, in, second, tokens))
              << tokens << " tokens, K = " << in << ", " << second;
        }
      }
    }
  }

  // One strip that is not full; more than one of whatever depth; and an odd K.
  static constexpr std::array<index_t, 4> kIns{77, 531, 592, 608};
  static constexpr index_t kLongIn = 3001;
  static constexpr index_t kTermOuts = 70;
  // More of it than a strip or, of many tokens, a part of their panels has.
  static constexpr index_t kDeepIn = 2016;
  static constexpr index_t kMostTokens = 200, kMostIn = kLongIn;
  AlignedBuffer<W> weights_;
  AlignedBuffer<float> x_;
  gemm::Scratch scratch_;
};

using Kernels =
    testing::Types<kernels::Portable<float>, kernels::Portable<bf16>, kernels::Avx2<float>, kernels::Avx2<bf16>,
                   kernels::Avx512<float>, kernels::Avx512<bf16>, kernels::Avx512Bf16>;
TYPED_TEST_SUITE(GemmTokens, Kernels);

TYPED_TEST(GemmTokens, ATaskOfFewTokensHasTheBitsOfAll) {
  this->make_sums_round();
  for (const index_t in : this->kIns) {
    const std::vector<float> all = this->product(in, 0, 70, 70);
    for (const auto& [first, tokens] :
         {std::pair<index_t, index_t>{64, 6}, {0, 1}, {32, 8}, {32, 27}, {48, 22}}) {
      const std::vector<float> some = this->product(in, first, tokens, 70);
      EXPECT_EQ(0, std::memcmp(some.data(), all.data() + first * kOut, some.size() * sizeof(float)))
          << tokens << " tokens from " << first << ", K = " << in;
    }
  }
}

// Where products are fused with sums an odd K, which strips pad, makes no +0 of a sum that has become -0.
TYPED_TEST(GemmTokens, TheLastSumKeepsItsSign) {
  if constexpr (std::is_same_v<typename TypeParam::Compute, float> &&
                !std::is_same_v<typename TypeParam::Microkernel, arch::PortableMicrokernel>) {
    for (const index_t in : {65, 66}) {
      this->make_last_products_tiny(in);
      for (const float sum : this->product(in, 0, 70, 70)) ASSERT_TRUE(sum == 0 && std::signbit(sum)) << in;
    }
  }
}

// Dot products sum in another order than what multiplies more tokens, if a kernel has them.
TYPED_TEST(GemmTokens, TheFormDecidesTheOrderOfSums) {
  this->make_sums_round();
  constexpr index_t kIn = 592;
  const bool dots = gemm::token_form<TypeParam>(6) == gemm::TokenForm::kDots;
  ASSERT_NE(gemm::TokenForm::kDots, gemm::token_form<TypeParam>(70));
  EXPECT_EQ(!dots, this->product(kIn, 0, 6, 6) == this->product(kIn, 0, 6, 70));
}

// Nor do outputs beside it change how one is summed: tiles of fewer rows have as many chains.
TYPED_TEST(GemmTokens, FewerOutputsHaveTheBitsOfAll) {
  this->make_sums_round();
  for (const index_t tokens : {6, 13, 16, 17, 22, 27, 49}) {
    const std::vector<float> all = this->product(531, 0, tokens, tokens, 40);
    for (index_t outs = 1; outs < 40; ++outs) {
      const std::vector<float> some = this->product(531, 0, tokens, tokens, outs);
      for (index_t t = 0; t < tokens; ++t) {
        ASSERT_EQ(0, std::memcmp(some.data() + t * outs, all.data() + t * 40,
                                 static_cast<std::size_t>(outs) * sizeof(float)))
            << tokens << " tokens, token " << t << ", " << outs << " outputs";
      }
    }
  }
}

// Few tokens in panels have sums of two chains, of even and of odd steps, if a kernel has panels for them.
TYPED_TEST(GemmTokens, FewPanelsAreSummedInAnotherOrder) {
  this->make_sums_round();
  for (const index_t tokens : {13, 16, 17, 20, 21, 24}) {
    const bool few = gemm::token_form<TypeParam>(tokens) == gemm::TokenForm::kFewPanels;
    if (!few) continue;
    EXPECT_NE(this->product(592, 0, tokens, 70), this->product(592, 0, tokens, tokens)) << tokens;
  }
}

// A second term, as LoRA has one, of few steps and an odd number of them or of more: in the form of the first.
TYPED_TEST(GemmTokens, TermsOfOneFormAreSummed) {
  for (const auto& [in, second] :
       {std::pair<index_t, index_t>{77, 7}, {77, 66}, {3001, 7}, {66, 77}, {7, 77}}) {
    for (const index_t tokens : {1, 6, 15, 16, 22, 27, 70, 172}) {
      const std::vector<float> y = this->product_of_two(in, second, tokens);
      for (index_t t = 0; t < tokens; ++t) {
        for (index_t o = 0; o < this->kTermOuts; ++o) {
          ASSERT_EQ(this->reference(in, t, o) + this->reference(second, t, o),
                    y[static_cast<std::size_t>(t * this->kTermOuts + o)])
              << tokens << " tokens, token " << t << ", output " << o << ", K = " << in << ", " << second;
        }
      }
    }
  }
}

TYPED_TEST(GemmTokens, EveryNumberOfTokensIsExact) {
  for (const index_t in : this->kIns) {
    for (index_t tokens = 1; tokens <= 70; tokens += tokens < 20 ? 1 : 7) this->expect_exact(in, tokens);
  }
}

TYPED_TEST(GemmTokens, FewTokensOfLongRowsAreExact) {
  for (index_t tokens = 11; tokens <= 17; ++tokens) this->expect_exact(this->kLongIn, tokens, 70);
}

// Tokens along the lanes: up to four panels, of the last 1 to 4, 5 to 8, 9 to 12 or more columns; and more panels, in several
// tiles.
TYPED_TEST(GemmTokens, EveryNumberOfPanelsIsExact) {
  for (const index_t whole : {16, 32, 48, 64, 80, 96, 112, 176}) {
    for (const index_t more : {1, 4, 5, 8, 9, 12, 13, 16}) this->expect_exact(77, whole + more);
  }
  this->expect_exact(77, 200);  // more than a block of C has
  this->expect_exact(1, 40);
}

// Tiles of 4 and 8 rows of W, and all that may be left over.
TYPED_TEST(GemmTokens, EveryNumberOfOutputsIsExact) {
  for (const index_t tokens : {3, 17, 22, 27, 40, 44, 50, 58, 63}) {
    for (index_t outs = 1; outs <= 40; ++outs) this->expect_exact(77, tokens, outs);
  }
}

// A panel alone, of an expert with more.
TYPED_TEST(GemmTokens, TheLastFewTokensHaveTheBitsOfAll) {
  this->make_sums_round();
  for (index_t outs = 1; outs <= 9; ++outs) {
    const std::vector<float> all = this->product(77, 0, 70, 70, outs);
    const std::vector<float> last = this->product(77, 64, 6, 70, outs);
    EXPECT_EQ(0, std::memcmp(last.data(), all.data() + 64 * outs, last.size() * sizeof(float)))
        << outs << " outputs";
  }
}

// A sum of nothing, where there was something else.
TYPED_TEST(GemmTokens, WithoutTermsResultsAreZero) {
  for (const index_t tokens : {3, 20, 70}) {
    this->product(77, 0, tokens, tokens);
    const std::vector<float> y = this->product(0, 0, tokens, tokens);
    EXPECT_EQ(std::vector<float>(y.size(), 0.0F), y) << tokens << " tokens";
  }
}

TYPED_TEST(GemmTokens, DeepStripsAreExact) {
  for (const index_t tokens : {19, 33, 70}) this->expect_exact(this->kDeepIn, tokens);
}

// More of x than stays in L2 at once: a tile adds to what is there, in whole panels and in one that rows share.
TYPED_TEST(GemmTokens, DeepPanelsAreExact) {
  for (const index_t tokens : {164, 168, 172, 192}) {
    ASSERT_GT(tokens * this->kDeepIn * index_t{sizeof(bf16)}, arch::kLanesBytes);
    this->expect_exact(this->kDeepIn, tokens, 40);
    this->expect_exact(this->kDeepIn - 1, tokens, 9);
  }
}

// Nor does it show that a task of fewer tokens has all of K at once.
TYPED_TEST(GemmTokens, PartsOfDeepPanelsHaveTheBitsOfTheWhole) {
  this->make_sums_round();
  const std::vector<float> all = this->product(this->kDeepIn, 0, 192, 192, 40);
  const std::vector<float> some = this->product(this->kDeepIn, 160, 32, 192, 40);
  EXPECT_EQ(0, std::memcmp(some.data(), all.data() + 160 * 40, some.size() * sizeof(float)));
}

// Whatever of a weight is used where it lies. In fp32 too where sums of both types have one order.
TYPED_TEST(GemmTokens, WeightsMayBeStrided) {
  this->make_sums_round();
  this->template expect_bits_of_adjacent_weights<typename TypeParam::Weight>();
  if constexpr (std::is_same_v<TypeParam, kernels::Avx512Bf16>) {
    this->template expect_bits_of_adjacent_weights<float>();
  }
}

// Tiles read weights in streams: each output once, whatever is left over of the rows of a stream, also for gate and up together.
using InStreams = GemmTokens<kernels::AmxBf16>;

TEST_F(InStreams, EachOutputIsExact) {
  for (const index_t outs : {1, 15, 16, 17, 32, 33, 47, 48, 63, 100, 264}) {
    for (const index_t tokens : {1, 16, 17, 100}) {
      for (const index_t in : {33, 64, 77}) expect_exact(in, tokens, outs);
    }
  }
}

// As many that a tile of rows meets them in several blocks, memory asked for the next one meanwhile; and more of x than stays
// in L2 beside streams, in blocks of neighbouring rows.
TEST_F(InStreams, AndWithManyTokens) {
  constexpr index_t kStreamed = 112, kMore = 190;
  static_assert(kLongIn * kStreamed * index_t{sizeof(bf16)} <= arch::kStreamedBytes &&
                kLongIn >= arch::kLongRow);
  static_assert(kLongIn * kMore * index_t{sizeof(bf16)} > arch::kStreamedBytes);
  for (const index_t tokens : {kStreamed, kMore}) {
    for (const index_t outs : {1, 31, 32, 47, 100, 264}) expect_exact(kLongIn, tokens, outs);
  }
}

// A sum of nothing, where there was something else.
TEST_F(InStreams, WithoutTermsResultsAreZero) {
  product(77, 0, 20, 20);
  const std::vector<float> y = product(0, 0, 20, 20);
  EXPECT_EQ(std::vector<float>(y.size(), 0.0F), y);
}

// Of one block of tokens side by side; of more one after the other.
TEST_F(InStreams, OfTwoOutputsEachIsExact) {
  constexpr index_t kOuts = 83;
  for (const auto& [in, tokens] : {std::pair<index_t, index_t>{70, 19}, {kLongIn, 100}}) {
    AlignedBuffer<bf16> packed;
    const gemm::Panels<const bf16> x = operand(packed, in, 0, tokens, gemm::TokenForm::kPanels);
    const MatrixView<const bf16> gate{weights_.data(), kOuts, in, kMostIn};
    const MatrixView<const bf16> up{weights_.data() + kOuts * kMostIn, kOuts, in, kMostIn};
    const std::array<gemm::Term<bf16>, 2> terms{{{gate, in, x}, {up, in, x}}};
    const std::array<std::span<const gemm::Term<bf16>>, 2> outputs{{{&terms[0], 1}, {&terms[1], 1}}};
    std::vector<float> y(static_cast<std::size_t>(2 * tokens * kOuts), std::nanf(""));
    gemm::ThreadContext<kernels::AmxBf16> thread(scratch_);
    gemm::gemm_nt(thread, kOuts, tokens, gemm::TokenForm::kPanels, outputs,
                  [&, &tokens = tokens](const std::array<gemm::TokenBlock, 2>& blocks) {
                    for (std::size_t o = 0; o < 2; ++o) {
                      float* to = y.data() + static_cast<index_t>(o) * tokens * kOuts + blocks[o].out;
                      gemm::store_tokens<kernels::AmxBf16>(blocks[o], to + blocks[o].token * kOuts, kOuts, 1.0F,
                                                           nullptr);
                    }
                  });
    for (index_t o = 0; o < 2 * kOuts; ++o) {
      for (index_t t = 0; t < tokens; ++t) {
        const index_t at = o / kOuts * tokens * kOuts + t * kOuts + o % kOuts;
        ASSERT_EQ(reference(in, t, o), y[static_cast<std::size_t>(at)]) << "token " << t << ", output " << o;
      }
    }
  }
}

}  // namespace
