// Dumps to a pipe: a step waits for no reader to come, not for long for one that does not read, and survives one that
// leaves.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <string>
#include <thread>

#include "amx_sft_moe/profile/timer_output.hpp"
#include "environment.hpp"

namespace sft_test {
namespace {

using amx_sft_moe::BoundedFile;
using amx_sft_moe::PipeWriter;
using std::chrono::steady_clock;

constexpr std::size_t kLarge = 300'000;  // beyond what a pipe holds

class Pipe : public testing::Test {
 protected:
  void SetUp() override {
    alarm(60);  // what waits for ever ends the test
    path_ = fresh_file("a_pipe").string();
    ASSERT_EQ(mkfifo(path_.c_str(), 0600), 0);
  }
  void TearDown() override {
    leave();
    unlink(path_.c_str());
    alarm(0);
  }

  BoundedFile file() const { return {path_, 1'000'000, "", "the end\n"}; }
  void come() { reader_ = open(path_.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC); }
  void leave() {
    if (reader_ >= 0) close(reader_);
    reader_ = -1;
  }
  // What is in the pipe.
  std::string read_all() const {
    std::string text;
    char part[4096];
    for (ssize_t n = 0; (n = read(reader_, part, sizeof part)) > 0;)
      text.append(part, static_cast<std::size_t>(n));
    return text;
  }
  static auto time_of(auto&& call) {
    const auto begin = steady_clock::now();
    call();
    return steady_clock::now() - begin;
  }

  std::string path_;
  int reader_ = -1;
};

TEST_F(Pipe, WithoutAReaderIsNotUsable) {
  EXPECT_FALSE(file().begin(false));
  EXPECT_FALSE(file().append("to nobody\n"));
  const Variable form("AMX_SFT_MOE_TIMER", "text"), dumps("AMX_SFT_MOE_TIMER_FILE", path_);
  EXPECT_THROW(amx_sft_moe::TimerOutput::from_environment(), amx_sft_moe::ArgumentError);
  come();
  EXPECT_NO_THROW(amx_sft_moe::TimerOutput::from_environment());
  EXPECT_TRUE(file().begin(false));
  EXPECT_FALSE(file().begin(true)) << "a trace has a limit, which a pipe cannot keep";
}

TEST_F(Pipe, HandsRecordsOver) {
  come();
  BoundedFile out = file();
  out.append("one\n");
  out.append("two\n");
  EXPECT_EQ(read_all(), "one\ntwo\n");
}

// As cat does: it reads until nobody has the pipe open any more.
TEST_F(Pipe, AReaderWhoReadsToTheEndGetsAllRecords) {
  std::string got;
  std::thread reader([&] {
    const int pipe = open(path_.c_str(), O_RDONLY | O_CLOEXEC);
    char part[64];
    for (ssize_t n = 0; (n = read(pipe, part, sizeof part)) > 0;) got.append(part, static_cast<std::size_t>(n));
    close(pipe);
  });
  {
    BoundedFile out = file();
    while (!out.begin(false)) std::this_thread::yield();  // until he is there
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    out.append("one\n");
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    EXPECT_TRUE(out.append("two\n"));
  }
  reader.join();
  EXPECT_EQ(got, "one\ntwo\n");
}

TEST_F(Pipe, AReaderThatIsSlowGetsRecordsWhole) {
  come();
  std::string got;
  std::thread reader([&] {
    while (got.size() < kLarge) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      got += read_all();
    }
  });
  file().append(std::string(kLarge, 'x'));
  reader.join();
  EXPECT_EQ(got, std::string(kLarge, 'x'));
}

TEST_F(Pipe, AReaderThatStopsCostsTheWaitOnce) {
  come();
  BoundedFile out = file();
  const std::string record = std::string(kLarge, 'x') + "\n";
  EXPECT_GE(time_of([&] { out.append(record); }), PipeWriter::kPatience);
  EXPECT_LT(time_of([&] {
              for (int n = 0; n < 100; ++n) out.append(record);
            }),
            20 * PipeWriter::kPatience);
  const std::string beginning = read_all();
  EXPECT_LT(beginning.size(), record.size()) << "the rest of it was lost, and all of the others";
  out.append("he reads again\n");
  EXPECT_EQ(read_all(), "he reads again\n");
}

TEST_F(Pipe, AReaderThatLeavesEndsTheDumpsOnly) {
  come();
  BoundedFile out = file();
  std::thread reader([this] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    leave();  // in the middle of a record
  });
  EXPECT_LT(time_of([&] { out.append(std::string(kLarge, 'x')); }), 100 * PipeWriter::kPatience);
  reader.join();
  out.append("to nobody\n");
  sigset_t signals;
  sigpending(&signals);
  EXPECT_EQ(sigismember(&signals, SIGPIPE), 0);
  pthread_sigmask(SIG_BLOCK, nullptr, &signals);
  EXPECT_EQ(sigismember(&signals, SIGPIPE), 0) << "signals are let through as before";
}

