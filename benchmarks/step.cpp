// One training step of the operator (forward_sft + backward, all LoRA gradients) on layers of published models.
//
//   bench_step [shape] [tokens] [kernel] [threads[,threads...]] [iterations] [--lora-cost]
//   shapes: qwen3-30b-a3b, deepseek-v3 (22 GB of weights), deepseek-v3-32 (a slice of 32 experts), mixtral, gpt-oss,
//   qwen3-235b-64 (64 of the model's 128 experts), small
//
// Prints medians, the phases of a median step, LoRA's share, the share of what is no GEMM, and the share of the
// machine's limit: the larger of useful FLOP / measured peak and bytes of active weights (each pass reads them once) /
// measured bandwidth.
//
//   --lora-cost   beside an operator without adapters: 1 - its step / the step with them
//   1,2           operators of 1 and of 2 threads: how many times as fast the second is, and how many times its limit;
//                 limits are measured before and after, the better value counts
//
// These take turns. In its turn an operator makes two steps, of which the second counts: caches and threads are its
// own. Their ratios are medians of the turns' ratios.
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>

#include "../examples/command_line.hpp"
#include "kernels.hpp"
#include "step_report.hpp"

namespace {

using namespace amx_sft_moe;  // NOLINT(google-build-using-namespace)
using bench::kRank;
using bench::Layer;
using bench::LayerShape;
using bench::Machine;

struct Options {
  const LayerShape* shape = nullptr;
  index_t tokens = 512;
  std::string kernel = "auto";
  std::vector<int> threads{parallel::default_num_threads()};
  int iterations = 7;
  bool lora_cost = false;
};

// An operator over the layer, and its steps so far.
struct Candidate {
  const Layer& layer;
  bool adapted;
  std::unique_ptr<AnySftMoe> moe;
  bench::Step steps;

  Candidate(const Layer& of, const std::string& kernel, int threads, bool with_adapters)
      : layer(of),
        adapted(with_adapters),
        moe(make_sft_moe<bench::Kernels>(kernel, of.config(threads), of.base(),
                                         with_adapters ? of.adapters() : LoraWeights{})) {}

