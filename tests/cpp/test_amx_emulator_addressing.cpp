// Operand encodings: every base and index register, scales, displacements, RIP-relative, and all tile numbers.
#include <cstring>
#include <utility>

#include "test_support.hpp"

namespace {

using amx_test::TileConfig;

// 64 KiB whose every row of 64 bytes is told apart by its first bytes; tests point into the middle.
class AmxAddressing : public amx_test::AmxTest {
 protected:
  static constexpr std::ptrdiff_t kBytes = 64 * 1024;
  static constexpr std::ptrdiff_t kMiddle = kBytes / 2;

  void SetUp() override {
    amx_test::AmxTest::SetUp();
    for (std::ptrdiff_t i = 0; i < kBytes; ++i) {
      data_[i] = static_cast<std::uint8_t>(i % 4 == 0 ? i / 64 : i % 4 == 1 ? i / 64 / 256 : i % 251);
    }
    TileConfig().all(16, 64).load();
  }
  const std::uint8_t* middle() const { return data_ + kMiddle; }

  // Whether tile 0 holds 16 rows from middle() + offset on.
  void expect_tile(std::ptrdiff_t offset, std::ptrdiff_t stride) {
    std::uint8_t stored[1024];
    tile_asm::tilestored<0>(stored, 64);
    for (int row = 0; row < 16; ++row) {
      EXPECT_EQ(std::memcmp(stored + 64 * row, middle() + offset + row * stride, 64), 0) << "row " << row;
    }
    tile_asm::tilezero<0>();
  }

  alignas(64) std::uint8_t data_[kBytes];
};

using Load = void (*)(const void* base, std::ptrdiff_t index);

struct NamedLoad {
  const char* name;
  Load load;
};

// A load through a register of our choice, which the statement saves and restores: the compiler may hold its
// frame there. The red zone is stepped over, since the save is a push.
#define LOAD_WITH(reg, operand, base_constraint, index_constraint)                  \
  NamedLoad {                                                                       \
    operand, [](const void* base, std::ptrdiff_t index) {                           \
      asm volatile("lea -128(%%rsp), %%rsp\n\tpush %%" reg                          \
                   "\n\t"                                                           \
                   "mov %[value], %%" reg                                           \
                   "\n\t"                                                           \
                   "tileloadd " operand                                             \
                   ", %%tmm0\n\t"                                                   \
                   "pop %%" reg "\n\tlea 128(%%rsp), %%rsp"                         \
                   :                                                                \
                   : [value] base_constraint(base), [other] index_constraint(index) \
                   : "memory");                                                     \
    }                                                                               \
  }
#define LOAD_WITH_BASE(reg) LOAD_WITH(reg, "(%%" reg ",%[other],1)", "a", "c")
#define LOAD_WITH_BASE_C(reg) LOAD_WITH(reg, "(%%" reg ",%[other],1)", "a", "d")

TEST_F(AmxAddressing, EveryBaseRegister) {
  const NamedLoad loads[] = {LOAD_WITH_BASE("rax"), LOAD_WITH_BASE("rbx"), LOAD_WITH_BASE_C("rcx"),
                             LOAD_WITH_BASE("rdx"), LOAD_WITH_BASE("rsi"), LOAD_WITH_BASE("rdi"),
                             LOAD_WITH_BASE("rbp"), LOAD_WITH_BASE("r8"),  LOAD_WITH_BASE("r9"),
                             LOAD_WITH_BASE("r10"), LOAD_WITH_BASE("r11"), LOAD_WITH_BASE("r12"),
                             LOAD_WITH_BASE("r13"), LOAD_WITH_BASE("r14"), LOAD_WITH_BASE("r15")};
  for (const NamedLoad& named : loads) {
    SCOPED_TRACE(named.name);
    named.load(middle() + 128, 192);
    expect_tile(128, 192);
  }
}

#undef LOAD_WITH_BASE
#undef LOAD_WITH_BASE_C
#undef LOAD_WITH

// The stride through a register of our choice: %[value] is the stride here, %[other] the base.
#define LOAD_WITH_INDEX(reg, scale, base_constraint)                   \
  NamedLoad {                                                          \
    reg "*" #scale, [](const void* base, std::ptrdiff_t index) {       \
      asm volatile("lea -128(%%rsp), %%rsp\n\tpush %%" reg             \
                   "\n\t"                                              \
                   "mov %[value], %%" reg                              \
                   "\n\t"                                              \
                   "tileloadd (%[other],%%" reg "," #scale             \
                   "), %%tmm0\n\t"                                     \
                   "pop %%" reg "\n\tlea 128(%%rsp), %%rsp"            \
                   :                                                   \
                   : [value] "a"(index), [other] base_constraint(base) \
                   : "memory");                                        \
    }                                                                  \
  }

