// The specification called directly: what no instruction shows, and what the signal frame would hide.
//
// The kernel gives every signal handler a fresh MXCSR, so only direct calls can tell whether TDPBF16PS consults
// the caller's. And bytes of a tile beyond its shape can be seen in the state alone.
#include <xmmintrin.h>

#include <cstring>
#include <memory>
#include <random>

#include "amx_spec.hpp"
#include "test_support.hpp"

namespace {

using amx_spec::Fault;
using amx_spec::TileState;
using amx_test::TileConfig;

class AmxSpec : public testing::Test {
 protected:
  std::unique_ptr<TileState> state_ = std::make_unique<TileState>();

  void configure(const TileConfig& config) { ASSERT_EQ(amx_spec::ldtilecfg(*state_, &config), Fault::kNone); }

  // All bytes outside `rows` x `colsb` are zero.
  void expect_zero_outside(int tile, int rows, int colsb) {
    for (int row = 0; row < amx_spec::kRows; ++row) {
      for (int byte = 0; byte < amx_spec::kRowBytes; ++byte) {
        if (row < rows && byte < colsb) continue;
        EXPECT_EQ(state_->data[tile][row][byte], 0) << row << ' ' << byte;
      }
    }
  }

  // As if left over from before: the instructions have to clear what they do not fill.
  void fill_tile(int tile) { std::memset(state_->data[tile], 0x3F, sizeof state_->data[tile]); }

  void fill_operands() {
    for (int tile = 0; tile < 3; ++tile) fill_tile(tile);
  }
};

TEST_F(AmxSpec, LoadZeroesUpperRowsAndColumns) {
  std::uint8_t memory[1024];
  std::memset(memory, 0x77, sizeof memory);
  configure(TileConfig().all(5, 20));
  fill_tile(0);
  ASSERT_EQ(amx_spec::tileloadd(*state_, 0, memory, 64), Fault::kNone);
  expect_zero_outside(0, 5, 20);
  fill_tile(0);
  ASSERT_EQ(amx_spec::tileloaddt1(*state_, 0, memory, 64), Fault::kNone);
  expect_zero_outside(0, 5, 20);
}

TEST_F(AmxSpec, ProductsZeroUpperRowsAndColumns) {
  for (const auto product :
       {&amx_spec::tdpbf16ps, &amx_spec::tdpbssd, &amx_spec::tdpbsud, &amx_spec::tdpbusd, &amx_spec::tdpbuud}) {
    configure(TileConfig().product(6, 5, 7));
    fill_operands();
    // Lanes beyond n must not leak, whatever they hold: an infinity times zero would be a NaN.
    state_->data[1][2][0] = 0x80;
    state_->data[1][2][1] = 0x7F;
    ASSERT_EQ(product(*state_, 0, 1, 2), Fault::kNone);
    expect_zero_outside(0, 6, 20);
  }
}

TEST_F(AmxSpec, ConfigurationZeroesAllData) {
  std::memset(state_->data, 0x55, sizeof state_->data);
  configure(TileConfig().all(16, 64));
  for (int tile = 0; tile < amx_spec::kTiles; ++tile) expect_zero_outside(tile, 0, 0);
  fill_tile(3);
  ASSERT_EQ(amx_spec::tilezero(*state_, 3), Fault::kNone);
  expect_zero_outside(3, 0, 0);
}

TEST_F(AmxSpec, ReleaseIsTheInitialState) {
  configure(TileConfig().all(16, 64));
  std::memset(state_->data, 0x55, sizeof state_->data);
  ASSERT_EQ(amx_spec::tilerelease(*state_), Fault::kNone);
  const auto initial = std::make_unique<TileState>();
  EXPECT_EQ(std::memcmp(state_.get(), initial.get(), sizeof(TileState)), 0);
}

TEST_F(AmxSpec, FaultsLeaveTheStateAlone) {
  configure(TileConfig().all(16, 64).tile(3, 0, 0));
  fill_operands();
  const auto before = std::make_unique<TileState>(*state_);
  TileConfig bad = TileConfig().all(16, 64);
  bad.reserved_56[7] = 1;
  EXPECT_EQ(amx_spec::ldtilecfg(*state_, &bad), Fault::kGeneralProtection);
  std::uint8_t memory[1024] = {};
  for (const int tile : {-1, 3, 8}) {
    EXPECT_EQ(amx_spec::tilezero(*state_, tile), Fault::kUndefinedOpcode);
    EXPECT_EQ(amx_spec::tileloadd(*state_, tile, memory, 64), Fault::kUndefinedOpcode);
    EXPECT_EQ(amx_spec::tilestored(*state_, tile, memory, 64), Fault::kUndefinedOpcode);
    EXPECT_EQ(amx_spec::tdpbf16ps(*state_, 0, 1, tile), Fault::kUndefinedOpcode);
    EXPECT_EQ(amx_spec::tdpbuud(*state_, tile, 1, 2), Fault::kUndefinedOpcode);
  }
  EXPECT_EQ(std::memcmp(state_.get(), before.get(), sizeof(TileState)), 0);
}

TEST_F(AmxSpec, ProductsIgnoreStartRowAndResetIt) {
  TileConfig config = TileConfig().all(16, 64);
  config.start_row = 200;
  configure(config);
  fill_operands();
  ASSERT_EQ(amx_spec::tdpbuud(*state_, 0, 1, 2), Fault::kNone);
  EXPECT_EQ(state_->start_row, 0);
}

constexpr unsigned kDefaultMxcsr = 0x1F80;

// Random operands whose products and sums are inexact, and some of them denormal.
void randomize(TileState& state) {
  std::mt19937 random(99);
  for (int tile = 0; tile < 3; ++tile) {
    for (auto& row : state.data[tile]) {
      for (int byte = 0; byte < amx_spec::kRowBytes; ++byte) {
        const bool high = byte % 2 == 1;  // sign and exponent of a bf16: around 2^-63
        row[byte] = static_cast<std::uint8_t>(high ? (random() & 0x80) | (tile == 0 ? 0x00 : 0x20) : random());
      }
    }
  }
}

TEST_F(AmxSpec, Tdpbf16psDoesNotConsultMxcsr) {
  configure(TileConfig().all(16, 64));
  randomize(*state_);
  const auto start = std::make_unique<TileState>(*state_);
  ASSERT_EQ(amx_spec::tdpbf16ps(*state_, 0, 1, 2), Fault::kNone);
  const auto expected = std::make_unique<TileState>(*state_);

  for (const unsigned mxcsr : {0x1F80u, 0x3F80u, 0x5F80u, 0x7F80u, 0xFFC0u, 0x1FBFu, 0x0000u}) {
    *state_ = *start;
    _mm_setcsr(mxcsr);
    const Fault fault = amx_spec::tdpbf16ps(*state_, 0, 1, 2);
    const unsigned after = _mm_getcsr();
    _mm_setcsr(kDefaultMxcsr);
    EXPECT_EQ(fault, Fault::kNone);
    EXPECT_EQ(after, mxcsr);
    EXPECT_EQ(std::memcmp(state_.get(), expected.get(), sizeof(TileState)), 0) << std::hex << mxcsr;
  }
}

}  // namespace
