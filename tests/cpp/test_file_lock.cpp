// Records of several threads and processes in one place: the lock outlives neither its holder nor a signal, a file is the
// same one wherever the process goes, and standard error's records do not mix in a pipe.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "amx_sft_moe/profile/timer_output.hpp"
#include "environment.hpp"

namespace sft_test {
namespace {

using amx_sft_moe::BoundedFile;
using amx_sft_moe::FileLock;
using amx_sft_moe::StandardError;

int opened(const std::filesystem::path& path) {
  return open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
}
// Whether somebody else holds it now.
bool is_locked(const std::filesystem::path& path) {
  const int file = opened(path);
  const bool locked = flock(file, LOCK_EX | LOCK_NB) != 0;
  close(file);
  return locked;
}

TEST(FileLock, IsNotHeldByTheChildOfAForkThatCameMeanwhile) {
  const auto path = fresh_file("lock_and_fork");
  const int file = opened(path);
  pid_t child = 0;
  {
    bool holder_stopped = false;
    const FileLock lock(file, holder_stopped);
    child = fork();
    if (child == 0) {
      pause();
      _exit(0);
    }
    EXPECT_TRUE(is_locked(path));
  }
  close(file);
  EXPECT_FALSE(is_locked(path));
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
}

TEST(FileLock, IsWaitedForThroughSignals) {
  const auto path = fresh_file("lock_and_signal");
  struct sigaction interrupting {
  }, before{};
  interrupting.sa_handler = [](int) {};
  sigaction(SIGALRM, &interrupting, &before);  // without SA_RESTART
  std::atomic<bool> held{false}, released{false};
  std::thread holder([&] {
    sigset_t alarms;
    sigemptyset(&alarms);
    sigaddset(&alarms, SIGALRM);
    pthread_sigmask(SIG_BLOCK, &alarms, nullptr);
    const int file = opened(path);
    {
      bool holder_stopped = false;
      const FileLock lock(file, holder_stopped);
      held = true;
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
      released = true;
    }
    close(file);
  });
  while (!held) std::this_thread::yield();
  const itimerval soon{{0, 20'000}, {0, 20'000}}, never{};
  setitimer(ITIMER_REAL, &soon, nullptr);
  const int file = opened(path);
  {
    bool holder_stopped = false;
    const FileLock lock(file, holder_stopped);
    EXPECT_TRUE(released);
    EXPECT_FALSE(lock.refused() || holder_stopped);
  }
  setitimer(ITIMER_REAL, &never, nullptr);
  holder.join();
  close(file);
  sigaction(SIGALRM, &before, nullptr);
}

// Were it waited for without bound, this would not end.
TEST(FileLock, OfSomebodyWhoHasStoppedCostsRecordsAndTheWaitOnce) {
  const auto path = fresh_file("lock_of_a_stopped_process");
  const int other = opened(path);
  ASSERT_EQ(flock(other, LOCK_EX), 0);
  BoundedFile file(path, 1000, "", "the end\n");
  const auto begin = std::chrono::steady_clock::now();
  file.append("lost ");
  EXPECT_GE(std::chrono::steady_clock::now() - begin, FileLock::kPatience);
  const int own = opened(path);
  bool holder_stopped = true;
  const FileLock refused(own, holder_stopped);
  EXPECT_TRUE(refused.refused() && holder_stopped);
  file.append("lost too ");
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 2 * FileLock::kPatience);
  EXPECT_EQ(contents(path), "");
  flock(other, LOCK_UN);
  file.append("written");
  EXPECT_EQ(contents(path), "written");
  close(own);
  close(other);
}

TEST(BoundedFile, IsTheSameOneInAnotherFolder) {
  const auto here = std::filesystem::current_path();
  const auto path = fresh_file("relative");
  std::filesystem::current_path(path.parent_path());
  BoundedFile file(path.filename().string(), 1000, "", "the end\n");
  EXPECT_TRUE(file.begin(true));
  file.append("one\n");
  std::filesystem::current_path("/");
  file.append("two\n");
  std::filesystem::current_path(here);
  EXPECT_EQ(contents(path), "one\ntwo\n");
}

TEST(StandardError, RecordsOfThreadsDoNotMixInAPipe) {
  constexpr std::size_t kRecord = 200'000;  // more than a pipe has room for
  constexpr int kThreads = 4, kRecords = 5;
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const int before = dup(STDERR_FILENO);
  dup2(ends[1], STDERR_FILENO);
  close(ends[1]);
  std::string text;
  std::thread reader([&] {
    std::vector<char> part(4096);
    while (text.size() < kRecord * kThreads * kRecords) {
      const ssize_t n = read(ends[0], part.data(), part.size());
      if (n <= 0) break;
      text.append(part.data(), static_cast<std::size_t>(n));
    }
  });
  std::vector<std::thread> writers;
  for (int t = 0; t < kThreads; ++t) {
    writers.emplace_back([t] {
      StandardError out;
      for (int n = 0; n < kRecords; ++n) out.write(std::string(kRecord, static_cast<char>('a' + t)));
    });
  }
  for (std::thread& writer : writers) writer.join();
  reader.join();
  dup2(before, STDERR_FILENO);
  close(before);
  close(ends[0]);
  ASSERT_EQ(text.size(), kRecord * kThreads * kRecords);
  for (std::size_t begin = 0; begin < text.size(); begin += kRecord) {
    ASSERT_EQ(text.substr(begin, kRecord), std::string(kRecord, text[begin])) << "from " << begin;
  }
}

}  // namespace
}  // namespace sft_test
