// How many AMX instructions each GEMM form executes, counted by the emulator. Counts follow from M, N, K alone:
//   products         ceil(M/16) ceil(N/16) ceil(K/32) for each term
//   loads            gemm_nn and gemm_tn: one per product in blocks of 2 x 2 tiles, 7/6 in strips of six, (t + 1) / t in
//                    shorter ones; gemm_nt: weights once per six tiles of tokens, as memory is what it waits for
//   accumulators     each stored once and never loaded, but where gemm_nn packs B in parts: once a part
//   configurations   at most one per block shape, none inside the loop over K, none for the same shape again
// and tiles are fitted to the tokens: columns of B and C in gemm_nt, rows of A and C in gemm_nn, K in gemm_tn. gemm_nn of up to
// 32 rows packs nothing and waits for memory: it takes twice the products, and accumulators pass once a turn (FewRows).
#include <gtest/gtest.h>

#include <numeric>

#include "amx_sft_moe/amx_sft_moe.hpp"
#include "emulation.hpp"
#include "step.hpp"
#ifdef SFT_TEST_HAS_AMX_EMULATOR
#include "amx_emulator.hpp"
#include "tile_asm.hpp"
#endif

namespace sft_test {
namespace {

#ifdef SFT_TEST_HAS_AMX_EMULATOR

using amx_sft_moe::bf16;
using amx_sft_moe::index_t;
namespace arch = amx_sft_moe::arch;
namespace gemm = amx_sft_moe::gemm;
using Kernel = amx_sft_moe::kernels::AmxBf16;

constexpr std::uint64_t tiles(index_t n) {
  return static_cast<std::uint64_t>((n + 15) / 16);
}
constexpr std::uint64_t steps(index_t k) {
  return static_cast<std::uint64_t>((k + 31) / 32);
}

// Tiles loaded for one step along K of C [m, n]: the least that eight tile registers allow when blocks of 2 x 2 are
// taken first. What those leave over is one tile wide (strips of up to six tiles) or almost two (pairs again).
std::uint64_t loads_of_step(index_t m, index_t n) {
  auto strip = [](index_t length) {  // one tile stays, `length` rows' or columns' tiles pass by
    return tiles(length) + (tiles(length) + 5) / 6;
  };
  const index_t rows = m / 32 * 32, cols = n / 32 * 32;
  auto beside = [&](index_t length, index_t left) -> std::uint64_t {
    if (length == 0 || left == 0) return 0;
    return left <= 16 ? strip(length) : tiles(length) / 2 * 4;
  };
  const std::uint64_t corner = m == rows || n == cols ? 0 : tiles(m - rows) + tiles(n - cols);
  return tiles(rows) / 2 * (tiles(cols) / 2) * 4 + beside(rows, n - cols) + beside(cols, m - rows) + corner;
}

// The same where A is streamed: a tile of it is loaded once per six tiles of B.
std::uint64_t streamed_loads_of_step(index_t m, index_t n) {
  return tiles(m) * (tiles(n) + (tiles(n) + 5) / 6);
}

// Rectangles of different blocks that C [m, n] is cut into.
std::uint64_t block_shapes(index_t m, index_t n) {
  const std::uint64_t rows = (m >= 32 ? 1U : 0U) + (m % 32 != 0 ? 1U : 0U);
  const std::uint64_t cols = (n >= 32 ? 1U : 0U) + (n % 32 != 0 ? 1U : 0U);
  return rows * cols;
}

// Of `n` rows or columns those in the last tile.
constexpr index_t in_last_tile(index_t n) {
  return (n - 1) % 16 + 1;
}

struct Matrix {
  Matrix(index_t r, index_t c) : rows(r), cols(c), data(static_cast<std::size_t>(r * c)) {
    for (std::size_t i = 0; i < data.size(); ++i)
      data[i] = amx_sft_moe::to_bf16(static_cast<float>(i * 7 % 11) - 5);
  }
  float at(index_t r, index_t c) const {
    return amx_sft_moe::to_float(data[static_cast<std::size_t>(r * cols + c)]);
  }
  arch::RowSource<bf16> source() const { return {data.data(), cols, 1, nullptr}; }

