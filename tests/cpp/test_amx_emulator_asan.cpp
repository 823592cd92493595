// Under AddressSanitizer a tile access beyond an object is reported like any other; elsewhere there is nothing
// here.
#include <memory>

#include "test_support.hpp"

#if defined(__SANITIZE_ADDRESS__)
#define AMX_TEST_WITH_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define AMX_TEST_WITH_ASAN 1
#endif
#endif

#ifdef AMX_TEST_WITH_ASAN
namespace {

using amx_test::TileConfig;

class EmulatorAsanDeathTest : public amx_test::EmulatorTest {
 protected:
  void SetUp() override {
    amx_test::EmulatorTest::SetUp();
    GTEST_FLAG_SET(death_test_style, "threadsafe");
    config_.load();
  }
  static constexpr int kRows = 7;
  static constexpr int kColsb = 20;
  static constexpr std::ptrdiff_t kStride = 24;
  static constexpr std::size_t kExact = (kRows - 1) * kStride + kColsb;
  const TileConfig config_ = TileConfig().all(kRows, kColsb);
};

TEST_F(EmulatorAsanDeathTest, ExactBuffersAreFine) {
  const auto buffer = std::make_unique<std::uint8_t[]>(kExact);
  tile_asm::tileloadd<0>(buffer.get(), kStride);
  tile_asm::tileloaddt1<0>(buffer.get(), kStride);
  tile_asm::tilestored<0>(buffer.get(), kStride);
}

// The report names kind, direction, the size of the part that is out of bounds, and where that lies.
TEST_F(EmulatorAsanDeathTest, OneByteTooFew) {
  const auto buffer = std::make_unique<std::uint8_t[]>(kExact - 1);
  EXPECT_DEATH(
      tile_asm::tileloadd<0>(buffer.get(), kStride),
      "heap-buffer-overflow(.|\n)*READ of size 1(.|\n)*0 bytes (to the right of|after) 163-byte region");
  EXPECT_DEATH(tile_asm::tileloaddt1<0>(buffer.get(), kStride), "heap-buffer-overflow(.|\n)*READ of size 1");
  EXPECT_DEATH(tile_asm::tilestored<0>(buffer.get(), kStride), "heap-buffer-overflow(.|\n)*WRITE of size 1");
}

TEST_F(EmulatorAsanDeathTest, OneByteTooEarly) {
  const auto buffer = std::make_unique<std::uint8_t[]>(kExact);
  EXPECT_DEATH(tile_asm::tileloadd<0>(buffer.get() - 1, kStride), "heap-buffer-overflow(.|\n)*READ");
  EXPECT_DEATH(tile_asm::tilestored<0>(buffer.get() + (kRows - 1) * kStride - 1, -kStride),
               "heap-buffer-overflow(.|\n)*WRITE");
}

TEST_F(EmulatorAsanDeathTest, FreedMemory) {
  auto buffer = std::make_unique<std::uint8_t[]>(kExact);
  const std::uint8_t* const freed = buffer.get();
  buffer.reset();
  EXPECT_DEATH(tile_asm::tileloadd<0>(freed, kStride), "heap-use-after-free");
}

TEST_F(EmulatorAsanDeathTest, Configuration) {
  const auto buffer = std::make_unique<std::uint8_t[]>(63);
  EXPECT_DEATH(tile_asm::ldtilecfg(buffer.get()), "heap-buffer-overflow(.|\n)*READ of size 1");
  EXPECT_DEATH(tile_asm::sttilecfg(buffer.get()), "heap-buffer-overflow(.|\n)*WRITE of size 1");
}

}  // namespace
#endif
