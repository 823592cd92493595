// The signal handlers behind the emulator's own: which one SIGILL had before, and how to pass a signal on.
#pragma once

#include <signal.h>

namespace amx_emulator {

using Action = struct sigaction;  // the type; its name is also a function's
using SigactionFunction = int (*)(int signo, const Action* action, Action* old_action);

// The sigaction that reaches the kernel. By default the one this code is linked against; the preloaded library,
// which defines sigaction itself, names the next one before anything else happens.
[[nodiscard]] SigactionFunction kernel_sigaction();
void set_kernel_sigaction(SigactionFunction function);

// What SIGILL is to do where it is not ours to handle. Both may be called from signal handlers.
[[nodiscard]] Action previous_action();
void set_previous_action(const Action& action);

// Does what `signo` would have done without the emulator: calls the previous handler (for signals other than
// SIGILL, the present one) under the mask that the kernel would have set, or takes the default action. The
// default action of a SIGILL that came from an instruction happens when the signal handler returns to that
// instruction.
void deliver(int signo, siginfo_t* info, void* context);

}  // namespace amx_emulator