  index_t rows, cols;
  std::vector<bf16> data;
};

// C of a GEMM, block by block, and the instructions it took.
class Counted {
 public:
  Counted(index_t rows, index_t cols) : cols_(cols), c_(static_cast<std::size_t>(rows * cols), NAN) {}

  template <class Run>
  void run(Run&& run) {
    amx_emulator::reset_counts();
    {
      gemm::Scratch scratch;
      gemm::ThreadContext<Kernel> thread(scratch);
      run(thread);
      tile_asm::sttilecfg(&last_config);
    }
    counts = amx_emulator::counts();
  }
  void take(const gemm::Block& block) {
    for (index_t i = 0; i < block.rows; ++i) {
      for (index_t j = 0; j < block.cols; ++j) at(block.row + i, block.col + j) = block.c[i * block.stride + j];
    }
  }
  void take(const gemm::TokenBlock& block) {
    ASSERT_FALSE(block.token_lines);
    take(gemm::Block{block.out, block.outs, block.token, block.tokens, block.c, block.stride});
  }
  float& at(index_t i, index_t j) { return c_[static_cast<std::size_t>(i * cols_ + j)]; }

  amx_emulator::Counts counts;
  arch::amx::TileConfig last_config;  // of the last block, where the remainders are

 private:
  index_t cols_;
  std::vector<float> c_;
};

class AmxCounts : public testing::TestWithParam<index_t> {
 protected:
  void SetUp() override {
    if (!amx_is_emulated())
      GTEST_SKIP() << "this CPU executes AMX itself: nothing is trapped, nothing can be counted";
    if (!Kernel::available()) GTEST_SKIP() << Kernel::refusal();  // AVX512 is not emulated
  }
  // What holds for every GEMM of M x N with `k_steps` steps along K, in one part.
  static void expect_products(const amx_emulator::Counts& counts, index_t m, index_t n, std::uint64_t k_steps) {
    EXPECT_EQ(counts.tdpbf16ps, tiles(m) * tiles(n) * k_steps);
    EXPECT_EQ(counts.tilezero, tiles(m) * tiles(n)) << "accumulators start at zero, none is loaded";
    EXPECT_EQ(counts.tilestored, tiles(m) * tiles(n)) << "and are stored once";
    EXPECT_GE(counts.ldtilecfg, 1U);
    EXPECT_LE(counts.ldtilecfg, block_shapes(m, n)) << "one configuration per block shape";
    EXPECT_EQ(counts.tilerelease, 1U);
  }
  // And where A and B come from a cache.
  static void expect_economy(const amx_emulator::Counts& counts, index_t m, index_t n, std::uint64_t k_steps) {
    expect_products(counts, m, n, k_steps);
    const std::uint64_t products = tiles(m) * tiles(n) * k_steps;
    EXPECT_EQ(counts.tileloadd + counts.tileloaddt1, loads_of_step(m, n) * k_steps);
    const auto loads = static_cast<double>(counts.tileloadd + counts.tileloaddt1);
    const double ratio = loads / static_cast<double>(products);
    if (m % 32 == 0 && n % 32 == 0) {
      EXPECT_EQ(ratio, 1.0);
    }
    if ((m % 96 == 0 && n <= 16) || (n % 96 == 0 && m <= 16)) {
      EXPECT_NEAR(ratio, 7.0 / 6, 1e-9);
    }
    if (m % 96 == 0 || n % 96 == 0) {
      EXPECT_LE(ratio, 7.0 / 6 + 1e-9);
    }
  }
};

// W [out, k] x x^T and LoRA's second term, for `m` tokens.
TEST_P(AmxCounts, GemmNt) {
  const index_t m = GetParam();
  for (const auto& [out, k, rank] : {std::tuple<index_t, index_t, index_t>{96, 64, 16},
                                     {96, 70, 0},
                                     {64, 32, 40},
                                     {40, 33, 5},
                                     {104, 1025, 16}}) {
    const Matrix w(out, k), x(m, k), b(out, std::max<index_t>(rank, 1)), u(m, std::max<index_t>(rank, 1));
    auto pack = [m](const Matrix& from, index_t depth, std::vector<bf16>& to) {
      const index_t padded = gemm::padded_k<Kernel>(depth);
      to.assign(static_cast<std::size_t>(amx_sft_moe::round_up(m, 16) * padded), bf16{0});
      Kernel::Rows::pack_columns<bf16>(from.source(), m, depth, padded, to.data(), padded * 16);
      return gemm::Panels<const bf16>{to.data(), padded * 16};
    };
    std::vector<bf16> x_panels, u_panels;
    const std::array<gemm::Term<bf16>, 2> terms{
        {{w.source(), k, pack(x, k, x_panels)}, {b.source(), rank, pack(u, rank, u_panels)}}};
    const std::array<std::span<const gemm::Term<bf16>>, 1> outputs{{terms}};
    Counted counted(out, m);
    counted.run([&](auto& thread) {
      gemm::gemm_nt<Kernel>(thread, out, m, gemm::TokenForm::kPanels, outputs,
                            [&](const auto& blocks) { counted.take(blocks[0]); });
    });
    expect_products(counted.counts, out, m, steps(k) + steps(rank));
    EXPECT_EQ(counted.counts.tileloadd + counted.counts.tileloaddt1,
              streamed_loads_of_step(out, m) * (steps(k) + steps(rank)));
    if (m <= 16) {  // tmm7 is B's tile, tmm0 an accumulator
      EXPECT_EQ(counted.last_config.row_bytes[7], 4 * m);
      EXPECT_EQ(counted.last_config.row_bytes[0], 4 * m);
    }
    for (index_t i = 0; i < out; ++i) {
      for (index_t t = 0; t < m; ++t) {
        float want = 0;
        for (index_t j = 0; j < k; ++j) want += w.at(i, j) * x.at(t, j);
        for (index_t j = 0; j < rank; ++j) want += b.at(i, j) * u.at(t, j);
        ASSERT_EQ(counted.at(i, t), want) << i << ", " << t;  // small integers: exact
      }
    }
  }
}

// The exact sum of grad w and v a.
struct TwoTerms {
  TwoTerms(index_t m, index_t n, index_t k, index_t rank) : grad(m, k), w(k, n), v(m, rank), a(rank, n) {}

