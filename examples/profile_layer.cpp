// Where the time of one MoE layer's LoRA step goes: checks it against float64, then times forward, backward and
// both, phase by phase, beside this machine's measured limits. `python -m amx_sft_moe profile` says more.
//
//     profile_layer [--shape deepseek-v3] [--experts N] [--tokens 128] [--check-tokens 4] [--rank 16] [--alpha 32]
//                   [--warmup 5] [--iterations 20] [--threads N] [--kernel auto]
//
// Experts that do not fit in memory are left out. NVTX ranges: forward_only, backward_only, full_train_loop.
// AMX_SFT_MOE_TRACE=file.json writes the same run for Perfetto.
#include <unistd.h>

#include <amx_sft_moe/kernels/machine_probe.hpp>
#include <cstdio>
#include <cstring>
#include <functional>
#include <iostream>
#include <map>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "command_line.hpp"
#include "profile_layer/reference.hpp"

using namespace profile_layer;  // NOLINT(google-build-using-namespace)

namespace {

constexpr double kAllowedError = 3e-2;  // bf16 products of numbers that were rounded to 8 bits

struct Options {
  Shape shape = kShapes[0];
  index_t tokens = 128, check_tokens = 4, rank = 16, warmup = 5, iterations = 20;
  float alpha = 32.0F;
  int threads = parallel::default_num_threads();
  std::string kernel = "auto";
};

Options parse(int argc, char** argv) {
  std::map<std::string, std::string> given;
  for (int i = 1; i < argc; i += 2) {
    if (i + 1 == argc) throw std::invalid_argument(std::string(argv[i]) + ": expected a value after it");
    given[argv[i]] = argv[i + 1];
  }
  Options options;
  const auto take = [&given]<class T>(const char* name, T& value, std::type_identity_t<T> least) {
    const auto found = given.find(name);
    if (found == given.end()) return;
    value = command_line::number<T>(name, found->second, least);
    given.erase(found);
  };
  if (const auto found = given.find("--shape"); found != given.end()) {
    const auto known = std::find_if(std::begin(kShapes), std::end(kShapes),
                                    [&found](const Shape& shape) { return found->second == shape.name; });
    if (known == std::end(kShapes)) throw std::invalid_argument("--shape: no such shape as " + found->second);
    options.shape = *known;
    given.erase(found);
  }
  if (const auto found = given.find("--kernel"); found != given.end()) {
    options.kernel = found->second;
    given.erase(found);
  }
  take("--experts", options.shape.experts, options.shape.top_k);  // a token has top_k different ones
  take("--tokens", options.tokens, 1);
  take("--check-tokens", options.check_tokens, 1);
  take("--rank", options.rank, 1);
  take("--alpha", options.alpha, 0);
  take("--warmup", options.warmup, 0);
  take("--iterations", options.iterations, 1);
  take("--threads", options.threads, 1);
  if (!given.empty()) throw std::invalid_argument(given.begin()->first + ": no such option");
  return options;
}

// As many experts as three quarters of the free memory hold: weights in bf16, factors and gradients in fp32.
index_t experts_that_fit(const Options& options) {
  const Shape& s = options.shape;
  const index_t free = sysconf(_SC_AVPHYS_PAGES) * sysconf(_SC_PAGESIZE) / 4 * 3;
  const index_t each = 3 * (2 * s.hidden * s.intermediate + 8 * options.rank * (s.hidden + s.intermediate));
  const index_t fit = std::min(free / each, s.experts);
  if (fit < s.top_k)
    throw std::runtime_error("memory: expected room for top_k experts, got room for " + std::to_string(fit));
  return fit;
}

// Milliseconds of some calls, and what the operator recorded of them.
struct Timing {
  std::vector<double> warmup, calls;
  StepTotals forward, backward;

  static double mean(const std::vector<double>& values) {
    return values.empty()
               ? 0
               : std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
  }
  double deviation() const {
    double sum = 0;
    for (const double ms : calls) sum += (ms - mean(calls)) * (ms - mean(calls));
    return calls.size() < 2 ? 0 : std::sqrt(sum / static_cast<double>(calls.size() - 1));
  }
  double inside() const { return (forward.total_ms + backward.total_ms) / static_cast<double>(calls.size()); }
};

class Experiment {
 public:
  Experiment(AnySftMoe& moe, const Layer& layer, Batch& batch)
      : moe_(moe), batch_(batch), grads_(batch.gradients(layer)) {}

