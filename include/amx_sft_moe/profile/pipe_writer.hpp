// Records written to somebody who may not read them: a pipe or a terminal, or standard error, which may be either.
#pragma once

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <ctime>
#include <string_view>

#include "amx_sft_moe/core/config_macros.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN

// While it lives, a write() of this thread to a pipe without a reader, or beyond the largest file that the process may make
// (ulimit -f), is an error and not the end of the process.
class WriteSignalsHeldBack {
 public:
  WriteSignalsHeldBack() {
    sigemptyset(&ours_);
    for (const int signal : {SIGPIPE, SIGXFSZ}) sigaddset(&ours_, signal);
    pthread_sigmask(SIG_BLOCK, &ours_, &before_);
    sigset_t pending;
    sigpending(&pending);
    for (const int signal : {SIGPIPE, SIGXFSZ}) {
      if (sigismember(&pending, signal) == 1) sigdelset(&ours_, signal);
    }
  }
  WriteSignalsHeldBack(const WriteSignalsHeldBack&) = delete;
  WriteSignalsHeldBack& operator=(const WriteSignalsHeldBack&) = delete;
  ~WriteSignalsHeldBack() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

  // After an error: the signal that came with it, which would arrive as soon as it is let through. One that somebody else
  // had sent before is left.
  void forget() const {
    const timespec at_once{};
    while (sigtimedwait(&ours_, nullptr, &at_once) < 0 && errno == EINTR) {
    }
  }

 private:
  sigset_t ours_, before_;
};

// While it lives, this thread is not cancelled (pthread_cancel): it would be at a write() or an open(), from which no exception
// may leave a dump. It is at its next such call.
class CancellationHeldBack {
 public:
  CancellationHeldBack() { pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before_); }
  CancellationHeldBack(const CancellationHeldBack&) = delete;
  CancellationHeldBack& operator=(const CancellationHeldBack&) = delete;
  ~CancellationHeldBack() { pthread_setcancelstate(before_, nullptr); }

 private:
  int before_ = PTHREAD_CANCEL_ENABLE;
};

// The lock of an open file, among all who open it by name, in whatever thread or process. Who holds it is waited for, for
// kPatience at most, as a slow reader may hold him up; one who has stopped costs that once: `holder_stopped`, the caller's,
// is true then, and nobody is waited for until the lock has been free.
class FileLock {
 public:
  static constexpr std::chrono::milliseconds kPatience{2000};

  FileLock(int file, bool& holder_stopped) : file_(file) {
    const auto deadline = Clock::now() + (holder_stopped ? std::chrono::milliseconds(0) : kPatience);
    for (timespec pause{0, kFirstPause}; is_taken();
         pause.tv_nsec = std::min(2 * pause.tv_nsec, kLongestPause)) {
      refused_ = Clock::now() >= deadline;
      if (refused_) break;
      ::nanosleep(&pause, nullptr);
    }
    holder_stopped = refused_;
  }
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;
  // Not left to close(): the child of a fork that came meanwhile has the file open too.
  ~FileLock() {
    if (held_) ::flock(file_, LOCK_UN);
  }

  // Somebody else has it still.
  bool refused() const { return refused_; }
  // Neither held nor refused where there are no locks: appending is atomic enough, what else is done to a file is not.
  bool held() const { return held_; }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr long kFirstPause = 50'000, kLongestPause = 2'000'000;  // ns

  bool is_taken() {
    held_ = ::flock(file_, LOCK_EX | LOCK_NB) == 0;
    return !held_ && errno == EWOULDBLOCK;
  }

  int file_;
  bool held_ = false;
  bool refused_ = false;
};

// A record is lost where the reader has left, and the rest of it where he takes nothing for kPatience: training goes on
// without its dumps. After that no record is waited for until there is room again, so that a reader who has stopped
// costs the time once; one who is slow holds the step up. That takes a file opened with O_NONBLOCK: of another one, such
// as standard error mostly is, any reader is waited for.
class PipeWriter {
 public:
  static constexpr std::chrono::milliseconds kPatience{250};

  void write(int file, std::string_view record) {
    const WriteSignalsHeldBack held_back;
    auto deadline = Clock::now() + kPatience;
    while (!record.empty()) {
      const ssize_t written = ::write(file, record.data(), record.size());
      if (written > 0) {
        record.remove_prefix(static_cast<std::size_t>(written));
        deadline = Clock::now() + kPatience;
        reader_stopped_ = false;
        continue;
      }
      const int error = written < 0 ? errno : EIO;
      if (error == EINTR) continue;
      if (error == EPIPE || error == EFBIG) held_back.forget();
      if (error != EAGAIN) return;
      reader_stopped_ = reader_stopped_ || !has_room(file, deadline);
      if (reader_stopped_) return;
    }
  }

 private:
  using Clock = std::chrono::steady_clock;

  // Waits for it; for an error too, which the next write() tells.
  static bool has_room(int file, Clock::time_point deadline) {
    for (;;) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
      if (left <= 0) return false;
      pollfd waiting{file, POLLOUT, 0};
      const int ready = ::poll(&waiting, 1, static_cast<int>(left));
      if (ready > 0) return true;
      if (ready < 0 && errno != EINTR) return false;
    }
  }

  bool reader_stopped_ = false;
};

// Standard error, record by record. What is written to a pipe mixes where it is more than the pipe has room for: there
// everybody takes the pipe's lock first. A file takes it as a whole.
class StandardError {
 public:
  void write(std::string_view record) {
    struct stat status {};
    const bool is_pipe = ::fstat(STDERR_FILENO, &status) == 0 && S_ISFIFO(status.st_mode);
    // Opened once more: threads and processes that share a descriptor would share its lock.
    const int pipe = is_pipe ? ::open("/proc/self/fd/2", O_WRONLY | O_CLOEXEC | O_NONBLOCK) : -1;
    if (pipe < 0) return writer_.write(STDERR_FILENO, record);
    {
      const FileLock lock(pipe, holder_stopped_);
      if (!lock.refused()) writer_.write(STDERR_FILENO, record);
    }
    ::close(pipe);
  }

 private:
  PipeWriter writer_;
  bool holder_stopped_ = false;
};

AMX_SFT_MOE_NAMESPACE_END
