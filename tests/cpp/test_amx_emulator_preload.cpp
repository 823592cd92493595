// The preloaded library, as a program sees it that knows nothing of the emulator: SIGILL handlers registered at
// run time must not take the tile instructions away from it.
//
// Preloading has to happen when a program starts, so one test starts this program again, and the tests of the
// suite PreloadedEmulator run only there. AMX_EMULATOR_LIBRARY, a macro or else an environment variable, is the
// library's path; without one they are skipped. They reach the library by name alone: an emulator that may be
// linked into this program is another one, and not installed.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>
#include <utility>

#include "tile_asm.hpp"

namespace {

const char* library_path() {
#ifdef AMX_EMULATOR_LIBRARY
  return AMX_EMULATOR_LIBRARY;
#else
  return std::getenv("AMX_EMULATOR_LIBRARY");
#endif
}

template <class Function>
Function from_library(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
}

int g_calls = 0;

void step_over_ud2(int, siginfo_t*, void* context) {
  ++g_calls;
  static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP] += 2;
}

void only_count(int) {
  ++g_calls;
}

bool tiles_work() {
  std::uint8_t config[64] = {};
  config[0] = 1;
  config[16] = 8;  // tile 0: 2 rows of 8 bytes
  config[48] = 2;
  const std::uint64_t values[2] = {0x0123456789ABCDEF, 42};
  std::uint64_t stored[2] = {};
  tile_asm::ldtilecfg(config);
  tile_asm::tileloadd<0>(values, 8);
  tile_asm::tilestored<0>(stored, 8);
  tile_asm::tilerelease();
  return std::memcmp(values, stored, sizeof values) == 0;
}

unsigned emulated_features() {
  return from_library<unsigned (*)()>("amx_sft_moe_emulated_features")();
}

constexpr char kIsPreloaded[] = "AMX_EMULATOR_TEST_IS_PRELOADED";

// The library for LD_PRELOAD, which blanks and colons separate: a path that has one gets a link without.
class Preloadable {
 public:
  explicit Preloadable(std::string path) : path_(std::move(path)) {
    if (path_.find_first_of(" :") == std::string::npos) return;
    link_ = testing::TempDir() + "libamx_emulator." + std::to_string(getpid()) + ".so";
    std::filesystem::create_symlink(path_, link_);
  }
  Preloadable(const Preloadable&) = delete;
  Preloadable& operator=(const Preloadable&) = delete;
  ~Preloadable() {
    if (!link_.empty()) std::filesystem::remove(link_);
  }
  const char* path() const { return link_.empty() ? path_.c_str() : link_.c_str(); }

 private:
  std::string path_, link_;
};

// In the child: sanitizers want to be the first of all libraries, and need not be, since the emulator asks them
// later.
[[noreturn]] void run_preloaded(const Preloadable& library) {
  setenv(kIsPreloaded, "1", 1);
  setenv("AMX_EMULATOR", "1", 1);
  setenv("LD_PRELOAD", library.path(), 1);
  const char* const asan_options = std::getenv("ASAN_OPTIONS");
  const std::string others = asan_options == nullptr ? "" : std::string(":") + asan_options;
  setenv("ASAN_OPTIONS", ("verify_asan_link_order=0" + others).c_str(), 1);
  const std::string program = std::filesystem::read_symlink("/proc/self/exe");
  execl(program.c_str(), program.c_str(), "--gtest_brief=1", "--gtest_filter=PreloadedEmulator*", nullptr);
  _exit(127);
}

TEST(EmulatorPreload, PreloadedProgramPassesItsTests) {
  if (library_path() == nullptr) GTEST_SKIP() << "AMX_EMULATOR_LIBRARY is not set";
  const Preloadable library(library_path());
  const pid_t child = fork();
  if (child == 0) run_preloaded(library);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status)) << "ended by signal " << WTERMSIG(status);
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

class PreloadedEmulator : public testing::Test {
 protected:
  void SetUp() override {
    if (std::getenv(kIsPreloaded) == nullptr) GTEST_SKIP() << "runs in EmulatorPreload's child";
    const auto installed = from_library<int (*)()>("amx_emulator_installed");
    ASSERT_NE(installed, nullptr) << "the library is not preloaded";
    if (installed() == 0) GTEST_SKIP() << "this CPU executes AMX itself";
    g_calls = 0;
    signal(SIGILL, SIG_DFL);
  }
};
using PreloadedEmulatorDeathTest = PreloadedEmulator;

TEST_F(PreloadedEmulator, RunsTileInstructions) {
  EXPECT_TRUE(tiles_work());
}

TEST_F(PreloadedEmulator, AnswersForTheOperator) {
  EXPECT_EQ(emulated_features(), 7u);
}

TEST_F(PreloadedEmulator, SigactionComesBehindTheEmulator) {
  struct sigaction action = {}, old;
  action.sa_sigaction = &step_over_ud2;
  action.sa_flags = SA_SIGINFO;
  sigemptyset(&action.sa_mask);
  sigaddset(&action.sa_mask, SIGUSR2);
  ASSERT_EQ(sigaction(SIGILL, &action, &old), 0);
  EXPECT_EQ(old.sa_handler, SIG_DFL);
  EXPECT_TRUE(tiles_work());
  EXPECT_EQ(g_calls, 0);
  asm volatile("ud2" : : : "memory");
  EXPECT_EQ(g_calls, 1);

  ASSERT_EQ(sigaction(SIGILL, nullptr, &old), 0);  // only asks
  EXPECT_EQ(old.sa_sigaction, &step_over_ud2);
  EXPECT_EQ(old.sa_flags & SA_SIGINFO, SA_SIGINFO);
  EXPECT_EQ(sigismember(&old.sa_mask, SIGUSR2), 1);
  ASSERT_EQ(sigaction(SIGILL, nullptr, nullptr), 0);
  asm volatile("ud2" : : : "memory");
  EXPECT_EQ(g_calls, 2);
}

