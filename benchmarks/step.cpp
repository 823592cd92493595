// One training step of the operator (forward_sft + backward, all LoRA gradients) on layers of published models.
//
//   bench_step [shape] [tokens] [kernel] [threads] [iterations]
//   shapes: qwen3-30b-a3b, deepseek-v3 (22 GB of weights), deepseek-v3-32 (a slice of 32 experts), mixtral, gpt-oss,
//   small
//
// Prints medians, the phases of a median step, LoRA's share, and the share of the machine's limit: the larger
// of useful FLOP / measured peak and bytes of active weights (each pass reads them once) / measured bandwidth.
#include <algorithm>
#include <exception>
#include <numeric>
#include <stdexcept>
#include <string>

#include "../examples/command_line.hpp"
#include "kernels.hpp"
#include "layer.hpp"
#include "machine.hpp"

namespace {

using namespace amx_sft_moe;  // NOLINT(google-build-using-namespace)
using bench::kRank;
using bench::Layer;
using bench::LayerShape;

struct Pass {
  std::vector<double> ms;
  std::vector<StepRecord> records;

  std::size_t middle() const {
    std::vector<std::size_t> order(ms.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::sort(order.begin(), order.end(), [this](std::size_t a, std::size_t b) { return ms[a] < ms[b]; });
    return order[order.size() / 2];
  }
  double median() const { return ms[middle()]; }
};

double lora_ms(const StepRecord& record) {
  double ms = 0;
  for (const Phase phase : {Phase::kLoraAForward, Phase::kLoraADownForward, Phase::kD4LoraGrad,
                            Phase::kGuLoraGate, Phase::kGuLoraUp}) {
    ms += record.phase_ms(phase);
  }
  return ms;
}

void report_phases(const StepRecord& record, double step_ms) {
  for (std::size_t p = 0; p < kPhaseCount; ++p) {
    const double ms = record.phase_ms(static_cast<Phase>(p));
    if (ms > 0) {
      std::printf("    %-26.*s %-32s %9.3f ms  %5.1f %%\n", static_cast<int>(name_of(kPhases[p].group).size()),
                  name_of(kPhases[p].group).data(), kPhases[p].name.data(), ms, 100 * ms / step_ms);
    }
  }
}

void report_pass(const char* name, double ms, double flop, double bytes, const bench::Machine& machine) {
  const double limit = 1e3 * std::max(flop / (machine.peak() * 1e9), bytes / (machine.bandwidth * 1e9));
  std::printf(
      "  %-9s %9.2f ms   %7.0f GFLOP/s   %6.1f GB/s of weights   limit %8.2f ms, %3.0f %% of it reached\n",
      name, ms, flop / ms * 1e-6, bytes / ms * 1e-6, limit, 100 * limit / ms);
}

void bench_step(const LayerShape& shape, index_t tokens, const char* kernel, int threads, int iterations) {
  const bench::Machine machine = bench::measure_machine(threads);
  bench::print(machine, threads);
  const Layer layer(shape, tokens);
  const auto moe = make_sft_moe<bench::Kernels>(kernel, layer.config(threads), layer.base(), layer.adapters());
  const Routing routing = layer.routing();
  const AnyConstMatrix x = layer.const_rows(layer.x);
  const AnyConstMatrix grad_y = layer.const_rows(layer.grad_y);
  const AnyMatrix y = layer.rows(layer.y);
  const Gradients grads = layer.gradients();

  Pass forward, backward;
  for (int i = 0; i <= iterations; ++i) {  // the first warms up
    const double f = bench::seconds_of([&] { moe->forward_sft(routing, x, y, true); });
    const double b = bench::seconds_of([&] { moe->backward(grad_y, grads); });
    if (i == 0) continue;
    forward.ms.push_back(f * 1e3);
    forward.records.push_back(moe->last_forward());
    backward.ms.push_back(b * 1e3);
    backward.records.push_back(moe->last_backward());
  }

  const double routes = static_cast<double>(tokens * shape.top_k);
  const double base = 2 * routes * 3 * static_cast<double>(shape.hidden * shape.intermediate);
  const double lora = 2 * routes * 3 * kRank * static_cast<double>(shape.hidden + shape.intermediate);
  const double bytes = 2.0 * 3 * static_cast<double>(layer.active * shape.hidden * shape.intermediate);
  const double step = forward.median() + backward.median();
  std::printf("%s T=%lld E=%lld k=%lld H=%lld I=%lld r=%lld, kernel %s, %d threads, median of %d\n", shape.name,
              static_cast<long long>(tokens), static_cast<long long>(shape.experts),
              static_cast<long long>(shape.top_k), static_cast<long long>(shape.hidden),
              static_cast<long long>(shape.intermediate), static_cast<long long>(kRank),
              moe->kernel_name().data(), threads, iterations);
  report_pass("forward", forward.median(), base + lora, bytes, machine);
  report_pass("backward", backward.median(), base + 2 * lora, bytes, machine);
  std::printf("  step      %9.2f ms   %7.0f tokens/s   backward / forward %.2f\n", step,
              1e3 * static_cast<double>(tokens) / step, backward.median() / forward.median());
  const StepRecord& f = forward.records[forward.middle()];
  const StepRecord& b = backward.records[backward.middle()];
  std::printf("  LoRA's own products %.1f %% of the step; synchronisation points %zu + %zu\n",
              100 * (lora_ms(f) + lora_ms(b)) / step, f.sync_points(), b.sync_points());
  report_phases(f, step);
  report_phases(b, step);
  const MemoryReport memory = moe->memory();
  std::printf("  workspace %.1f MB, saved activations %.1f MB\n",
              static_cast<double>(memory.workspace_bytes) * 1e-6,
              static_cast<double>(memory.saved_bytes) * 1e-6);
}

}  // namespace

int main(int argc, char** argv) {
  using command_line::number;
  try {
    const char* name = argc > 1 ? argv[1] : "qwen3-30b-a3b";
    const index_t tokens = argc > 2 ? number<index_t>("tokens", argv[2], 1) : 512;
    const char* kernel = argc > 3 ? argv[3] : "auto";
    const int threads = argc > 4 ? number("threads", argv[4], 1) : parallel::default_num_threads();
    const int iterations = argc > 5 ? number("iterations", argv[5], 1) : 7;
    if (argc > 6)
      throw std::invalid_argument("expected at most 5 arguments, got another: " + std::string(argv[6]));
    if (const LayerShape* shape = bench::shape_named(name); shape != nullptr) {
      bench_step(*shape, tokens, kernel, threads, iterations);
      return 0;
    }
    std::fprintf(stderr, "bench_step: no shape %s; one of:", name);
    for (const LayerShape& shape : bench::kShapes) std::fprintf(stderr, " %s", shape.name);
    std::fprintf(stderr, "\n");
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_step: %s\n", error.what());
  }
  return 2;
}
