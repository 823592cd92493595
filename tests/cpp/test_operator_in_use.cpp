// A call into an object that another thread is in is refused and disturbs nothing.
//
// To hold a call still inside the operator for certain, x lies in pages without access: the first read of it
// faults, and the fault handler waits until the other thread has made its attempt before it opens the pages.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "compare.hpp"
#include "step.hpp"

namespace sft_test {
namespace {

using amx_sft_moe::StateError;

struct Gate {
  std::byte* begin = nullptr;
  std::size_t bytes = 0;
  std::atomic<bool> reached{false};
  std::atomic<bool> open{false};
};
Gate g_gate;
struct sigaction g_previous;

void on_fault(int signal, siginfo_t* info, void* context) {
  const auto* address = static_cast<const std::byte*>(info->si_addr);
  if (address < g_gate.begin || address >= g_gate.begin + g_gate.bytes) {
    // Not ours: a real fault goes where it would have gone.
    if ((g_previous.sa_flags & SA_SIGINFO) != 0) return g_previous.sa_sigaction(signal, info, context);
    ::sigaction(SIGSEGV, &g_previous, nullptr);
    return;
  }
  g_gate.reached = true;
  while (!g_gate.open) ::usleep(100);
  ::mprotect(g_gate.begin, g_gate.bytes, PROT_READ | PROT_WRITE);
}

class OperatorInUse : public testing::Test {
 protected:
  using Kernel = PortableBf16;  // the guard is the operator's, not the kernel's

  void close_gate(Tensor& tensor) {
    g_gate.begin = tensor.memory().pages();
    g_gate.bytes = tensor.memory().page_bytes();
    g_gate.reached = false;
    g_gate.open = false;
    tensor.memory().protect(PROT_NONE);
    struct sigaction action {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO;
    ASSERT_EQ(::sigaction(SIGSEGV, &action, &g_previous), 0);
  }
  void TearDown() override {
    g_gate.open = true;
    if (g_gate.begin != nullptr) ::sigaction(SIGSEGV, &g_previous, nullptr);
    g_gate.begin = nullptr;
  }

  // Runs `inside` on another thread, `attempt` while it is held, and lets it go on.
  template <class Inside, class Attempt>
  static void while_inside(Inside&& inside, Attempt&& attempt) {
    std::thread holder(inside);
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (!g_gate.reached && std::chrono::steady_clock::now() < deadline) ::usleep(100);
    EXPECT_TRUE(g_gate.reached) << "the call never read its input";
    if (g_gate.reached) attempt();
    g_gate.open = true;
    holder.join();
  }

  static constexpr Case kCase{"in_use", 9, 2, 3, 17, 33, {3, 3, 3}};
  Problem problem_ = random_problem(kCase, kPlain, DType::kBf16);
  Outputs want_ = step_alone<Kernel>(problem_);
};

TEST_F(OperatorInUse, EveryCallDuringAForwardIsRefused) {
  const Problem other = random_problem(kCase, kPlain, DType::kBf16);
  Moe<Kernel> moe = make_moe<Kernel>(problem_);
  Outputs got(problem_);
  Outputs refused(other);
  close_gate(problem_.x_tensor());
  while_inside([&] { moe.forward_sft(problem_.routing(), problem_.x(), got.y()); },
               [&] {
                 EXPECT_THROW(moe.forward_sft(other.routing(), other.x(), refused.y()), StateError);
                 EXPECT_THROW(moe.forward_sft(other.routing(), other.x(), refused.y(), false), StateError);
                 EXPECT_THROW(moe.backward(other.grad_y(), refused.gradients()), StateError);
                 EXPECT_THROW(moe.clear(), StateError);
                 EXPECT_THROW(moe.set_lora(other.lora()), StateError);
                 EXPECT_THROW(moe.set_base(other.base<bf16>()), StateError);
                 EXPECT_THROW(moe.saved_depth(), StateError);
                 EXPECT_THROW(moe.memory(), StateError);
               });
  EXPECT_EQ(moe.saved_depth(), 1);
  for (const double value : refused[reference::kY].values()) ASSERT_TRUE(std::isnan(value));
  moe.backward(problem_.grad_y(), got.gradients());
  expect_same_bits(want_, got);
}

TEST_F(OperatorInUse, EveryCallDuringABackwardIsRefused) {
  const Problem other = random_problem(kCase, kPlain, DType::kBf16);
  Moe<Kernel> moe = make_moe<Kernel>(problem_);
  Outputs got(problem_);
  Outputs refused(other);
  moe.forward_sft(problem_.routing(), problem_.x(), got.y());
  close_gate(problem_.grad_y_tensor());
  while_inside([&] { moe.backward(problem_.grad_y(), got.gradients()); },
               [&] {
                 EXPECT_THROW(moe.forward_sft(other.routing(), other.x(), refused.y()), StateError);
                 EXPECT_THROW(moe.backward(other.grad_y(), refused.gradients()), StateError);
               });
  EXPECT_EQ(moe.saved_depth(), 0);
  expect_same_bits(want_, got);
}

// Two layers that share a workspace may only run one after another; another layer with its own is free to.
TEST_F(OperatorInUse, WorkspaceInUseIsRefusedAndOwnWorkspaceIsNot) {
  const Problem other = random_problem(kCase, kPlain, DType::kBf16);
  const auto workspace = std::make_shared<amx_sft_moe::Workspace>();
  Moe<Kernel> moe(problem_.config(), problem_.base<bf16>(), problem_.lora(), workspace);
  Moe<Kernel> sharing(other.config(), other.base<bf16>(), other.lora(), workspace);
  Moe<Kernel> separate = make_moe<Kernel>(other);
  Outputs got(problem_);
  Outputs refused(other);
  Outputs free(other);
  close_gate(problem_.x_tensor());
  while_inside([&] { moe.forward_sft(problem_.routing(), problem_.x(), got.y()); },
               [&] {
                 EXPECT_THROW(sharing.forward_sft(other.routing(), other.x(), refused.y()), StateError);
                 EXPECT_THROW(sharing.memory(), StateError);  // whose buffers are growing
                 sharing.set_lora(other.lora());              // needs no workspace
                 Moe<Kernel>(other.config(), other.base<bf16>(), other.lora(), workspace);
                 run_step(separate, other, free);
               });
  EXPECT_EQ(sharing.saved_depth(), 0);
  moe.backward(problem_.grad_y(), got.gradients());
  expect_same_bits(want_, got);
  expect_same_bits(step_alone<Kernel>(other), free);
  run_step(sharing, other, refused);
  expect_same_bits(free, refused);
}

}  // namespace
}  // namespace sft_test
