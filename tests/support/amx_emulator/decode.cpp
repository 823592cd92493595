// VEX, ModRM and SIB decoding of the AMX instructions; see the opcode tables of the manual's volume 2.
#include "decode.hpp"

#include <cstring>

namespace amx_emulator {
namespace {

// Values of VEX.pp.
constexpr unsigned kNoPrefix = 0;
constexpr unsigned kPrefix66 = 1;
constexpr unsigned kPrefixF3 = 2;
constexpr unsigned kPrefixF2 = 3;

constexpr unsigned kRegisterForm = 3;      // ModRM.mod: r/m is a register
constexpr unsigned kSibFollows = 4;        // ModRM.rm
constexpr unsigned kNoIndex = 4;           // index number in SIB, with VEX.X
constexpr unsigned kDisplacementOnly = 5;  // ModRM.rm or SIB.base, where ModRM.mod is 0

// Fetches the instruction byte by byte: the next page need not be there.
class Cursor {
 public:
  explicit Cursor(const std::uint8_t* code) : start_(code), next_(code) {}

  unsigned byte() { return *next_++; }
  std::ptrdiff_t displacement8() { return static_cast<std::int8_t>(byte()); }
  std::ptrdiff_t displacement32() {
    std::int32_t value;
    std::memcpy(&value, next_, sizeof value);
    next_ += sizeof value;
    return value;
  }
  std::uintptr_t address() const { return reinterpret_cast<std::uintptr_t>(next_); }
  std::size_t length() const { return static_cast<std::size_t>(next_ - start_); }

