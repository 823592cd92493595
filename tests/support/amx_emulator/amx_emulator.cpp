// The SIGILL handler of the emulator, its counters, and its public interface.
#include "amx_emulator.hpp"

#include <cpuid.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <array>
#include <atomic>
#include <bit>
#include <cerrno>
#include <mutex>

#include "amx_spec.hpp"
#include "asan_check.hpp"
#include "decode.hpp"
#include "signal_chain.hpp"

namespace amx_emulator {
namespace {

using amx_spec::Fault;
using amx_spec::TileState;

std::atomic<bool> g_installed{false};

std::atomic<std::uint64_t> g_counts[kOperations] = {};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free, "counted in a signal handler");
static_assert(sizeof(Counts) == kOperations * sizeof(std::uint64_t));

// A pointer, not the 8 KiB themselves: with the initial-exec model, the one whose first access in a thread
// never allocates, the block must fit the little static space that a library opened later still finds.
[[gnu::tls_model("initial-exec")]] constinit thread_local TileState* t_state = nullptr;

// Fresh pages are zero, which is the INIT state. Null where the system has none left.
TileState* state_of_this_thread() {
  if (t_state == nullptr) {
    void* const pages =
        mmap(nullptr, sizeof(TileState), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages != MAP_FAILED) t_state = static_cast<TileState*>(pages);
  }
  return t_state;
}

void check_rows(Access access, const TileState& state, const Instruction& instruction) {
  if (amx_spec::check_tile_move(state, instruction.dest) != Fault::kNone) return;  // faults before any access
  for (int row = state.start_row; row < state.rows[instruction.dest]; ++row) {
    check_with_asan(access, amx_spec::row_address(instruction.address, instruction.stride, row),
                    state.colsb[instruction.dest]);
  }
}

Fault execute_product(const Instruction& i, TileState& state) {
  switch (i.operation) {
    case Operation::kTdpbf16ps:
      return amx_spec::tdpbf16ps(state, i.dest, i.src1, i.src2);
    case Operation::kTdpbssd:
      return amx_spec::tdpbssd(state, i.dest, i.src1, i.src2);
    case Operation::kTdpbsud:
      return amx_spec::tdpbsud(state, i.dest, i.src1, i.src2);
    case Operation::kTdpbusd:
      return amx_spec::tdpbusd(state, i.dest, i.src1, i.src2);
    default:
      return amx_spec::tdpbuud(state, i.dest, i.src1, i.src2);
  }
}

Fault execute(const Instruction& i, TileState& state) {
  void* const memory = reinterpret_cast<void*>(i.address);
  switch (i.operation) {
    case Operation::kLdtilecfg:
      check_with_asan(Access::kLoad, i.address, amx_spec::kConfigBytes);
      return amx_spec::ldtilecfg(state, memory);
    case Operation::kSttilecfg:
      check_with_asan(Access::kStore, i.address, amx_spec::kConfigBytes);
      return amx_spec::sttilecfg(state, memory);
    case Operation::kTilezero:
      return amx_spec::tilezero(state, i.dest);
    case Operation::kTileloadd:
      check_rows(Access::kLoad, state, i);
      return amx_spec::tileloadd(state, i.dest, memory, i.stride);
    case Operation::kTileloaddt1:
      check_rows(Access::kLoad, state, i);
      return amx_spec::tileloaddt1(state, i.dest, memory, i.stride);
    case Operation::kTilestored:
      check_rows(Access::kStore, state, i);
      return amx_spec::tilestored(state, i.dest, memory, i.stride);
    case Operation::kTilerelease:
      return amx_spec::tilerelease(state);
    default:
      return execute_product(i, state);
  }
}

// Executes the instruction at RIP and steps over it, or says what it raises.
Fault emulate(ucontext_t& context) {
  greg_t* const registers = context.uc_mcontext.gregs;
  const auto* code = reinterpret_cast<const std::uint8_t*>(registers[REG_RIP]);
  const std::optional<Instruction> instruction = decode(code, registers);
  if (!instruction) return Fault::kUndefinedOpcode;
  TileState* const state = state_of_this_thread();
  if (state == nullptr) return Fault::kUndefinedOpcode;
  const Fault fault = execute(*instruction, *state);
  if (fault != Fault::kNone) return fault;
  registers[REG_RIP] += static_cast<greg_t>(instruction->length);
  g_counts[static_cast<std::size_t>(instruction->operation)].fetch_add(1, std::memory_order_relaxed);
  return Fault::kNone;
}

void deliver_general_protection(void* context) {
  siginfo_t info = {};  // as the kernel fills it: #GP has no address
  info.si_signo = SIGSEGV;
  info.si_code = SI_KERNEL;
  deliver(SIGSEGV, &info, context);
}

void on_sigill(int signo, siginfo_t* info, void* context) {
  const int saved_errno = errno;
  const bool is_trap = info->si_code > 0;  // not raise() or kill(), wherever RIP may stand
  const Fault fault =
      is_trap && installed() ? emulate(*static_cast<ucontext_t*>(context)) : Fault::kUndefinedOpcode;
  if (fault == Fault::kUndefinedOpcode) deliver(signo, info, context);
  if (fault == Fault::kGeneralProtection) deliver_general_protection(context);
  errno = saved_errno;
}

// No SA_ONSTACK: an alternate stack is sized for a crash report. SA_NODEFER and the empty mask leave the
// interrupted code's mask in force, so that a memory fault inside the handler is an ordinary SIGSEGV, and a
// handler further down the chain that jumps out leaves no signal blocked that it would not have blocked itself.
Action our_action() {
  Action action = {};
  action.sa_sigaction = &on_sigill;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigemptyset(&action.sa_mask);
  return action;
}

bool is_ours(const Action& action) {
  return (action.sa_flags & SA_SIGINFO) != 0 && action.sa_sigaction == &on_sigill;
}

// With AMX in XCR0 the kernel arms extended feature disable until a process asks for tiles. Tile loads then
// trap too, but LDTILECFG and TILERELEASE do not, so emulation would see half of the program.
bool cpu_executes_amx() {
  constexpr unsigned kOsxsave = 1u << 27;
  constexpr unsigned kTileState = 3u << 17;
  unsigned eax, ebx, ecx, edx;
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0 || (ecx & kOsxsave) == 0) return false;
  unsigned low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & kTileState) == kTileState;
}

