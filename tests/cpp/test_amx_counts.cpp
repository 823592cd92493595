// How many AMX instructions each GEMM form executes, counted by the emulator (docs: counts follow from M, N, K
// alone): products ceil(M/16) ceil(N/16) ceil(K/32) per term, one load per product in 2 x 2 blocks and 7/6 in
// strips of six, no accumulator ever loaded, each stored once, a configuration per block shape and none inside
// the loop over K.
#include <gtest/gtest.h>

#include <numeric>

#include "amx_sft_moe/amx_sft_moe.hpp"
#include "emulation.hpp"
#ifdef SFT_TEST_HAS_AMX_EMULATOR
#include "amx_emulator.hpp"
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

 private:
  index_t cols_;
  std::vector<float> c_;
};

class AmxCounts : public testing::TestWithParam<index_t> {
 protected:
  void SetUp() override {
    if (!amx_is_emulated())
      GTEST_SKIP() << "this CPU executes AMX itself: nothing is trapped, nothing can be counted";
  }
  // What holds for every GEMM of M x N.
  static void expect_economy(const amx_emulator::Counts& counts, index_t m, index_t n, std::uint64_t products) {
    EXPECT_EQ(counts.tdpbf16ps, products);
    EXPECT_EQ(counts.tilezero, tiles(m) * tiles(n)) << "accumulators start at zero, none is loaded";
    EXPECT_EQ(counts.tilestored, tiles(m) * tiles(n)) << "and are stored once";
    EXPECT_LE(counts.ldtilecfg, 4U) << "one configuration per block shape";
    EXPECT_EQ(counts.tilerelease, 1U);
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
    EXPECT_LE(ratio, 2.0);
  }
};

// W [out, k] x x^T and LoRA's second term, for `m` tokens.
TEST_P(AmxCounts, GemmNt) {
  const index_t m = GetParam();
  for (const auto& [out, k, rank] :
       {std::tuple<index_t, index_t, index_t>{96, 64, 16}, {96, 70, 0}, {64, 32, 40}}) {
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
      gemm::gemm_nt<Kernel>(thread, out, m, m, outputs, [&](const auto& blocks) { counted.take(blocks[0]); });
    });
    expect_economy(counted.counts, out, m, tiles(out) * tiles(m) * (steps(k) + steps(rank)));
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

TEST_P(AmxCounts, GemmNn) {
  const index_t m = GetParam();
  const index_t n = 96, k = 70, rank = 16;
  const Matrix grad(m, k), w(k, n), v(m, rank), a(rank, n);
  const std::array<gemm::NnTerm, 2> terms{{{grad.source(), w.source(), k}, {v.source(), a.source(), rank}}};
  Counted counted(m, n);
  counted.run([&](auto& thread) {
    gemm::gemm_nn<Kernel>(thread, m, n, terms, [&](const gemm::Block& block) { counted.take(block); });
  });
  expect_economy(counted.counts, m, n, tiles(m) * tiles(n) * (steps(k) + steps(rank)));
  for (index_t i = 0; i < m; ++i) {
    for (index_t j = 0; j < n; ++j) {
      float want = 0;
      for (index_t p = 0; p < k; ++p) want += grad.at(i, p) * w.at(p, j);
      for (index_t p = 0; p < rank; ++p) want += v.at(i, p) * a.at(p, j);
      ASSERT_EQ(counted.at(i, j), want) << i << ", " << j;
    }
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
  expect_economy(counted.counts, rank, n, tiles(rank) * tiles(n) * steps(m));
  EXPECT_EQ(counted.counts.ldtilecfg, 1U);
  for (index_t i = 0; i < rank; ++i) {
    for (index_t j = 0; j < n; ++j) {
      float want = 0;
      for (index_t t = 0; t < m; ++t) want += weights[static_cast<std::size_t>(t)] * v.at(t, i) * x.at(t, j);
      ASSERT_EQ(counted.at(i, j), want) << i << ", " << j;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Tokens, AmxCounts, testing::Values(1, 4, 8, 16, 17, 32, 48, 128));

#else

TEST(AmxCounts, NeedTheEmulator) {
  GTEST_SKIP() << "built without the emulator: nothing can be counted";
}

#endif

}  // namespace
}  // namespace sft_test
