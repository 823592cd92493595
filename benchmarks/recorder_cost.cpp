// What recording costs: the same small step with the recorder compiled out, compiled in, with text dumps, with a
// trace. Two builds of the library in one program, taking turns step by step, so that a machine's moods meet all.
//
//   recorder_cost [tokens] [rounds] [threads] [kernel]         default: 8 tokens of qwen3-30b-a3b, 100 rounds;
//                                                              threads 0, the default: all OpenMP threads
//
// Kernels: avx512_bf16, avx2, portable, or auto, the first of them that this CPU has. `compiled out, again` is the
// noise: a second operator of the first kind. Dumps are also timed by themselves.
#include "recorder_cost.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <system_error>

#include "../examples/command_line.hpp"

namespace {

using recorder_cost::Data;
using recorder_cost::Variant;

void fill(std::vector<std::uint16_t>& values, std::size_t count) {
  values.resize(count);
  std::uint32_t state = 1;
  for (std::uint16_t& value : values) {  // bf16 of some 0.01 to 0.03, of both signs
    state = state * 1664525U + 1013904223U;
    value = static_cast<std::uint16_t>(0x3c00U + (state >> 25U) + ((state >> 8U) & 1U) * 0x8000U);
  }
}

Data make_data(std::int64_t tokens) {
  Data data;
  data.tokens = tokens;
  const auto matrix = static_cast<std::size_t>(Data::kExperts * Data::kHidden * Data::kIntermediate);
  for (auto* weight : {&data.gate, &data.up, &data.down}) fill(*weight, matrix);
  for (std::size_t f = 0; f < data.factors.size(); ++f) {
    fill(data.factors[f],
         static_cast<std::size_t>(Data::kExperts * Data::kRank * std::max(Data::kHidden, Data::kIntermediate)));
    data.grads[f].resize(data.factors[f].size());
  }
  for (auto* rows : {&data.x, &data.y, &data.grad_y, &data.grad_x}) {
    fill(*rows, static_cast<std::size_t>(tokens * Data::kHidden));
  }
  std::vector<std::int64_t> experts(static_cast<std::size_t>(Data::kExperts));
  std::iota(experts.begin(), experts.end(), 0);
  std::mt19937 random(7);
  for (std::int64_t t = 0; t < tokens; ++t) {
    std::shuffle(experts.begin(), experts.end(), random);
    data.ids.insert(data.ids.end(), experts.begin(), experts.begin() + Data::kTopK);
  }
  data.weights.assign(data.ids.size(), 1.0F / Data::kTopK);
  data.grad_weights.resize(data.ids.size());
  return data;
}

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

struct Candidate {
  const char* name;
  std::unique_ptr<Variant> variant;
  std::vector<double> ms, of_first;  // and its ratio to the first candidate's step of the same round
};

// Where dumps and traces go; what throws leaves none behind.
class TemporaryFolder {
 public:
  TemporaryFolder()
      : path_(std::filesystem::temp_directory_path() /
              ("recorder_cost." + std::to_string(std::random_device()()))) {
    std::filesystem::create_directory(path_);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  std::filesystem::path operator/(const char* file) const { return path_ / file; }

 private:
  std::filesystem::path path_;
};

struct Options {
  int tokens = 8, rounds = 100, threads = 0;
  std::string kernel = "auto";
};

Options parse(int argc, char** argv) {
  using command_line::number;
  Options options;
  if (argc > 1) options.tokens = number("tokens", argv[1], 1);
  if (argc > 2) options.rounds = number("rounds", argv[2], 1);
  if (argc > 3) options.threads = number("threads", argv[3], 0);
  if (argc > 4) options.kernel = argv[4];
  if (argc <= 5) return options;
  throw std::invalid_argument("expected at most 4 arguments, got another: " + std::string(argv[5]));
}

void run(const Options& options) {
  const int tokens = options.tokens, rounds = options.rounds, threads = options.threads;
  const std::string& kernel = options.kernel;
  Data data = make_data(tokens);
  const TemporaryFolder folder;
  const auto with = [&](const char* name, const char* value, const auto& make) {
    setenv(name, value, 1);
    auto made = make(data, kernel, threads);
    unsetenv(name);
    return made;
  };
  setenv("AMX_SFT_MOE_TIMER_FILE", (folder / "dumps").c_str(), 1);
  setenv("AMX_SFT_MOE_TRACE_LIMIT", "100000", 1);
  const std::string trace = folder / "trace.json";
  std::vector<Candidate> candidates;
  candidates.push_back({"compiled out", recorder_cost::make_without_timer(data, kernel, threads), {}, {}});
  candidates.push_back(
      {"compiled out, again", recorder_cost::make_without_timer(data, kernel, threads), {}, {}});
  candidates.push_back({"recording", recorder_cost::make_with_timer(data, kernel, threads), {}, {}});
  candidates.push_back({"text", with("AMX_SFT_MOE_TIMER", "text", recorder_cost::make_with_timer), {}, {}});
  candidates.push_back({"json", with("AMX_SFT_MOE_TIMER", "json", recorder_cost::make_with_timer), {}, {}});
  candidates.push_back(
      {"trace", with("AMX_SFT_MOE_TRACE", trace.c_str(), recorder_cost::make_with_timer), {}, {}});

  std::vector<std::size_t> order(candidates.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::mt19937 random(1);
  std::vector<double> ms(candidates.size());
  for (int round = -3; round < rounds; ++round) {  // the first three warm up
    std::shuffle(order.begin(), order.end(), random);
    for (const std::size_t i : order) ms[i] = candidates[i].variant->step();
    for (std::size_t i = 0; round >= 0 && i < ms.size(); ++i) {
      candidates[i].ms.push_back(ms[i]);
      candidates[i].of_first.push_back(ms[i] / ms[0]);
    }
  }
  std::printf("%d tokens of qwen3-30b-a3b, kernel %s, median of %d steps\n", tokens,
              candidates[0].variant->kernel().c_str(), rounds);
  for (const Candidate& candidate : candidates) {
    std::printf("  %-20s %8.3f ms   %+6.2f %% (of medians)   %+6.2f %% (median of rounds)\n", candidate.name,
                median(candidate.ms), 100 * (median(candidate.ms) / median(candidates[0].ms) - 1),
                100 * (median(candidate.of_first) - 1));
  }
  const double step_us = 1e3 * median(candidates[0].ms);
  const recorder_cost::DumpCosts dumps =
      recorder_cost::dump_costs(*candidates.back().variant, folder / "alone");
  std::printf(
      "dumps of a step by themselves: text %.0f us (%.2f %% of a step), json %.0f us (%.2f %%), trace %.0f us "
      "(%.2f %%)\n",
      dumps.text, 100 * dumps.text / step_us, dumps.json, 100 * dumps.json / step_us, dumps.trace,
      100 * dumps.trace / step_us);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    run(parse(argc, argv));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "recorder_cost: %s\n", error.what());
    return 2;
  }
}