constinit std::mutex g_install_mutex;

}  // namespace

bool install() {
  const std::lock_guard<std::mutex> lock(g_install_mutex);
  if (installed()) return true;
  if (cpu_executes_amx()) return false;
  Action present;
  kernel_sigaction()(SIGILL, nullptr, &present);
  if (!is_ours(present)) {
    // Known before it can be needed: an unrelated SIGILL may come right after the next call.
    set_previous_action(present);
    const Action ours = our_action();
    kernel_sigaction()(SIGILL, &ours, nullptr);
  }
  g_installed.store(true);
  return true;
}

void uninstall() {
  const std::lock_guard<std::mutex> lock(g_install_mutex);
  if (!g_installed.exchange(false)) return;
  Action present;
  kernel_sigaction()(SIGILL, nullptr, &present);
  if (!is_ours(present)) return;
  const Action previous = previous_action();
  kernel_sigaction()(SIGILL, &previous, nullptr);
}

bool installed() {
  return g_installed.load(std::memory_order_relaxed);
}

Counts counts() {
  std::array<std::uint64_t, kOperations> values;
  for (std::size_t i = 0; i < kOperations; ++i) values[i] = g_counts[i].load(std::memory_order_relaxed);
  return std::bit_cast<Counts>(values);
}

void reset_counts() {
  for (auto& count : g_counts) count.store(0, std::memory_order_relaxed);
}

}  // namespace amx_emulator

extern "C" {

int amx_emulator_install(void) {
  return amx_emulator::install() ? 1 : 0;
}

void amx_emulator_uninstall(void) {
  amx_emulator::uninstall();
}

int amx_emulator_installed(void) {
  return amx_emulator::installed() ? 1 : 0;
}

void amx_emulator_counts(std::uint64_t* out) {
  const auto values =
      std::bit_cast<std::array<std::uint64_t, amx_emulator::kOperations>>(amx_emulator::counts());
  for (const std::uint64_t value : values) *out++ = value;
}

void amx_emulator_reset_counts(void) {
  amx_emulator::reset_counts();
}

unsigned amx_sft_moe_emulated_features(void) {
  constexpr unsigned kTileBf16Int8 = 7;
  return amx_emulator::installed() ? kTileBf16Int8 : 0;
}

}  // extern "C"
