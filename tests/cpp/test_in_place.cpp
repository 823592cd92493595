// Products in place have the bits of exact sums, whichever CPU this is: in either order in which memory is asked for rows to
// come, where it depends on the CPU, and by blocks of rows.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>
#include <vector>

#include "amx_sft_moe/amx_sft_moe.hpp"
#include "guarded.hpp"

namespace {

using namespace amx_sft_moe;  // NOLINT(google-build-using-namespace)

// Sixteenths below one, of which sums of products of two are exact in fp32.
template <class T>
void fill(T* to, index_t count, index_t step) {
  for (index_t i = 0; i < count; ++i) to[i] = from_float<T>(static_cast<float>(i * step % 31 - 15) / 16);
}

template <class Kernel>
class InPlace : public testing::Test {
 protected:
  using Micro = typename Kernel::Microkernel;
  using E = typename Kernel::Compute;
  using W = typename Kernel::Weight;

  void SetUp() override {
    if (!Kernel::available()) GTEST_SKIP() << Kernel::refusal();
  }

  // [rows, k] of a weight, which ends where memory that may be read does.
  static const W* weights(const sft_test::GuardedMemory& memory, index_t elements) {
    auto* data = reinterpret_cast<W*>(memory.data());
    fill(data, elements, 7);
    return data;
  }
  // Rows of x, zeros behind k. They end where memory that may be read does.
  static const E* rows_of_x(const sft_test::GuardedMemory& memory, index_t rows, index_t k, index_t stride) {
    auto* x = reinterpret_cast<E*>(memory.data());
    std::fill_n(x, rows * stride, E{});
    for (index_t r = 0; r < rows; ++r) fill(x + r * stride, k, 5 + 2 * r);
    return x;
  }
  static sft_test::GuardedMemory memory_of_x(index_t elements) {
    return {static_cast<std::size_t>(elements) * sizeof(E), sft_test::Edge::kEnd};
  }
  // Elements of a row of x: whole pairs, of products of single elements nothing behind them.
  static index_t stride_of_x(index_t k) { return round_up(k, arch::kPairing<E>); }

  template <class S>
  static double product(const E* x, const S* w, index_t w_step, index_t k) {
    double sum = 0;
    for (index_t i = 0; i < k; ++i) sum += static_cast<double>(to_float(x[i])) * to_float(w[i * w_step]);
    return sum;
  }

  // C = or += A [0 to 19, 36 and 37 rows, k] x B [k, cols], of those products that are for so many rows and steps.
  void sums_are_exact(index_t k, index_t cols) {
    const sft_test::GuardedMemory memory(static_cast<std::size_t>(k * cols) * sizeof(W), sft_test::Edge::kEnd);
    products_are_exact<Micro>(weights(memory, k * cols), k, cols);
    if constexpr (gemm::BlocksOfRows<Kernel>) {
      products_are_exact<typename Micro::RowBlocks>(weights(memory, k * cols), k, cols);
      // Of factors in fp32, too.
      const sft_test::GuardedMemory floats(static_cast<std::size_t>(k * cols) * sizeof(float),
                                           sft_test::Edge::kEnd);
      auto* b = reinterpret_cast<float*>(floats.data());
      fill(b, k * cols, 7);
      products_are_exact<typename Micro::RowBlocks>(b, k, cols);
    }
  }
  template <class Products, class S>
  void products_are_exact(const S* b, index_t k, index_t cols) {
    const index_t stride = stride_of_x(k);
    for (index_t rows = 0; rows <= 37; rows += rows == 19 ? 17 : 1) {
      if (!Products::in_place(k, rows)) continue;
      const sft_test::GuardedMemory memory_of_a = memory_of_x(rows * stride);
      const E* a = rows_of_x(memory_of_a, rows, k, stride);
      for (const bool in_order : {false, true}) {
        for (const bool fresh : {true, false}) {
          const index_t c_stride = round_up(cols, 64) + 32;
          std::vector<float> c(static_cast<std::size_t>(rows * c_stride), std::nanf(""));
          const auto sum_of = [&](index_t r, index_t j) -> float& {
            return c[static_cast<std::size_t>(r * c_stride + j)];
          };
          const auto before = [&](index_t r, index_t j) {
            return fresh ? 0.0 : static_cast<double>(r + j % 13) / 4;
          };
          for (index_t r = 0; r < (fresh ? 0 : rows); ++r)
            for (index_t j = 0; j < cols; ++j) sum_of(r, j) = static_cast<float>(before(r, j));
          const arch::RowSource<S> source{b, cols, 1, nullptr};
          Products::multiply_in_place(a, stride, rows, source, k, cols, {c.data(), c_stride, fresh}, in_order);
          for (index_t r = 0; r < rows; ++r) {
            for (index_t j = 0; j < cols; ++j) {
              ASSERT_EQ(before(r, j) + product(a + r * stride, b + j, cols, k), sum_of(r, j))
                  << Kernel::kName << " k " << k << " cols " << cols << " rows " << rows << " at " << r << ", "
                  << j << (in_order ? " in order" : " side by side") << (fresh ? "" : ", added");
            }
          }
        }
      }
    }
  }

