// Dot products by blocks of W's rows and parts of K: no bit differs from a token's dot products with whole rows, and during a
// block each line of the next one is asked for once.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <map>
#include <vector>

#include "amx_sft_moe/amx_sft_moe.hpp"
#include "guarded.hpp"

namespace {

using namespace amx_sft_moe;  // NOLINT(google-build-using-namespace)

constexpr index_t kMostTokens = 33, kMostOuts = 100;

template <class Kernel>
class DotBlocks : public testing::Test {
 protected:
  using Micro = typename Kernel::Microkernel;
  using W = typename Kernel::Weight;

  void SetUp() override {
    if (!Kernel::available()) GTEST_SKIP() << Kernel::refusal();
  }

  // Thirds and sevenths: their sums round.
  void fill(index_t k, index_t w_stride) {
    k_ = k;
    w_.assign(static_cast<std::size_t>(kMostOuts * w_stride), from_float<W>(std::nanf("")));
    x_.assign(static_cast<std::size_t>(kMostTokens * k), 0.0F);
    source_ = {w_.data(), w_stride, 1, nullptr};
    for (index_t o = 0; o < kMostOuts; ++o) {
      for (index_t i = 0; i < k; ++i)
        w_[static_cast<std::size_t>(o * w_stride + i)] =
            from_float<W>(static_cast<float>((o * 37 + i * 11) % 101 - 50) / 3);
    }
    for (std::size_t i = 0; i < x_.size(); ++i) x_[i] = static_cast<float>(i * 53 % 89) / 7 - 6;
  }

  static sft_test::GuardedMemory floats(index_t count) {
    return {static_cast<std::size_t>(count) * sizeof(float), sft_test::Edge::kEnd};
  }

  // C [tokens, outs] += the dot products of tokens from `first` on.
  std::vector<float> dots(index_t first, index_t tokens, index_t outs, bool fresh, bool in_order) const {
    const sft_test::GuardedMemory memory_of_x = floats(Micro::ordered_size(tokens, k_));
    const sft_test::GuardedMemory memory_of_c = floats(tokens * outs);
    auto* ordered = reinterpret_cast<float*>(memory_of_x.data());
    auto* c = reinterpret_cast<float*>(memory_of_c.data());
    Micro::template order_tokens<W>(x_.data() + first * k_, k_, tokens, k_, ordered);
    std::fill_n(c, tokens * outs, fresh ? std::nanf("") : 0.3F);
    Micro::dot_in_place(source_, outs, ordered, tokens, k_, {c, outs, fresh}, in_order);
    return {c, c + tokens * outs};
  }

  void have_the_bits_of_a_token_alone(index_t outs) const {
    for (const bool fresh : {true, false}) {
      std::vector<float> alone;
      for (index_t t = 0; t < kMostTokens; ++t) {
        const std::vector<float> one = dots(t, 1, outs, fresh, /*in_order=*/true);
        alone.insert(alone.end(), one.begin(), one.end());
      }
      for (index_t tokens = 1; tokens <= kMostTokens; ++tokens) {
        const std::vector<float> c = dots(0, tokens, outs, fresh, /*in_order=*/false);
        ASSERT_EQ(0, std::memcmp(c.data(), alone.data(), c.size() * sizeof(float)))
            << Kernel::kName << " k " << k_ << " outs " << outs << " tokens " << tokens;
      }
    }
  }