// A signal that somebody else had sent is still there.
TEST_F(Pipe, ForgetsItsOwnSignalOnly) {
  sigset_t only, before;
  sigemptyset(&only);
  sigaddset(&only, SIGPIPE);
  pthread_sigmask(SIG_BLOCK, &only, &before);
  raise(SIGPIPE);
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  close(ends[0]);
  PipeWriter().write(ends[1], "to nobody\n");
  close(ends[1]);
  const timespec at_once{};
  EXPECT_EQ(sigtimedwait(&only, nullptr, &at_once), SIGPIPE);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

// A file as large as the process may make one: records are lost, SIGXFSZ would end the test.
TEST(LargestFile, EndsTheDumpsOnly) {
  const std::string path = fresh_file("at_its_limit").string();
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit small{1000, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  BoundedFile out(path, 1 << 20, "", "");
  for (int n = 0; n < 3; ++n) out.append(std::string(399, 'x') + "\n");
  const int file = open(path.c_str(), O_WRONLY | O_APPEND);
  PipeWriter().write(file, std::string(300, 'y'));  // as to standard error, beyond what is left
  close(file);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  EXPECT_EQ(std::filesystem::file_size(path), 1000U);
  sigset_t signals;
  sigpending(&signals);
  EXPECT_EQ(sigismember(&signals, SIGXFSZ), 0);
}

// Standard error is a pipe too where a program's output is piped.
TEST_F(Pipe, StandardErrorWithoutAReaderEndsTheDumpsOnly) {
  const Variable form("AMX_SFT_MOE_TIMER", "text"), file("AMX_SFT_MOE_TIMER_FILE", "");
  amx_sft_moe::TimerOutput output = amx_sft_moe::TimerOutput::from_environment();
  amx_sft_moe::StepRecord record;
  record.begin_ns = 1;
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const int before = dup(STDERR_FILENO);
  dup2(ends[1], STDERR_FILENO);
  close(ends[1]);
  const auto write = [&] { output.write(record, {amx_sft_moe::StepKind::kBackward, "", "none", 0}); };
  write();
  char some[16];
  const ssize_t got = read(ends[0], some, sizeof some);
  close(ends[0]);
  write();  // SIGPIPE would end the test
  dup2(before, STDERR_FILENO);
  close(before);
  EXPECT_GT(got, 0) << "while there was a reader";
}

// A thread that is cancelled during a dump ends after it, by what it calls next, and not the process.
TEST(Cancellation, WaitsForTheDump) {
  const auto path = fresh_file("cancelled");
  const Variable form("AMX_SFT_MOE_TIMER", "text"), file("AMX_SFT_MOE_TIMER_FILE", path.string());
  amx_sft_moe::TimerOutput output = amx_sft_moe::TimerOutput::from_environment();
  amx_sft_moe::StepRecord record;
  record.begin_ns = 1;
  bool ended = false;
  std::thread step([&] {
    pthread_cancel(pthread_self());
    output.write(record, {amx_sft_moe::StepKind::kBackward, "", "none", 0});
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, nullptr);  // no std::thread survives it
    ended = true;
  });
  step.join();
  EXPECT_TRUE(ended);
  EXPECT_FALSE(contents(path).empty());
}

// Disks are waited for, and records of files stay whole.
TEST_F(Pipe, RegularFilesAreOpenedAsBefore) {
  const auto path = fresh_file("no_pipe");
  BoundedFile out(path.string(), 1'000'000, "", "the end\n");
  EXPECT_TRUE(out.begin(true));
  for (int n = 0; n < 3; ++n) out.append(std::string(kLarge, 'x') + "\n");
  EXPECT_EQ(contents(path).size(), 3 * (kLarge + 1));
}

}  // namespace
}  // namespace sft_test
