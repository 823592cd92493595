// TILELOADD, TILELOADDT1 and TILESTORED: shapes, strides, the exact bytes they touch, and restart after a
// fault.
#include <cstring>
#include <random>
#include <vector>

#include "test_support.hpp"

namespace {

using amx_test::GuardedPages;
using amx_test::TileConfig;

struct Shape {
  int rows;
  int colsb;
};

const Shape kShapes[] = {{16, 64}, {1, 4},  {1, 64},  {16, 4},  {3, 12},
                         {5, 20},  {7, 36}, {13, 60}, {15, 64}, {2, 8}};

std::vector<std::uint8_t> random_bytes(std::size_t size, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<std::uint8_t> bytes(size);
  for (auto& byte : bytes) byte = static_cast<std::uint8_t>(random());
  return bytes;
}

// Lowest offset from the base that a move touches, and the number of bytes from there to the highest.
struct Extent {
  std::ptrdiff_t low;
  std::size_t size;
};

Extent extent_of(Shape shape, std::ptrdiff_t stride) {
  const std::ptrdiff_t last = (shape.rows - 1) * stride;
  const std::ptrdiff_t low = std::min<std::ptrdiff_t>(0, last);
  const std::ptrdiff_t high = std::max<std::ptrdiff_t>(0, last) + shape.colsb;
  return {low, static_cast<std::size_t>(high - low)};
}

std::vector<std::ptrdiff_t> strides_of(Shape shape) {
  const std::ptrdiff_t colsb = shape.colsb;
  return {colsb, -colsb, colsb + 1, 0, 1, -1, 64, -64, 100, -100, 127};
}

class AmxMemory : public amx_test::AmxTest {};

using Load = void (*)(const void*, std::ptrdiff_t);

// Loads tile 3 from memory that ends, or begins, at a guard page, and stores it packed for the comparison.
void expect_load(Load load, Shape shape, std::ptrdiff_t stride, bool against_end) {
  SCOPED_TRACE(testing::Message() << shape.rows << " x " << shape.colsb << " stride " << stride);
  const GuardedPages pages;
  const Extent extent = extent_of(shape, stride);
  std::uint8_t* const low = against_end ? pages.end() - extent.size : pages.begin();
  const auto content = random_bytes(extent.size, 1);
  std::memcpy(low, content.data(), extent.size);

  TileConfig().tile(3, shape.rows, shape.colsb).load();
  load(low - extent.low, stride);
  const std::size_t colsb = static_cast<std::size_t>(shape.colsb);
  std::vector<std::uint8_t> packed(static_cast<std::size_t>(shape.rows) * colsb);
  tile_asm::tilestored<3>(packed.data(), shape.colsb);
  for (int row = 0; row < shape.rows; ++row) {
    const std::uint8_t* const expected = content.data() + (row * stride - extent.low);
    EXPECT_EQ(std::memcmp(packed.data() + static_cast<std::size_t>(row) * colsb, expected, colsb), 0) << row;
  }
}

TEST_F(AmxMemory, LoadReadsRowsAtAnyStrideAndNothingElse) {
  for (const Shape shape : kShapes) {
    for (const std::ptrdiff_t stride : strides_of(shape)) {
      for (const bool against_end : {false, true}) {
        expect_load(&tile_asm::tileloadd<3>, shape, stride, against_end);
        expect_load(&tile_asm::tileloaddt1<3>, shape, stride, against_end);
      }
    }
  }
}

// The image of memory after the rows of `tile` have been written in ascending order.
std::vector<std::uint8_t> expected_image(const std::vector<std::uint8_t>& before, const std::uint8_t* tile,
                                         Shape shape, std::ptrdiff_t stride, std::ptrdiff_t low) {
  std::vector<std::uint8_t> image = before;
  for (int row = 0; row < shape.rows; ++row) {
    for (int byte = 0; byte < shape.colsb; ++byte) {
      image[static_cast<std::size_t>(row * stride + byte - low)] = tile[row * shape.colsb + byte];
    }
  }
  return image;
}

void expect_store(Shape shape, std::ptrdiff_t stride, bool against_end) {
  SCOPED_TRACE(testing::Message() << shape.rows << " x " << shape.colsb << " stride " << stride);
  const GuardedPages pages;
  const auto tile = random_bytes(static_cast<std::size_t>(shape.rows * shape.colsb), 2);
  TileConfig().tile(6, shape.rows, shape.colsb).load();
  tile_asm::tileloadd<6>(tile.data(), shape.colsb);

  const Extent extent = extent_of(shape, stride);
  std::uint8_t* const low = against_end ? pages.end() - extent.size : pages.begin();
  const std::ptrdiff_t before_low = low - pages.begin();  // the image is the whole page: gaps and both sides
  const auto before = random_bytes(pages.page(), 3);
  std::memcpy(pages.begin(), before.data(), pages.page());
  tile_asm::tilestored<6>(low - extent.low, stride);

  const auto image = expected_image(before, tile.data(), shape, stride, extent.low - before_low);
  EXPECT_EQ(std::memcmp(pages.begin(), image.data(), image.size()), 0);
}

TEST_F(AmxMemory, StoreWritesRowsAtAnyStrideAndNothingElse) {
  for (const Shape shape : kShapes) {
    for (const std::ptrdiff_t stride : strides_of(shape)) {
      for (const bool against_end : {false, true}) expect_store(shape, stride, against_end);
    }
  }
}

// One byte too far in any direction must be seen, or the tests above prove nothing.
TEST_F(AmxMemory, OneByteBeyondTheGuardIsASegmentationFault) {
  const GuardedPages pages;
  const std::size_t size = 15 * 64 + 64;
  const auto fault_of = [](auto body) {
    TileConfig().all(16, 64).load();  // the fault before has left its row in start_row
    return amx_test::catch_signal(body);
  };

  auto caught = fault_of([&] { tile_asm::tileloadd<0>(pages.end() - size + 1, 64); });
  EXPECT_EQ(caught.signo, SIGSEGV);
  EXPECT_EQ(caught.code, SEGV_ACCERR);
  EXPECT_EQ(caught.address, pages.end());
  EXPECT_EQ(fault_of([&] { tile_asm::tileloaddt1<0>(pages.end() - size + 1, 64); }).signo, SIGSEGV);
  EXPECT_EQ(fault_of([&] { tile_asm::tilestored<0>(pages.end() - size + 1, 64); }).signo, SIGSEGV);
  EXPECT_EQ(fault_of([&] { tile_asm::tileloadd<0>(pages.begin() - 1, 64); }).signo, SIGSEGV);
  EXPECT_EQ(fault_of([&] { tile_asm::tileloadd<0>(pages.begin() + 15 * 64 - 1, -64); }).signo, SIGSEGV);
  EXPECT_EQ(fault_of([&] { tile_asm::tilestored<0>(pages.begin() - 1, 64); }).signo, SIGSEGV);
  EXPECT_EQ(fault_of([&] { tile_asm::tileloadd<0>(pages.begin(), 64); }).signo, 0);
}

int stored_start_row() {
  TileConfig stored;
  tile_asm::sttilecfg(&stored);
  return stored.start_row;
}

// start_row as configured: rows before it are not touched, neither in the tile nor in memory.
TEST_F(AmxMemory, LoadGoesOnAtStartRow) {
  const auto content = random_bytes(1024, 4);
  TileConfig config = TileConfig().all(16, 64);
  config.start_row = 5;
  config.load();
  tile_asm::tileloadd<2>(content.data(), 64);
  EXPECT_EQ(stored_start_row(), 0);

  std::uint8_t stored[1024];
  tile_asm::tilestored<2>(stored, 64);
  EXPECT_EQ(std::count(stored, stored + 5 * 64, 0), 5 * 64);
  EXPECT_EQ(std::memcmp(stored + 5 * 64, content.data() + 5 * 64, 11 * 64), 0);
}

TEST_F(AmxMemory, StoreGoesOnAtStartRow) {
  TileConfig config = TileConfig().all(16, 64);
  config.start_row = 15;
  config.load();
  std::uint8_t stored[1024];
  std::memset(stored, 0xEE, sizeof stored);
  tile_asm::tilestored<2>(stored, 64);  // a tile of zeros
  EXPECT_EQ(stored_start_row(), 0);
  EXPECT_EQ(std::count(stored, stored + 15 * 64, 0xEE), 15 * 64);
  EXPECT_EQ(std::count(stored + 15 * 64, stored + 16 * 64, 0), 64);
}

// A load that faults keeps the rows it has and says in start_row where it stopped; run again it goes on there.
TEST_F(AmxMemory, FaultingLoadIsRestartable) {
  if (!emulated()) GTEST_SKIP() << "natively nothing is left behind a jump out of the handler";
  const GuardedPages pages;
  const auto content = random_bytes(1024, 5);
  std::memcpy(pages.end() - 6 * 64, content.data(), 6 * 64);
  TileConfig().all(16, 64).load();
  const int signo = amx_test::signal_of([&] { tile_asm::tileloadd<1>(pages.end() - 6 * 64, 64); });
  ASSERT_EQ(signo, SIGSEGV);
  EXPECT_EQ(stored_start_row(), 6);

  tile_asm::tileloadd<1>(content.data(), 64);
  std::uint8_t stored[1024];
  tile_asm::tilestored<1>(stored, 64);
  EXPECT_EQ(std::memcmp(stored, content.data(), 1024), 0);
}

TEST_F(AmxMemory, FaultingStoreIsRestartable) {
  if (!emulated()) GTEST_SKIP() << "natively nothing is left behind a jump out of the handler";
  const GuardedPages pages;
  const auto content = random_bytes(1024, 6);
  TileConfig().all(16, 64).load();
  tile_asm::tileloadd<1>(content.data(), 64);
  const int signo = amx_test::signal_of([&] { tile_asm::tilestored<1>(pages.end() - 10 * 64, 64); });
  ASSERT_EQ(signo, SIGSEGV);
  EXPECT_EQ(stored_start_row(), 10);
  EXPECT_EQ(std::memcmp(pages.end() - 10 * 64, content.data(), 10 * 64), 0);

  std::uint8_t rest[1024] = {};
  tile_asm::tilestored<1>(rest, 64);
  EXPECT_EQ(std::count(rest, rest + 10 * 64, 0), 10 * 64);
  EXPECT_EQ(std::memcmp(rest + 10 * 64, content.data() + 10 * 64, 6 * 64), 0);
}

const GuardedPages* g_pages_to_open = nullptr;

void open_pages(int) {
  g_pages_to_open->protect(PROT_READ | PROT_WRITE);
}

// A handler that repairs the fault and returns, as memory managers do.
TEST_F(AmxMemory, LoadGoesOnBehindAHandlerThatMapsThePage) {
  const GuardedPages pages;
  const auto content = random_bytes(1024, 7);
  std::memcpy(pages.begin(), content.data(), 1024);
  pages.protect(PROT_NONE);
  g_pages_to_open = &pages;
  struct sigaction repair = {}, old;
  repair.sa_handler = &open_pages;
  sigaction(SIGSEGV, &repair, &old);
  TileConfig().all(16, 64).load();
  tile_asm::tileloadd<7>(pages.begin(), 64);
  sigaction(SIGSEGV, &old, nullptr);

  std::uint8_t stored[1024];
  tile_asm::tilestored<7>(stored, 64);
  EXPECT_EQ(std::memcmp(stored, content.data(), 1024), 0);
}

}  // namespace
