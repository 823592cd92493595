// TDPBF16PS against a scalar model in 128-bit arithmetic that shares nothing with the specification under test.
#include <xmmintrin.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "test_support.hpp"

namespace {

using amx_test::TileConfig;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kMinNormal = std::numeric_limits<float>::min();

float denormals_are_zero(float x) {
  return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x;
}

// a * b + c rounded once to nearest even, denormals taken and given as zero. 113 bits hold the sum of a product
// of bf16 and a float exactly, except where the smaller term is too small to matter to the rounding.
float model_fma(float a, float b, float c) {
  using Quad = __float128;
  const Quad exact = static_cast<Quad>(denormals_are_zero(a)) * denormals_are_zero(b) + denormals_are_zero(c);
  // Tininess is decided after rounding with unbounded exponent: scaled up, nothing is a denormal.
  const float scale = 0x1p100f;
  const bool small = exact < static_cast<Quad>(1) && exact > static_cast<Quad>(-1);
  if (small && exact != 0) {
    const float scaled = static_cast<float>(exact * static_cast<Quad>(scale));
    if (std::fabs(scaled) < kMinNormal * scale) return std::copysign(0.0f, scaled);
  }
  return static_cast<float>(exact);
}

float model_add(float a, float b) {
  return model_fma(a, 1.0f, b);
}

float bf16_to_float(std::uint16_t x) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(x) << 16);
}

std::uint16_t bf16(float x) {  // of a value that bf16 holds exactly
  return static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(x) >> 16);
}

// C [m, n] float, A [m, 2k] bf16, B [2k, n] bf16: ordinary row-major matrices.
struct Problem {
  int m, n, k;  // k counts pairs
  std::vector<float> c;
  std::vector<std::uint16_t> a, b;

  Problem(int rows, int columns, int pairs)
      : m(rows),
        n(columns),
        k(pairs),
        c(static_cast<std::size_t>(rows * columns)),
        a(static_cast<std::size_t>(rows * 2 * pairs)),
        b(static_cast<std::size_t>(2 * pairs * columns)) {}
  float& c_at(int i, int j) { return c[static_cast<std::size_t>(i * n + j)]; }
  std::uint16_t& a_at(int i, int l) { return a[static_cast<std::size_t>(i * 2 * k + l)]; }
  std::uint16_t& b_at(int l, int j) { return b[static_cast<std::size_t>(l * n + j)]; }
};

std::vector<float> model(Problem p) {
  for (int i = 0; i < p.m; ++i) {
    for (int j = 0; j < p.n; ++j) {
      float even = 0, odd = 0;
      for (int l = 0; l < p.k; ++l) {
        even = model_fma(bf16_to_float(p.a_at(i, 2 * l)), bf16_to_float(p.b_at(2 * l, j)), even);
        odd = model_fma(bf16_to_float(p.a_at(i, 2 * l + 1)), bf16_to_float(p.b_at(2 * l + 1, j)), odd);
      }
      p.c_at(i, j) = model_add(p.c_at(i, j), model_add(even, odd));
    }
  }
  return p.c;
}

std::vector<float> execute(Problem p) {
  std::vector<std::uint16_t> pairs_of_b;  // row l: (B[2l][j], B[2l + 1][j]) for each j
  for (int l = 0; l < p.k; ++l) {
    for (int j = 0; j < p.n; ++j) {
      pairs_of_b.push_back(p.b_at(2 * l, j));
      pairs_of_b.push_back(p.b_at(2 * l + 1, j));
    }
  }
  TileConfig().product(p.m, p.n, p.k).load();
  tile_asm::tileloadd<0>(p.c.data(), 4 * p.n);
  tile_asm::tileloadd<1>(p.a.data(), 4 * p.k);
  tile_asm::tileloadd<2>(pairs_of_b.data(), 4 * p.n);
  tile_asm::tdpbf16ps<0, 1, 2>();
  tile_asm::tilestored<0>(p.c.data(), 4 * p.n);
  return p.c;
}

// Same bits, where both are NaN any.
void expect_same(const std::vector<float>& actual, const std::vector<float>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) {
    if (std::isnan(actual[i]) && std::isnan(expected[i])) continue;
    EXPECT_EQ(std::bit_cast<std::uint32_t>(actual[i]), std::bit_cast<std::uint32_t>(expected[i]))
        << "element " << i << ": " << actual[i] << " for " << expected[i];
  }
}

