// NVTX ranges as a profiler's tool library receives them: names from the one list of phases, nested, balanced
// on every thread, exceptions included. NVTX loads the recorder because NVTX_INJECTION64_PATH names it
// (tests/CMakeLists.txt).
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "nvtx_recorder.hpp"
#include "step.hpp"
#include "trace_events.hpp"

namespace sft_test {
namespace {

using amx_sft_moe::kPhaseGroups;
using amx_sft_moe::kPhases;

constexpr Case kCase{"nvtx", 40, 2, 4, 48, 64, {8, 8, 8}};

class NvtxTest : public testing::Test {
 protected:
  void SetUp() override {
    const char* path = std::getenv("NVTX_INJECTION64_PATH");
    ASSERT_NE(path, nullptr) << "run by ctest, or set NVTX_INJECTION64_PATH to the built nvtx_recorder library";
    void* library = dlopen(path, RTLD_NOW);
    ASSERT_NE(library, nullptr) << dlerror();
    events_ = reinterpret_cast<NvtxRecorderEvents>(dlsym(library, "nvtx_recorder_events"));
    reinterpret_cast<NvtxRecorderClear>(dlsym(library, "nvtx_recorder_clear"))();
  }

  std::vector<NvtxEvent> events() const {
    std::vector<NvtxEvent> all(events_(nullptr, 0));
    events_(all.data(), all.size());
    return all;
  }

  // Checks domain, balance and nesting thread by thread; returns every name seen, by depth.
  static std::map<int, std::multiset<std::string>> names_by_depth(const std::vector<NvtxEvent>& events) {
    std::map<int, std::multiset<std::string>> names;
    std::map<unsigned long, int> depth;
    for (const NvtxEvent& event : events) {
      EXPECT_STREQ(event.domain, "amx_sft_moe");
      int& d = depth[event.thread];
      if (event.push) {
        names[d++].insert(event.name);
      } else {
        EXPECT_GT(d--, 0) << "a pop without a push";
      }
    }
    for (const auto& [thread, d] : depth) EXPECT_EQ(d, 0) << "a push without a pop";
    return names;
  }

