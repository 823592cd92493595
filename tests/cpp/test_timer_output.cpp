// Dumps: every published name with a number, in the published form; only on request; to the file that was
// named.
#include <gtest/gtest.h>

#include <regex>
#include <string>
#include <thread>
#include <utility>

#include "environment.hpp"
#include "step.hpp"

namespace sft_test {
namespace {

constexpr Case kCase{"timer", 20, 2, 4, 32, 48, {4, 4, 4}};

TEST(TimerOutput, TextHasEveryPublishedNameWithANumber) {
  const auto path = fresh_file("timer_text");
  const Variable form("AMX_SFT_MOE_TIMER", "text");
  const Variable file("AMX_SFT_MOE_TIMER_FILE", path.string());
  step_alone<PortableBf16>(random_problem(kCase, kPlain, DType::kBf16));
  const std::string text = contents(path);
  for (const char* line : {R"(\[DOWN\] D0_prepare\+memset: 0\.000 ms \(not needed\))",
                           R"(\[DOWN\] D1_scatter: \d+\.\d{3} ms)",
                           R"(\[DOWN\] D2_quantize: 0\.000 ms \(not needed\))",
                           R"(\[DOWN\] D3_gemm: \d+\.\d{3} ms)",
                           R"(\[DOWN\] D4_lora_grad: \d+\.\d{3} ms)",
                           R"(\[DOWN\] D5_weight_grad: 0\.000 ms)",
                           R"(\[GU\] weight_grad\(gate\): 0\.000 ms)",
                           R"(\[GU\] weight_grad\(up\): 0\.000 ms)",
                           R"(\[BWD TIMER\] backward_down: \d+\.\d{3} ms \(total: \d+\.\d{3} ms\))",
                           R"(\[ACT\] silu_backward: \d+\.\d{3} ms)",
                           R"(\[BWD TIMER\] backward_activation: \d+\.\d{3} ms)",
                           R"(\[GU\] GU0_prepare\+memset: 0\.000 ms \(not needed\))",
                           R"(\[GU\] base_pass\(gate\)\+base_pass\(up\): \d+\.\d{3} ms \(fused\))",
                           R"(\[GU\] GU1_base_passes_total: \d+\.\d{3} ms)",
                           R"(\[GU\] GU2_requantize_for_lora: 0\.000 ms \(not needed\))",
                           R"(\[GU\] lora_pass\(gate\): \d+\.\d{3} ms)",
                           R"(\[GU\] lora_pass\(up\): \d+\.\d{3} ms)",
                           R"(\[GU\] GU3_lora_passes_total: \d+\.\d{3} ms)",
                           R"(\[GU\] GU4_sum_tokens: \d+\.\d{3} ms)",
                           R"(\[BWD TIMER\] backward_gate_up: \d+\.\d{3} ms)",
                           R"(\[BWD TIMER\] backward_routing_weights: \d+\.\d{3} ms)",
                           R"(\[FWD TIMER\] forward_gate_up: \d+\.\d{3} ms)"}) {
    EXPECT_TRUE(std::regex_search(text, std::regex(line))) << line << "\n" << text;
  }
}

TEST(TimerOutput, JsonIsOneLineAStep) {
  const auto path = fresh_file("timer_json");
  const Variable form("AMX_SFT_MOE_TIMER", "json");
  const Variable file("AMX_SFT_MOE_TIMER_FILE", path.string());
  const Problem problem = random_problem(kCase, kPlain, DType::kBf16);
  auto config = problem.config();
  config.name = "a \"quoted\" layer";
  step_alone<PortableBf16>(problem, config);
  const std::string text = contents(path);
  EXPECT_EQ(lines_with(text, "\"step\":\"forward\""), 1U);
  EXPECT_EQ(lines_with(text, "\"step\":\"backward\""), 1U);
  EXPECT_EQ(lines_with(text, R"({"format":"amx_sft_moe.step/1","step":)"), 2U);
  EXPECT_EQ(lines_with(text, R"("name":"a \"quoted\" layer","kernel":"portable","pid":)"), 2U);
  EXPECT_EQ(lines_with(text, R"(,"tokens":20,"routed_rows":40,"threads":2,"begin_ns":)"), 2U);
  EXPECT_EQ(lines_with(text, "\"GU3_lora_passes_total\":"), 1U);
  EXPECT_EQ(lines_with(text, ""), 2U);
}

// Threads of a process call at the same time: a line says whose team is meant, by the numbers of the trace.
TEST(TimerOutput, JsonSaysWhoCalled) {
  const auto path = fresh_file("timer_callers");
  const Variable form("AMX_SFT_MOE_TIMER", "json");
  const Variable file("AMX_SFT_MOE_TIMER_FILE", path.string());
  amx_sft_moe::TimerOutput output = amx_sft_moe::TimerOutput::from_environment();
  amx_sft_moe::StepRecord record;
  record.begin_ns = 1;
  const auto write = [&] { output.write(record, {amx_sft_moe::StepKind::kForward, "", "none", 7}); };
  write();
  std::int64_t other = 0;
  std::jthread([&] {
    other = amx_sft_moe::TraceLane::of_caller().first_tid;
    write();
  }).join();
  EXPECT_EQ(lines_with(contents(path), R"(,"caller":0,"operator":7,)"), 1U);
  EXPECT_GE(other, 1000);
  EXPECT_EQ(lines_with(contents(path), ",\"caller\":" + std::to_string(other) + ","), 1U);
}

// By who counts the operators of several libraries.
TEST(TimerOutput, NumbersCanBeGiven) {
  const auto path = fresh_file("timer_numbers");
  const Variable form("AMX_SFT_MOE_TIMER", "json");
  const Variable file("AMX_SFT_MOE_TIMER_FILE", path.string());
  const Problem problem = random_problem(kCase, kPlain, DType::kBf16);
  Moe<PortableBf16> moe = make_moe<PortableBf16>(problem);
  moe.set_number(1234);
  const Outputs out(problem);
  run_step(moe, problem, out);
  EXPECT_EQ(lines_with(contents(path), R"("operator":1234,)"), 2U);
}

TEST(TimerOutput, SilentUnlessAsked) {
  testing::internal::CaptureStderr();
  testing::internal::CaptureStdout();
  step_alone<PortableBf16>(random_problem(kCase, kPlain, DType::kBf16));
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
  EXPECT_EQ(testing::internal::GetCapturedStdout(), "");
}

TEST(TimerOutput, WritesToStandardErrorWithoutAFile) {
  const Variable form("AMX_SFT_MOE_TIMER", "text");
  testing::internal::CaptureStderr();
  step_alone<PortableBf16>(random_problem(kCase, kPlain, DType::kBf16));
  EXPECT_EQ(lines_with(testing::internal::GetCapturedStderr(), "[BWD TIMER] backward_down"), 1U);
}

TEST(TimerOutput, RefusesWhatItCannotDo) {
  const Problem problem = random_problem(kCase, kPlain, DType::kBf16);
  auto message = [&problem] {
    try {
      make_moe<PortableBf16>(problem);
    } catch (const amx_sft_moe::ArgumentError& error) {
      return std::string(error.what());
    }
    return std::string("nothing was thrown");
  };
  const Variable form("AMX_SFT_MOE_TIMER", "xml");
  EXPECT_EQ(message(), "AMX_SFT_MOE_TIMER: expected text or json, got xml");
  const Variable good("AMX_SFT_MOE_TIMER", "text");
  for (const char* limit : {"0", "-1", "many", "3x", "nan", "1e30", "1e400", "1e"}) {
    const Variable wrong("AMX_SFT_MOE_TRACE_LIMIT", limit);
    EXPECT_EQ(message(), std::string("AMX_SFT_MOE_TRACE_LIMIT: expected a number of MB above 0, got ") + limit);
  }
  {
    const Variable trace("AMX_SFT_MOE_TRACE", testing::TempDir());
    EXPECT_NE(message().find("AMX_SFT_MOE_TRACE: expected a file to append to, got "), std::string::npos);
  }
  {
    const Variable terminal("AMX_SFT_MOE_TRACE", "/dev/null");
    EXPECT_NE(message().find("AMX_SFT_MOE_TRACE: expected a file to append to, got "), std::string::npos);
  }
  {
    const std::string path = fresh_file("dumps_and_trace").string();
    const Variable dumps("AMX_SFT_MOE_TIMER_FILE", path), trace("AMX_SFT_MOE_TRACE", path);
    EXPECT_EQ(message(), "AMX_SFT_MOE_TRACE: expected another file than AMX_SFT_MOE_TIMER_FILE, got " + path);
    const std::string other_name = fresh_file("another_name").string();
    std::filesystem::create_symlink(path, other_name);
    const Variable same("AMX_SFT_MOE_TRACE", other_name);
    EXPECT_EQ(message(),
              "AMX_SFT_MOE_TRACE: expected another file than AMX_SFT_MOE_TIMER_FILE, got " + other_name);
  }
  const Variable file("AMX_SFT_MOE_TIMER_FILE", testing::TempDir() + "no/such/folder/file");
  EXPECT_NE(message().find("AMX_SFT_MOE_TIMER_FILE: expected a file to append to, got "), std::string::npos);
}

TEST(TimerOutput, RecordsThatWereMovedFromHaveNoRegions) {
  amx_sft_moe::StepRecord record;
  record.add_region(amx_sft_moe::PhaseGroup::kForwardDown, 1, 1);
  const amx_sft_moe::StepRecord taken = std::move(record);
  EXPECT_EQ(taken.regions().size(), 1U);
  EXPECT_EQ(record.regions().size(), 0U);  // NOLINT(bugprone-use-after-move)
  EXPECT_EQ(record.times().ms, amx_sft_moe::PhaseTimes{}.ms);
}

TEST(TimerOutput, RefusedArgumentsLeaveNoFiles) {
  const std::filesystem::path dumps = fresh_file("no_dumps"), trace = fresh_file("no_trace");
  const Variable form("AMX_SFT_MOE_TIMER", "json"), file("AMX_SFT_MOE_TIMER_FILE", dumps.string()),
      traced("AMX_SFT_MOE_TRACE", trace.string());
  using Moe = amx_sft_moe::AMX_SFT_MOE<amx_sft_moe::kernels::Portable<float>>;
  const Problem problem = random_problem(kCase, kPlain, DType::kFp32);
  EXPECT_THROW(Moe(problem.config(), {}), amx_sft_moe::ArgumentError);
  EXPECT_FALSE(std::filesystem::exists(dumps));
  EXPECT_FALSE(std::filesystem::exists(trace));
}

}  // namespace
}  // namespace sft_test
