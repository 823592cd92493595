// What this CPU and this operating system can run: CPUID, XCR0 and, for AMX, the kernel's permission.
#pragma once

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <string>
#include <system_error>

#include "amx_sft_moe/core/config_macros.hpp"

// Test support that executes AMX instructions in a signal handler defines this symbol (bit 0 AMX-TILE, 1
// AMX-BF16, 2 AMX-INT8). It is weak: without such support nothing is linked and its address is null. CPUID
// cannot be trapped, so this is the one place where the library can be told of instructions that the CPU does
// not report.
extern "C" __attribute__((weak)) unsigned amx_sft_moe_emulated_features();

AMX_SFT_MOE_NAMESPACE_BEGIN

struct CpuFeatures {
  bool avx2 = false;         // AVX2 and FMA, with the operating system saving ymm
  bool avx512 = false;       // AVX512 F, BW, DQ, VL, with the operating system saving zmm
  bool avx512_bf16 = false;  // VDPBF16PS
  // VDPBF16PS runs at half the rate of fp32 FMA (Intel; measured 106 against 214 GFLOP/s a core on Emerald Rapids). AMD
  // Zen 4 and 5 have twice the rate of FMA instead.
  bool slow_dpbf16 = false;
  // Hardware follows rows that are read side by side (Intel; measured on Cascade Lake): asking for lines in another order
  // leads it astray. AMD's Zen reads the faster the less it jumps.
  bool follows_rows = false;
  // Lines asked for into L2 may not come: of single ones 4 to 13 % did not on AMD Zen 5 (family 26; benchmarks/LOG.md,
  // "Requests that are lost"), where all came that were asked for into L1. Zen 4 is the slower for that.
  bool loses_requests = false;
  // What follows a line on a page that no TLB knows goes on until its entry has been read (Zen 5: a loop that looks up many
  // pages at once takes longer, "Pages one by one").
  bool hides_page_walks = false;
  bool amx_tile = false;  // AMX-TILE, with the operating system saving tiles
  bool amx_bf16 = false;
  bool amx_int8 = false;
  bool amx_emulated = false;  // the three above come from test support, not from the CPU
};

namespace arch {

// XCR0. `volatile` asm: callers have checked OSXSAVE.
inline std::uint64_t read_xcr0() {
  std::uint32_t low = 0;
  std::uint32_t high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<std::uint64_t>(high) << 32) | low;
}

inline CpuFeatures read_cpu_features() {
  CpuFeatures found;
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0) return found;
  const unsigned family = (a >> 8 & 0xfU) + (a >> 20 & 0xffU);  // the second part counts where the first is 15
  const bool osxsave = (c >> 27 & 1U) != 0;
  const bool fma = (c >> 12 & 1U) != 0;
  const std::uint64_t xcr0 = osxsave ? read_xcr0() : 0;
  const bool ymm = (xcr0 & 0x6U) == 0x6U;
  const bool zmm = (xcr0 & 0xe6U) == 0xe6U;
  const bool tiles = (xcr0 & 0x60000U) == 0x60000U;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return found;
  found.avx2 = ymm && fma && (b >> 5 & 1U) != 0;
  found.avx512 =
      zmm && fma && (b >> 16 & 1U) != 0 && (b >> 17 & 1U) != 0 && (b >> 30 & 1U) != 0 && (b >> 31 & 1U) != 0;
  found.amx_bf16 = tiles && (d >> 22 & 1U) != 0;
  found.amx_tile = tiles && (d >> 24 & 1U) != 0;
  found.amx_int8 = tiles && (d >> 25 & 1U) != 0;
  if (a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0)
    found.avx512_bf16 = found.avx512 && (a >> 5 & 1U) != 0;
  const bool intel = __get_cpuid(0, &a, &b, &c, &d) != 0 && b == 0x756e6547U;  // "Genu"(ineIntel)
  found.slow_dpbf16 = intel;
  found.follows_rows = intel;
  const bool zen5 = b == 0x68747541U && family >= 26;  // "Auth"(enticAMD)
  found.loses_requests = zen5;
  found.hides_page_walks = zen5;
  return found;
}

// Features of this process, the emulator's included.
inline CpuFeatures cpu_features() {
  CpuFeatures found = read_cpu_features();
  if (amx_sft_moe_emulated_features != nullptr) {
    const unsigned emulated = amx_sft_moe_emulated_features();
    if (emulated != 0) {
      found.amx_tile = (emulated & 1U) != 0;
      found.amx_bf16 = (emulated & 2U) != 0;
      found.amx_int8 = (emulated & 4U) != 0;
      found.amx_emulated = true;
    }
  }
  return found;
}

// Linux gives tile state to a process on request only (arch_prctl ARCH_REQ_XCOMP_PERM). Asking again is
// harmless and the answer holds for all threads of the process; from then on alternate signal stacks (sigaltstack) need
// room for tiles, AT_MINSIGSTKSZ (some 12 KB), and with one that has less the request is refused, ENOSPC. Returns 0, or -1
// and sets errno.
inline long request_amx_permission() {
  constexpr long kRequestPermission = 0x1023;
  constexpr long kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData);
}

// What request_amx_permission() was refused for.
inline std::string amx_denial(int error) {
  std::string why = std::generic_category().message(error) + " (arch_prctl ARCH_REQ_XCOMP_PERM)";
  if (error == ENOSPC)
    why += ": a thread's alternate signal stack (sigaltstack) is smaller than AT_MINSIGSTKSZ";
  return why;
}

// Empty where AMX can be used; otherwise why not.
inline std::string amx_refusal(const CpuFeatures& cpu) {
  if (!cpu.amx_tile || !cpu.amx_bf16) return "the CPU or the operating system reports no AMX-BF16";
  if (!cpu.avx512) return "AMX kernels need AVX512 (F, BW, DQ, VL) beside AMX";
  if (cpu.amx_emulated || request_amx_permission() == 0) return {};
  return "the operating system refused the permission for AMX tile data: " + amx_denial(errno);
}

}  // namespace arch
AMX_SFT_MOE_NAMESPACE_END
