// The emulator among signal handlers: what it passes on, to whom, in which form, and what it leaves behind.
#include <atomic>
#include <cerrno>
#include <cstring>

#include "test_support.hpp"

namespace {

using amx_test::PreviousSigillHandler;
using amx_test::TileConfig;

struct Seen {
  int calls = 0;
  int signo = 0;
  int code = 0;
  bool blocks_itself = false;
  bool blocks_usr1 = false;
  bool blocks_usr2 = false;
};
Seen g_seen;

bool is_blocked(int signo) {
  sigset_t mask;
  pthread_sigmask(SIG_SETMASK, nullptr, &mask);
  return sigismember(&mask, signo) == 1;
}

void note(int signo, int code) {
  ++g_seen.calls;
  g_seen.signo = signo;
  g_seen.code = code;
  g_seen.blocks_itself = is_blocked(signo);
  g_seen.blocks_usr1 = is_blocked(SIGUSR1);
  g_seen.blocks_usr2 = is_blocked(SIGUSR2);
}

// Both step over the two bytes of UD2.
void step_over(int signo, siginfo_t* info, void* context) {
  note(signo, info->si_code);
  static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP] += 2;
}

void only_note(int signo) {
  note(signo, 0);
}

struct sigaction action_of(void (*handler)(int, siginfo_t*, void*), int flags = 0) {
  struct sigaction action = {};
  action.sa_sigaction = handler;
  action.sa_flags = SA_SIGINFO | flags;
  sigemptyset(&action.sa_mask);
  return action;
}

struct sigaction action_of(void (*handler)(int), int flags = 0) {
  struct sigaction action = {};
  action.sa_handler = handler;
  action.sa_flags = flags;
  sigemptyset(&action.sa_mask);
  return action;
}

void ud2() {
  asm volatile("ud2" : : : "memory");
}

class EmulatorSignals : public amx_test::EmulatorTest {
 protected:
  void SetUp() override {
    amx_test::EmulatorTest::SetUp();
    g_seen = Seen();
  }
};
using EmulatorSignalsDeathTest = EmulatorSignals;

TEST_F(EmulatorSignals, UnrelatedInstructionReachesThePreviousHandler) {
  const PreviousSigillHandler previous(action_of(&step_over));
  ud2();
  EXPECT_EQ(g_seen.calls, 1);
  EXPECT_EQ(g_seen.signo, SIGILL);
  EXPECT_EQ(g_seen.code, ILL_ILLOPN);
  TileConfig().all(1, 4).load();  // and the emulator goes on
  EXPECT_EQ(g_seen.calls, 1);
}

TEST_F(EmulatorSignals, PreviousHandlerSeesTheFaultingInstruction) {
  const void* expected = nullptr;
  const auto caught = amx_test::catch_signal([&expected] {
    asm volatile("lea 1f(%%rip), %%rax\n\tmov %%rax, %0\n1:\ttilezero %%tmm0"
                 : "=m"(expected)
                 :
                 : "rax", "memory");
  });
  EXPECT_EQ(caught.signo, SIGILL);
  EXPECT_NE(expected, nullptr);
  EXPECT_EQ(caught.rip, expected);
}

TEST_F(EmulatorSignals, GeneralProtectionNamesTheFaultingInstruction) {
  TileConfig config;
  config.palette = 9;
  const void* expected = nullptr;
  const auto caught = amx_test::catch_signal([&] {
    asm volatile("lea 1f(%%rip), %%rax\n\tmov %%rax, %0\n1:\tldtilecfg (%1)"
                 : "=m"(expected)
                 : "r"(&config)
                 : "rax", "memory");
  });
  EXPECT_EQ(caught.signo, SIGSEGV);
  EXPECT_EQ(caught.rip, expected);
}

TEST_F(EmulatorSignals, HandlerOfOneArgument) {
  const PreviousSigillHandler previous(action_of(&only_note));
  raise(SIGILL);
  EXPECT_EQ(g_seen.calls, 1);
  EXPECT_EQ(g_seen.signo, SIGILL);
}

// raise() is not an instruction: it goes on even when a tile instruction happens to be next.
TEST_F(EmulatorSignals, RaisedSigillIsNotEmulated) {
  const PreviousSigillHandler previous(action_of(&only_note));
  TileConfig().all(1, 4).load();
  amx_emulator::reset_counts();
  long result;  // the kernel delivers the signal on the way back to the instruction behind SYSCALL
  asm volatile("syscall\n\ttilezero %%tmm0"
               : "=a"(result)
               : "0"(SYS_tgkill), "D"(getpid()), "S"(syscall(SYS_gettid)), "d"(SIGILL)
               : "rcx", "r11", "memory");
  EXPECT_EQ(result, 0);
  EXPECT_EQ(g_seen.calls, 1);
  EXPECT_EQ(amx_emulator::counts().tilezero, 1u);
}

TEST_F(EmulatorSignals, IgnoredSigillStaysIgnored) {
  const PreviousSigillHandler previous(action_of(SIG_IGN));
  raise(SIGILL);
  SUCCEED();
}