  static constexpr bool dots(index_t tokens) { return Micro::dots(tokens) || Micro::short_dots(tokens); }

  // C [tokens, outs] = X [1 to 33 tokens, k] x W^T, W [outs, k].
  void dots_are_exact(index_t k, index_t outs) {
    const index_t stride = stride_of_x(k);
    const sft_test::GuardedMemory memory(static_cast<std::size_t>(k * outs) * sizeof(W), sft_test::Edge::kEnd);
    const W* w = weights(memory, k * outs);
    for (index_t tokens = 1; tokens <= 33; ++tokens) {
      if (!dots(tokens)) continue;
      const sft_test::GuardedMemory memory_of_tokens = memory_of_x(tokens * stride);
      const E* x = rows_of_x(memory_of_tokens, tokens, k, stride);
      AlignedBuffer<E> ordered(Micro::ordered_size(tokens, k));
      Micro::template order_tokens<W>(x, stride, tokens, k, ordered.data());
      for (const bool in_order : {false, true}) {
        std::vector<float> c(static_cast<std::size_t>(tokens * outs), std::nanf(""));
        const arch::RowSource<W> source{w, k, 1, nullptr};
        Micro::dot_in_place(source, outs, ordered.data(), tokens, k, {c.data(), outs, true}, in_order);
        for (index_t at = 0; at < tokens * outs; ++at) {
          const index_t t = at / outs, o = at % outs;
          ASSERT_EQ(product(x + t * stride, w + o * k, 1, k), c[static_cast<std::size_t>(at)])
              << Kernel::kName << " k " << k << " outs " << outs << " tokens " << tokens << " at " << t << ", "
              << o << (in_order ? " in order" : " side by side");
        }
      }
    }
  }
};

using Kernels = testing::Types<kernels::Avx512<bf16>, kernels::Avx512<float>, kernels::Avx512Bf16,
                               kernels::Avx2<bf16>, kernels::Avx2<float>>;
TYPED_TEST_SUITE(InPlace, Kernels);

TYPED_TEST(InPlace, BothOrdersAreExactForFewColumns) {
  for (const index_t k : {1, 3, 8, 9, 13, 17, 40, 49, 301}) {
    for (const index_t cols : {1, 15, 16, 33, 64}) this->sums_are_exact(k, cols);
  }
}

TYPED_TEST(InPlace, BothOrdersAreExactForRowsOfPages) {
  for (const index_t k : {9, 12, 31, 64}) this->sums_are_exact(k, 2050);
}

TYPED_TEST(InPlace, BothOrdersAreExactForRowsLongerThanABlocks) {
  for (const index_t k : {19, 57}) {
    this->sums_are_exact(k, arch::kBlockRowBytes / index_t{sizeof(typename TypeParam::Weight)} + 33);
  }
}

TYPED_TEST(InPlace, BothOrdersOfDotProductsAreExact) {
  for (const index_t k : {64, 65, 96, 301, 2049}) {
    for (const index_t outs : {1, 3, 7, 64}) this->dots_are_exact(k, outs);
  }
}

struct Turns {
  index_t count = 0;
  void turn() { ++count; }
};

// What tiles of R rows ask for while they go over a block: a line with each of its lines.
template <class Tiles, class W, int R>
void expect_a_turn_with_each_line() {
  using A = typename Tiles::Element;
  constexpr index_t kSteps = 8, kCols = 1024;
  const std::vector<A> a(std::size_t{R * kSteps}, from_float<A>(1.0F));
  const std::vector<W> b(std::size_t{kSteps * kCols}, from_float<W>(2.0F));
  std::vector<float> c(std::size_t{R * kCols});
  const W* row[std::size_t{kSteps} + 1] = {};
  for (index_t k = 0; k < kSteps; ++k) row[k] = b.data() + k * kCols;
  Turns turns;
  Tiles::template block<R>(a.data(), kSteps, row, kSteps, kCols, arch::SumRows{c.data(), kCols, true}, {},
                           turns);
  EXPECT_EQ(kSteps * kCols * index_t{sizeof(W)} / arch::kLineBytes, turns.count)
      << R << " rows of " << sizeof(W) << " bytes an element";
  EXPECT_EQ(std::vector<float>(c.size(), 16.0F), c);
}
template <class Kernel, class Tiles, class W = typename Kernel::Weight>
void expect_turns_of_all_rows() {
  if (!Kernel::available()) GTEST_SKIP() << Kernel::refusal();
  [&]<int... More>(std::integer_sequence<int, More...>) {
    (expect_a_turn_with_each_line<Tiles, W, More + int{Tiles::kLeastRows}>(), ...);
  }(std::make_integer_sequence<int, int{Tiles::kRows - Tiles::kLeastRows + 1}>{});
}

TEST(BlocksOfRows, Avx512AsksForALineWithEachLine) {
  expect_turns_of_all_rows<kernels::Avx512<bf16>, arch::avx512::InPlaceTiles>();
  expect_turns_of_all_rows<kernels::Avx512<float>, arch::avx512::InPlaceTiles>();
}
TEST(BlocksOfRows, Avx512Bf16AsksForALineWithEachLine) {
  expect_turns_of_all_rows<kernels::Avx512Bf16, arch::avx512::PairBlockTiles>();
  expect_turns_of_all_rows<kernels::Avx512Bf16, arch::avx512::PairBlockTiles, float>();
}
TEST(BlocksOfRows, Avx2AsksForALineWithEachLine) {
  expect_turns_of_all_rows<kernels::Avx2<bf16>, arch::avx2::InPlaceTiles>();
  expect_turns_of_all_rows<kernels::Avx2<float>, arch::avx2::InPlaceTiles>();
}

// Strips pad an odd K, products in place do not: neither makes +0 of a sum that has become -0, as of a product that is too
// small for a float.
template <class Kernel>
class SignOfZero : public InPlace<Kernel> {};
using KernelsOfFloats =
    testing::Types<kernels::Avx512<bf16>, kernels::Avx512<float>, kernels::Avx2<bf16>, kernels::Avx2<float>>;
TYPED_TEST_SUITE(SignOfZero, KernelsOfFloats);

TYPED_TEST(SignOfZero, IsThatOfTheLastSum) {
  using Weight = typename TypeParam::Weight;
  constexpr index_t kCols = 64;
  gemm::Scratch scratch;
  gemm::ThreadContext<TypeParam> thread(scratch);
  for (const index_t k : {65, 66}) {
    for (const index_t rows : {1, 8, 12, 13, 19, 36, 37}) {
      std::vector<float> a(static_cast<std::size_t>(rows * k), 0.0F);
      std::vector<Weight> b(static_cast<std::size_t>(k * kCols), Weight{});
      for (index_t r = 0; r < rows; ++r) a[static_cast<std::size_t>((r + 1) * k - 1)] = 1e-30F;
      std::fill(b.end() - kCols, b.end(), from_float<Weight>(-1e-30F));
      const arch::RowSource<float> rows_of_a{a.data(), k, 1, nullptr};
      const arch::RowSource<Weight> rows_of_b{b.data(), kCols, 1, nullptr};
      const std::array<gemm::NnTerm, 1> terms{{{rows_of_a, rows_of_b, k}}};
      gemm::gemm_nn<TypeParam>(thread, rows, kCols, terms, [&](const gemm::Block& block) {
        for (index_t r = 0; r < block.rows; ++r) {
          for (index_t j = 0; j < block.cols; ++j) {
            const float sum = block.c[r * block.stride + j];
            ASSERT_TRUE(sum == 0 && std::signbit(sum))
                << rows << " rows, K = " << k << ", at " << r << ", " << j;
          }
        }
      });
    }
  }
}

}  // namespace