// Fills all three matrices from generators of float and of bf16 bits.
template <class OfC, class OfAB>
Problem filled(int m, int n, int k, OfC of_c, OfAB of_ab) {
  Problem p(m, n, k);
  for (auto& x : p.c) x = of_c();
  for (auto& x : p.a) x = of_ab();
  for (auto& x : p.b) x = of_ab();
  return p;
}

struct Shape {
  int m, n, k;
};

const Shape kShapes[] = {{16, 16, 16}, {1, 1, 1},  {1, 16, 16}, {16, 1, 16}, {16, 16, 1},
                         {3, 5, 7},    {13, 2, 9}, {7, 15, 4},  {15, 16, 3}, {2, 9, 16}};

class AmxBf16 : public amx_test::AmxTest {
 protected:
  std::mt19937 random_{20240607};

  std::uint16_t random_bits16() { return static_cast<std::uint16_t>(random_()); }
  float normal() { return std::normal_distribution<float>()(random_); }
  Problem random_problem(Shape s) {
    return filled(
        s.m, s.n, s.k, [this] { return normal(); }, [this] { return bf16(normal()); });
  }
};

TEST_F(AmxBf16, RandomValuesOfManyShapes) {
  for (const Shape shape : kShapes) {
    SCOPED_TRACE(testing::Message() << shape.m << " x " << shape.n << " x " << shape.k);
    for (int repeat = 0; repeat < 4; ++repeat) {
      const Problem p = random_problem(shape);
      expect_same(execute(p), model(p));
    }
  }
}

// Small integers: no rounding anywhere, so the result is the sum as one would write it down.
TEST_F(AmxBf16, SmallIntegersAreExact) {
  std::uniform_int_distribution<int> integer(-64, 64);
  for (const Shape shape : kShapes) {
    Problem p = filled(
        shape.m, shape.n, shape.k, [&] { return static_cast<float>(integer(random_)); },
        [&] { return bf16(static_cast<float>(integer(random_))); });
    const std::vector<float> actual = execute(p);
    for (int i = 0; i < p.m; ++i) {
      for (int j = 0; j < p.n; ++j) {
        float sum = p.c_at(i, j);
        for (int l = 0; l < 2 * p.k; ++l) sum += bf16_to_float(p.a_at(i, l)) * bf16_to_float(p.b_at(l, j));
        EXPECT_EQ(actual[static_cast<std::size_t>(i * p.n + j)], sum);
      }
    }
  }
}

// One element of C from explicit pairs, for the cases below.
struct Pairs {
  std::vector<float> a, b;  // even and odd members in turn
  float c = 0;
};

float one_element(const Pairs& pairs) {
  Problem p(1, 1, static_cast<int>(pairs.a.size() / 2));
  for (std::size_t l = 0; l < pairs.a.size(); ++l) {
    p.a[l] = bf16(pairs.a[l]);
    p.b[l] = bf16(pairs.b[l]);
  }
  p.c[0] = pairs.c;
  return execute(p)[0];
}

TEST_F(AmxBf16, OrderOfSummation) {
  // The chains start at zero, not at C: 2^24 + 1 is lost before C takes the 2^24 away.
  EXPECT_EQ(one_element({{0x1p24f, 0, 1, 0}, {1, 0, 1, 0}, -0x1p24f}), 0.0f);
  // Even and odd are two chains: the 1 survives in its own until both are added.
  EXPECT_EQ(one_element({{0x1p24f, 1, -0x1p24f, 0}, {1, 1, 1, 0}, 0}), 1.0f);
  EXPECT_EQ(one_element({{0x1p24f, 0, 1, 0, -0x1p24f, 0}, {1, 0, 1, 0, 1, 0}, 0}), 0.0f);
  // Ascending k.
  EXPECT_EQ(one_element({{0x1p24f, 0, -0x1p24f, 0, 1, 0}, {1, 0, 1, 0, 1, 0}, 0}), 1.0f);
}

