// Gradients of base weights that leave registers for the caller's memory (gemm/finished_strips.hpp): exact, for every height
// of a register tile, one token and many, parts of a strip; where rows are whole cache lines and where they are not; added
// to what is there or not; the bits that the way through a cache gives, denormals and NaN included; nothing else is written.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "amx_sft_moe/amx_sft_moe.hpp"

namespace {

using namespace amx_sft_moe;  // NOLINT(google-build-using-namespace)

struct Extents {
  index_t rows, tokens, cols;
};

// Memory of a gradient and what lies around it: rows `stride` apart, elements `step`.
template <class T>
struct Target {
  Target(const Extents& e, index_t row_step, index_t col_step, index_t first)
      : row_stride(row_step), col_stride(col_step), offset(first) {
    size = offset + (e.rows - 1) * row_stride + (e.cols - 1) * col_stride + 65;
    memory.reserve(size);
    std::fill_n(memory.data(), size, from_float<T>(std::nanf("")));
  }
  T& at(index_t row, index_t col) const { return memory[offset + row * row_stride + col * col_stride]; }
  arch::BlockTarget<T> block(bool accumulate, float scale) const {
    return {memory.data() + offset, row_stride, col_stride, accumulate, scale, nullptr};
  }

  index_t row_stride, col_stride, offset, size = 0;
  AlignedBuffer<T> memory;
};

// Whole lines, rows that begin in the middle of one, rows of any length, a transposed gradient.
template <class T>
std::vector<Target<T>> targets(const Extents& e) {
  std::vector<Target<T>> all;
  all.emplace_back(e, round_up(e.cols, 32) + 32, 1, 0);
  all.emplace_back(e, round_up(e.cols, 32), 1, 8);
  all.emplace_back(e, e.cols + 3, 1, 0);
  all.emplace_back(e, 1, e.rows + 1, 0);
  return all;
}

template <class Kernel>
class FinishedStrips : public testing::Test {
 protected:
  using W = typename Kernel::Weight;

  void SetUp() override {
    if (!Kernel::available()) GTEST_SKIP() << Kernel::refusal();
    a_.reserve(kMostTokens * kStride);
    b_.reserve(kMostTokens * kStride);
    for (index_t i = 0; i < kMostTokens * kStride; ++i) {
      a_[i] = from_float<W>(static_cast<float>(i * 53 % 89 - 44) / 16);
      b_[i] = from_float<W>(static_cast<float>(i * 37 % 101 - 50) / 64);
    }
  }

  gemm::Factor factor(const float* weights = nullptr) const {
    return {arch::RowSource<W>{a_.data(), kStride, 1, nullptr}, weights};
  }
  gemm::AnyRows inputs() const { return arch::RowSource<W>{b_.data(), kStride, 1, nullptr}; }

  template <class T>
  void finish(const Extents& e, const gemm::Factor& of, const gemm::AnyRows& inputs, bool read_soon,
              const arch::BlockTarget<T>& to) {
    const auto strips = gemm::strips_of_tokens<Kernel>(scratch_, inputs, e.tokens, e.cols);
    gemm::gemm_tn_finished<Kernel>(scratch_, e.rows, of, strips, read_soon, to);
  }
  // The same by gemm_tn, whose C is stored from a cache.
  template <class T>
  void store(const Extents& e, const gemm::Factor& of, const gemm::AnyRows& inputs,
             const arch::BlockTarget<T>& to) {
    gemm::ThreadContext<Kernel> thread(scratch_);
    const auto rows = gemm::pack_tokens<Kernel>(thread, inputs, e.tokens, e.cols);
    gemm::gemm_tn<Kernel>(thread, e.rows, std::array<gemm::Factor, 1>{of}, rows, [&](const gemm::Block& block) {
      arch::BlockTarget<T> part = to;
      part.data += block.row * to.row_stride + block.col * to.col_stride;
      Kernel::Rows::store(block.c, block.stride, block.rows, block.cols, part);
    });
  }

