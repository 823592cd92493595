// Only in the preloaded library: installs the emulator at start and keeps SIGILL with it.
//
// Programs register SIGILL handlers of their own later than any library is loaded. Python's faulthandler, which
// pytest switches on, is one: it would take SIGILL away and report the first tile instruction as a crash. A
// preloaded library comes first in the search for symbols, so it can define sigaction and signal. Its versions
// leave the emulator's handler with the kernel and remember what the program registers for SIGILL as the
// previous handler, the one that everything but AMX goes on to. The program cannot tell: what it set it gets
// back as the old action. All other signals pass through unchanged.
//
// Calls inside the C library (sigset, sysv_signal) and the system call itself are not seen here.
#include <dlfcn.h>
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>

#include "amx_emulator.hpp"
#include "signal_chain.hpp"

namespace amx_emulator {
namespace {

using SignalFunction = sighandler_t (*)(int signo, sighandler_t handler);

// Other libraries' constructors may call sigaction before ours has run, so whoever comes first looks the next
// one up. Later calls, among them those from signal handlers, where dlsym must not be called, find it done.
// Plain atomics rather than static locals: those would call into a sanitizer that may be just starting.
template <class Function>
Function next_function(std::atomic<Function>& known, const char* name) {
  Function function = known.load();
  if (function == nullptr) {
    function = reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
    known.store(function);
  }
  return function;
}

constinit std::atomic<SigactionFunction> g_next_sigaction{nullptr};
constinit std::atomic<SignalFunction> g_next_signal{nullptr};

SigactionFunction next_sigaction() {
  return next_function(g_next_sigaction, "sigaction");
}

SignalFunction next_signal() {
  return next_function(g_next_signal, "signal");
}

// The process whose memory this is. A child of vfork() runs in its parent's memory, but its signal actions are
// its own: what it sets before exec, as Python's subprocess does for all signals, must not reach the parent's
// handlers.
constinit std::atomic<pid_t> g_memory_owner{0};

void note_memory_owner() {
  g_memory_owner.store(getpid());
}

bool borrows_memory() {
  return getpid() != g_memory_owner.load();
}

// Makes `action` what SIGILL does behind the emulator, or instead of it in a process that is about to exec.
int set_sigill(const Action& action) {
  if (borrows_memory()) return next_sigaction()(SIGILL, &action, nullptr);
  set_previous_action(action);
  return 0;
}

[[gnu::constructor]] void start() {
  set_kernel_sigaction(next_sigaction());
  next_signal();
  note_memory_owner();
  pthread_atfork(nullptr, nullptr, &note_memory_owner);  // not run by vfork()
  const char* const wanted = std::getenv("AMX_EMULATOR");
  if (wanted != nullptr && std::strcmp(wanted, "1") == 0) install();
}

}  // namespace
}  // namespace amx_emulator

extern "C" {

AMX_EMULATOR_EXPORT int sigaction(int signo, const struct sigaction* action,
                                  struct sigaction* old_action) noexcept {
  using namespace amx_emulator;
  if (signo != SIGILL || !installed()) return next_sigaction()(signo, action, old_action);
  const Action previous = previous_action();
  const int result = action != nullptr ? set_sigill(*action) : 0;
  if (old_action != nullptr) *old_action = previous;
  return result;
}

AMX_EMULATOR_EXPORT sighandler_t signal(int signo, sighandler_t handler) noexcept {
  using namespace amx_emulator;
  if (signo != SIGILL || !installed()) return next_signal()(signo, handler);
  const Action previous = previous_action();
  Action action = {};
  action.sa_handler = handler;
  action.sa_flags = SA_RESTART;  // the C library's choice
  sigemptyset(&action.sa_mask);
  return set_sigill(action) == 0 ? previous.sa_handler : SIG_ERR;
}

}  // extern "C"