TEST_F(AmxBf16, ProductsAreNotRoundedBeforeTheirAddition) {
  // 2^64 * 2^64 alone is too large for a float; 2^128 - 2^127 is not.
  EXPECT_EQ(one_element({{-0x1p64f, 0, 0x1p64f, 0}, {0x1p63f, 0, 0x1p64f, 0}, 0}), 0x1p127f);
  // -2^-132 alone is a denormal and would be flushed; in 2^-125 - 2^-132 it counts.
  EXPECT_EQ(one_element({{0x1p-62f, 0, 0x1p-80f, 0}, {0x1p-63f, 0, -0x1p-52f, 0}, 0}), 0x1p-125f - 0x1p-132f);
}

TEST_F(AmxBf16, RoundsTiesToEven) {
  EXPECT_EQ(one_element({{0x1p24f, 0, 1, 0}, {1, 0, 1, 0}, 0}), 0x1p24f);
  EXPECT_EQ(one_element({{0x1p24f, 0, 3, 0}, {1, 0, 1, 0}, 0}), 0x1p24f + 4);
  EXPECT_EQ(one_element({{-0x1p24f, 0, -3, 0}, {1, 0, 1, 0}, 0}), -0x1p24f - 4);
}

TEST_F(AmxBf16, DenormalsCountAsZero) {
  const float denormal = 0x1p-130f;
  EXPECT_EQ(one_element({{denormal, 0}, {0x1p100f, 0}, 0}), 0.0f);  // as a factor
  EXPECT_EQ(one_element({{0x1p100f, 0}, {-denormal, 0}, 0}), 0.0f);
  EXPECT_EQ(one_element({{0, 0}, {0, 0}, denormal}), 0.0f);  // as C
  EXPECT_EQ(one_element({{0, 0}, {0, 0}, 0x1.fffffcp-127f}), 0.0f);
  EXPECT_EQ(one_element({{0x1p-65f, 0}, {0x1p-65f, 0}, 0}), 0.0f);  // as a sum
  EXPECT_EQ(one_element({{0x1.8p-126f, -0x1p-126f}, {1, 1}, 0}), 0.0f);
  EXPECT_EQ(one_element({{0x1.8p-126f, 0}, {1, 0}, -kMinNormal}), 0.0f);
  EXPECT_EQ(one_element({{kMinNormal, 0}, {1, 0}, 0}), kMinNormal);
  EXPECT_EQ(one_element({{-kMinNormal, -0.0f}, {1, 1}, -0.0f}), -kMinNormal);
}

// 2^-126 - 2^-150 fits in 24 bits with the exponent of a denormal: flushed. 2^-126 - 2^-152 rounds up: kept.
TEST_F(AmxBf16, TininessIsDecidedAfterRounding) {
  EXPECT_EQ(one_element({{0x1p-63f, 0, 0x1p-75f, 0}, {0x1p-63f, 0, -0x1p-75f, 0}, 0}), 0.0f);
  EXPECT_EQ(one_element({{0x1p-63f, 0, 0x1p-76f, 0}, {0x1p-63f, 0, -0x1p-76f, 0}, 0}), kMinNormal);
}

TEST_F(AmxBf16, SignOfZero) {
  // The chains start at +0, so -0 never survives: not from C, not from the products.
  EXPECT_FALSE(std::signbit(one_element({{-1, -1}, {0, 0}, -0.0f})));
  EXPECT_FALSE(std::signbit(one_element({{1, 0}, {1, 0}, -1})));
}

TEST_F(AmxBf16, Infinities) {
  EXPECT_EQ(one_element({{kInfinity, 0}, {2, 0}, 0}), kInfinity);
  EXPECT_EQ(one_element({{kInfinity, 0}, {-2, 0}, 0}), -kInfinity);
  EXPECT_EQ(one_element({{1, 1}, {1, 1}, -kInfinity}), -kInfinity);
  EXPECT_EQ(one_element({{0x1p127f, 0}, {2, 0}, 0}), kInfinity);
  EXPECT_EQ(one_element({{0x1p127f, 0x1p127f}, {1, 1}, 0}), kInfinity);
  EXPECT_TRUE(std::isnan(one_element({{kInfinity, 0}, {0, 0}, 0})));
  EXPECT_TRUE(std::isnan(one_element({{kInfinity, 0}, {0x1p-130f, 0}, 0})));  // a denormal is a zero
  EXPECT_TRUE(std::isnan(one_element({{kInfinity, kInfinity}, {1, -1}, 0})));
  EXPECT_TRUE(std::isnan(one_element({{kInfinity, 0}, {1, 0}, -kInfinity})));
}

