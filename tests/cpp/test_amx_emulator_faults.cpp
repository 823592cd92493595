// What must fault: illegal operands and encodings as SIGILL, as the architecture's #UD.
#include <cstring>
#include <string>
#include <vector>

#include "test_support.hpp"

namespace {

using amx_test::signal_of;
using amx_test::TileConfig;

alignas(64) std::uint8_t g_memory[1024];

// One instruction of each kind, on tiles 0, 1 and 2.
struct Instruction {
  const char* name;
  void (*execute)();
};

const Instruction kOnTile0[] = {
    {"TILEZERO", &tile_asm::tilezero<0>},
    {"TILELOADD", [] { tile_asm::tileloadd<0>(g_memory, 64); }},
    {"TILELOADDT1", [] { tile_asm::tileloaddt1<0>(g_memory, 64); }},
    {"TILESTORED", [] { tile_asm::tilestored<0>(g_memory, 64); }},
};

const Instruction kClear[] = {kOnTile0[0]};

const Instruction kMoves[] = {kOnTile0[1], kOnTile0[2], kOnTile0[3]};

const Instruction kProducts[] = {
    {"TDPBF16PS", &tile_asm::tdpbf16ps<0, 1, 2>}, {"TDPBSSD", &tile_asm::tdpbssd<0, 1, 2>},
    {"TDPBSUD", &tile_asm::tdpbsud<0, 1, 2>},     {"TDPBUSD", &tile_asm::tdpbusd<0, 1, 2>},
    {"TDPBUUD", &tile_asm::tdpbuud<0, 1, 2>},
};

class AmxFaults : public amx_test::AmxTest {
 protected:
  // Loads `config` first: tiles start out configured like that.
  template <std::size_t kCount>
  void expect(int signo, const TileConfig& config, const Instruction (&instructions)[kCount]) {
    for (const Instruction& instruction : instructions) {
      config.load();
      EXPECT_EQ(signal_of(instruction.execute), signo) << instruction.name;
    }
  }
};

TEST_F(AmxFaults, NothingFaultsOnLegalOperands) {
  expect(0, TileConfig().product(16, 16, 16), kOnTile0);
  expect(0, TileConfig().product(16, 16, 16), kProducts);
  expect(0, TileConfig().product(1, 1, 1), kProducts);
}

TEST_F(AmxFaults, UnconfiguredTiles) {
  TileConfig released;
  released.palette = 0;
  expect(SIGILL, released, kOnTile0);
  expect(SIGILL, released, kProducts);
}

TEST_F(AmxFaults, TileNotInUse) {
  expect(SIGILL, TileConfig().all(16, 64).tile(0, 0, 0), kOnTile0);
  expect(SIGILL, TileConfig().tile(5, 16, 64), kProducts);  // all three: their shapes fit, being empty
  for (const int tile : {0, 1, 2}) expect(SIGILL, TileConfig().all(16, 64).tile(tile, 0, 0), kProducts);
}

TEST_F(AmxFaults, ColumnBytesThatAreNoMultipleOfFour) {
  for (const int colsb : {1, 2, 3, 5, 62, 63}) {
    expect(SIGILL, TileConfig().all(16, colsb), kMoves);
    expect(0, TileConfig().all(16, colsb), kClear);
  }
  expect(SIGILL, TileConfig().tile(0, 4, 7).tile(1, 4, 16).tile(2, 4, 7), kProducts);
  expect(SIGILL, TileConfig().tile(0, 4, 16).tile(1, 4, 18).tile(2, 4, 16), kProducts);
}

TEST_F(AmxFaults, ShapesThatDoNotFit) {
  const auto good = [] { return TileConfig().product(5, 6, 7); };
  expect(0, good(), kProducts);
  expect(SIGILL, good().tile(0, 4, 24), kProducts);  // rows of C and A
  expect(SIGILL, good().tile(1, 6, 28), kProducts);
  expect(SIGILL, good().tile(0, 5, 20), kProducts);  // columns of C and B
  expect(SIGILL, good().tile(2, 7, 28), kProducts);
  expect(SIGILL, good().tile(1, 5, 24), kProducts);  // k of A and B
  expect(SIGILL, good().tile(2, 8, 24), kProducts);
}

// As bytes, since no assembler writes a product whose tiles are the same. kPrefix is VEX.pp.
template <int kPrefix, int kOpcode, int kDest, int kSrc1, int kSrc2>
void encoded_product() {
  asm volatile(".byte 0xC4, 0xE2, %c0, %c1, %c2"
               :
               : "i"((~kSrc2 & 15) << 3 | kPrefix), "i"(kOpcode), "i"(0xC0 | kDest << 3 | kSrc1)
               : "memory");
}

template <int kDest, int kSrc1, int kSrc2>
std::vector<int> signals_of_products() {
  const auto signal_of_configured = [](void (*execute)()) {
    TileConfig().all(16, 64).load();
    return signal_of(execute);
  };
  return {signal_of_configured(&encoded_product<2, 0x5C, kDest, kSrc1, kSrc2>),
          signal_of_configured(&encoded_product<3, 0x5E, kDest, kSrc1, kSrc2>),
          signal_of_configured(&encoded_product<2, 0x5E, kDest, kSrc1, kSrc2>),
          signal_of_configured(&encoded_product<1, 0x5E, kDest, kSrc1, kSrc2>),
          signal_of_configured(&encoded_product<0, 0x5E, kDest, kSrc1, kSrc2>)};
}

TEST_F(AmxFaults, TilesOfAProductMustDiffer) {
  const std::vector<int> faults(5, SIGILL);
  EXPECT_EQ((signals_of_products<3, 3, 4>()), faults);
  EXPECT_EQ((signals_of_products<3, 4, 3>()), faults);
  EXPECT_EQ((signals_of_products<4, 3, 3>()), faults);
  EXPECT_EQ((signals_of_products<3, 3, 3>()), faults);
  EXPECT_EQ((signals_of_products<3, 4, 5>()), std::vector<int>(5, 0));
}

TEST_F(AmxFaults, StartRowBeyondTheTile) {
  TileConfig config = TileConfig().all(6, 64);
  config.start_row = 5;
  expect(0, config, kMoves);
  for (const int start_row : {6, 7, 16, 255}) {
    config.start_row = static_cast<std::uint8_t>(start_row);
    expect(SIGILL, config, kMoves);
  }
}

// Checks come before memory: no access may happen on the way to SIGILL.
TEST_F(AmxFaults, OperandsAreCheckedBeforeMemory) {
  const TileConfig only_tile1 = TileConfig().tile(1, 1, 4);
  const Instruction unconfigured[] = {{"TILELOADD", [] { tile_asm::tileloadd<0>(nullptr, 64); }},
                                      {"TILESTORED", [] { tile_asm::tilestored<0>(nullptr, 64); }}};
  const Instruction configured[] = {{"TILELOADD", [] { tile_asm::tileloadd<1>(nullptr, 64); }},
                                    {"TILESTORED", [] { tile_asm::tilestored<1>(nullptr, 64); }}};
  expect(SIGILL, only_tile1, unconfigured);
  expect(SIGSEGV, only_tile1, configured);
}

// A faulting product leaves C as it is.
TEST_F(AmxFaults, FaultChangesNoTile) {
  if (!emulated()) GTEST_SKIP() << "natively nothing is left behind a jump out of the handler";
  std::memset(g_memory, 0x3C, sizeof g_memory);
  TileConfig().all(16, 64).tile(2, 15, 64).load();
  tile_asm::tileloadd<0>(g_memory, 64);
  for (const Instruction& product : kProducts) EXPECT_EQ(signal_of(product.execute), SIGILL);
  std::uint8_t stored[1024];
  tile_asm::tilestored<0>(stored, 64);
  EXPECT_EQ(std::memcmp(stored, g_memory, 1024), 0);
}

// Bytes that no assembler writes. rax points to memory for those that would have a memory operand.
struct Encoding {
  std::string name;
  void (*execute)();
};

#define ENCODING(name, bytes)                                                                        \
  Encoding {                                                                                         \
    name, [] { asm volatile(".byte " bytes : : "a"(g_memory), "c"(std::ptrdiff_t{64}) : "memory"); } \
  }

const Encoding kLegalEncodings[] = {
    ENCODING("Tilezero0", "0xC4,0xE2,0x7B,0x49,0xC0"),  ENCODING("Tilerelease", "0xC4,0xE2,0x78,0x49,0xC0"),
    ENCODING("Sttilecfg", "0xC4,0xE2,0x79,0x49,0x00"),  ENCODING("Tileloadd0", "0xC4,0xE2,0x7B,0x4B,0x04,0x08"),
    ENCODING("Tdpbssd012", "0xC4,0xE2,0x6B,0x5E,0xC1"),
};

const Encoding kIllegalEncodings[] = {
    ENCODING("TilezeroW1", "0xC4,0xE2,0xFB,0x49,0xC0"),
    ENCODING("TilezeroL1", "0xC4,0xE2,0x7F,0x49,0xC0"),
    ENCODING("TilezeroVvvvInUse", "0xC4,0xE2,0x73,0x49,0xC0"),
    ENCODING("TilezeroOfTile8", "0xC4,0x62,0x7B,0x49,0xC0"),
    ENCODING("TilezeroWithRm1", "0xC4,0xE2,0x7B,0x49,0xC1"),
    ENCODING("TilereleaseVvvvInUse", "0xC4,0xE2,0x70,0x49,0xC0"),
    ENCODING("TilereleaseWithReg1", "0xC4,0xE2,0x78,0x49,0xC8"),
    ENCODING("LdtilecfgW1", "0xC4,0xE2,0xF8,0x49,0x00"),
    ENCODING("LdtilecfgWithReg1", "0xC4,0xE2,0x78,0x49,0x08"),
    ENCODING("SttilecfgVvvvInUse", "0xC4,0xE2,0x71,0x49,0x00"),
    ENCODING("SttilecfgOfRegister", "0xC4,0xE2,0x79,0x49,0xC0"),
    ENCODING("TileloaddWithoutSib", "0xC4,0xE2,0x7B,0x4B,0x00"),
    ENCODING("TileloaddOfRegister", "0xC4,0xE2,0x7B,0x4B,0xC4"),
    ENCODING("TileloaddOfTile8", "0xC4,0x62,0x7B,0x4B,0x04,0x08"),
    ENCODING("TileloaddW1", "0xC4,0xE2,0xFB,0x4B,0x04,0x08"),
    ENCODING("TileloaddL1", "0xC4,0xE2,0x7F,0x4B,0x04,0x08"),
    ENCODING("TileloaddVvvvInUse", "0xC4,0xE2,0x3B,0x4B,0x04,0x08"),
    ENCODING("MoveWithoutPrefix", "0xC4,0xE2,0x78,0x4B,0x04,0x08"),
    ENCODING("TdpbssdOfMemory", "0xC4,0xE2,0x6B,0x5E,0x01"),
    ENCODING("TdpbssdW1", "0xC4,0xE2,0xEB,0x5E,0xC1"),
    ENCODING("TdpbssdL1", "0xC4,0xE2,0x6F,0x5E,0xC1"),
    ENCODING("TdpbssdSrc1IsTile9", "0xC4,0xC2,0x6B,0x5E,0xC1"),
    ENCODING("TdpbssdSrc2IsTile10", "0xC4,0xE2,0x2B,0x5E,0xC1"),
    ENCODING("TdpbssdDestIsTile8", "0xC4,0x62,0x6B,0x5E,0xC1"),
    ENCODING("Opcode5CWithoutPrefix", "0xC4,0xE2,0x68,0x5C,0xC1"),
    ENCODING("Opcode48", "0xC4,0xE2,0x7B,0x48,0xC0"),
    ENCODING("Map0F3A", "0xC4,0xE3,0x7B,0x49,0xC0"),
    ENCODING("PrefixBeforeVex", "0x66,0xC4,0xE2,0x7B,0x49,0xC0"),
};
#undef ENCODING

TEST_F(AmxFaults, LegalEncodings) {
  for (const Encoding& encoding : kLegalEncodings) {
    TileConfig().all(16, 64).load();
    EXPECT_EQ(signal_of(encoding.execute), 0) << encoding.name;
  }
}

TEST_F(AmxFaults, IllegalEncodings) {
  for (const Encoding& encoding : kIllegalEncodings) {
    TileConfig().all(16, 64).load();
    EXPECT_EQ(signal_of(encoding.execute), SIGILL) << encoding.name;
  }
}

}  // namespace