  void forward() {
    moe_.forward_sft(batch_.routing(), batch_.x_view(), batch_.y_view(), /*save_for_backward=*/true);
  }
  void backward() { moe_.backward(batch_.grad_y_view(), grads_); }

  // Times `passes`, in a range of that name, after `before` and followed by clear().
  Timing time(const char* name, const Options& options, const std::function<void()>& before,
              const std::function<void()>& passes, bool forwards, bool backwards) {
    Timing timing;
    for (index_t n = 0; n < options.warmup + options.iterations; ++n) {
      before();
      double ms = 0;
      {
        const nvtx::Range range(name);
        ms = 1e3 * probe::seconds_of(passes);
      }
      moe_.clear();
      (n < options.warmup ? timing.warmup : timing.calls).push_back(ms);
      if (n < options.warmup) continue;
      if (forwards) timing.forward.add(moe_.last_forward());
      if (backwards) timing.backward.add(moe_.last_backward());
    }
    return timing;
  }

 private:
  AnySftMoe& moe_;
  Batch& batch_;
  Gradients grads_;
};

void print_latency(const char* name, const Timing& timing, index_t tokens) {
  const double mean = Timing::mean(timing.calls);
  const auto [least, most] = std::minmax_element(timing.calls.begin(), timing.calls.end());
  std::printf("  %-16s %10.3f %10.3f %10.3f %10.3f %10.0f %10.3f %10.3f %10.3f\n", name, mean,
              timing.deviation(), *least, *most, 1e3 * static_cast<double>(tokens) / mean, timing.inside(),
              mean - timing.inside(), Timing::mean(timing.warmup));
}

void print_line(const char* indent, std::string_view name, double ms, double total, double flop, double bytes,
                const Machine& machine, std::string_view kernel) {
  std::printf("  %s%-*.*s %10.3f %8.1f %%", indent, static_cast<int>(34 - std::strlen(indent)),
              static_cast<int>(name.size()), name.data(), ms, 100 * ms / total);
  const double gflops = flop / ms * 1e-6, gbytes = bytes / ms * 1e-6;
  if (flop > 0) {
    std::printf(" %9.0f %7.1f %%", gflops, 100 * gflops / machine.peak_of_kernel(kernel));
  } else {
    std::printf(" %19s", "");
  }
  if (ms > 0) std::printf(" %8.1f %7.1f %%", gbytes, 100 * gbytes / machine.bandwidth);
  std::printf("\n");
}

// Groups and in them phases, means of the passes.
void print_phases(StepKind kind, const StepTotals& totals, const Machine& machine, std::string_view kernel) {
  const auto passes = static_cast<double>(totals.passes);
  const double total = totals.total_ms / passes;
  std::printf("\n  %-34s %10s %10s %9s %9s %8s %9s\n", std::string(name_of(kind)).c_str(), "ms", "share",
              "GFLOP/s", "of peak", "GB/s", "of reads");
  for (std::size_t g = 0; g < kPhaseGroupCount; ++g) {
    const auto group = static_cast<PhaseGroup>(g);
    if (!dump::belongs_to(group, kind)) continue;
    double flop = 0, bytes = 0;
    for (std::size_t p = 0; p < kPhaseCount; ++p) {
      if (kPhases[p].group != group) continue;
      flop += static_cast<double>(totals.work.flop[p]) / passes;
      bytes += static_cast<double>(totals.work.bytes[p]) / passes;
    }
    print_line("", name_of(group), totals.times.group_ms(group) / passes, total, flop, bytes, machine, kernel);
    for (std::size_t p = 0; p < kPhaseCount; ++p) {
      if (kPhases[p].group != group || kPhases[p].name == name_of(group)) continue;
      print_line("  ", kPhases[p].name, totals.times.ms[p] / passes, total,
                 static_cast<double>(totals.work.flop[p]) / passes,
                 static_cast<double>(totals.work.bytes[p]) / passes, machine, kernel);
    }
  }
}

// Busy and waiting milliseconds of each thread in one pass, how far the busiest is above the mean, and the pass'
// synchronisation points.
void print_threads(const StepRecord& record) {
  std::vector<double> busy, waiting;
  for (const RegionRecord& region : record.regions()) {
    busy.resize(std::max(busy.size(), region.threads.size()));
    waiting.resize(busy.size());
    for (std::size_t t = 0; t < region.threads.size(); ++t) {
      const ThreadRecord& thread = region.threads[t];
      if (thread.begin_ns == 0) continue;  // took no part
      for (const std::int64_t ns : thread.busy_ns) busy[t] += static_cast<double>(ns) * 1e-6;
      waiting[t] += static_cast<double>(region.end_ns - thread.end_ns) * 1e-6;
    }
  }
  for (std::size_t t = 0; t < busy.size(); ++t) {
    std::printf("  thread %-3zu busy %10.3f ms, waiting %10.3f ms\n", t, busy[t], waiting[t]);
  }
  if (busy.empty()) return;  // compiled with AMX_SFT_MOE_NO_TIMER
  std::printf("  imbalance %.1f %%, %zu synchronisation points\n",
              100 * (*std::max_element(busy.begin(), busy.end()) / Timing::mean(busy) - 1),
              record.sync_points());
}

void print_heading(const Options& options, const Shape& wanted, const Machine& machine,
                   std::string_view kernel) {
  const Shape& shape = options.shape;
  std::cout << shape.name << ": E=" << shape.experts << " k=" << shape.top_k << " H=" << shape.hidden
            << " I=" << shape.intermediate << ", LoRA r=" << options.rank << " alpha=" << options.alpha
            << ", kernel " << kernel << ", " << options.threads << " threads\n";
  if (shape.experts < wanted.experts) {
    std::cout << shape.experts << " of " << wanted.experts << " experts: that is what fits in memory\n";
  }
  std::cout << "machine: " << machine.peak_of_kernel(kernel)
            << " GFLOP/s with the kernel's instructions, reads " << machine.bandwidth << " GB/s\n";
}

void check(AnySftMoe& moe, const Layer& layer, Batch batch) {
  Experiment experiment(moe, layer, batch);
  experiment.forward();
  experiment.backward();
  const double error = largest_error(batch, Reference(layer, batch));
  std::cout << "check, " << batch.tokens << " tokens against float64: largest relative error " << error
            << ", allowed " << kAllowedError << std::endl;
  if (!(error <= kAllowedError)) throw std::runtime_error("the check failed");
}

// Prints the three latencies; returns the passes of both.
Timing measure(AnySftMoe& moe, const Layer& layer, Batch batch, const Options& options) {
  Experiment experiment(moe, layer, batch);
  const auto nothing = [] {};
  const auto forward = [&] { experiment.forward(); };
  const auto backward = [&] { experiment.backward(); };
  const auto both = [&] {
    experiment.forward();
    experiment.backward();
  };
  const Timing forward_only = experiment.time("forward_only", options, nothing, forward, true, false);
  const Timing backward_only = experiment.time("backward_only", options, forward, backward, false, true);
  Timing full = experiment.time("full_train_loop", options, nothing, both, true, true);
  std::printf("\n  %-16s %10s %10s %10s %10s %10s %10s %10s %10s\n", "ms", "mean", "deviation", "min", "max",
              "tokens/s", "inside", "outside", "warm-up");
  print_latency("forward_only", forward_only, options.tokens);
  print_latency("backward_only", backward_only, options.tokens);
  print_latency("full_train_loop", full, options.tokens);
  return full;
}

void run(const Options& wanted) {
  Options options = wanted;
  options.shape.experts = experts_that_fit(wanted);
  const Machine machine = measure_machine(options.threads);  // before the layer takes the memory
  std::mt19937 random(1);
  const Layer layer(options.shape, options.rank, options.alpha, random);
  const Config config{.num_experts = options.shape.experts,
                      .top_k = options.shape.top_k,
                      .hidden_size = options.shape.hidden,
                      .intermediate_size = options.shape.intermediate,
                      .num_threads = options.threads,
                      .name = options.shape.name};
  const auto moe = make_sft_moe(options.kernel, config, layer.base(), layer.lora());
  print_heading(options, wanted.shape, machine, moe->kernel_name());
  check(*moe, layer, Batch(layer, options.check_tokens, random));
  const Timing full = measure(*moe, layer, Batch(layer, options.tokens, random), options);
  print_phases(StepKind::kForward, full.forward, machine, moe->kernel_name());
  print_threads(moe->last_forward());
  print_phases(StepKind::kBackward, full.backward, machine, moe->kernel_name());
  print_threads(moe->last_backward());
  std::cout << "\n" << text_dump(moe->last_backward(), moe->label(StepKind::kBackward));
}

}  // namespace

int main(int argc, char** argv) {
  try {
    run(parse(argc, argv));
  } catch (const std::exception& error) {
    std::cerr << "profile_layer: " << error.what() << "\n";
    return 2;
  }
}