TEST_F(PreloadedEmulator, SignalComesBehindTheEmulator) {
  EXPECT_EQ(signal(SIGILL, &only_count), SIG_DFL);
  EXPECT_TRUE(tiles_work());
  EXPECT_EQ(g_calls, 0);
  raise(SIGILL);
  EXPECT_EQ(g_calls, 1);
  EXPECT_EQ(signal(SIGILL, SIG_DFL), &only_count);
}

TEST_F(PreloadedEmulator, OtherSignalsAreNotItsBusiness) {
  struct sigaction action = {}, old;
  action.sa_handler = &only_count;
  ASSERT_EQ(sigaction(SIGUSR1, &action, nullptr), 0);
  ASSERT_EQ(sigaction(SIGUSR1, nullptr, &old), 0);
  EXPECT_EQ(old.sa_handler, &only_count);
  raise(SIGUSR1);
  EXPECT_EQ(g_calls, 1);
  EXPECT_EQ(signal(SIGUSR1, SIG_DFL), &only_count);
  EXPECT_EQ(sigaction(4711, &action, nullptr), -1);
}

// Python's faulthandler does this: it registers, and in its handler puts the old action back and raises again.
struct sigaction g_before_crash_handler;

void report_and_die(int signo) {
  sigaction(signo, &g_before_crash_handler, nullptr);
  raise(signo);
}

TEST_F(PreloadedEmulatorDeathTest, CrashReporterStillEndsTheProcess) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto crash = [] {
    struct sigaction action = {};
    action.sa_handler = &report_and_die;
    action.sa_flags = SA_NODEFER | SA_ONSTACK;
    sigaction(SIGILL, &action, &g_before_crash_handler);
    if (!tiles_work()) _exit(1);
    asm volatile("ud2" : : : "memory");
    _exit(2);
  };
  EXPECT_EXIT(crash(), testing::KilledBySignal(SIGILL), "");
}

// What a child does between fork and exec, as Python's subprocess does.
[[noreturn]] void reset_sigill_in_child() {
  struct sigaction action = {}, old;
  sigaction(SIGILL, nullptr, &old);
  action.sa_handler = SIG_DFL;
  sigaction(SIGILL, &action, nullptr);
  _exit(old.sa_handler == &only_count ? 17 : 1);
}

void expect_exit_17_and_own_handler(pid_t child) {
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(WEXITSTATUS(status), 17);
  raise(SIGILL);
  EXPECT_EQ(g_calls, 1);
  EXPECT_TRUE(tiles_work());
}

// A child of vfork() shares its parent's memory but not its signal actions; a child of fork() neither.
TEST_F(PreloadedEmulator, ChildOfVforkDoesNotChangeTheParentsHandler) {
  signal(SIGILL, &only_count);
  const pid_t child = vfork();
  if (child == 0) reset_sigill_in_child();
  expect_exit_17_and_own_handler(child);
}

TEST_F(PreloadedEmulator, ChildOfForkDoesNotChangeTheParentsHandler) {
  signal(SIGILL, &only_count);
  const pid_t child = fork();
  if (child == 0) reset_sigill_in_child();
  expect_exit_17_and_own_handler(child);
}

TEST_F(PreloadedEmulator, ForkedChildKeepsTheEmulator) {
  const pid_t child = fork();
  if (child == 0) {
    signal(SIGILL, &only_count);
    _exit(tiles_work() && g_calls == 0 ? 17 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(WEXITSTATUS(status), 17);
}

TEST_F(PreloadedEmulator, CountsForPython) {
  const auto reset = from_library<void (*)()>("amx_emulator_reset_counts");
  const auto counts = from_library<void (*)(std::uint64_t*)>("amx_emulator_counts");
  ASSERT_NE(reset, nullptr);
  ASSERT_NE(counts, nullptr);
  reset();
  ASSERT_TRUE(tiles_work());
  std::uint64_t values[12];
  counts(values);
  const std::uint64_t expected[12] = {1, 0, 0, 1, 0, 1, 1};
  for (int i = 0; i < 12; ++i) EXPECT_EQ(values[i], expected[i]) << i;
}

TEST_F(PreloadedEmulator, MayBeUninstalledAndInstalledAgain) {
  signal(SIGILL, &only_count);
  from_library<void (*)()>("amx_emulator_uninstall")();
  EXPECT_EQ(emulated_features(), 0u);
  struct sigaction found;
  sigaction(SIGILL, nullptr, &found);
  EXPECT_EQ(found.sa_handler, &only_count);
  EXPECT_EQ(from_library<int (*)()>("amx_emulator_install")(), 1);
  EXPECT_TRUE(tiles_work());
  raise(SIGILL);
  EXPECT_EQ(g_calls, 1);
}

}  // namespace
