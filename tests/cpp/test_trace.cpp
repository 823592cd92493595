// Trace files: what stands in them and how it nests, that several writers share one, and that they end where they
// have to.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <regex>
#include <set>
#include <string>
#include <thread>

#include "step.hpp"
#include "trace_events.hpp"

namespace sft_test {
namespace {

using amx_sft_moe::BoundedFile;

constexpr Case kCase = with_trained_base({"trace", 40, 2, 4, 48, 64, {8, 8, 8}});

TEST(Trace, NestsPhasesInGroupsInSteps) {
  const auto path = fresh_file("nested.json");
  const Variable trace("AMX_SFT_MOE_TRACE", path.string());
  const Problem problem = random_problem(kCase, kPlain, DType::kBf16);
  auto config = problem.config();
  config.name = "layers.3";
  step_alone<PortableBf16>(problem, config);
  const std::string text = contents(path);
  const std::vector<TraceSlice> slices = slices_of(text);
  std::vector<TraceSlice> steps;
  std::map<std::int64_t, TraceSlice> group;
  std::set<std::string> phases;
  std::set<std::int64_t> threads;
  for (const TraceSlice& slice : slices) {
    EXPECT_EQ(slice.pid, getpid());
    EXPECT_LE(slice.begin_ns, slice.end_ns);
    threads.insert(slice.tid);
    if (slice.category == "step") {
      EXPECT_EQ(slice.tid, 0);
      steps.push_back(slice);
    } else if (slice.category == "group") {
      EXPECT_TRUE(steps.back().contains(slice)) << slice.name;
      group[slice.tid] = slice;
    } else {
      ASSERT_EQ(slice.category, "phase");
      EXPECT_TRUE(group[slice.tid].contains(slice)) << slice.name << " in " << group[slice.tid].name;
      phases.insert(slice.name);
    }
  }
  ASSERT_EQ(steps.size(), 2U);
  EXPECT_EQ(steps[0].name, "layers.3 forward");
  EXPECT_EQ(steps[1].name, "layers.3 backward");
  EXPECT_LE(steps[0].end_ns, steps[1].begin_ns);
  EXPECT_TRUE(threads == std::set<std::int64_t>({0}) || threads == std::set<std::int64_t>({0, 1}));
  for (const amx_sft_moe::PhaseInfo& phase : amx_sft_moe::kPhases) {
    EXPECT_EQ(phases.contains(std::string(phase.name)), phase.kind != amx_sft_moe::PhaseKind::kNotNeeded)
        << phase.name;
  }
  EXPECT_EQ(lines_with(text, R"("ph":"M","name":"process_name")"), 1U);
  EXPECT_EQ(lines_with(text, R"("ph":"M","name":"thread_name")"), 2U);
  EXPECT_GE(lines_with(text, R"("ph":"C","name":"GFLOP/s")"), 12U);
  EXPECT_EQ(lines_with(text, R"("ph":"C","name":"GFLOP/s")"), lines_with(text, R"("ph":"C","name":"GB/s")"));
  EXPECT_EQ(lines_with(text, R"("args":{"layer":"layers.3","operator":)"), 2U);
}

// A thread's slices of a phase are its busy time, to the nanosecond.
TEST(Trace, SlicesAreTheRecordsTimes) {
  const auto path = fresh_file("times.json");
  const Variable trace("AMX_SFT_MOE_TRACE", path.string());
  const Problem problem = random_problem(kCase, kPlain, DType::kBf16);
  Moe<PortableBf16> moe = make_moe<PortableBf16>(problem);
  const Outputs out(problem);
  run_step(moe, problem, out);
  std::map<std::pair<std::int64_t, std::string>, std::int64_t> of_trace, of_record;
  for (const TraceSlice& slice : slices_of(contents(path))) {
    if (slice.category == "phase") of_trace[{slice.tid, slice.name}] += slice.end_ns - slice.begin_ns;
  }
  for (const amx_sft_moe::StepRecord* record : {&moe.last_forward(), &moe.last_backward()}) {
    for (const amx_sft_moe::RegionRecord& region : record->regions()) {
      for (std::size_t t = 0; t < region.threads.size(); ++t) {
        for (std::size_t p = 0; p < amx_sft_moe::kPhaseCount; ++p) {
          if (region.threads[t].tasks[p] == 0) continue;
          of_record[{static_cast<std::int64_t>(t), std::string(amx_sft_moe::kPhases[p].name)}] +=
              region.threads[t].busy_ns[p];
        }
      }
    }
  }
  EXPECT_EQ(of_trace, of_record);
}

// Callers have teams of their own and so tracks of their own; every event is whole.
TEST(Trace, SeveralOperatorsAndThreadsShareAFile) {
  const auto path = fresh_file("shared.json");
  const Variable trace("AMX_SFT_MOE_TRACE", path.string());
  constexpr int kCallers = 3;
  constexpr int kSteps = 5;
  const Problem problem = random_problem(kCase, kPlain, DType::kBf16);
  std::vector<Moe<PortableBf16>> operators;
  std::vector<Outputs> outputs;
  for (int n = 0; n < kCallers; ++n) {
    auto config = problem.config();
    config.name = "layer " + std::to_string(n);
    operators.push_back(make_moe<PortableBf16>(problem, config));
    outputs.emplace_back(problem);
  }
  {
    std::vector<std::jthread> callers;
    for (std::size_t n = 0; n < kCallers; ++n) {
      callers.emplace_back([&, n] {
        for (int step = 0; step < kSteps; ++step) run_step(operators[n], problem, outputs[n]);
      });
    }
  }
  std::map<std::string, int> steps;
  std::map<std::string, std::int64_t> lanes;
  for (const TraceSlice& slice : slices_of(contents(path))) {
    if (slice.category != "step") continue;
    ++steps[slice.name];
    EXPECT_GE(slice.tid, 1000) << "of the main thread";
    const std::string layer = slice.name.substr(0, 7);
    EXPECT_EQ(lanes.try_emplace(layer, slice.tid).first->second, slice.tid) << "a caller's track changed";
  }
  EXPECT_EQ(steps.size(), 2U * kCallers);
  for (const auto& [name, count] : steps) EXPECT_EQ(count, kSteps) << name;
  std::set<std::int64_t> distinct;
  for (const auto& [layer, lane] : lanes) distinct.insert(lane);
  EXPECT_EQ(distinct.size(), static_cast<std::size_t>(kCallers));
}

TEST(Trace, EndsAtItsLimit) {
  const auto path = fresh_file("limited.json");
  const auto dumps = fresh_file("limited.jsonl");
  const Variable trace("AMX_SFT_MOE_TRACE", path.string());
  const Variable form("AMX_SFT_MOE_TIMER", "json");
  const Variable file("AMX_SFT_MOE_TIMER_FILE", dumps.string());
  const Variable limit("AMX_SFT_MOE_TRACE_LIMIT", "0.05");
  const Problem problem = random_problem(kCase, kPlain, DType::kBf16);
  Moe<PortableBf16> first = make_moe<PortableBf16>(problem);
  Moe<PortableBf16> second = make_moe<PortableBf16>(problem);
  const Outputs out(problem);
  for (int n = 0; n < 20; ++n) {
    run_step(first, problem, out);
    run_step(second, problem, out);
  }
  EXPECT_EQ(std::filesystem::file_size(path), 50'000U);
  EXPECT_EQ(std::filesystem::file_size(dumps), 50'000U);
  EXPECT_EQ(lines_with(contents(path), "amx_sft_moe trace ended"), 1U);
  EXPECT_EQ(lines_with(contents(dumps), "{\"format\":\"amx_sft_moe.end/1\",\"limit_bytes\":50000}"), 1U);
  EXPECT_TRUE(lines_of(contents(path)).back().ends_with("}},"));
  EXPECT_NE(lines_of(contents(path)).back().find("{\"ph\":\"i\""), std::string::npos);
  EXPECT_NE(lines_of(contents(dumps)).back().find("{\"format\":\"amx_sft_moe.end/1\""), std::string::npos);
}

// The mark stands where the last passes do, and takes as much room whatever its numbers are.
TEST(Trace, MarksItsEndWhenItEnded) {
  const auto path = fresh_file("ended.json");
  const Variable trace("AMX_SFT_MOE_TRACE", path.string());
  const Variable limit("AMX_SFT_MOE_TRACE_LIMIT", "0.05");
  amx_sft_moe::TimerOutput output = amx_sft_moe::TimerOutput::from_environment();
  amx_sft_moe::StepRecord record;
  for (record.begin_ns = 999'000; record.begin_ns < 1'300'000; record.begin_ns += 1000) {
    record.end_ns = record.begin_ns + 345;
    output.write(record, {amx_sft_moe::StepKind::kForward, "", "none", 0});
  }
  EXPECT_EQ(std::filesystem::file_size(path), 50'000U);
  const std::string text = contents(path);
  const std::size_t mark_at = text.rfind('\n', text.size() - 2) + 1;
  const TraceSlice last = slices_of(text.substr(0, mark_at)).back();
  const std::string line = text.substr(mark_at, text.size() - mark_at - 1);
  std::smatch mark;
  const std::regex form(
      R"( *\{"ph":"i","s":"g","name":"amx_sft_moe trace ended","pid":(\d+) *,"tid":0 *,"ts":(\d+)\.345 *,)"
      R"("args":\{"limit_bytes":50000\}\},)");
  ASSERT_TRUE(std::regex_match(line, mark, form)) << line;
  EXPECT_EQ(std::stoll(mark[1]), getpid());
  EXPECT_EQ(std::stoll(mark[2]), last.end_ns / 1000 + 1) << "of the first pass that is not there";
}

TEST(Trace, EndMarksAreOfOneLength) {
  std::set<std::size_t> lengths;
  for (const std::int64_t number :
       {std::int64_t{0}, std::int64_t{999}, std::int64_t{4'194'304'000}, INT64_MAX}) {
    std::string text;
    amx_sft_moe::trace::append_end(text, {number, number}, number, 256'000'000);
    lengths.insert(text.size());
  }
  EXPECT_EQ(lengths.size(), 1U);
}

TEST(BoundedFile, HoldsWhatFits) {
  const auto path = fresh_file("bounded");
  BoundedFile file(path.string(), 30, "<\n", "end\n");
  file.append("0123456789\n");  // 13 with the head
  file.append("0123456789\n");  // 24, and 4 for the mark
  EXPECT_EQ(contents(path), "<\n0123456789\n0123456789\n");
  file.append("xyz\n");
  EXPECT_EQ(contents(path), "<\n0123456789\n0123456789\n  end\n") << "the mark, at the limit";
  file.append("\n");
  EXPECT_EQ(contents(path).size(), 30U);
}

TEST(BoundedFile, AFirstRecordThatIsTooLarge) {
  const auto path = fresh_file("too_large");
  BoundedFile(path.string(), 10, "<\n", "end\n").append("0123456789\n");
  EXPECT_EQ(contents(path), "<\n    end\n");
  const auto tiny = fresh_file("tiny");
  BoundedFile(tiny.string(), 5, "<\n", "end\n").append("0123456789\n");
  EXPECT_EQ(contents(tiny), "") << "no room for head and mark";
}

TEST(BoundedFile, MarksItsEndOnceWhoeverWrites) {
  const auto path = fresh_file("raced");
  {
    std::vector<std::jthread> writers;
    for (int n = 0; n < 4; ++n) {
      writers.emplace_back([&path, n] {
        BoundedFile file(path.string(), 20'000, "[\n", "the end\n");
        const std::string record(static_cast<std::size_t>(11 + 10 * n), static_cast<char>('a' + n));
        for (int i = 0; i < 300; ++i) file.append(record + "\n");
      });
    }
  }
  const std::string text = contents(path);
  EXPECT_EQ(text.size(), 20'000U);
  const std::vector<std::string> lines = lines_of(text);
  EXPECT_EQ(lines.front(), "[");
  EXPECT_TRUE(lines.back().ends_with("the end"));
  EXPECT_EQ(lines_with(text, "the end"), 1U);
  for (std::size_t i = 1; i + 1 < lines.size(); ++i) {
    const char c = lines[i].at(0);
    EXPECT_EQ(lines[i], std::string(static_cast<std::size_t>(11 + 10 * (c - 'a')), c)) << "a torn record";
  }
}

TEST(BoundedFile, KnowsWhatItCanAppendTo) {
  EXPECT_FALSE(BoundedFile(testing::TempDir() + "no/such/folder/file", 10, "", "\n").begin(false));
  EXPECT_TRUE(BoundedFile("/dev/null", 10, "", "\n").begin(false));
  EXPECT_FALSE(BoundedFile("/dev/null", 10, "", "\n").begin(true));
  BoundedFile("/dev/null", 10, "", "\n").append("not bounded, not a file");
}

// What names processes and threads goes with a record, and again with the next where that one was lost.
TEST(Trace, NamesThreadsOnceTheFileCanBeWritten) {
  const auto path = fresh_file("names.json");
  const Variable trace("AMX_SFT_MOE_TRACE", path.string());
  amx_sft_moe::TimerOutput output = amx_sft_moe::TimerOutput::from_environment();
  amx_sft_moe::StepRecord record;
  record.begin_ns = 1;
  record.threads = 2;
  const auto write = [&] { output.write(record, {amx_sft_moe::StepKind::kForward, "", "none", 0}); };
  const int holder = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  ASSERT_EQ(flock(holder, LOCK_EX), 0);
  write();
  EXPECT_EQ(contents(path), "") << "he has the file's lock";
  close(holder);
  write();
  write();
  EXPECT_EQ(lines_with(contents(path), R"("ph":"M","name":"thread_name")"), 2U);
}

}  // namespace
}  // namespace sft_test