  index_t k_ = 0;
  std::vector<W> w_;
  std::vector<float> x_;
  arch::RowSource<W> source_;
};

using Kernels =
    testing::Types<kernels::Avx512<bf16>, kernels::Avx512<float>, kernels::Avx2<bf16>, kernels::Avx2<float>>;
TYPED_TEST_SUITE(DotBlocks, Kernels);

TYPED_TEST(DotBlocks, PartsOfKChangeNoBit) {
  for (const index_t k : {64, 767, 769, 2048, 2081}) {
    this->fill(k, k);
    for (const index_t outs : {1, 2, 3, 10, 47, 100}) this->have_the_bits_of_a_token_alone(outs);
  }
}

TYPED_TEST(DotBlocks, RowsMayLieApart) {
  for (const index_t gap : {5, 3000}) {
    this->fill(1500, 1500 + gap);
    for (const index_t outs : {4, 47}) this->have_the_bits_of_a_token_alone(outs);
  }
}

TYPED_TEST(DotBlocks, LongRowsTakeSmallBlocks) {
  this->fill(20'000, 20'000);
  this->have_the_bits_of_a_token_alone(13);
}

// Where there is one, nothing is said of the distance of a second: no address is made of it.
TYPED_TEST(DotBlocks, OneRowMayHaveAnyStride) {
  this->fill(600, 600);
  this->source_.row_stride = index_t{1} << (sizeof(typename TypeParam::Weight) == 2 ? 62 : 61);
  this->have_the_bits_of_a_token_alone(1);
}

TYPED_TEST(DotBlocks, RowsMayBeGathered) {
  this->fill(1500, 1500);
  std::vector<std::int32_t> last_first;
  for (std::int32_t o = kMostOuts; o-- > 0;) last_first.push_back(o);
  this->source_.row_index = last_first.data();
  this->have_the_bits_of_a_token_alone(47);
}

// Lines that the tiles of a block ask for: in `passes` over it, K in parts of so many lines of a row.
std::map<index_t, int> asked(const arch::RowBytes& next, index_t rows, index_t passes,
                             const std::vector<index_t>& parts) {
  std::map<index_t, int> times;
  const float x = 0;
  arch::NextBlockOfDots ahead(next);
  const auto record = [&]<int Lines>(arch::LinesOfTile<Lines> tile, index_t turns) {
    const std::uintptr_t behind[] = {0, tile.second, tile.third};
    for (index_t turn = 0; turn < turns; ++turn, tile.at += tile.step)
      for (int i = 0; i < (tile.step > 0 ? Lines : 0); ++i) ++times[static_cast<index_t>(tile.at + behind[i])];
  };
  for (index_t pass = 0; pass < passes; ++pass) {
    index_t begin = 0;
    for (const index_t turns : parts) {
      const arch::NextBlockOfDots::Share share = arch::NextBlockOfDots::share_of(pass, passes);
      ahead.part(share, begin, turns, &x);
      for (index_t row = 0; row < rows; row += 3) {
        if (share.lines == 3) {
          record(ahead.lines<3>(row), turns);
        } else if (share.lines == 2) {
          record(ahead.lines<2>(row), turns);
        } else {
          record(ahead.lines<1>(row), turns);
        }
      }
      begin += turns * arch::kLineBytes;
    }
  }
  return times;
}

TEST(NextBlockOfDots, EachLineIsAskedForOnce) {
  constexpr index_t kFirst = 1 << 20, kRows = 24;
  for (const index_t stride :
       {4096, 4096 + 64, 65536}) {  // in order, in order with what lies between, side by side
    for (const index_t passes : {1, 2, 3, 4, 5, 6}) {
      const auto times = asked({kFirst, stride, kRows, 4096}, kRows, passes, {16, 16, 16, 16});
      index_t once = 0;
      for (index_t row = 0; row < kRows; ++row) {
        for (index_t line = 0; line < 4096; line += arch::kLineBytes) {
          const auto found = times.find(kFirst + row * stride + line);
          once += found != times.end() && found->second == 1 ? 1 : 0;
        }
      }
      // What lies between takes its share of the turns.
      EXPECT_EQ(kRows * 64 - (stride == 4160 ? kRows - 1 : 0), once) << stride << " in " << passes << " passes";
      EXPECT_EQ(kRows * 64, static_cast<index_t>(times.size())) << stride << " in " << passes << " passes";
    }
  }
}

TEST(NextBlockOfDots, NothingIsAskedForBehindTheLastBlock) {
  EXPECT_TRUE(asked({1 << 20, 0, 0, 4096}, 24, 1, {64}).empty());
}

TEST(NextBlockOfDots, ASmallerOneIsAskedForAndNoMore) {
  for (const index_t stride : {4096, 65536}) {
    for (const index_t passes : {1, 2, 3, 4, 6}) {
      const auto times = asked({1 << 20, stride, 5, 4096}, 24, passes, {16, 16, 16, 16});
      // In order tiles ask for whole turns; side by side rows behind the last are the last.
      const index_t behind = stride == 4096 ? 3 * 16 * arch::kLineBytes : 0;
      ASSERT_GE(times.size(), std::size_t{5 * 64}) << stride << " in " << passes << " passes";
      EXPECT_EQ(1 << 20, times.begin()->first);
      EXPECT_LT(times.rbegin()->first, (1 << 20) + 4 * stride + 4096 + behind);
    }
  }
}

}  // namespace
