// Rows::store(): blocks of C that pass the caches are, to the bit, those that do not; in whole lines of memory, beside such
// lines, and where there are none.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "amx_sft_moe/amx_sft_moe.hpp"

namespace {

using namespace amx_sft_moe;  // NOLINT(google-build-using-namespace)

constexpr index_t kMost = 70;  // rows and columns of a block

template <class Rows>
class Stores : public testing::Test {
 protected:
  void SetUp() override {
    const CpuFeatures cpu = arch::cpu_features();
    if (std::is_same_v<Rows, arch::Avx512Rows> && !cpu.avx512) GTEST_SKIP() << "no AVX512";
    if (std::is_same_v<Rows, arch::Avx2Rows> && !cpu.avx2) GTEST_SKIP() << "no AVX2";
    for (std::size_t i = 0; i < c_.size(); ++i) c_[i] = std::sin(static_cast<float>(i)) * 3;
    c_[5] = -0.0F;
    c_[kMost + 1] = INFINITY;
    for (std::size_t i = 0; i < scales_.size(); ++i) scales_[i] = std::cos(static_cast<float>(i));
  }

  // What lies behind `offset` elements of a line, NaN before: of a block whose lines are `stride` apart.
  template <class T>
  std::vector<T> stored(const arch::BlockTarget<T>& like, index_t rows, index_t cols, index_t offset,
                        bool past_caches) {
    const index_t stride = std::max(like.row_stride, like.col_stride);
    AlignedBuffer<T> memory(kMost * stride + offset);
    std::fill_n(memory.data(), kMost * stride + offset, from_float<T>(std::nanf("")));
    arch::BlockTarget<T> to = like;
    to.data = memory.data() + offset;
    to.past_caches = past_caches;
    Rows::store(c_.data(), kMost, rows, cols, to);
    if constexpr (requires { Rows::settle(); }) Rows::settle();
    return {memory.data(), memory.data() + kMost * stride + offset};
  }

  template <class T>
  void expect_same(bool columns, index_t rows, index_t cols, index_t stride, index_t offset,
                   const float* col_scale, bool accumulate) {
    SCOPED_TRACE(std::to_string(rows) + " x " + std::to_string(cols) + (columns ? " as columns" : " as rows") +
                 ", stride " + std::to_string(stride) + ", offset " + std::to_string(offset));
    arch::BlockTarget<T> like{nullptr,  columns ? 1 : stride, columns ? stride : 1, accumulate, 0.75F,
                              col_scale};
    const std::vector<T> kept = stored(like, rows, cols, offset, false);
    const std::vector<T> past = stored(like, rows, cols, offset, true);
    EXPECT_EQ(std::memcmp(kept.data(), past.data(), kept.size() * sizeof(T)), 0);
    const index_t last = offset + (columns ? (cols - 1) * stride + rows - 1 : (rows - 1) * stride + cols - 1);
    const float factor = 0.75F * (col_scale == nullptr ? 1.0F : col_scale[cols - 1]);
    if (!accumulate) {
      const T want = from_float<T>(c_[static_cast<std::size_t>((rows - 1) * kMost + cols - 1)] * factor);
      EXPECT_EQ(to_float(past[static_cast<std::size_t>(last)]), to_float(want));
    }
  }

  template <class T>
  void expect_same_of_all() {
    for (const bool columns : {false, true}) {
      for (const index_t rows : {1, 16, 17, 32, 47, 64, 70}) {
        for (const index_t cols : {1, 15, 16, 32, 33, 70}) {
          expect_same<T>(columns, rows, cols, 96, 0, nullptr, false);
          expect_same<T>(columns, rows, cols, 96, 0, scales_.data(), false);
        }
      }
      expect_same<T>(columns, 64, 64, 70, 0, nullptr, false);  // lines that are no lines of memory
      expect_same<T>(columns, 64, 64, 96, 3, nullptr, false);  // nor the first
      expect_same<T>(columns, 64, 64, 96, 64, nullptr, false);
      expect_same<T>(columns, 64, 64, 96, 0, nullptr, true);  // what is there has to be read
    }
  }

 private:
  std::array<float, std::size_t{kMost * kMost}> c_;
  std::array<float, std::size_t{kMost}> scales_;
};

using AllRows = testing::Types<arch::PortableRows, arch::Avx2Rows, arch::Avx512Rows>;
TYPED_TEST_SUITE(Stores, AllRows);

TYPED_TEST(Stores, OfFloatsPastTheCaches) {
  this->template expect_same_of_all<float>();
}
TYPED_TEST(Stores, OfBf16PastTheCaches) {
  this->template expect_same_of_all<bf16>();
}

// lora::clear() of [5, 3] wherever its elements lie: zeros there and nothing beside them.
TEST(Clear, WritesNothingButTheGradient) {
  constexpr index_t kRows = 5, kCols = 3;
  const std::array<std::array<index_t, 2>, 8> strides{
      {{kCols, 1}, {kCols + 2, 1}, {1, kRows}, {1, kRows + 2}, {2 * kCols, 2}, {2, 2 * kRows}, {1, 9}, {9, 1}}};
  for (const auto& [row_stride, col_stride] : strides) {
    std::vector<float> memory(64, 7.0F);
    lora::clear({memory.data(), kRows, kCols, row_stride, col_stride});
    std::vector<float> expected(64, 7.0F);
    for (index_t i = 0; i < kRows; ++i) {
      for (index_t j = 0; j < kCols; ++j) expected[i * row_stride + j * col_stride] = 0.0F;
    }
    EXPECT_EQ(memory, expected) << row_stride << ", " << col_stride;
  }
}

// Of one row, whose stride may be anything, and of none.
TEST(Clear, OneRowAndNone) {
  std::vector<bf16> memory(8, from_float<bf16>(7.0F));
  for (const index_t row_stride : {0, 1, 3, 100}) lora::clear({memory.data() + 1, 1, 3, row_stride, 2});
  lora::clear({static_cast<float*>(nullptr), 0, 3, 3, 1});
  for (std::size_t i = 0; i < memory.size(); ++i) {
    EXPECT_EQ(to_float(memory[i]), i == 1 || i == 3 || i == 5 ? 0.0F : 7.0F) << i;
  }
}

}  // namespace
