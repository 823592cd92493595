// LDTILECFG, STTILECFG, TILERELEASE and TILEZERO: what they store, what they reset, which configurations fault.
#include <cstring>
#include <string>
#include <vector>

#include "test_support.hpp"

namespace {

using amx_test::signal_of;
using amx_test::TileConfig;

using ConfigBytes = std::vector<std::uint8_t>;

ConfigBytes bytes_of(const TileConfig& config) {
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(&config);
  return ConfigBytes(bytes, bytes + sizeof config);
}

ConfigBytes stored_config() {
  ConfigBytes bytes(64, 0xEE);  // every byte must be written
  tile_asm::sttilecfg(bytes.data());
  return bytes;
}

class AmxConfig : public amx_test::AmxTest {};

TEST_F(AmxConfig, UnconfiguredStoresZeros) {
  EXPECT_EQ(stored_config(), ConfigBytes(64, 0));
}

TEST_F(AmxConfig, RoundTripKeepsEveryField) {
  TileConfig config;
  config.start_row = 3;
  for (int i = 0; i < 8; ++i) config.tile(i, 2 * i + 1, 7 * i + 4);
  config.tile(5, 0, 0).tile(6, 16, 64).tile(7, 1, 1);
  config.load();
  EXPECT_EQ(stored_config(), bytes_of(config));
}

TEST_F(AmxConfig, OperandNeedsNoAlignment) {
  const TileConfig config = TileConfig().all(5, 20);
  std::uint8_t buffer[64 + 13];
  std::memcpy(buffer + 13, &config, 64);
  tile_asm::ldtilecfg(buffer + 13);
  std::uint8_t stored[64 + 5];
  tile_asm::sttilecfg(stored + 5);
  EXPECT_EQ(std::memcmp(stored + 5, &config, 64), 0);
}

TEST_F(AmxConfig, ReadsAndWritesExactly64Bytes) {
  const amx_test::GuardedPages pages;
  const TileConfig config = TileConfig().all(16, 64);
  for (std::uint8_t* const place : {pages.begin(), pages.end() - 64}) {
    std::memcpy(place, &config, 64);
    tile_asm::ldtilecfg(place);
    std::memset(place, 0xEE, 64);
    tile_asm::sttilecfg(place);
    EXPECT_EQ(std::memcmp(place, &config, 64), 0);
  }
  EXPECT_EQ(signal_of([&] { tile_asm::ldtilecfg(pages.end() - 63); }), SIGSEGV);
  EXPECT_EQ(signal_of([&] { tile_asm::sttilecfg(pages.end() - 63); }), SIGSEGV);
}

TEST_F(AmxConfig, ReleaseForgetsTheConfiguration) {
  TileConfig().all(16, 64).load();
  tile_asm::tilerelease();
  EXPECT_EQ(stored_config(), ConfigBytes(64, 0));
  EXPECT_EQ(signal_of([] { tile_asm::tilezero<0>(); }), SIGILL);
}

// The other bytes of a palette 0 configuration are not looked at.
TEST_F(AmxConfig, PaletteZeroReleases) {
  TileConfig().all(16, 64).load();
  ConfigBytes release(64, 0xFF);
  release[0] = 0;
  tile_asm::ldtilecfg(release.data());
  EXPECT_EQ(stored_config(), ConfigBytes(64, 0));
  EXPECT_EQ(signal_of([] { tile_asm::tilezero<0>(); }), SIGILL);
}

class AmxTileData : public AmxConfig {
 protected:
  void fill() {
    std::memset(ones_, 0x11, sizeof ones_);
    TileConfig().all(16, 64).load();
    tile_asm::tileloadd<0>(ones_, 64);
    tile_asm::tileloadd<1>(ones_, 64);
  }
  // Smallest and largest byte of the tile.
  template <int kTile>
  std::pair<int, int> range() {
    std::uint8_t bytes[1024];
    std::memset(bytes, 0xEE, sizeof bytes);
    tile_asm::tilestored<kTile>(bytes, 64);
    const auto [low, high] = std::minmax_element(bytes, bytes + sizeof bytes);
    return {*low, *high};
  }
  std::uint8_t ones_[1024];
};

TEST_F(AmxTileData, TilezeroClearsItsTileAlone) {
  fill();
  tile_asm::tilezero<0>();
  EXPECT_EQ(range<0>(), std::make_pair(0, 0));
  EXPECT_EQ(range<1>(), std::make_pair(0x11, 0x11));
}

TEST_F(AmxTileData, ConfiguringAgainClearsAllTiles) {
  fill();
  TileConfig().all(16, 64).load();
  EXPECT_EQ(range<0>(), std::make_pair(0, 0));
  EXPECT_EQ(range<1>(), std::make_pair(0, 0));
}

TEST_F(AmxTileData, ReleaseClearsAllTiles) {
  fill();
  tile_asm::tilerelease();
  TileConfig().all(16, 64).load();
  EXPECT_EQ(range<0>(), std::make_pair(0, 0));
  EXPECT_EQ(range<1>(), std::make_pair(0, 0));
}

TEST_F(AmxTileData, TilezeroResetsStartRow) {
  TileConfig config = TileConfig().all(16, 64);
  config.start_row = 9;
  config.load();
  tile_asm::tilezero<4>();
  config.start_row = 0;
  EXPECT_EQ(stored_config(), bytes_of(config));
}

struct BadConfig {
  std::string name;
  TileConfig config;
};

// Every way in which a palette 1 configuration can be illegal.
std::vector<BadConfig> bad_configs() {
  const TileConfig good = TileConfig().all(16, 64);
  std::vector<BadConfig> bad;
  for (const int palette : {2, 3, 128, 255}) {
    TileConfig config = good;
    config.palette = static_cast<std::uint8_t>(palette);
    bad.push_back({"Palette" + std::to_string(palette), config});
  }
  const auto reserved = [&](std::size_t first, std::size_t last) {
    for (std::size_t byte = first; byte <= last; ++byte) {
      TileConfig config = good;
      reinterpret_cast<std::uint8_t*>(&config)[byte] = static_cast<std::uint8_t>(1u << (byte % 8));
      bad.push_back({"ReservedByte" + std::to_string(byte), config});
    }
  };
  reserved(2, 15);
  reserved(32, 47);
  reserved(56, 63);
  for (int tile = 0; tile < 8; ++tile) {
    const std::string of_tile = "OfTile" + std::to_string(tile);
    bad.push_back({"Rows17" + of_tile, TileConfig(good).tile(tile, 17, 64)});
    bad.push_back({"Rows255" + of_tile, TileConfig(good).tile(tile, 255, 64)});
    bad.push_back({"Colsb65" + of_tile, TileConfig(good).tile(tile, 16, 65)});
    bad.push_back({"Colsb256" + of_tile, TileConfig(good).tile(tile, 16, 256)});
    bad.push_back({"RowsWithoutColsb" + of_tile, TileConfig(good).tile(tile, 1, 0)});
    bad.push_back({"ColsbWithoutRows" + of_tile, TileConfig(good).tile(tile, 0, 4)});
  }
  return bad;
}

class AmxBadConfig : public AmxConfig, public testing::WithParamInterface<BadConfig> {};

TEST_P(AmxBadConfig, IsAGeneralProtectionFault) {
  const TileConfig before = TileConfig().all(3, 8);
  before.load();
  const amx_test::CaughtSignal caught = amx_test::catch_signal([] { GetParam().config.load(); });
  EXPECT_EQ(caught.signo, SIGSEGV);
  EXPECT_EQ(caught.code, SI_KERNEL);
  EXPECT_EQ(caught.address, nullptr);
  if (!emulated()) return;  // the handler that jumped out left fresh tile state
  EXPECT_EQ(stored_config(), bytes_of(before)) << "a refused configuration must change nothing";
}

INSTANTIATE_TEST_SUITE_P(All, AmxBadConfig, testing::ValuesIn(bad_configs()),
                         [](const auto& instance) { return instance.param.name; });

}  // namespace