TEST_F(AmxAddressing, EveryIndexRegister) {
  const NamedLoad loads[] = {
      LOAD_WITH_INDEX("rax", 1, "c"), LOAD_WITH_INDEX("rbx", 1, "c"), LOAD_WITH_INDEX("rcx", 1, "d"),
      LOAD_WITH_INDEX("rdx", 1, "c"), LOAD_WITH_INDEX("rsi", 1, "c"), LOAD_WITH_INDEX("rdi", 1, "c"),
      LOAD_WITH_INDEX("rbp", 1, "c"), LOAD_WITH_INDEX("r8", 1, "c"),  LOAD_WITH_INDEX("r9", 1, "c"),
      LOAD_WITH_INDEX("r10", 1, "c"), LOAD_WITH_INDEX("r11", 1, "c"), LOAD_WITH_INDEX("r12", 1, "c"),
      LOAD_WITH_INDEX("r13", 1, "c"), LOAD_WITH_INDEX("r14", 1, "c"), LOAD_WITH_INDEX("r15", 1, "c")};
  for (const NamedLoad& named : loads) {
    SCOPED_TRACE(named.name);
    named.load(middle() + 64, -320);
    expect_tile(64, -320);
  }
}

TEST_F(AmxAddressing, EveryScale) {
  const NamedLoad loads[] = {LOAD_WITH_INDEX("rdi", 1, "c"), LOAD_WITH_INDEX("rdi", 2, "c"),
                             LOAD_WITH_INDEX("r14", 4, "c"), LOAD_WITH_INDEX("r9", 8, "c")};
  for (int i = 0; i < 4; ++i) {
    SCOPED_TRACE(loads[i].name);
    for (const std::ptrdiff_t index : {52, -44, 0}) {
      loads[i].load(middle(), index);
      expect_tile(0, index << i);
    }
  }
}

#undef LOAD_WITH_INDEX

#define LOAD_AT(operand)                                                                               \
  [](const void* base, std::ptrdiff_t index) {                                                         \
    asm volatile("tileloadd " operand ", %%tmm0" : : [base] "r"(base), [index] "r"(index) : "memory"); \
  }

TEST_F(AmxAddressing, Displacements) {
  const struct {
    std::ptrdiff_t displacement;
    Load load;
  } cases[] = {{1, LOAD_AT("1(%[base],%[index],1)")},          {127, LOAD_AT("127(%[base],%[index],1)")},
               {-128, LOAD_AT("-128(%[base],%[index],1)")},    {128, LOAD_AT("128(%[base],%[index],1)")},
               {-129, LOAD_AT("-129(%[base],%[index],1)")},    {12345, LOAD_AT("12345(%[base],%[index],1)")},
               {-12345, LOAD_AT("-12345(%[base],%[index],1)")}};
  for (const auto& [displacement, load] : cases) {
    SCOPED_TRACE(displacement);
    load(middle(), 80);
    expect_tile(displacement, 80);
  }
}

