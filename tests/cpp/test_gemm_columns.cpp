// gemm_nn and gemm_tn: exact for few rows and for many, for few steps along K and for many, and for columns below and
// above every block; whatever memory held before, and also where terms have no products at all.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <initializer_list>
#include <utility>
#include <vector>

#include "amx_sft_moe/amx_sft_moe.hpp"

namespace {

using namespace amx_sft_moe;  // NOLINT(google-build-using-namespace)

struct Extents {
  index_t rows, k, cols;
};

template <class Kernel>
class GemmColumns : public testing::Test {
 protected:
  using W = typename Kernel::Weight;

  void SetUp() override {
    if (!Kernel::available()) GTEST_SKIP() << Kernel::refusal();
    a_.reserve(kMostRows * kMostK);
    b_.reserve(kMostOfB);
    for (index_t i = 0; i < kMostRows * kMostK; ++i)
      a_[i] = from_float<W>(static_cast<float>(i * 53 % 89 - 44) / 16);
    for (index_t i = 0; i < kMostOfB; ++i) b_[i] = from_float<W>(static_cast<float>(i * 37 % 101 - 50) / 64);
  }

  // Multiples of 1/16 and 1/64 of few bits: bf16 holds them, and fp32 every sum of their products.
  float a(index_t row, index_t k) const { return to_float(a_[row * kMostK + k]); }
  float b(index_t k, index_t col) const { return to_float(b_[k * b_stride_ + col]); }
  float sum_of(index_t steps, index_t row, index_t col) const {
    float sum = 0;
    for (index_t k = 0; k < steps; ++k) sum += a(row, k) * b(k, col);
    return sum;
  }
  MatrixView<const W> rows_of_a(index_t rows, index_t k) const { return {a_.data(), rows, k, kMostK}; }
  MatrixView<const W> rows_of_b(index_t k, index_t cols) {
    b_stride_ = cols + 3;
    return {b_.data(), k, cols, b_stride_};
  }

  // C, once its memory has been NaN.
  template <class Run>
  std::vector<float> result(index_t rows, index_t cols, Run&& run) {
    const index_t factor_block = arch::kFactorBlockRows * gemm::strips_stride(arch::kFactorBlockSums);
    const index_t floats =
        std::max(factor_block, (rows + arch::kPanelCols) * (gemm::strips_stride(cols) + arch::kPanelCols));
    std::fill_n(scratch_.c_blocks.template as<float>(floats), floats, std::nanf(""));
    std::vector<float> c(static_cast<std::size_t>(rows * cols), std::nanf(""));
    gemm::ThreadContext<Kernel> thread(scratch_);
    run(thread, [&](const gemm::Block& block) {
      const arch::BlockTarget<float> to{c.data() + block.row * cols + block.col, cols, 1, false, 1.0F, nullptr};
      Kernel::Rows::store(block.c, block.stride, block.rows, block.cols, to);
    });
    return c;
  }

  // A[rows, K] B[K, cols], the sum of `terms`.
  template <std::size_t N>
  std::vector<float> nn(index_t rows, index_t cols, const std::array<gemm::NnTerm, N>& terms) {
    return result(rows, cols, [&](auto& thread, auto&& epilogue) {
      gemm::gemm_nn<Kernel>(thread, rows, cols, terms, epilogue);
    });
  }

  // A^T B: the first e.rows columns of e.k rows of A's memory, in memory that is NaN beside and behind them; e.cols
  // columns of B's.
  std::vector<float> tn(const Extents& e, const gemm::AnyRows& rows_of_b) {
    const index_t stride = e.rows + 3;
    std::vector<W> copy(static_cast<std::size_t>((e.k + 1) * stride), from_float<W>(std::nanf("")));
    for (index_t t = 0; t < e.k; ++t) std::copy_n(a_.data() + t * kMostK, e.rows, copy.data() + t * stride);
    const arch::RowSource<W> factor{copy.data(), stride, 1, nullptr};
    return tn<1>(e, rows_of_b, {{{factor, nullptr}}});
  }
  template <std::size_t N>
  std::vector<float> tn(const Extents& e, const gemm::AnyRows& rows_of_b,
                        const std::array<gemm::Factor, N>& factors) {
    return result(e.rows, e.cols, [&](auto& thread, auto&& epilogue) {
      const auto b = gemm::pack_tokens<Kernel>(thread, rows_of_b, e.k, e.cols);
      gemm::gemm_tn<Kernel>(thread, e.rows, factors, b, epilogue);
    });
  }

