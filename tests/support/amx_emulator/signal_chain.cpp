// Storage of the previous SIGILL action and delivery of signals to it.
#include "signal_chain.hpp"

#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <cstring>

namespace amx_emulator {
namespace {

std::atomic<SigactionFunction> g_kernel_sigaction{&::sigaction};

// A struct sigaction that signal handlers read while other threads replace it: a sequence lock, odd while a
// writer is inside. Writers block all signals of their thread, so that no handler can wait for the thread it
// interrupted.
class SharedAction {
 public:
  void store(const Action& action) {
    Words words = {};
    std::memcpy(words, &action, sizeof action);
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &old);
    std::uint32_t version = version_.load() & ~1u;
    while (!version_.compare_exchange_weak(version, version + 1)) version &= ~1u;
    for (std::size_t i = 0; i < kWords; ++i) words_[i].store(words[i]);
    version_.store(version + 2);
    pthread_sigmask(SIG_SETMASK, &old, nullptr);
  }

  Action load() const {
    Words words;
    std::uint32_t before, after;
    do {
      before = version_.load();
      for (std::size_t i = 0; i < kWords; ++i) words[i] = words_[i].load();
      after = version_.load();
    } while (before != after || before % 2 != 0);
    Action action;
    std::memcpy(&action, words, sizeof action);
    return action;
  }

 private:
  static constexpr std::size_t kWords = (sizeof(Action) + 7) / 8;
  using Words = std::uint64_t[kWords];

  std::atomic<std::uint32_t> version_{0};
  std::atomic<std::uint64_t> words_[kWords] = {};  // all zero is SIG_DFL
};

SharedAction g_previous;

constexpr int kResetHandler = static_cast<int>(SA_RESETHAND);  // its bit is the sign of sa_flags

Action present_action(int signo) {
  if (signo == SIGILL) return previous_action();
  Action action;
  kernel_sigaction()(signo, nullptr, &action);
  return action;
}

void set_present_action(int signo, const Action& action) {
  if (signo == SIGILL) {
    set_previous_action(action);
  } else {
    kernel_sigaction()(signo, &action, nullptr);
  }
}

// Signals from kill() and its like carry codes up to 0, those of a fault are positive.
bool comes_from_fault(const siginfo_t& info) {
  return info.si_code > 0;
}

void take_default_action(int signo, const siginfo_t& info) {
  Action action = {};
  action.sa_handler = SIG_DFL;
  kernel_sigaction()(signo, &action, nullptr);
  // Back at the instruction it traps again: the process ends there, where a core file should point.
  if (signo == SIGILL && comes_from_fault(info)) return;
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, signo);
  pthread_sigmask(SIG_UNBLOCK, &set, nullptr);
  raise(signo);
}

// The return from our own signal handler puts the mask back.
void call_handler(const Action& action, int signo, siginfo_t* info, void* context) {
  sigset_t blocked = action.sa_mask;
  if ((action.sa_flags & SA_NODEFER) == 0) sigaddset(&blocked, signo);
  pthread_sigmask(SIG_BLOCK, &blocked, nullptr);
  if ((action.sa_flags & SA_SIGINFO) != 0) {
    action.sa_sigaction(signo, info, context);
  } else {
    action.sa_handler(signo);
  }
}

}  // namespace

SigactionFunction kernel_sigaction() {
  return g_kernel_sigaction.load();
}

void set_kernel_sigaction(SigactionFunction function) {
  g_kernel_sigaction.store(function);
}

Action previous_action() {
  return g_previous.load();
}

void set_previous_action(const Action& action) {
  g_previous.store(action);
}

void deliver(int signo, siginfo_t* info, void* context) {
  const Action action = present_action(signo);
  const bool siginfo_form = (action.sa_flags & SA_SIGINFO) != 0;
  if (!siginfo_form && action.sa_handler == SIG_IGN && !comes_from_fault(*info)) return;
  // A fault cannot be ignored: the kernel takes SIG_IGN for SIG_DFL there.
  if (!siginfo_form && (action.sa_handler == SIG_DFL || action.sa_handler == SIG_IGN)) {
    take_default_action(signo, *info);
    return;
  }
  if ((action.sa_flags & kResetHandler) != 0) {
    Action reset = action;
    reset.sa_handler = SIG_DFL;
    reset.sa_flags &= ~(SA_SIGINFO | kResetHandler);
    set_present_action(signo, reset);
  }
  call_handler(action, signo, info, context);
}

}  // namespace amx_emulator