 private:
  const std::uint8_t* start_;
  const std::uint8_t* next_;
};

// VEX prefix, opcode and ModRM. r, x and b are 0 or 8: the high bit of a register number.
struct Encoding {
  unsigned prefix;
  unsigned r, x, b;
  unsigned vvvv;
  unsigned opcode;
  unsigned mod, reg, rm;
};

// Only VEX.128.0F38.W0, the form all AMX instructions have.
std::optional<Encoding> read_encoding(Cursor& cursor) {
  constexpr unsigned kThreeByteVex = 0xC4;
  constexpr unsigned kMap0F38 = 2;
  constexpr unsigned kWAndL = 0x84;
  if (cursor.byte() != kThreeByteVex) return std::nullopt;
  const unsigned rxb_map = cursor.byte();
  if ((rxb_map & 0x1F) != kMap0F38) return std::nullopt;
  const unsigned w_vvvv_l_pp = cursor.byte();
  if ((w_vvvv_l_pp & kWAndL) != 0) return std::nullopt;

  Encoding e;
  e.r = (rxb_map & 0x80) != 0 ? 0 : 8;  // stored inverted, as vvvv is
  e.x = (rxb_map & 0x40) != 0 ? 0 : 8;
  e.b = (rxb_map & 0x20) != 0 ? 0 : 8;
  e.vvvv = ~(w_vvvv_l_pp >> 3) & 0xF;
  e.prefix = w_vvvv_l_pp & 3;
  e.opcode = cursor.byte();
  const unsigned modrm = cursor.byte();
  e.mod = modrm >> 6;
  e.reg = (modrm >> 3) & 7;
  e.rm = modrm & 7;
  return e;
}

std::uintptr_t register_value(const greg_t* registers, unsigned number) {
  constexpr int kFrameIndex[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                   REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
  return static_cast<std::uintptr_t>(registers[kFrameIndex[number]]);
}

struct MemoryOperand {
  std::uintptr_t base;   // base register and displacement
  std::uintptr_t index;  // scaled index register, 0 without one
};

MemoryOperand read_memory_operand(Cursor& cursor, const Encoding& e, const greg_t* registers) {
  MemoryOperand operand = {0, 0};
  unsigned base = e.rm;
  if (e.rm == kSibFollows) {
    const unsigned sib = cursor.byte();
    const unsigned index = ((sib >> 3) & 7) | e.x;
    if (index != kNoIndex) operand.index = register_value(registers, index) << (sib >> 6);
    base = sib & 7;
  }
  if (e.mod == 0 && base == kDisplacementOnly) {
    operand.base = static_cast<std::uintptr_t>(cursor.displacement32());
    // Without a SIB byte this form is relative to the next instruction, which starts after the displacement.
    if (e.rm != kSibFollows) operand.base += cursor.address();
    return operand;
  }
  operand.base = register_value(registers, base | e.b);
  if (e.mod == 1) operand.base += static_cast<std::uintptr_t>(cursor.displacement8());
  if (e.mod == 2) operand.base += static_cast<std::uintptr_t>(cursor.displacement32());
  return operand;
}

// 0F38 49 with a register: TILERELEASE and TILEZERO.
std::optional<Instruction> decode_state_change(const Encoding& e) {
  if (e.r != 0 || e.b != 0 || e.rm != 0) return std::nullopt;
  Instruction instruction = {};
  instruction.dest = static_cast<int>(e.reg);
  if (e.prefix == kPrefixF2) {
    instruction.operation = Operation::kTilezero;
    return instruction;
  }
  if (e.prefix == kNoPrefix && e.reg == 0) {
    instruction.operation = Operation::kTilerelease;
    return instruction;
  }
  return std::nullopt;
}

// 0F38 49 with memory: LDTILECFG and STTILECFG.
std::optional<Instruction> decode_config(Cursor& cursor, const Encoding& e, const greg_t* registers) {
  if (e.prefix > kPrefix66 || e.reg != 0 || e.r != 0) return std::nullopt;
  Instruction instruction = {};
  instruction.operation = e.prefix == kNoPrefix ? Operation::kLdtilecfg : Operation::kSttilecfg;
  const MemoryOperand operand = read_memory_operand(cursor, e, registers);
  instruction.address = operand.base + operand.index;
  return instruction;
}

// 0F38 4B: TILELOADD, TILELOADDT1 and TILESTORED. The index register is not added: it is the stride.
std::optional<Instruction> decode_move(Cursor& cursor, const Encoding& e, const greg_t* registers) {
  if (e.prefix == kNoPrefix || e.mod == kRegisterForm || e.rm != kSibFollows || e.r != 0) return std::nullopt;
  Instruction instruction = {};
  instruction.operation = e.prefix == kPrefixF2   ? Operation::kTileloadd
                          : e.prefix == kPrefix66 ? Operation::kTileloaddt1
                                                  : Operation::kTilestored;
  instruction.dest = static_cast<int>(e.reg);
  const MemoryOperand operand = read_memory_operand(cursor, e, registers);
  instruction.address = operand.base;
  instruction.stride = static_cast<std::ptrdiff_t>(operand.index);
  return instruction;
}

// 0F38 5C and 5E: the products, three tiles each.
std::optional<Instruction> decode_product(const Encoding& e) {
  constexpr Operation kByteProduct[4] = {Operation::kTdpbuud, Operation::kTdpbusd, Operation::kTdpbsud,
                                         Operation::kTdpbssd};  // by prefix
  if (e.mod != kRegisterForm || e.r != 0 || e.b != 0 || e.vvvv > 7) return std::nullopt;
  if (e.opcode == 0x5C && e.prefix != kPrefixF3) return std::nullopt;  // TDPFP16PS and the like
  Instruction instruction = {};
  instruction.operation = e.opcode == 0x5C ? Operation::kTdpbf16ps : kByteProduct[e.prefix];
  instruction.dest = static_cast<int>(e.reg);
  instruction.src1 = static_cast<int>(e.rm);
  instruction.src2 = static_cast<int>(e.vvvv);
  return instruction;
}

std::optional<Instruction> decode_operands(Cursor& cursor, const Encoding& e, const greg_t* registers) {
  if (e.opcode == 0x5C || e.opcode == 0x5E) return decode_product(e);
  if (e.vvvv != 0) return std::nullopt;
  if (e.opcode == 0x4B) return decode_move(cursor, e, registers);
  if (e.opcode != 0x49) return std::nullopt;
  return e.mod == kRegisterForm ? decode_state_change(e) : decode_config(cursor, e, registers);
}

}  // namespace

std::optional<Instruction> decode(const std::uint8_t* code, const greg_t* registers) {
  Cursor cursor(code);
  const std::optional<Encoding> encoding = read_encoding(cursor);
  if (!encoding) return std::nullopt;
  std::optional<Instruction> instruction = decode_operands(cursor, *encoding, registers);
  if (instruction) instruction->length = cursor.length();
  return instruction;
}

}  // namespace amx_emulator
