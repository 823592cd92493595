// Trapping emulator for Intel AMX: lets compiled AMX code run on an x86-64 Linux machine that has no AMX.
//
// Such a machine raises #UD at an AMX instruction, which the kernel turns into SIGILL. The emulator handles
// that signal: it decodes the instruction, executes it as amx_spec.hpp says on tiles of the current thread, and
// goes on behind it. So tests run the instruction stream that the compiler made, with the architecture's
// checks:
//   #UD        goes on to the previous SIGILL handler, as does every instruction that is not AMX
//   #GP        arrives as SIGSEGV with si_code SI_KERNEL, as the kernel would report it
//   page fault arrives as SIGSEGV with the address, raised by the emulator's own access to that row
// Where AddressSanitizer is present each row is checked against its shadow first and reported through it.
//
// Ways to use it: link amx_emulator_static and call install(); or preload libamx_emulator.so with
// AMX_EMULATOR=1 in the environment, which also works under Python (see signal_interpose.cpp).
//
// What it cannot do: change what CPUID and XGETBV say (ask amx_sft_moe_emulated_features() instead), save tiles
// around signal handlers that use AMX themselves, help a thread that blocks SIGILL (the kernel ends the
// process), and work on a CPU with AMX, which traps only some of the instructions: there install() refuses.
// Under ThreadSanitizer, which runs handlers with all signals blocked, a page fault ends the process. Per trap
// it takes microseconds, and a thread that has used a tile keeps 12 KiB until the process ends.
#pragma once

#include <cstdint>

#define AMX_EMULATOR_EXPORT __attribute__((visibility("default")))

namespace amx_emulator {

// Instructions executed to their end, over all threads. Faulting ones do not count.
struct Counts {
  std::uint64_t ldtilecfg = 0;
  std::uint64_t sttilecfg = 0;
  std::uint64_t tilezero = 0;
  std::uint64_t tileloadd = 0;
  std::uint64_t tileloaddt1 = 0;
  std::uint64_t tilestored = 0;
  std::uint64_t tilerelease = 0;
  std::uint64_t tdpbf16ps = 0;
  std::uint64_t tdpbssd = 0;
  std::uint64_t tdpbsud = 0;
  std::uint64_t tdpbusd = 0;
  std::uint64_t tdpbuud = 0;

  friend bool operator==(const Counts&, const Counts&) = default;
};

// Takes SIGILL over; the handler found there becomes the previous one. False, and nothing is done, where the
// CPU and the kernel provide AMX themselves. Calling it again changes nothing.
AMX_EMULATOR_EXPORT bool install();

// Puts the previous handler back. A handler that someone else has put above ours stays; ours then only passes
// on.
AMX_EMULATOR_EXPORT void uninstall();

AMX_EMULATOR_EXPORT bool installed();
AMX_EMULATOR_EXPORT Counts counts();
AMX_EMULATOR_EXPORT void reset_counts();

}  // namespace amx_emulator

// The same for C and for Python's ctypes.
extern "C" {

AMX_EMULATOR_EXPORT int amx_emulator_install(void);  // 1: installed, 0: refused
AMX_EMULATOR_EXPORT void amx_emulator_uninstall(void);
AMX_EMULATOR_EXPORT int amx_emulator_installed(void);

// Fills out[0..11] in the order of Counts:
//   0 LDTILECFG    1 STTILECFG  2 TILEZERO   3 TILELOADD   4 TILELOADDT1   5 TILESTORED
//   6 TILERELEASE  7 TDPBF16PS  8 TDPBSSD    9 TDPBSUD    10 TDPBUSD      11 TDPBUUD
AMX_EMULATOR_EXPORT void amx_emulator_counts(std::uint64_t* out);
AMX_EMULATOR_EXPORT void amx_emulator_reset_counts(void);

// What the operator library asks, through a weak declaration of its own: bit 0 AMX-TILE, bit 1 AMX-BF16,
// bit 2 AMX-INT8, all set while the emulator is installed, 0 otherwise.
AMX_EMULATOR_EXPORT unsigned amx_sft_moe_emulated_features(void);

}  // extern "C"