  template <class Sum>
  void expect_exact(const std::vector<float>& c, const Extents& e, Sum&& sum) {
    for (index_t row = 0; row < e.rows; ++row) {
      for (index_t col = 0; col < e.cols; ++col) {
        ASSERT_EQ(sum(row, col), c[static_cast<std::size_t>(row * e.cols + col)])
            << e.rows << " x " << e.k << " x " << e.cols << " at " << row << ", " << col;
      }
    }
  }

  static constexpr index_t kMostRows = 2032, kMostK = 2032;
  static constexpr index_t kMostOfB = 2032 * 267;  // more than 55 x 6203 and 240 x 2053
  index_t b_stride_ = 0;                           // of the product at hand
  AlignedBuffer<W> a_, b_;
  gemm::Scratch scratch_;
};

using Kernels =
    testing::Types<kernels::Portable<float>, kernels::Portable<bf16>, kernels::Avx2<float>, kernels::Avx2<bf16>,
                   kernels::Avx512<float>, kernels::Avx512<bf16>, kernels::Avx512Bf16, kernels::AmxBf16>;
TYPED_TEST_SUITE(GemmColumns, Kernels);

// `deep`: steps along K of a strip that is not full, of one or more and a rest. 97 columns are one whole strip and a
// part of one; 128 and 200 have whole ones that follow, which are made while the one before is multiplied.
std::vector<Extents> all_extents(std::initializer_list<index_t> deep) {
  std::vector<Extents> all;
  for (const index_t rows : {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 33}) {
    for (const index_t k : {1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 19, 40, 53, 54, 55}) {
      for (const index_t cols : {1, 15, 33, 97}) all.push_back({rows, k, cols});
    }
  }
  // Blocks of C of gemm_tn with few tokens: one, one and a rest of either kind, several.
  for (const index_t rows : {15, 16, 17, 64, 65}) {
    for (const index_t k : {1, 2, 11, 13, 16, 17, 48, 49}) {
      for (const index_t cols : {255, 256, 257, 600}) all.push_back({rows, k, cols});
    }
  }
  for (const index_t rows : {1, 13, 49}) {
    for (const index_t k : deep) {
      for (const index_t cols : {97, 128, 200}) all.push_back({rows, k, cols});
    }
  }
  // So narrow that a block of columns is not whole, with so many rows of B that memory is asked for some of them.
  for (const index_t rows : {1, 5, 8, 11, 12}) {
    for (const index_t cols : {16, 17, 31, 32}) all.push_back({rows, 300, cols});
  }
  // Two parts of K; and strips up to the deepest there is: 256, then 512, then 1024 steps and less.
  all.push_back({13, 2032, 264});
  all.push_back({49, 2032, 264});
  // Wider than what of C stays in L1: by a few columns for one row, many times for eight.
  for (const index_t rows : {1, 8, 9}) {
    for (const index_t k : {11, 16, 35, 51, 54}) all.push_back({rows, k, 6200});
  }
  return all;
}

TYPED_TEST(GemmColumns, NnIsExact) {
  for (const Extents& e : all_extents({129, 257, 355, 356, 530})) {
    const std::array<gemm::NnTerm, 1> terms{
        {{this->rows_of_a(e.rows, e.k), this->rows_of_b(e.k, e.cols), e.k}}};
    const auto c = this->nn(e.rows, e.cols, terms);
    this->expect_exact(c, e, [&](index_t row, index_t col) { return this->sum_of(e.k, row, col); });
  }
}

TYPED_TEST(GemmColumns, TnIsExact) {
  for (const Extents& e : all_extents({129, 257, 355, 356, 530})) {
    const auto c = this->tn(e, this->rows_of_b(e.k, e.cols));
    this->expect_exact(c, e, [&](index_t row, index_t col) {
      float sum = 0;
      for (index_t t = 0; t < e.k; ++t) sum += this->a(t, row) * this->b(t, col);
      return sum;
    });
  }
}

// Several whole strips, one along K and more; several blocks of few tokens; one row and two.
constexpr Extents kSeveralStrips[] = {{13, 129, 200}, {13, 356, 128}, {49, 530, 200}, {13, 1100, 128},
                                      {40, 11, 300},  {17, 16, 513},  {17, 7, 300},   {40, 35, 300},
                                      {16, 48, 97},   {8, 51, 300},   {1, 129, 200},  {2, 35, 300}};

// B's rows as an index has them, here from the last to the first: an expert's tokens.
TYPED_TEST(GemmColumns, RowsOfBMayBeGathered) {
  for (const Extents& e : kSeveralStrips) {
    std::vector<std::int32_t> index(static_cast<std::size_t>(e.k));
    for (index_t t = 0; t < e.k; ++t)
      index[static_cast<std::size_t>(t)] = static_cast<std::int32_t>(e.k - 1 - t);
    const gemm::AnyRows rows = gemm::AnyRows(this->rows_of_b(e.k, e.cols)).gathered(index.data());
    const auto c = this->tn(e, rows);
    this->expect_exact(c, e, [&](index_t row, index_t col) {
      float sum = 0;
      for (index_t t = 0; t < e.k; ++t) sum += this->a(t, row) * this->b(e.k - 1 - t, col);
      return sum;
    });
  }
}

// Two factors of one x, that of gate and that of up where they share LoRA's A, one of them with a weight for each token.
TYPED_TEST(GemmColumns, FactorsAreSummed) {
  for (const Extents& e : {Extents{16, 7, 300}, {40, 16, 513}, {9, 17, 97}, {16, 40, 300}}) {
    const auto b = this->rows_of_b(e.k, e.cols);
    const auto first = this->rows_of_a(e.k, e.rows);
    const auto second = gemm::AnyRows(first).from(41, 0);
    std::vector<float> weights;
    for (index_t t = 0; t < e.k; ++t) weights.push_back(t % 3 == 0 ? 2.0F : 1.0F);
    const auto c = this->template tn<2>(e, b, {{{first, nullptr}, {second, weights.data()}}});
    this->expect_exact(c, e, [&](index_t row, index_t col) {
      float sum = 0;
      for (index_t t = 0; t < e.k; ++t) {
        const float weight = weights[static_cast<std::size_t>(t)];
        sum += (this->a(t, row) + weight * this->a(t + 41, row)) * this->b(t, col);
      }
      return sum;
    });
  }
}

// B^T in memory: products are made from a copy.
TYPED_TEST(GemmColumns, ColumnsOfBMayBeStrided) {
  for (const Extents& e : kSeveralStrips) {
    const index_t stride = e.k + 3;
    const arch::RowSource<typename TypeParam::Weight> b{this->b_.data(), 1, stride, nullptr};
    const std::array<gemm::NnTerm, 1> terms{{{this->rows_of_a(e.rows, e.k), b, e.k}}};
    const auto c = this->nn(e.rows, e.cols, terms);
    this->expect_exact(c, e, [&](index_t row, index_t col) {
      float sum = 0;
      for (index_t k = 0; k < e.k; ++k) sum += this->a(row, k) * to_float(this->b_[col * stride + k]);
      return sum;
    });
    this->expect_exact(this->tn(e, b), e, [&](index_t row, index_t col) {
      float sum = 0;
      for (index_t t = 0; t < e.k; ++t) sum += this->a(t, row) * to_float(this->b_[col * stride + t]);
      return sum;
    });
  }
}

// Rounded on their way where products are of bf16, here to themselves.
TYPED_TEST(GemmColumns, BMayBeFp32) {
  for (const Extents& e : kSeveralStrips) {
    std::vector<float> values(static_cast<std::size_t>(e.k * e.cols));
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = to_float(this->b_[static_cast<index_t>(i)]);
    this->b_stride_ = e.cols;
    const arch::RowSource<float> b{values.data(), e.cols, 1, nullptr};
    const std::array<gemm::NnTerm, 1> terms{{{this->rows_of_a(e.rows, e.k), b, e.k}}};
    const auto c = this->nn(e.rows, e.cols, terms);
    this->expect_exact(c, e, [&](index_t row, index_t col) { return this->sum_of(e.k, row, col); });
    this->expect_exact(this->tn(e, b), e, [&](index_t row, index_t col) {
      float sum = 0;
      for (index_t t = 0; t < e.k; ++t) sum += this->a(t, row) * this->b(t, col);
      return sum;
    });
  }
}

// Where pairs are multiplied and K is odd, the last row has no partner: not itself either, 0 times infinity is NaN.
TYPED_TEST(GemmColumns, AnInfinityInTheLastRowStaysOne) {
  constexpr index_t kCols = 33, kAt = 5;
  using Weight = typename TypeParam::Weight;
  for (const index_t rows : {1, 8, 13}) {
    for (const index_t k : {1, 3, 7, 35, 51}) {
      const std::array<gemm::NnTerm, 1> terms{{{this->rows_of_a(rows, k), this->rows_of_b(k, kCols), k}}};
      Weight& last = this->b_[(k - 1) * this->b_stride_ + kAt];
      const Weight before = std::exchange(last, from_float<Weight>(INFINITY));
      for (index_t row = 0; row < rows; ++row) this->a_[row * this->kMostK + k - 1] = from_float<Weight>(1.0F);
      const auto c = this->nn(rows, kCols, terms);
      last = before;
      for (index_t row = 0; row < rows; ++row) {
        EXPECT_EQ(INFINITY, c[static_cast<std::size_t>(row * kCols + kAt)]) << rows << " x " << k;
      }
    }
  }
}

// Nothing behind B's last row is read: gemm_tn has as many rows as there are tokens.
TYPED_TEST(GemmColumns, TokensBehindTheLastAreNotRead) {
  constexpr index_t kCols = 33;
  using Weight = typename TypeParam::Weight;
  for (const index_t rows : {1, 8, 13, 40}) {
    for (const index_t k : {1, 3, 7, 11, 35, 51}) {
      const Extents e{rows, k, kCols};
      const auto b = this->rows_of_b(k, kCols);
      const auto behind = this->b_.data() + k * this->b_stride_;
      const std::vector<Weight> before(behind, behind + kCols);
      std::fill_n(behind, kCols, from_float<Weight>(std::nanf("")));
      const auto c = this->tn(e, b);
      std::copy(before.begin(), before.end(), behind);
      this->expect_exact(c, e, [&](index_t row, index_t col) {
        float sum = 0;
        for (index_t t = 0; t < k; ++t) sum += this->a(t, row) * this->b(t, col);
        return sum;
      });
    }
  }
}

// Whether B is read in place, by blocks of its rows, held in registers or cut into strips is a matter of speed: a row of C has
// the same bits with few rows beside it and with more. But tiles that read B as it lies, one or two at a time, sum in other orders.
TYPED_TEST(GemmColumns, TheWayOfAProductDoesNotShow) {
  using Weight = typename TypeParam::Weight;
  for (index_t i = 0; i < this->kMostRows * this->kMostK; ++i) {
    const float factor = i % 7 == 0 ? 1000.0F / 3 : 1.0F / 3;
    this->a_[i] = from_float<Weight>(to_float(this->a_[i]) * factor);
  }
  const auto first_rows = [](const std::vector<float>& c, index_t rows, index_t cols) {
    return std::vector<float>(c.begin(), c.begin() + rows * cols);
  };
  constexpr index_t kCols = 130;
  for (const index_t k : {7, 11, 17, 35, 48, 49, 130, 355}) {
    const auto b = this->rows_of_b(k, kCols);
    const auto nn = [&](index_t rows) {
      const std::array<gemm::NnTerm, 1> terms{{{this->rows_of_a(rows, k), b, k}}};
      return first_rows(this->nn(rows, kCols, terms), std::min<index_t>(rows, 8), kCols);
    };
    if constexpr (!gemm::FewRowsInPlace<TypeParam>) {
      for (const index_t rows : {1, 2, 3, 4, 5}) {  // fewer than blocks are for, and more than two
        EXPECT_EQ(first_rows(nn(8), rows, kCols), nn(rows)) << rows << " rows, K = " << k;
      }
    }
    const auto tn = [&](index_t rows) { return first_rows(this->tn({rows, k, kCols}, b), 8, kCols); };
    for (const index_t rows : {9, 12, 13, 16, 17, 32, 33, 64, 65}) {
      index_t alike = 8;
      if constexpr (gemm::FewRowsInPlace<TypeParam>) alike = rows <= 16 ? 8 : rows <= 32 ? 24 : 40;
      EXPECT_EQ(nn(alike), nn(rows)) << rows << " rows, K = " << k;
      EXPECT_EQ(tn(8), tn(rows)) << rows << " rows, " << k << " tokens";
    }
  }
}

// So wide and deep that kernels of tiles pack B in parts, some with the end of one term and the begin of the next.
TYPED_TEST(GemmColumns, NnInPartsIsExact) {
  constexpr index_t kCols = 2050;
  for (const index_t rows : {1, 17, 33, 40}) {
    const Extents e{rows, 150 + 230 + 16, kCols};
    const std::array<gemm::NnTerm, 3> terms{{{this->rows_of_a(rows, 150), this->rows_of_b(150, kCols), 150},
                                             {this->rows_of_a(rows, 230), this->rows_of_b(230, kCols), 230},
                                             {this->rows_of_a(rows, 16), this->rows_of_b(16, kCols), 16}}};
    if constexpr (gemm::AddsToC<TypeParam>) {
      ASSERT_LT(gemm::panel_depth<TypeParam>(e.k, kCols), e.k);
    }
    const auto c = this->nn(rows, kCols, terms);
    this->expect_exact(c, e, [&](index_t row, index_t col) {
      float sum = 0;
      for (const gemm::NnTerm& term : terms) sum += this->sum_of(term.k, row, col);
      return sum;
    });
  }
}

// Whether rows, columns or neither lie side by side where C is stored: the same bits, also where it is added to, which is
// rounded once.
TYPED_TEST(GemmColumns, StoredAnywhereAlike) {
  constexpr index_t kRows = 21, kCols = 83;
  for (const bool accumulate : {false, true}) {
    for (const float scale : {1.0F, -0.3F}) {
      const auto stored = [&]<class T>(index_t row_stride, index_t col_stride, T) {
        std::vector<T> memory(static_cast<std::size_t>(3 * kRows * kCols + 1), from_float<T>(0.7F));
        const arch::BlockTarget<T> to{memory.data(), row_stride, col_stride, accumulate, scale, nullptr};
        std::vector<float> c(static_cast<std::size_t>(kRows * kCols));
        for (std::size_t n = 0; n < c.size(); ++n) c[n] = 0.1F * static_cast<float>(n % 97) - 3.3F;
        TypeParam::Rows::store(c.data(), kCols, kRows, kCols, to);
        std::vector<float> found;
        for (index_t i = 0; i < kRows; ++i) {
          for (index_t j = 0; j < kCols; ++j) {
            found.push_back(to_float(memory[static_cast<std::size_t>(i * row_stride + j * col_stride)]));
          }
        }
        return found;
      };
      const auto by_rows = stored(kCols, 1, float{});
      EXPECT_EQ(stored(1, kRows, float{}), by_rows);
      EXPECT_EQ(stored(2, 2 * kRows, float{}), by_rows);
      const auto rounded = stored(kCols, 1, bf16{});
      EXPECT_EQ(stored(1, kRows, bf16{}), rounded);
      EXPECT_EQ(stored(2, 2 * kRows, bf16{}), rounded);
    }
  }
}

// A's rows as an index has them, of either type; B's columns a row apart, of either type: what lies otherwise is copied first.
TYPED_TEST(GemmColumns, NnTakesOperandsAsTheyLie) {
  using Weight = typename TypeParam::Weight;
  for (const Extents& e : {Extents{1, 40, 83}, {8, 53, 97}, {19, 130, 66}, {32, 17, 96}, {40, 53, 97}}) {
    std::vector<std::int32_t> index;
    for (index_t i = 0; i < e.rows; ++i) index.push_back(static_cast<std::int32_t>(e.rows - 1 - i));
    const auto plain_b = this->rows_of_b(e.k, e.cols);
    std::vector<float> wide_a, turned_b(static_cast<std::size_t>(e.k * e.cols));
    std::vector<Weight> turned(turned_b.size());
    for (index_t i = 0; i < e.rows; ++i) {
      for (index_t k = 0; k < e.k; ++k) wide_a.push_back(this->a(i, k));
    }
    for (index_t k = 0; k < e.k; ++k) {
      for (index_t j = 0; j < e.cols; ++j) {
        const auto at = static_cast<std::size_t>(j * e.k + k);
        turned_b[at] = this->b(k, j);
        turned[at] = from_float<Weight>(turned_b[at]);
      }
    }
    const auto expect = [&](const gemm::AnyRows& a, const gemm::AnyRows& b) {
      const std::array<gemm::NnTerm, 1> terms{{{a, b, e.k}}};
      const auto c = this->nn(e.rows, e.cols, terms);
      this->expect_exact(c, e,
                         [&](index_t row, index_t col) { return this->sum_of(e.k, e.rows - 1 - row, col); });
    };
    const auto gathered = gemm::AnyRows(this->rows_of_a(e.rows, e.k)).gathered(index.data());
    expect(gathered, plain_b);
    expect(gathered, arch::RowSource<Weight>{turned.data(), 1, e.k, nullptr});
    const gemm::AnyRows floats = arch::RowSource<float>{wide_a.data(), e.k, 1, index.data()};
    expect(floats, plain_b);
    expect(floats, arch::RowSource<float>{turned_b.data(), 1, e.k, nullptr});
  }
}

// An element of B that is not finite has no sums in its column, and perhaps in the one it is paired with; all others have theirs.
TYPED_TEST(GemmColumns, WhatIsNotFiniteStaysInItsPairOfColumns) {
  using Weight = typename TypeParam::Weight;
  constexpr index_t kCols = 97, kCol = 37, kRow = 5;
  for (const index_t rows : {1, 8, 20, 40}) {
    for (const index_t k : {7, 16, 53}) {
      const Extents e{rows, k, kCols};
      const auto b = this->rows_of_b(k, kCols);
      Weight& element = this->b_[kRow * this->b_stride_ + kCol];
      const Weight before = std::exchange(element, from_float<Weight>(INFINITY));
      const std::array<gemm::NnTerm, 1> terms{{{this->rows_of_a(rows, k), b, k}}};
      auto c = this->nn(rows, kCols, terms);
      element = before;
      for (index_t row = 0; row < rows; ++row) {
        EXPECT_FALSE(std::isfinite(c[static_cast<std::size_t>(row * kCols + kCol)]))
            << rows << " rows, K = " << k;
        for (const index_t col : {kCol & ~index_t{1}, kCol | index_t{1}}) {
          c[static_cast<std::size_t>(row * kCols + col)] = this->sum_of(k, row, col);
        }
      }
      this->expect_exact(c, e, [&](index_t row, index_t col) { return this->sum_of(k, row, col); });
    }
  }
}

// Base product and LoRA are terms of one sum; an absent adapter has no products, and neither has an idle sum.
TYPED_TEST(GemmColumns, TermsAreSummedAndEmptyOnesAreNothing) {
  for (const auto& [first, second, third] :
       {std::array<index_t, 3>{19, 3, 9}, {0, 19, 3}, {3, 0, 19}, {0, 0, 5}, {9, 0, 0}, {0, 0, 0}}) {
    for (const index_t rows : {1, 8, 33}) {
      const Extents e{rows, first + second + third, 97};
      const std::array<gemm::NnTerm, 3> terms{
          {{this->rows_of_a(rows, first), this->rows_of_b(first, 97), first},
           {this->rows_of_a(rows, second), this->rows_of_b(second, 97), second},
           {this->rows_of_a(rows, third), this->rows_of_b(third, 97), third}}};
      const auto c = this->nn(rows, 97, terms);
      this->expect_exact(c, e, [&](index_t row, index_t col) {
        float sum = 0;
        for (const gemm::NnTerm& term : terms) sum += this->sum_of(term.k, row, col);
        return sum;
      });
    }
  }
}

}  // namespace
