// TDPBSSD, TDPBSUD, TDPBUSD, TDPBUUD against plain 64-bit sums taken modulo 2^32.
#include <cstring>
#include <random>
#include <vector>

#include "test_support.hpp"

namespace {

using amx_test::TileConfig;

struct Form {
  const char* name;
  bool a_signed;
  bool b_signed;
  void (*execute)();
};

const Form kForms[] = {{"TDPBSSD", true, true, &tile_asm::tdpbssd<0, 1, 2>},
                       {"TDPBSUD", true, false, &tile_asm::tdpbsud<0, 1, 2>},
                       {"TDPBUSD", false, true, &tile_asm::tdpbusd<0, 1, 2>},
                       {"TDPBUUD", false, false, &tile_asm::tdpbuud<0, 1, 2>}};

std::int64_t value_of(std::uint8_t byte, bool is_signed) {
  return is_signed && byte >= 128 ? byte - 256 : byte;
}

// C [m, n] 32-bit, A [m, 4k] bytes, B [4k, n] bytes: ordinary row-major matrices.
struct Problem {
  int m, n, k;  // k counts groups of four
  std::vector<std::uint32_t> c;
  std::vector<std::uint8_t> a, b;

  Problem(int rows, int columns, int groups)
      : m(rows),
        n(columns),
        k(groups),
        c(static_cast<std::size_t>(rows * columns)),
        a(static_cast<std::size_t>(rows * 4 * groups)),
        b(static_cast<std::size_t>(4 * groups * columns)) {}
};

std::vector<std::uint32_t> model(const Problem& p, const Form& form) {
  std::vector<std::uint32_t> c = p.c;
  for (int i = 0; i < p.m; ++i) {
    for (int j = 0; j < p.n; ++j) {
      std::int64_t sum = 0;
      for (int l = 0; l < 4 * p.k; ++l) {
        sum += value_of(p.a[static_cast<std::size_t>(i * 4 * p.k + l)], form.a_signed) *
               value_of(p.b[static_cast<std::size_t>(l * p.n + j)], form.b_signed);
      }
      c[static_cast<std::size_t>(i * p.n + j)] += static_cast<std::uint32_t>(sum);
    }
  }
  return c;
}

std::vector<std::uint32_t> execute(const Problem& p, const Form& form) {
  std::vector<std::uint8_t> groups_of_b;  // row l: B[4l .. 4l + 3][j] for each j
  for (int l = 0; l < p.k; ++l) {
    for (int j = 0; j < p.n; ++j) {
      for (int i = 0; i < 4; ++i) groups_of_b.push_back(p.b[static_cast<std::size_t>((4 * l + i) * p.n + j)]);
    }
  }
  TileConfig().product(p.m, p.n, p.k).load();
  std::vector<std::uint32_t> c = p.c;
  tile_asm::tileloadd<0>(c.data(), 4 * p.n);
  tile_asm::tileloadd<1>(p.a.data(), 4 * p.k);
  tile_asm::tileloadd<2>(groups_of_b.data(), 4 * p.n);
  form.execute();
  tile_asm::tilestored<0>(c.data(), 4 * p.n);
  return c;
}

class AmxInt8 : public amx_test::AmxTest, public testing::WithParamInterface<Form> {};

TEST_P(AmxInt8, RandomBytesOfManyShapes) {
  const int shapes[][3] = {{16, 16, 16}, {1, 1, 1},  {1, 16, 16}, {16, 1, 16}, {16, 16, 1},
                           {3, 5, 7},    {13, 2, 9}, {7, 15, 4},  {15, 16, 3}, {2, 9, 16}};
  std::mt19937 random(7);
  for (const auto& [m, n, k] : shapes) {
    SCOPED_TRACE(testing::Message() << m << " x " << n << " x " << k);
    for (int repeat = 0; repeat < 4; ++repeat) {
      Problem p(m, n, k);
      for (auto& x : p.c) x = static_cast<std::uint32_t>(random());
      for (auto& x : p.a) x = static_cast<std::uint8_t>(random());
      for (auto& x : p.b) x = static_cast<std::uint8_t>(random());
      EXPECT_EQ(execute(p, GetParam()), model(p, GetParam()));
    }
  }
}

TEST_P(AmxInt8, ExtremeBytesAndWraparound) {
  const std::uint8_t extremes[] = {0x00, 0x01, 0x7F, 0x80, 0xFF};
  const std::uint32_t starts[] = {0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF};
  for (const std::uint8_t a : extremes) {
    for (const std::uint8_t b : extremes) {
      for (const std::uint32_t start : starts) {
        Problem p(2, 3, 16);
        std::fill(p.c.begin(), p.c.end(), start);
        std::fill(p.a.begin(), p.a.end(), a);
        std::fill(p.b.begin(), p.b.end(), b);
        EXPECT_EQ(execute(p, GetParam()), model(p, GetParam())) << int{a} << ' ' << int{b} << ' ' << start;
      }
    }
  }
}

// Written out by hand: -1 or 255 times -128 or 128, four times, on top of 10.
TEST_P(AmxInt8, SignednessByHand) {
  Problem p(1, 1, 1);
  p.c = {10};
  p.a = {0xFF, 0xFF, 0xFF, 0xFF};
  p.b = {0x80, 0x80, 0x80, 0x80};
  const std::int64_t a = GetParam().a_signed ? -1 : 255;
  const std::int64_t b = GetParam().b_signed ? -128 : 128;
  EXPECT_EQ(execute(p, GetParam())[0], static_cast<std::uint32_t>(10 + 4 * a * b));
}

INSTANTIATE_TEST_SUITE_P(All, AmxInt8, testing::ValuesIn(kForms),
                         [](const auto& instance) { return instance.param.name; });

}  // namespace
