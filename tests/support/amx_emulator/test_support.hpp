// What the emulator's tests share: a fixture, tile configurations, memory between guard pages, caught signals.
//
// On a machine that has AMX the same tests run on the hardware, as far as they do not look at the emulator
// itself.
#pragma once

#include <gtest/gtest.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "amx_emulator.hpp"
#include "guarded.hpp"
#include "tile_asm.hpp"

namespace amx_test {

// The 64 bytes of LDTILECFG, field by field.
struct alignas(64) TileConfig {
  std::uint8_t palette = 1;
  std::uint8_t start_row = 0;
  std::uint8_t reserved_2[14] = {};
  std::uint16_t colsb[8] = {};
  std::uint8_t reserved_32[16] = {};
  std::uint8_t rows[8] = {};
  std::uint8_t reserved_56[8] = {};

  TileConfig& tile(int index, int tile_rows, int tile_colsb) {
    rows[index] = static_cast<std::uint8_t>(tile_rows);
    colsb[index] = static_cast<std::uint16_t>(tile_colsb);
    return *this;
  }
  // The same shape for all eight.
  TileConfig& all(int tile_rows, int tile_colsb) {
    for (int i = 0; i < 8; ++i) tile(i, tile_rows, tile_colsb);
    return *this;
  }
  // Tiles C = 0, A = 1, B = 2 of a product [m, k] x [k, n], n and k in groups of 4 bytes.
  TileConfig& product(int m, int n, int k) { return tile(0, m, 4 * n).tile(1, m, 4 * k).tile(2, k, 4 * n); }

  void load() const { tile_asm::ldtilecfg(this); }
};
static_assert(sizeof(TileConfig) == 64);

// Linux gives tile data only to processes that ask for it.
inline bool request_native_amx() {
  constexpr int kRequestPermission = 0x1023;
  constexpr int kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

class AmxTest : public testing::Test {
 protected:
  void SetUp() override {
    emulated_ = amx_emulator::install();
    if (!emulated_ && !request_native_amx()) GTEST_SKIP() << "neither emulated nor permitted by the kernel";
    amx_emulator::reset_counts();
    usable_ = true;
  }
  void TearDown() override {
    if (usable_) tile_asm::tilerelease();
    amx_emulator::uninstall();
  }
  // Natively Linux gives a handler fresh tile state, and one that jumps out leaves it so; the emulator's tiles are what
  // the faulting instruction left.
  bool emulated() const { return emulated_; }

 private:
  bool emulated_ = false;
  bool usable_ = false;
};

// For tests of the emulator itself.
class EmulatorTest : public AmxTest {
 protected:
  void SetUp() override {
    AmxTest::SetUp();
    if (!emulated()) GTEST_SKIP() << "this CPU executes AMX itself";
  }
};

// The bytes of a page directly before and directly behind which every access is a SIGSEGV.
class GuardedPages {
 public:
  void protect(int protection) const { memory_.protect(protection); }
  std::uint8_t* begin() const { return reinterpret_cast<std::uint8_t*>(memory_.pages()); }
  std::uint8_t* end() const { return begin() + page(); }
  std::size_t page() const { return memory_.page_bytes(); }

 private:
  sft_test::GuardedMemory memory_{1, sft_test::Edge::kStart};  // of which there are whole pages
};

struct CaughtSignal {
  int signo = 0;  // 0: none came
  int code = 0;
  void* address = nullptr;
  const void* rip = nullptr;
};

namespace detail {
inline sigjmp_buf jump_out;
inline CaughtSignal caught;

inline void catch_and_jump(int signo, siginfo_t* info, void* context) {
  caught.signo = signo;
  caught.code = info->si_code;
  caught.address = info->si_addr;
  caught.rip = reinterpret_cast<void*>(static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP]);
  siglongjmp(jump_out, 1);
}
}  // namespace detail

// A handler for SIGILL below the emulator's, as a program would have it that registered before the emulator.
class PreviousSigillHandler {
 public:
  explicit PreviousSigillHandler(const struct sigaction& action) : was_installed_(amx_emulator::installed()) {
    amx_emulator::uninstall();
    sigaction(SIGILL, &action, &old_);
    if (was_installed_) amx_emulator::install();
  }
  ~PreviousSigillHandler() {
    amx_emulator::uninstall();
    sigaction(SIGILL, &old_, nullptr);
    if (was_installed_) amx_emulator::install();
  }
  PreviousSigillHandler(const PreviousSigillHandler&) = delete;
  PreviousSigillHandler& operator=(const PreviousSigillHandler&) = delete;

 private:
  bool was_installed_;
  struct sigaction old_;
};

// Runs `body` up to its end or to the first SIGILL or SIGSEGV, and tells which. One thread at a time.
template <class Body>
CaughtSignal catch_signal(Body body) {
  struct sigaction catcher = {};
  catcher.sa_sigaction = &detail::catch_and_jump;
  catcher.sa_flags = SA_SIGINFO;
  sigemptyset(&catcher.sa_mask);
  const PreviousSigillHandler sigill(catcher);
  struct sigaction old_sigsegv;
  sigaction(SIGSEGV, &catcher, &old_sigsegv);
  detail::caught = CaughtSignal();
  if (sigsetjmp(detail::jump_out, 1) == 0) body();
  sigaction(SIGSEGV, &old_sigsegv, nullptr);
  return detail::caught;
}

template <class Body>
int signal_of(Body body) {
  return catch_signal(body).signo;
}

}  // namespace amx_test