  // Both ways, and everything around.
  template <class T>
  void expect_same_bits(const Extents& e, const gemm::Factor& of, const gemm::AnyRows& inputs, bool accumulate,
                        float scale) {
    const auto stored = targets<T>(e);
    const auto finished = targets<T>(e);
    for (std::size_t i = 0; i < stored.size(); ++i) {
      for (index_t row = 0; row < e.rows; ++row) {
        for (index_t col = 0; accumulate && col < e.cols; ++col) {
          stored[i].at(row, col) = finished[i].at(row, col) = from_float<T>(static_cast<float>(row - col));
        }
      }
      store(e, of, inputs, stored[i].block(accumulate, scale));
      finish(e, of, inputs, e.rows % 2 == 0,
             finished[i].block(accumulate, scale));  // left in the caches or not
      const auto bytes = static_cast<std::size_t>(stored[i].size) * sizeof(T);
      ASSERT_EQ(0, std::memcmp(stored[i].memory.data(), finished[i].memory.data(), bytes))
          << "target " << i << ", " << e.rows << " x " << e.tokens << " x " << e.cols << ", scale " << scale
          << (accumulate ? ", added" : "");
    }
  }

  static constexpr index_t kMostTokens = 515, kStride = 331;
  AlignedBuffer<W> a_, b_;
  gemm::Scratch scratch_;
};

using Kernels =
    testing::Types<kernels::Portable<float>, kernels::Portable<bf16>, kernels::Avx2<float>, kernels::Avx2<bf16>,
                   kernels::Avx512<float>, kernels::Avx512<bf16>, kernels::Avx512Bf16>;
TYPED_TEST_SUITE(FinishedStrips, Kernels);

// Sums of multiples of 1/1024 that fp32 holds.
TYPED_TEST(FinishedStrips, IsExact) {
  for (const index_t rows : {1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 97}) {
    for (const index_t tokens : {1, 2, 3, 8, 9, 16, 17, 130}) {
      for (const index_t cols : {1, 16, 63, 64, 65, 128, 203}) {
        const Extents e{rows, tokens, cols};
        for (const Target<float>& target : targets<float>(e)) {
          this->finish(e, this->factor(), this->inputs(), false, target.block(false, 1.0F));
          for (index_t row = 0; row < rows; ++row) {
            for (index_t col = 0; col < cols; ++col) {
              float sum = 0;
              for (index_t t = 0; t < tokens; ++t) {
                sum +=
                    to_float(this->a_[t * this->kStride + row]) * to_float(this->b_[t * this->kStride + col]);
              }
              ASSERT_EQ(sum, target.at(row, col))
                  << rows << " x " << tokens << " x " << cols << " at " << row << ", " << col;
            }
          }
        }
      }
    }
  }
}

// With products that round. gemm_tn's own ways are those of test_gemm_columns.
TYPED_TEST(FinishedStrips, GivesTheBitsOfTheWayThroughACache) {
  using Weight = typename TypeParam::Weight;
  std::vector<float> weights;
  for (index_t t = 0; t < this->kMostTokens; ++t) weights.push_back(1.0F / static_cast<float>(t % 7 + 1));
  for (index_t i = 0; i < this->kMostTokens * this->kStride; ++i) {
    this->a_[i] = from_float<Weight>(to_float(this->a_[i]) / 3);
  }
  for (const Extents& e : {Extents{1, 1, 64}, Extents{7, 3, 130}, Extents{96, 16, 256}, Extents{40, 33, 331},
                           Extents{13, 129, 200}, Extents{6, 515, 65}}) {
    for (const bool accumulate : {false, true}) {
      for (const float scale : {1.0F, 0.37F}) {
        this->template expect_same_bits<bf16>(e, this->factor(), this->inputs(), accumulate, scale);
        this->template expect_same_bits<float>(e, this->factor(weights.data()), this->inputs(), accumulate,
                                               scale);
      }
    }
  }
}

// One element of a tile that is a denormal, or between two bf16, or out of their range, whichever it is of each height of a
// tile; then whole rows and columns that are infinite or NaN.
TYPED_TEST(FinishedStrips, RoundsSpecialValuesTheSame) {
  using Weight = typename TypeParam::Weight;
  const Extents e{13, 1, 192};
  std::fill_n(this->a_.data(), e.rows, from_float<Weight>(1.0F));
  std::fill_n(this->b_.data(), e.cols, from_float<Weight>(1.0F));
  const float tiny = std::ldexp(1.0F, -60), nan = std::nanf("");
  const std::array<float, 3> special[] = {// x, y, scale
                                          {tiny, tiny, std::ldexp(1.0F, -10)},
                                          {-tiny, tiny, std::ldexp(1.0F, -10)},
                                          {tiny, tiny, std::ldexp(1.0F, -6)},
                                          {1.5F, 1.0078125F, 1.0F},
                                          {1.5F, 1.0234375F, 1.0F},
                                          {1.5F, 1.0078125F, 0.5F},
                                          {1e19F, 3e19F, 1.0F},
                                          {1e19F, 1e19F, 4.0F},
                                          {INFINITY, 1.0F, 1.0F},
                                          {INFINITY, -2.0F, 0.5F},
                                          {1.0F, nan, 1.0F},
                                          {nan, 2.0F, 3.0F},
                                          {0.0F, -1.0F, 1.0F},
                                          {1e-20F, 1e-20F, 1.0F},
                                          {1e-38F, 0.25F, 1.0F}};
  for (const auto& [x, y, scale] : special) {
    for (index_t row = 0; row < e.rows; ++row) {
      for (const index_t col : {0, 15, 16, 40, 63, 64, 130}) {
        const Weight one_of_a = std::exchange(this->a_[row], from_float<Weight>(x));
        const Weight one_of_b = std::exchange(this->b_[col], from_float<Weight>(y));
        this->template expect_same_bits<bf16>(e, this->factor(), this->inputs(), false, scale);
        if (row == 5) this->template expect_same_bits<bf16>(e, this->factor(), this->inputs(), true, scale);
        if (row == 5) this->template expect_same_bits<float>(e, this->factor(), this->inputs(), false, scale);
        this->a_[row] = one_of_a;
        this->b_[col] = one_of_b;
      }
    }
  }
}

// Pairs of an odd number of tokens: what lies behind the last one is no number.
TYPED_TEST(FinishedStrips, TokensBehindTheLastAreNotRead) {
  using Weight = typename TypeParam::Weight;
  for (const index_t tokens : {1, 7, 8, 15, 33}) {
    const Extents e{7, tokens, 70};
    std::vector<Weight> a(this->a_.data(), this->a_.data() + tokens * this->kStride);
    std::vector<Weight> b(this->b_.data(), this->b_.data() + tokens * this->kStride);
    for (std::vector<Weight>* rows : {&a, &b})
      rows->resize(rows->size() + 331, from_float<Weight>(std::nanf("")));
    const arch::RowSource<Weight> of_a{a.data(), this->kStride, 1, nullptr},
        of_b{b.data(), this->kStride, 1, nullptr};
    Target<float> known(e, 128, 1, 0), target(e, 128, 1, 0);
    this->finish(e, this->factor(), this->inputs(), false, known.block(false, 1.0F));
    this->finish(e, {of_a, nullptr}, of_b, false, target.block(false, 1.0F));
    EXPECT_EQ(0, std::memcmp(known.memory.data(), target.memory.data(),
                             static_cast<std::size_t>(known.size) * sizeof(float)));
  }
}

// An expert's tokens, columns of a transposed x, and what has to be rounded on its way.
TYPED_TEST(FinishedStrips, InputsMayBeGatheredStridedOrFp32) {
  const Extents e{13, 35, 200};
  std::vector<std::int32_t> index;
  for (index_t t = 0; t < e.tokens; ++t) index.push_back(static_cast<std::int32_t>(t * 7 % 36));
  this->template expect_same_bits<float>(e, this->factor(), this->inputs().gathered(index.data()), false, 1.0F);
  const arch::RowSource<typename TypeParam::Weight> strided{this->b_.data(), 1, this->kStride, nullptr};
  this->template expect_same_bits<float>(e, this->factor(), strided, false, 1.0F);
  std::vector<float> values;
  for (index_t i = 0; i < e.tokens * e.cols; ++i) values.push_back(1.0F / static_cast<float>(i % 31 + 3));
  const arch::RowSource<float> fp32{values.data(), e.cols, 1, nullptr};
  this->template expect_same_bits<bf16>(e, this->factor(), fp32, false, 1.0F);
}

}  // namespace