TEST_F(EmulatorSignals, HandlerRunsUnderItsOwnMask) {
  struct sigaction action = action_of(&step_over);
  sigaddset(&action.sa_mask, SIGUSR1);
  {
    const PreviousSigillHandler previous(action);
    ud2();
  }
  EXPECT_TRUE(g_seen.blocks_itself);
  EXPECT_TRUE(g_seen.blocks_usr1);
  EXPECT_FALSE(g_seen.blocks_usr2);
  EXPECT_FALSE(is_blocked(SIGUSR1)) << "the mask must be back";

  const PreviousSigillHandler previous(action_of(&step_over, SA_NODEFER));
  ud2();
  EXPECT_EQ(g_seen.calls, 2);
  EXPECT_FALSE(g_seen.blocks_itself);
  EXPECT_FALSE(g_seen.blocks_usr1);
}

TEST_F(EmulatorSignals, ErrnoIsKept) {
  errno = 4711;
  TileConfig().all(16, 64).load();
  tile_asm::tilezero<0>();
  EXPECT_EQ(errno, 4711);
}

TEST_F(EmulatorSignals, UninstallPutsThePreviousHandlerBack) {
  const PreviousSigillHandler previous(action_of(&step_over, SA_NODEFER));
  amx_emulator::uninstall();
  EXPECT_FALSE(amx_emulator::installed());
  EXPECT_EQ(amx_sft_moe_emulated_features(), 0u);
  struct sigaction found;
  sigaction(SIGILL, nullptr, &found);
  EXPECT_EQ(found.sa_sigaction, &step_over);
  EXPECT_EQ(found.sa_flags & SA_NODEFER, SA_NODEFER);
  EXPECT_TRUE(amx_emulator::install());
}

TEST_F(EmulatorSignals, InstallingTwiceIsInstallingOnce) {
  const PreviousSigillHandler previous(action_of(&step_over));
  EXPECT_TRUE(amx_emulator::install());
  EXPECT_TRUE(amx_emulator::installed());
  EXPECT_EQ(amx_sft_moe_emulated_features(), 7u);
  ud2();  // would recurse for ever, were the emulator its own previous handler
  EXPECT_EQ(g_seen.calls, 1);
}

// A handler put above the emulator's that passes on what it does not know, as crash reporters do.
TEST_F(EmulatorSignals, HandlerAboveMayPassOn) {
  static struct sigaction below;
  static std::atomic<int> calls;
  calls = 0;
  const struct sigaction above = action_of([](int signo, siginfo_t* info, void* context) {
    ++calls;
    below.sa_sigaction(signo, info, context);
  });
  sigaction(SIGILL, &above, &below);
  TileConfig().all(1, 4).load();
  tile_asm::tilezero<0>();
  EXPECT_EQ(calls, 2);
  amx_emulator::uninstall();
  struct sigaction found;
  sigaction(SIGILL, nullptr, &found);
  EXPECT_EQ(found.sa_sigaction, above.sa_sigaction) << "uninstall() must not remove a handler that is not ours";
  const struct sigaction standard = action_of(SIG_DFL);
  sigaction(SIGILL, &standard, nullptr);
  EXPECT_TRUE(amx_emulator::install());
}

// Without a handler the process must end by the signal, not by anything else.
void default_actions() {
  signal(SIGSEGV, SIG_DFL);
  amx_emulator::uninstall();
  signal(SIGILL, SIG_DFL);
  amx_emulator::install();
}

TEST_F(EmulatorSignalsDeathTest, DefaultActions) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto killed = [](int signo) { return testing::KilledBySignal(signo); };
  EXPECT_EXIT((default_actions(), tile_asm::tilezero<0>()), killed(SIGILL), "");
  EXPECT_EXIT((default_actions(), ud2()), killed(SIGILL), "");
  EXPECT_EXIT((default_actions(), raise(SIGILL)), killed(SIGILL), "");
  EXPECT_EXIT((default_actions(), TileConfig().tile(0, 17, 64).load()), killed(SIGSEGV), "");
  EXPECT_EXIT((default_actions(), TileConfig().all(1, 4).load(), tile_asm::tileloadd<0>(nullptr, 0)),
              killed(SIGSEGV), "");
}

TEST_F(EmulatorSignalsDeathTest, FaultsCannotBeIgnored) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto ignoring = [] {
    signal(SIGSEGV, SIG_IGN);
    amx_emulator::uninstall();
    signal(SIGILL, SIG_IGN);
    amx_emulator::install();
  };
  EXPECT_EXIT((ignoring(), tile_asm::tilezero<0>()), testing::KilledBySignal(SIGILL), "");
  EXPECT_EXIT((ignoring(), TileConfig().tile(0, 17, 64).load()), testing::KilledBySignal(SIGSEGV), "");
}

TEST_F(EmulatorSignalsDeathTest, HandlerOfOneShotIsUsedOnce) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto twice = [] {
    default_actions();
    const PreviousSigillHandler previous(action_of(&step_over, static_cast<int>(SA_RESETHAND)));
    ud2();
    if (g_seen.calls != 1) _exit(1);
    ud2();
  };
  EXPECT_EXIT(twice(), testing::KilledBySignal(SIGILL), "");
}

}  // namespace