// rbp and r13 as bases cannot be encoded without a displacement, rsp and r12 not without SIB.
TEST_F(AmxAddressing, DisplacementOnSpecialBases) {
  const auto load = [this](auto statement) {
    statement(middle());
    expect_tile(-64, 96);
  };
  load([](const void* base) {
    asm volatile("mov %0, %%r13\n\ttileloadd -64(%%r13,%1,1), %%tmm0"
                 :
                 : "r"(base), "r"(std::ptrdiff_t{96})
                 : "r13", "memory");
  });
  load([](const void* base) {
    asm volatile("mov %0, %%r12\n\ttileloadd -64(%%r12,%1,1), %%tmm0"
                 :
                 : "r"(base), "r"(std::ptrdiff_t{96})
                 : "r12", "memory");
  });
}

TEST_F(AmxAddressing, NoIndexMeansStrideZero) {
  LOAD_AT("(%[base])")(middle(), 64);
  expect_tile(0, 0);
  LOAD_AT("640(%[base])")(middle(), 64);
  expect_tile(640, 0);
}

#undef LOAD_AT

// The stack pointer as base: rows copied below the stack, clear of the red zone.
TEST_F(AmxAddressing, StackPointerAsBase) {
  const std::uint8_t* source = middle();
  std::size_t size = 1024;
  std::uint8_t* destination;
  asm volatile(
      "lea -1280(%%rsp), %%rsp\n\t"
      "mov %%rsp, %0\n\t"
      "rep movsb\n\t"
      "tileloadd (%%rsp,%3,1), %%tmm0\n\t"
      "lea 1280(%%rsp), %%rsp"
      : "=&D"(destination), "+S"(source), "+c"(size)
      : "r"(std::ptrdiff_t{64})
      : "memory");
  expect_tile(0, 64);
}

// No base at all: a 32-bit address and a stride. The second one has VEX.B set, which must not make it r13.
TEST_F(AmxAddressing, DisplacementWithoutBase) {
  void* const low = reinterpret_cast<void*>(0x12340000);
  if (mmap(low, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0) !=
      low) {
    GTEST_SKIP() << "the address is taken";
  }
  std::memcpy(low, middle(), 1024);
  asm volatile("tileloadd 0x12340000(,%0,1), %%tmm0" : : "r"(std::ptrdiff_t{64}) : "memory");
  expect_tile(0, 64);
  asm volatile(".byte 0xC4,0xC2,0x7B,0x4B,0x04,0x0D,0x00,0x00,0x34,0x12"
               :
               : "c"(std::ptrdiff_t{64})
               : "memory");
  expect_tile(0, 64);
  munmap(low, 4096);
}

TEST_F(AmxAddressing, TilestoredUsesTheSameOperands) {
  tile_asm::tileloadd<0>(middle(), 64);
  std::uint8_t stored[4096] = {};
  asm volatile("mov %0, %%r12\n\tmov %1, %%r15\n\ttilestored %%tmm0, 200(%%r12,%%r15,4)"
               :
               : "r"(stored), "r"(std::ptrdiff_t{20})
               : "r12", "r15", "memory");
  for (int row = 0; row < 16; ++row)
    EXPECT_EQ(std::memcmp(stored + 200 + 80 * row, middle() + 64 * row, 64), 0);
}

TEST_F(AmxAddressing, Tileloaddt1UsesTheSameOperands) {
  asm volatile("mov %0, %%r13\n\tmov %1, %%r8\n\ttileloaddt1 4096(%%r13,%%r8,2), %%tmm0"
               :
               : "r"(middle()), "r"(std::ptrdiff_t{40})
               : "r13", "r8", "memory");
  expect_tile(4096, 80);
}

extern "C" {
[[gnu::used]] alignas(64) TileConfig amx_test_rip_config = TileConfig().all(9, 28);
[[gnu::used]] alignas(64) std::uint8_t amx_test_rip_stored[64];
}

TEST_F(AmxAddressing, ConfigurationRelativeToRip) {
  asm volatile("ldtilecfg amx_test_rip_config(%%rip)" : : : "memory");
  asm volatile("sttilecfg amx_test_rip_stored(%%rip)" : : : "memory");
  EXPECT_EQ(std::memcmp(amx_test_rip_stored, &amx_test_rip_config, 64), 0);
}