  std::array<gemm::NnTerm, 2> terms() const {
    return {{{grad.source(), w.source(), w.rows}, {v.source(), a.source(), a.rows}}};
  }
  void expect(Counted& counted) const {
    for (index_t i = 0; i < grad.rows; ++i) {
      for (index_t j = 0; j < w.cols; ++j) {
        float want = 0;
        for (index_t p = 0; p < w.rows; ++p) want += grad.at(i, p) * w.at(p, j);
        for (index_t p = 0; p < a.rows; ++p) want += v.at(i, p) * a.at(p, j);
        ASSERT_EQ(counted.at(i, j), want) << i << ", " << j;
      }
    }
  }
  // By panels whatever the rows, as gemm_nn has it for more than a few.
  Counted packed() const {
    Counted counted(grad.rows, w.cols);
    counted.run([&](auto& thread) {
      gemm::product_of_panels<Kernel>(thread, grad.rows, w.cols, terms(),
                                      [&](const gemm::Block& block) { counted.take(block); });
    });
    return counted;
  }

  Matrix grad, w, v, a;
};

TEST_P(AmxCounts, GemmNn) {
  const index_t m = GetParam();
  const index_t n = 96, k = 70, rank = 16;
  const TwoTerms product(m, n, k, rank);
  Counted counted = product.packed();
  expect_economy(counted.counts, m, n, steps(k) + steps(rank));
  const bool strip = m % 32 > 0 && m % 32 <= 16;
  EXPECT_EQ(counted.last_config.rows[strip ? 6 : 5], in_last_tile(m)) << "rows of A's last tile";
  EXPECT_EQ(counted.last_config.rows[strip ? 0 : 2], in_last_tile(m)) << "rows of its accumulator";
  product.expect(counted);
}

// A contraction whose B is packed in parts: accumulators are stored and loaded between them, and nothing else is more.
TEST_P(AmxCounts, GemmNnInParts) {
  const index_t m = GetParam();
  const index_t n = 32, rank = 16;
  const index_t fit = arch::kPackedBytes / (n * index_t{sizeof(bf16)});  // steps along K of a part at most
  const index_t k = fit + 40;
  ASSERT_LT(gemm::panel_depth<Kernel>(k + rank, n), k) << "two parts";
  const TwoTerms product(m, n, k, rank);
  Counted counted = product.packed();
  const std::uint64_t c_tiles = tiles(m) * tiles(n), k_steps = steps(k) + steps(rank);
  EXPECT_EQ(counted.counts.tdpbf16ps, c_tiles * k_steps);
  EXPECT_EQ(counted.counts.tilezero, c_tiles);
  EXPECT_EQ(counted.counts.tilestored, 2 * c_tiles);
  EXPECT_EQ(counted.counts.tileloadd + counted.counts.tileloaddt1, loads_of_step(m, n) * k_steps + c_tiles);
  product.expect(counted);
}

// Few rows, which multiply B as it lies: 16 steps along K and 32 columns a tile, a product for the even columns and one for the
// odd ones. Each tile of B is loaded once; C passes once a turn of as many tiles of B as there are of rows, the last columns,
// where they are no whole tile, once for each tile of B; A stays in its tiles where it has one of rows.
TEST_P(AmxCounts, FewRows) {
  const index_t m = GetParam();
  if (m > Kernel::Microkernel::FewRows::kRows) GTEST_SKIP() << "not few";
  const std::uint64_t row_tiles = tiles(m);
  for (const auto& [n, k, rank] : {std::array<index_t, 3>{96, 70, 16}, {83, 96, 5}, {16, 160, 40}}) {
    const TwoTerms product(m, n, k, rank);
    Counted counted(m, n);
    counted.run([&, columns = n](auto& thread) {
      gemm::gemm_nn<Kernel>(thread, m, columns, product.terms(),
                            [&](const gemm::Block& block) { counted.take(block); });
    });
    const auto turns_of = [&](index_t depth) {
      return row_tiles == 1 ? tiles(depth) : static_cast<std::uint64_t>(depth / 32) + tiles(depth % 32);
    };
    const std::uint64_t turns = turns_of(k) + turns_of(rank), b_tiles = tiles(k) + tiles(rank);
    const auto whole = static_cast<std::uint64_t>(n / 32), rest = std::uint64_t{n % 32 != 0};
    const std::uint64_t products = 2 * row_tiles * (whole + rest) * b_tiles;
    const std::uint64_t stores = 2 * row_tiles * (whole * turns + rest * b_tiles);
    const std::uint64_t zeros = 2 * row_tiles * (whole + rest);
    const std::uint64_t of_a = row_tiles == 1 ? 2 * turns : products;
    EXPECT_EQ(counted.counts.tdpbf16ps, products);
    EXPECT_EQ(counted.counts.tilezero, zeros) << "the first turn's";
    EXPECT_EQ(counted.counts.tilestored, stores);
    EXPECT_EQ(counted.counts.tileloadd + counted.counts.tileloaddt1,
              (stores - zeros) + (whole + rest) * b_tiles + of_a);
    EXPECT_LE(counted.counts.ldtilecfg, 4U) << "whole tiles and a rest, for each term";
    EXPECT_EQ(counted.last_config.rows[row_tiles == 1 ? 0 : 2], in_last_tile(m));
    product.expect(counted);
  }
}

// LoRA's gradient: the contraction is over `m` tokens.
TEST_P(AmxCounts, GemmTn) {
  const index_t m = GetParam();
  const index_t rank = 16, n = 96;
  const Matrix v(m, rank), x(m, n);
  std::vector<float> weights(static_cast<std::size_t>(m));
  for (std::size_t t = 0; t < weights.size(); ++t) weights[t] = t % 3 == 0 ? 2.0F : 1.0F;
  Counted counted(rank, n);
  counted.run([&](auto& thread) {
    const auto panels = gemm::pack_tokens<Kernel>(thread, x.source(), m, n);
    gemm::gemm_tn<Kernel>(thread, rank, std::array<gemm::Factor, 1>{{{v.source(), weights.data()}}}, panels,
                          [&](const gemm::Block& block) { counted.take(block); });
  });
  expect_economy(counted.counts, rank, n, steps(m));
  EXPECT_EQ(counted.counts.ldtilecfg, 1U);
  const auto parts = static_cast<index_t>(steps(m));
  const index_t depth = amx_sft_moe::round_up((m + parts - 1) / parts, 2);  // equal parts of the tokens, even
  EXPECT_EQ(counted.last_config.row_bytes[6], 2 * depth) << "columns of A";
  EXPECT_EQ(counted.last_config.rows[7], depth / 2) << "rows of B, pairs of tokens";
  for (index_t i = 0; i < rank; ++i) {
    for (index_t j = 0; j < n; ++j) {
      float want = 0;
      for (index_t t = 0; t < m; ++t) want += weights[static_cast<std::size_t>(t)] * v.at(t, i) * x.at(t, j);
      ASSERT_EQ(counted.at(i, j), want) << i << ", " << j;
    }
  }
}

// Neither a longer K nor the same shape again loads another configuration.
TEST_P(AmxCounts, ConfigurationsDoNotDependOnK) {
  const index_t m = GetParam(), n = 80;
  std::vector<std::uint64_t> configurations;
  for (const auto& [k, times] : {std::pair<index_t, int>{32, 1}, {160, 1}, {32, 3}}) {
    const Matrix grad(m, k), w(k, n);
    const std::array<gemm::NnTerm, 1> terms{{{grad.source(), w.source(), k}}};
    Counted counted(m, n);
    counted.run([&, repeat = times](auto& thread) {
      for (int i = 0; i < repeat; ++i) {
        gemm::gemm_nn<Kernel>(thread, m, n, terms, [&](const gemm::Block& block) { counted.take(block); });
      }
    });
    configurations.push_back(counted.counts.ldtilecfg);
  }
  EXPECT_EQ(configurations[1], configurations[0]) << "none inside the loop over K";
  if (block_shapes(m, n) == 1) {
    EXPECT_EQ(configurations[2], 1U) << "none for the next task of this shape";
  }
  EXPECT_LE(configurations[2], 3 * configurations[0]);
}

// u = s x A^T of gate and up is one product where they have one A, and the same bits as two.
TEST(AmxCountsOfAStep, SharedAIsProjectedOnce) {
  if (!amx_is_emulated()) GTEST_SKIP() << "this CPU executes AMX itself";
  if (!Kernel::available()) GTEST_SKIP() << Kernel::refusal();
  constexpr Case kCase{"shared", 20, 2, 3, 70, 48, {18, 18, 4}, kDistinct, true};
  const Problem problem = random_problem(kCase, kPlain, DType::kBf16);
  Moe<Kernel> moe = make_moe<Kernel>(problem);
  const auto count_forward = [&](Outputs& out) {
    amx_emulator::reset_counts();
    moe.forward_sft(problem.routing(), problem.x(), out.y(), /*save_for_backward=*/false);
    return amx_emulator::counts().tdpbf16ps;
  };
  Outputs shared(problem), separate(problem);
  const std::uint64_t with_one = count_forward(shared);

  amx_sft_moe::LoraWeights lora = problem.lora();
  const index_t size = kCase.experts * kCase.ranks.up * kCase.hidden;
  const bf16* a = lora.up.a[0].visit([](const auto* data) { return reinterpret_cast<const bf16*>(data); });
  const std::vector<bf16> copy(a, a + size);
  lora.up.a = {copy.data(), kCase.experts, kCase.ranks.up, kCase.hidden};
  moe.set_lora(lora);
  const std::uint64_t with_two = count_forward(separate);

  std::vector<index_t> tokens(kCase.experts, 0);
  for (const std::int64_t id : problem.batch().ids) ++tokens[static_cast<std::size_t>(id)];
  std::uint64_t projection = 0;
  for (const index_t m : tokens) projection += tiles(kCase.ranks.up) * tiles(m) * steps(kCase.hidden);
  EXPECT_EQ(with_two - with_one, projection);
  EXPECT_EQ(shared[reference::kY].bits(), separate[reference::kY].bits());
}

INSTANTIATE_TEST_SUITE_P(Tokens, AmxCounts, testing::Values(1, 4, 8, 16, 17, 32, 48, 128));

#else

TEST(AmxCounts, NeedTheEmulator) {
  GTEST_SKIP() << "built without the emulator: nothing can be counted";
}

#endif

}  // namespace
}  // namespace sft_test
