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
#include <cmath>
#include <thread>

#include "compare.hpp"
#include "saved_buffers.hpp"
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

// Counts what it is told; between calls nothing is under way.
class CountingObserver final : public amx_sft_moe::StepObserver {
 public:
  void group_begins(amx_sft_moe::PhaseGroup) noexcept override { ++told; }
  void phase_begins(amx_sft_moe::Phase) noexcept override { ++told; }
  void phase_ends() noexcept override { ++told; }
  void group_ends() noexcept override { ++told; }
  int told = 0;
};

// Every member but those that are documented as to be read between calls: config(), lora(), label(), last_*().
class EveryCallInUse : public OperatorInUse {
 protected:
  void expect_every_call_refused() {
    const amx_sft_moe::AnyConstMatrix x = other_.x(), grad_y = other_.grad_y();
    EXPECT_THROW(moe_.forward_sft(other_.routing(), x, refused_.y()), StateError);
    EXPECT_THROW(moe_.forward_sft(other_.routing(), x, refused_.y(), false), StateError);
    EXPECT_THROW(moe_.forward_sft(other_.routing(), x, refused_.y(), saved_.view()), StateError);
    EXPECT_THROW(moe_.backward(grad_y, refused_.gradients()), StateError);
    EXPECT_THROW(moe_.backward(other_.routing(), x, saved_.view(), grad_y, refused_.gradients()), StateError);
    EXPECT_THROW(moe_.clear(), StateError);
    EXPECT_THROW(moe_.set_lora(other_.lora()), StateError);
    EXPECT_THROW(moe_.set_base(other_.base<bf16>()), StateError);
    EXPECT_THROW(moe_.set_observer(&observer_), StateError);
    EXPECT_THROW(moe_.set_name("refused"), StateError);
    EXPECT_THROW(moe_.backward_text(), StateError);
    EXPECT_THROW(moe_.saved_depth(), StateError);
    EXPECT_THROW(moe_.memory(), StateError);
  }
  void expect_nothing_changed() {
    expect_same_bits(Outputs(other_), refused_);
    for (const Tensor* saved : {&saved_.gate, &saved_.up, &saved_.u_gate, &saved_.u_up, &saved_.u_down}) {
      for (const double value : saved->values()) ASSERT_TRUE(std::isnan(value));
    }
    EXPECT_EQ(moe_.config().name, problem_.config().name);
    run_step(moe_, problem_, got_);  // with the weights, factors and observer of before
    expect_same_bits(want_, got_);
    EXPECT_EQ(observer_.told, 0);
  }

  const Problem other_ = random_problem(kCase, kPlain, DType::kBf16, 2);
  Moe<Kernel> moe_ = make_moe<Kernel>(problem_);
  Outputs got_{problem_};
  Outputs refused_{other_};
  SavedBuffers<Kernel::Stored> saved_{other_};
  CountingObserver observer_;
};

TEST_F(EveryCallInUse, IsRefusedDuringAForward) {
  close_gate(problem_.x_tensor());
  while_inside([&] { moe_.forward_sft(problem_.routing(), problem_.x(), got_.y()); },
               [&] { expect_every_call_refused(); });
  EXPECT_EQ(moe_.saved_depth(), 1);
  moe_.backward(problem_.grad_y(), got_.gradients());
  expect_same_bits(want_, got_);
  expect_nothing_changed();
}

TEST_F(EveryCallInUse, IsRefusedDuringABackward) {
  moe_.forward_sft(problem_.routing(), problem_.x(), got_.y());
  close_gate(problem_.grad_y_tensor());
  while_inside([&] { moe_.backward(problem_.grad_y(), got_.gradients()); },
               [&] { expect_every_call_refused(); });
  EXPECT_EQ(moe_.saved_depth(), 0);
  expect_same_bits(want_, got_);
  expect_nothing_changed();
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