  void step(bool counts) {
    const Routing routing = layer.routing();
    const AnyConstMatrix x = layer.const_rows(layer.x);
    const AnyConstMatrix grad_y = layer.const_rows(layer.grad_y);
    const AnyMatrix y = layer.rows(layer.y);
    const Gradients grads = layer.gradients(adapted, adapted);
    const double f = bench::seconds_of([&] { moe->forward_sft(routing, x, y, true); });
    const double b = bench::seconds_of([&] { moe->backward(grad_y, grads); });
    if (!counts) return;
    steps.forward.ms.push_back(f * 1e3);
    steps.forward.records.push_back(moe->last_forward());
    steps.backward.ms.push_back(b * 1e3);
    steps.backward.records.push_back(moe->last_backward());
  }
};

// Operators with the same number of threads, and the machine's limits with it.
struct Team {
  int threads;
  Machine machine;
  Candidate with;
  std::unique_ptr<Candidate> without;  // null: not asked for
};

std::vector<Team> make_teams(const Options& options, const Layer& layer) {
  std::vector<Team> teams;
  for (const int threads : options.threads) {
    teams.push_back({threads, {}, Candidate(layer, options.kernel, threads, true), nullptr});
    if (!options.lora_cost) continue;
    teams.back().without = std::make_unique<Candidate>(layer, options.kernel, threads, false);
  }
  return teams;
}

void measure_limits(std::vector<Team>& teams) {
  for (Team& team : teams) {
    team.machine = bench::better_of(team.machine, bench::measure_machine(team.threads));
    bench::print(team.machine, team.threads);
  }
}

void take_turns(std::vector<Team>& teams, int iterations) {
  std::vector<Candidate*> candidates;
  for (Team& team : teams) {
    candidates.push_back(&team.with);
    if (team.without) candidates.push_back(team.without.get());
  }
  for (int i = 0; i <= iterations; ++i) {  // the first warms up
    for (Candidate* candidate : candidates) {
      if (candidates.size() > 1) candidate->step(false);
      candidate->step(i > 0);
    }
  }
}

void report(const Team& team, const Options& options, const bench::StepNeeds& needs) {
  const LayerShape& shape = *options.shape;
  const bench::Pass& forward = team.with.steps.forward;
  const bench::Pass& backward = team.with.steps.backward;
  const double step = team.with.steps.median();
  std::printf("%s T=%lld E=%lld k=%lld H=%lld I=%lld r=%lld, kernel %s, %d threads, median of %d\n", shape.name,
              static_cast<long long>(options.tokens), static_cast<long long>(shape.experts),
              static_cast<long long>(shape.top_k), static_cast<long long>(shape.hidden),
              static_cast<long long>(shape.intermediate), static_cast<long long>(kRank),
              team.with.moe->kernel_name().data(), team.threads, options.iterations);
  bench::report_pass("forward", forward.median(), needs.forward_flop, needs, team.machine);
  bench::report_pass("backward", backward.median(), needs.backward_flop, needs, team.machine);
  std::printf("  step      %9.2f ms   %7.0f tokens/s   backward / forward %.2f\n", step,
              1e3 * static_cast<double>(options.tokens) / step, backward.median() / forward.median());
  const StepRecord& f = forward.median_record();
  const StepRecord& b = backward.median_record();
  std::printf("  LoRA's own products %.1f %% of the step; synchronisation points %zu + %zu\n",
              100 * (bench::lora_ms(f) + bench::lora_ms(b)) / step, f.sync_points(), b.sync_points());
  if (team.without) bench::report_lora_cost(team.with.steps, team.without->steps);
  bench::report_other_than_gemms(f, b, step);
  bench::report_phases(f, step);
  bench::report_phases(b, step);
  const MemoryReport memory = team.with.moe->memory();
  std::printf("  workspace %.1f MB, saved activations %.1f MB\n",
              static_cast<double>(memory.workspace_bytes) * 1e-6,
              static_cast<double>(memory.saved_bytes) * 1e-6);
}

void bench_step(const Options& options) {
  const Layer layer(*options.shape, options.tokens);
  std::vector<Team> teams = make_teams(options, layer);
  measure_limits(teams);
  take_turns(teams, options.iterations);
  if (teams.size() > 1) measure_limits(teams);  // their ratio counts
  const bench::StepNeeds needs(*options.shape, options.tokens, layer.active);
  for (const Team& team : teams) report(team, options, needs);
  const auto threaded = [&needs](const Team& team) {
    return bench::Threaded{team.threads, team.with.steps, needs.step_limit_ms(team.machine)};
  };
  for (std::size_t t = 1; t < teams.size(); ++t) {
    bench::report_speedup(threaded(teams[0]), threaded(teams[t]));
  }
}

// 2, or 1,2.
std::vector<int> thread_counts(const std::string& text) {
  std::vector<int> counts;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    counts.push_back(command_line::number("threads", text.substr(begin, end - begin), 1));
    begin = end + 1;
  }
  return counts;
}

Options parse(int argc, char** argv) {
  using command_line::number;
  Options options;
  std::vector<std::string> words;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word.rfind("--", 0) != 0) {
      words.push_back(word);
    } else if (word == "--lora-cost") {
      options.lora_cost = true;
    } else {
      throw std::invalid_argument("expected --lora-cost as the only option, got " + word);
    }
  }
  if (words.empty()) words.emplace_back("qwen3-30b-a3b");
  options.shape = bench::shape_named(words[0]);
  if (words.size() > 1) options.tokens = number<index_t>("tokens", words[1], 1);
  if (words.size() > 2) options.kernel = words[2];
  if (words.size() > 3) options.threads = thread_counts(words[3]);
  if (words.size() > 4) options.iterations = number("iterations", words[4], 1);
  if (words.size() > 5) throw std::invalid_argument("expected at most 5 arguments, got another: " + words[5]);
  if (options.shape != nullptr) return options;

  std::string message = "no shape " + words[0] + "; one of:";
  for (const LayerShape& shape : bench::kShapes) message.append(" ").append(shape.name);
  throw std::invalid_argument(message);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    bench_step(parse(argc, argv));
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_step: %s\n", error.what());
  }
  return 2;
}