 private:
  NvtxRecorderEvents events_ = nullptr;
};

bool is_group(const std::string& name) {
  return std::find(kPhaseGroups.begin(), kPhaseGroups.end(), name) != kPhaseGroups.end();
}
bool is_phase(const std::string& name) {
  return std::any_of(kPhases.begin(), kPhases.end(), [&](const auto& phase) { return phase.name == name; });
}

TEST_F(NvtxTest, StepOpensGroupsAndPhases) {
  const Problem problem = random_problem(kCase, kPlain, DType::kBf16);
  for (const int threads : {1, 3}) {
    auto config = problem.config();
    config.num_threads = threads;
    step_alone<PortableBf16>(problem, config);
  }
  std::set<std::string> seen;
  for (const auto& [depth, names] : names_by_depth(events())) {
    for (const std::string& name : names) {
      EXPECT_TRUE(depth == 0 ? is_group(name) || is_phase(name) : is_phase(name)) << name;
      seen.insert(name);
    }
  }
  for (const char* name :
       {"forward_gather", "forward_gate_up", "forward_down", "forward_sum_tokens", "backward_down",
        "backward_activation", "backward_gate_up", "gemm(down)", "D1_scatter", "D3_gemm", "D4_lora_grad",
        "silu_backward", "base_pass(gate)+base_pass(up)", "lora_pass(gate)", "lora_pass(up)", "GU4_sum_tokens",
        "backward_routing_weights"}) {
    EXPECT_EQ(seen.count(name), 1U) << name;
  }
}

// On one thread a phase's range lies inside its region's group.
TEST_F(NvtxTest, PhasesLieInGroups) {
  const Problem problem = random_problem(kCase, kPlain, DType::kBf16);
  auto config = problem.config();
  config.num_threads = 1;
  step_alone<PortableBf16>(problem, config);
  const auto names = names_by_depth(events());
  ASSERT_EQ(names.size(), 2U);
  for (const std::string& name : names.at(0)) EXPECT_TRUE(is_group(name)) << name;
  for (const std::string& name : names.at(1)) EXPECT_TRUE(is_phase(name)) << name;
}

// The trace of the same step, without what the calling thread did before the first region (it is over when the
// record begins), has the same groups and in them the same phases in the same order.
TEST_F(NvtxTest, SameTreeAsTheTrace) {
  const auto path = fresh_file("nvtx_tree.json");
  const Variable trace("AMX_SFT_MOE_TRACE", path.string());
  const Problem problem = random_problem(kCase, kPlain, DType::kBf16);
  auto config = problem.config();
  config.num_threads = 1;
  step_alone<PortableBf16>(problem, config);
  std::vector<std::string> of_nvtx;
  int depth = 0;
  for (const NvtxEvent& event : events()) {
    depth += event.push ? 1 : -1;
    if (event.push) of_nvtx.push_back(std::string(static_cast<std::size_t>(depth), ' ') + event.name);
  }
  std::vector<std::string> of_trace;
  int to_leave_out = 0;
  for (const TraceSlice& slice : slices_of(contents(path))) {
    if (slice.category == "step") to_leave_out = 2;  // its first group with the one phase in it
    if (slice.category == "step" || to_leave_out-- > 0) continue;
    of_trace.push_back((slice.category == "group" ? " " : "  ") + slice.name);
  }
  EXPECT_GT(of_nvtx.size(), 20U);
  EXPECT_EQ(of_nvtx, of_trace);
}

TEST_F(NvtxTest, ADriversOwnRangeIsAroundAll) {
  const Problem problem = random_problem(kCase, kPlain, DType::kBf16);
  auto config = problem.config();
  config.num_threads = 1;
  {
    const amx_sft_moe::nvtx::Range range("full_train_loop");
    step_alone<PortableBf16>(problem, config);
  }
  const auto names = names_by_depth(events());
  EXPECT_EQ(names.at(0), std::multiset<std::string>({"full_train_loop"}));
  for (const std::string& name : names.at(1)) EXPECT_TRUE(is_group(name)) << name;
}

// Not when the timer goes, after whatever follows the region.
TEST_F(NvtxTest, ARangeEndsWithItsRegion) {
  amx_sft_moe::StepRecord record;
  {
    amx_sft_moe::StepTimer timer(record, 1, 1, amx_sft_moe::now_ns(), amx_sft_moe::Phase::kRoute);
    timer.start_region(amx_sft_moe::PhaseGroup::kBackwardDown, 1);
    ASSERT_FALSE(events().empty());
    EXPECT_TRUE(events().back().push);
    timer.end_region();
    EXPECT_FALSE(events().back().push);
  }
  names_by_depth(events());
}

TEST_F(NvtxTest, BalancedWhenATaskThrows) {
  amx_sft_moe::StepRecord record;
  auto step = [&record] {
    amx_sft_moe::StepTimer timer(record, 1, 1, amx_sft_moe::now_ns(), amx_sft_moe::Phase::kRoute);
    timer.start_region(amx_sft_moe::PhaseGroup::kBackwardDown, 2);
    amx_sft_moe::parallel::run_tasks(2, 8, [&timer](int thread) {
      return [thread_timer = amx_sft_moe::ThreadTimer(timer, thread)](amx_sft_moe::index_t task) mutable {
        thread_timer.begin(amx_sft_moe::Phase::kD3Gemm);
        if (task == 3) throw std::runtime_error("task 3");
        thread_timer.checkpoint(amx_sft_moe::Phase::kD3Gemm);
      };
    });
  };
  EXPECT_THROW(step(), std::runtime_error);
  const auto names = names_by_depth(events());
  EXPECT_EQ(names.at(0).count("backward_down"), 1U);
  EXPECT_TRUE(record.empty()) << "a pass that was left half way";
}

}  // namespace
}  // namespace sft_test
