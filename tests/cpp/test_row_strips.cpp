// Strips of rows of B that many rows of A meet: of bf16, widened for each few rows anew, or of floats, widened once. Which of
// them a CPU takes changes no bit, and the results are those of products in a row, in float64.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <type_traits>
#include <vector>

#include "amx_sft_moe/amx_sft_moe.hpp"
#include "guarded.hpp"

namespace {

using namespace amx_sft_moe;  // NOLINT(google-build-using-namespace)

struct Extents {
  index_t rows, k, cols;
};

template <class Kernel>
class RowStrips : public testing::Test {
 protected:
  using W = typename Kernel::Weight;
  using E = typename Kernel::Compute;

  void SetUp() override {
    if (!Kernel::available()) GTEST_SKIP() << Kernel::refusal();
  }

  // A [rows, k], B [k, cols] with NaN behind its rows and nothing behind its last one. Thirds and sevenths: their sums round.
  void fill(const Extents& e) {
    e_ = e;
    a_.assign(static_cast<std::size_t>(e.rows * e.k), E{});
    for (std::size_t i = 0; i < a_.size(); ++i) a_[i] = from_float<E>(static_cast<float>(i * 53 % 89) / 7 - 6);
    b_stride_ = e.cols + 5;
    b_memory_ = {static_cast<std::size_t>((e.k - 1) * b_stride_ + e.cols) * sizeof(W), sft_test::Edge::kEnd};
    for (index_t i = 0; i < (e.k - 1) * b_stride_ + e.cols; ++i) {
      const bool there = i % b_stride_ < e.cols;
      b()[i] = from_float<W>(there ? static_cast<float>(i * 37 % 101 - 50) / 3 : std::nanf(""));
    }
  }
  W* b() const { return reinterpret_cast<W*>(b_memory_.data()); }

  std::vector<float> product(bool fresh, bool roomy_l1) {
    const index_t stride = gemm::strips_stride(e_.cols);
    std::vector<float> c(static_cast<std::size_t>(e_.rows * stride), fresh ? std::nanf("") : 0.3F);
    gemm::Scratch scratch;
    gemm::multiply_rows_by_blocks<Kernel>(scratch, MatrixView<const E>{a_.data(), e_.rows, e_.k, e_.k}, e_.rows,
                                          MatrixView<const W>{b(), e_.k, e_.cols, b_stride_}, e_.k, e_.cols,
                                          {c.data(), stride, fresh}, roomy_l1);
    std::vector<float> whole;
    for (index_t r = 0; r < e_.rows; ++r)
      whole.insert(whole.end(), c.begin() + r * stride, c.begin() + r * stride + e_.cols);
    return whole;
  }

  void is_near(const std::vector<float>& c, float before) const {
    for (index_t r = 0; r < e_.rows; ++r) {
      for (index_t j = 0; j < e_.cols; ++j) {
        double sum = before, size = std::abs(before);
        for (index_t k = 0; k < e_.k; ++k) {
          const double product = static_cast<double>(to_float(a_[static_cast<std::size_t>(r * e_.k + k)])) *
                                 static_cast<double>(to_float(b()[k * b_stride_ + j]));
          sum += product;
          size += std::abs(product);
        }
        const double found = static_cast<double>(c[static_cast<std::size_t>(r * e_.cols + j)]);
        ASSERT_LE(std::abs(found - sum), 6e-8 * static_cast<double>(e_.k + 1) * size) << r << ", " << j;
      }
    }
  }

  Extents e_{};
  std::vector<E> a_;
  index_t b_stride_ = 0;
  sft_test::GuardedMemory b_memory_;
};

using Kernels = testing::Types<kernels::Avx512<bf16>, kernels::Avx512<float>, kernels::Avx2<bf16>>;
TYPED_TEST_SUITE(RowStrips, Kernels);

TYPED_TEST(RowStrips, NoBitDependsOnWhatStripsAreOf) {
  constexpr index_t kMany = arch::kRowsOfDeepStrips;
  for (const Extents& e : {Extents{kMany, 300, 200}, Extents{kMany + 13, 129, 65}, Extents{2 * kMany, 256, 64},
                           Extents{kMany + 1, 1, 1}, Extents{kMany, 2, 63}, Extents{kMany - 1, 131, 130}}) {
    this->fill(e);
    for (const bool fresh : {true, false}) {
      SCOPED_TRACE(testing::Message() << e.rows << " x " << e.k << " x " << e.cols << (fresh ? "" : ", added"));
      const std::vector<float> narrow = this->product(fresh, /*roomy_l1=*/false);
      const std::vector<float> wide = this->product(fresh, /*roomy_l1=*/true);
      ASSERT_EQ(std::memcmp(narrow.data(), wide.data(), narrow.size() * sizeof(float)), 0);
      this->is_near(wide, fresh ? 0.0F : 0.3F);
    }
  }
}

// Of the tiles for both ways there is one only where there is nothing to choose.
TEST(RowStripTiles, WhatKernelsChooseFrom) {
  const auto type_of = []<class Kernel, class S>(bool floats) {
    return gemm::with_row_tiles<Kernel, S>(
        floats, []<class Tiles>() -> bool { return std::is_same_v<typename Tiles::StripElement, float>; });
  };
  EXPECT_FALSE((type_of.operator()<kernels::Avx512<bf16>, bf16>(false)));
  EXPECT_TRUE((type_of.operator()<kernels::Avx512<bf16>, bf16>(true)));
  EXPECT_TRUE((type_of.operator()<kernels::Avx512<float>, float>(false)));
  EXPECT_TRUE((type_of.operator()<kernels::Avx512<float>, float>(true)));
  EXPECT_FALSE((type_of.operator()<kernels::Avx512Bf16, bf16>(true)));
}

}  // namespace