// Here an index register is part of the address, not a stride.
TEST_F(AmxAddressing, ConfigurationWithAllParts) {
  const TileConfig configs[] = {TileConfig().all(1, 4), TileConfig().all(2, 8), TileConfig().all(3, 12)};
  TileConfig stored[3];
  asm volatile("ldtilecfg 64(%0,%1,8)" : : "r"(configs), "r"(std::ptrdiff_t{8}) : "memory");
  asm volatile("sttilecfg -64(%0,%1,4)" : : "r"(stored + 2), "r"(std::ptrdiff_t{-16}) : "memory");
  EXPECT_EQ(std::memcmp(stored, configs + 2, 64), 0);
  asm volatile("mov %0, %%r13\n\tldtilecfg (%%r13)" : : "r"(configs + 1) : "r13", "memory");
  asm volatile("mov %0, %%r12\n\tsttilecfg 128(%%r12)" : : "r"(stored) : "r12", "memory");
  EXPECT_EQ(std::memcmp(stored + 2, configs + 1, 64), 0);
}

// Each of the eight tiles is its own, in all instructions that name one.
template <int... kTile>
void expect_distinct_tiles(std::integer_sequence<int, kTile...>, const std::uint8_t* rows) {
  (tile_asm::tileloadd<kTile>(rows + 64 * kTile, 64), ...);
  std::uint8_t stored[8][1024];
  (tile_asm::tilestored<kTile>(stored[kTile], 64), ...);
  for (int i = 0; i < 8; ++i) EXPECT_EQ(std::memcmp(stored[i], rows + 64 * i, 1024), 0) << "tile " << i;
  (tile_asm::tileloaddt1<7 - kTile>(rows + 64 * kTile, 64), ...);
  (tile_asm::tilestored<kTile>(stored[7 - kTile], 64), ...);
  for (int i = 0; i < 8; ++i) EXPECT_EQ(std::memcmp(stored[i], rows + 64 * i, 1024), 0) << "tile " << 7 - i;
}

TEST_F(AmxAddressing, EveryTileNumber) {
  expect_distinct_tiles(std::make_integer_sequence<int, 8>(), middle());
}

// C = 1 x 1 of A[0][0] * B[0][0], every tile holding its own number in byte 0: the sum names both sources.
template <int kDest, int kSrc1, int kSrc2>
void expect_product_operands() {
  if constexpr (kDest != kSrc1 && kDest != kSrc2 && kSrc1 != kSrc2) {
    const auto load = []<int... kTile>(std::integer_sequence<int, kTile...>) {
      const std::uint32_t numbers[8] = {2, 3, 5, 7, 11, 13, 17, 19};
      (tile_asm::tileloadd<kTile>(&numbers[kTile], 0), ...);
    };
    load(std::make_integer_sequence<int, 8>());
    tile_asm::tdpbuud<kDest, kSrc1, kSrc2>();
    constexpr std::uint32_t kNumbers[8] = {2, 3, 5, 7, 11, 13, 17, 19};
    std::uint32_t result = 0;
    tile_asm::tilestored<kDest>(&result, 0);
    EXPECT_EQ(result, kNumbers[kDest] + kNumbers[kSrc1] * kNumbers[kSrc2]) << kDest << kSrc1 << kSrc2;
  }
}

template <int kDest, int... kPair>
void expect_all_sources(std::integer_sequence<int, kPair...>) {
  (expect_product_operands<kDest, kPair / 8, kPair % 8>(), ...);
}

template <int... kDest>
void expect_all_product_operands(std::integer_sequence<int, kDest...>) {
  (expect_all_sources<kDest>(std::make_integer_sequence<int, 64>()), ...);
}

TEST_F(AmxAddressing, EveryTripleOfProductOperands) {
  TileConfig().all(1, 4).load();
  expect_all_product_operands(std::make_integer_sequence<int, 8>());
}

}  // namespace