// A NaN or an infinity stays in its row of A and its column of B, even where the tile is not full.
TEST_F(AmxBf16, NanStaysInItsRowAndColumn) {
  const auto nan_of_bf16 = [](bool signaling) {
    return static_cast<std::uint16_t>(signaling ? 0x7F81 : 0xFFC0);
  };
  for (const bool signaling : {false, true}) {
    Problem p = random_problem({9, 7, 5});
    p.a_at(3, 4) = nan_of_bf16(signaling);
    p.b_at(9, 6) = nan_of_bf16(signaling);
    p.a_at(5, 1) = 0x7F80;  // infinity
    const std::vector<float> actual = execute(p);
    expect_same(actual, model(p));
    for (int i = 0; i < p.m; ++i) {
      for (int j = 0; j < p.n; ++j) {
        EXPECT_EQ(std::isnan(actual[static_cast<std::size_t>(i * p.n + j)]), i == 3 || j == 6) << i << ' ' << j;
      }
    }
  }
}

// Any bits at all, and then values around the smallest normal, where flushing and rounding meet.
TEST_F(AmxBf16, ArbitraryBits) {
  for (const Shape shape : kShapes) {
    for (int repeat = 0; repeat < 8; ++repeat) {
      const Problem p = filled(
          shape.m, shape.n, shape.k,
          [this] { return std::bit_cast<float>(static_cast<std::uint32_t>(random_())); },
          [this] { return random_bits16(); });
      expect_same(execute(p), model(p));
    }
  }
}

TEST_F(AmxBf16, ValuesAroundTheSmallestNormal) {
  std::uniform_int_distribution<int> exponent(-76, -62);
  const auto factor = [&] { return bf16(bf16_to_float(bf16(normal())) * std::ldexp(1.0f, exponent(random_))); };
  for (const Shape shape : {Shape{16, 16, 1}, Shape{16, 16, 2}, Shape{16, 16, 4}, Shape{5, 9, 16}}) {
    for (int repeat = 0; repeat < 20; ++repeat) {
      const Problem p = filled(
          shape.m, shape.n, shape.k, [this] { return normal() * kMinNormal; }, factor);
      expect_same(execute(p), model(p));
    }
  }
}

constexpr unsigned kDefaultMxcsr = 0x1F80;

// Each rounding mode, with and without flushing, must give the same bits and find its MXCSR unchanged.
TEST_F(AmxBf16, IgnoresAndKeepsMxcsr) {
  const Problem p = filled(
      16, 16, 16, [this] { return normal() * kMinNormal * 4; },
      [this] { return bf16(bf16_to_float(bf16(normal())) * 0x1p-63f); });
  const std::vector<float> expected = execute(p);
  expect_same(expected, model(p));
  for (const unsigned mxcsr : {0x1F80u, 0x3F80u, 0x5F80u, 0x7F80u, 0xFFC0u, 0x9FC0u, 0x1FBFu}) {
    SCOPED_TRACE(mxcsr);
    _mm_setcsr(mxcsr);
    const std::vector<float> actual = execute(p);
    const unsigned after = _mm_getcsr();
    _mm_setcsr(kDefaultMxcsr);
    EXPECT_EQ(after, mxcsr);
    expect_same(actual, expected);
  }
}

// Inexact, overflow and invalid results raise no exception, even where the caller has unmasked them.
TEST_F(AmxBf16, RaisesNoFloatingPointException) {
  Problem p(2, 2, 1);
  p.c = {1, 2, 3, 4};
  p.a = {0x7F7F, 0x7F81, 0x7F80, 0x0001};
  p.b = {0x7F7F, 0x0000, 0x3F81, 0x7F80};
  _mm_setcsr(0);  // all unmasked
  execute(p);
  const unsigned after = _mm_getcsr();
  _mm_setcsr(kDefaultMxcsr);
  EXPECT_EQ(after, 0u);
}

}  // namespace
