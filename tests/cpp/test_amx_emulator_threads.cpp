// Tile state belongs to a thread; counts are exact and summed over all threads.
#include <barrier>
#include <cstring>
#include <thread>
#include <vector>

#include "test_support.hpp"

namespace {

using amx_emulator::Counts;
using amx_test::TileConfig;

class AmxThreads : public amx_test::AmxTest {};
class EmulatorCounts : public amx_test::EmulatorTest {};

TEST_F(AmxThreads, NewThreadIsUnconfigured) {
  if (!emulated()) GTEST_SKIP() << "Linux copies the configuration to a new thread";
  TileConfig().all(16, 64).load();
  TileConfig stored = TileConfig().all(1, 1);
  std::thread([&] { tile_asm::sttilecfg(&stored); }).join();
  const std::uint8_t zeros[64] = {};
  EXPECT_EQ(std::memcmp(&stored, zeros, 64), 0);
}

// Two threads in lockstep, with different shapes and contents: neither sees the other's.
TEST_F(AmxThreads, StateIsIndependent) {
  std::barrier<> step(2);
  bool right[2] = {false, false};
  const auto body = [&](int me) {
    const int rows = me == 0 ? 16 : 3;
    const int colsb = me == 0 ? 64 : 12;
    std::uint8_t content[1024];
    std::uint8_t stored[1024] = {};
    std::memset(content, me == 0 ? 0xA0 : 0xB1, sizeof content);
    TileConfig().all(rows, colsb).load();
    step.arrive_and_wait();
    tile_asm::tileloadd<0>(content, colsb);
    step.arrive_and_wait();
    if (me == 0) tile_asm::tilezero<1>();
    if (me == 1) tile_asm::tileloadd<1>(content, colsb);
    step.arrive_and_wait();
    tile_asm::tilestored<0>(stored, colsb);
    right[me] = std::memcmp(stored, content, static_cast<std::size_t>(rows * colsb)) == 0;
    step.arrive_and_wait();
    if (me == 0) tile_asm::tilerelease();
    step.arrive_and_wait();
    TileConfig config;
    tile_asm::sttilecfg(&config);
    right[me] = right[me] && config.palette == me && config.rows[7] == (me == 0 ? 0 : 3);
  };
  std::thread other(body, 1);
  body(0);
  other.join();
  EXPECT_TRUE(right[0]);
  EXPECT_TRUE(right[1]);
}

void one_of_each_but_two_products() {
  alignas(64) std::uint8_t memory[1024] = {};
  TileConfig().all(16, 64).load();
  TileConfig stored;
  tile_asm::sttilecfg(&stored);
  tile_asm::tilezero<0>();
  tile_asm::tileloadd<1>(memory, 64);
  tile_asm::tileloaddt1<2>(memory, 64);
  tile_asm::tdpbf16ps<0, 1, 2>();
  tile_asm::tdpbf16ps<0, 1, 2>();
  tile_asm::tdpbssd<0, 1, 2>();
  tile_asm::tdpbsud<0, 1, 2>();
  tile_asm::tdpbusd<0, 1, 2>();
  tile_asm::tdpbuud<0, 1, 2>();
  tile_asm::tilestored<0>(memory, 64);
  tile_asm::tilerelease();
}

TEST_F(EmulatorCounts, StartAtZero) {
  EXPECT_EQ(amx_emulator::counts(), Counts());
}

TEST_F(EmulatorCounts, EachInstructionHasItsOwn) {
  TileConfig().all(16, 64).load();
  const auto counted = [](auto instruction, std::uint64_t Counts::*field) {
    amx_emulator::reset_counts();
    for (int i = 0; i < 3; ++i) instruction();
    Counts expected;
    expected.*field = 3;
    return amx_emulator::counts() == expected;
  };
  alignas(64) static std::uint8_t memory[1024];
  EXPECT_TRUE(counted([] { TileConfig().all(16, 64).load(); }, &Counts::ldtilecfg));
  EXPECT_TRUE(counted([] { tile_asm::sttilecfg(memory); }, &Counts::sttilecfg));
  EXPECT_TRUE(counted(&tile_asm::tilezero<5>, &Counts::tilezero));
  EXPECT_TRUE(counted([] { tile_asm::tileloadd<5>(memory, 64); }, &Counts::tileloadd));
  EXPECT_TRUE(counted([] { tile_asm::tileloaddt1<5>(memory, 64); }, &Counts::tileloaddt1));
  EXPECT_TRUE(counted([] { tile_asm::tilestored<5>(memory, 64); }, &Counts::tilestored));
  EXPECT_TRUE(counted(&tile_asm::tdpbf16ps<5, 6, 7>, &Counts::tdpbf16ps));
  EXPECT_TRUE(counted(&tile_asm::tdpbssd<5, 6, 7>, &Counts::tdpbssd));
  EXPECT_TRUE(counted(&tile_asm::tdpbsud<5, 6, 7>, &Counts::tdpbsud));
  EXPECT_TRUE(counted(&tile_asm::tdpbusd<5, 6, 7>, &Counts::tdpbusd));
  EXPECT_TRUE(counted(&tile_asm::tdpbuud<5, 6, 7>, &Counts::tdpbuud));
  EXPECT_TRUE(counted(&tile_asm::tilerelease, &Counts::tilerelease));
}

TEST_F(EmulatorCounts, AreSummedOverThreads) {
  constexpr int kThreads = 4;
  constexpr int kRepeats = 50;
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([] {
      for (int repeat = 0; repeat < kRepeats; ++repeat) one_of_each_but_two_products();
    });
  }
  for (std::thread& thread : threads) thread.join();
  constexpr std::uint64_t kEach = kThreads * kRepeats;
  EXPECT_EQ(amx_emulator::counts(),
            (Counts{kEach, kEach, kEach, kEach, kEach, kEach, kEach, 2 * kEach, kEach, kEach, kEach, kEach}));
}

TEST_F(EmulatorCounts, FaultingInstructionsDoNotCount) {
  amx_test::signal_of(&tile_asm::tilezero<0>);
  amx_test::signal_of(&tile_asm::tdpbf16ps<0, 1, 2>);
  amx_test::signal_of([] { TileConfig().tile(0, 17, 64).load(); });
  EXPECT_EQ(amx_emulator::counts(), Counts());
  TileConfig().all(1, 4).load();
  amx_test::signal_of([] { tile_asm::tileloadd<0>(nullptr, 0); });
  EXPECT_EQ(amx_emulator::counts(), Counts{.ldtilecfg = 1});
}

TEST_F(EmulatorCounts, InterfaceForC) {
  std::uint64_t values[12];
  one_of_each_but_two_products();
  amx_emulator_counts(values);
  for (int i = 0; i < 12; ++i) EXPECT_EQ(values[i], i == 7 ? 2u : 1u) << i;
  amx_emulator_reset_counts();
  tile_asm::tilerelease();
  amx_emulator_counts(values);
  for (int i = 0; i < 12; ++i) EXPECT_EQ(values[i], i == 6 ? 1u : 0u) << i;

  EXPECT_EQ(amx_emulator_installed(), 1);
  amx_emulator_uninstall();
  EXPECT_EQ(amx_emulator_installed(), 0);
  EXPECT_EQ(amx_emulator_install(), 1);
}

}  // namespace
