// One training step of the operator (forward_sft + backward, all LoRA gradients) on layers of published models.
//
//   bench_step [shape] [tokens] [kernel] [threads] [iterations]
//   shapes: qwen3-30b-a3b, deepseek-v3-32 (a slice of 32 experts), mixtral, gpt-oss, small
//
// Prints medians, the phases of a median step, LoRA's share, and the share of the machine's limit: the larger
// of useful FLOP / measured peak and bytes of active weights (each pass reads them once) / measured bandwidth.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>

#include "kernels.hpp"
#include "machine.hpp"
#include "random_data.hpp"

namespace {

using namespace amx_sft_moe;  // NOLINT(google-build-using-namespace)

struct LayerShape {
  const char* name;
  index_t experts, top_k, hidden, intermediate;
};
constexpr LayerShape kShapes[] = {{"qwen3-30b-a3b", 128, 8, 2048, 768},
                                  {"deepseek-v3-32", 32, 8, 7168, 2048},
                                  {"mixtral", 8, 2, 4096, 14336},
                                  {"gpt-oss", 32, 4, 2880, 2880},
                                  {"small", 16, 4, 512, 256}};
constexpr index_t kRank = 16;

struct Layer {
  AlignedBuffer<bf16> gate, up, down;
  AlignedBuffer<bf16> lora[6], grads[6];
  AlignedBuffer<bf16> x, y, grad_y, grad_x;
  AlignedBuffer<float> weights, grad_weights;
  AlignedBuffer<std::int64_t> ids;
  index_t active = 0;  // experts with tokens

  Layer(const LayerShape& s, index_t tokens) {
    const index_t matrix = s.experts * s.hidden * s.intermediate;
    bench::fill(gate, matrix, 0.03F, 1);
    bench::fill(up, matrix, 0.03F, 2);
    bench::fill(down, matrix, 0.03F, 3);
    for (int f = 0; f < 6; ++f) {
      const index_t size = s.experts * kRank * std::max(s.hidden, s.intermediate);
      bench::fill(lora[f], size, 0.03F, 10 + static_cast<std::uint32_t>(f));
      bench::fill(grads[f], size, 0.0F, 1);
    }
    for (auto* buffer : {&x, &y, &grad_y, &grad_x}) bench::fill(*buffer, tokens * s.hidden, 1.0F, 4);
    bench::fill(weights, tokens * s.top_k, 0.0F, 1);
    bench::fill(grad_weights, tokens * s.top_k, 0.0F, 1);
    route(s, tokens);
  }

  void route(const LayerShape& s, index_t tokens) {
    ids.reserve(tokens * s.top_k);
    std::mt19937 random(7);
    std::vector<std::int64_t> experts(static_cast<std::size_t>(s.experts));
    std::vector<bool> used(experts.size());
    for (index_t t = 0; t < tokens; ++t) {
      std::iota(experts.begin(), experts.end(), 0);
      std::shuffle(experts.begin(), experts.end(), random);
      for (index_t j = 0; j < s.top_k; ++j) {
        ids[t * s.top_k + j] = experts[static_cast<std::size_t>(j)];
        used[static_cast<std::size_t>(experts[static_cast<std::size_t>(j)])] = true;
        weights[t * s.top_k + j] = 1.0F / static_cast<float>(s.top_k);
      }
    }
    active = std::count(used.begin(), used.end(), true);
  }

  BaseWeights<bf16> base(const LayerShape& s) const {
    return {ExpertMatrices<const bf16>::stacked(gate.data(), s.intermediate, s.hidden),
            ExpertMatrices<const bf16>::stacked(up.data(), s.intermediate, s.hidden),
            ExpertMatrices<const bf16>::stacked(down.data(), s.hidden, s.intermediate)};
  }
  // Rows and columns of factor f: gate a, b, up a, b, down a, b.
  static std::pair<index_t, index_t> dims(const LayerShape& s, int f) {
    const index_t in = f < 4 ? s.hidden : s.intermediate;
    const index_t out = f < 4 ? s.intermediate : s.hidden;
    return f % 2 == 0 ? std::pair{kRank, in} : std::pair{out, kRank};
  }
  LoraWeights adapters(const LayerShape& s) const {
    auto factor = [&](int f) {
      return AnyConstExpertTensor(lora[f].data(), s.experts, dims(s, f).first, dims(s, f).second);
    };
    return {{factor(0), factor(1), 2.0F}, {factor(2), factor(3), 2.0F}, {factor(4), factor(5), 2.0F}};
  }
  Gradients gradients(const LayerShape& s, index_t tokens) const {
    auto factor = [&](int f) {
      return AnyExpertTensor(grads[f].data(), s.experts, dims(s, f).first, dims(s, f).second);
    };
    Gradients to;
    to.x = AnyMatrix(grad_x.data(), tokens, s.hidden, s.hidden);
    to.routing_weights = AnyMatrix(grad_weights.data(), tokens, s.top_k, s.top_k);
    to.lora = {factor(0), factor(1), factor(2), factor(3), factor(4), factor(5)};
    return to;
  }
};

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
  Config config;
  config.num_experts = shape.experts;
  config.top_k = shape.top_k;
  config.hidden_size = shape.hidden;
  config.intermediate_size = shape.intermediate;
  config.num_threads = threads;
  const auto moe = make_sft_moe<bench::Kernels>(kernel, config, layer.base(shape), layer.adapters(shape));
  const Routing routing{tokens, ExpertIds(layer.ids.data(), shape.top_k),
                        AnyConstMatrix(layer.weights.data(), tokens, shape.top_k, shape.top_k)};
  const AnyConstMatrix x(layer.x.data(), tokens, shape.hidden, shape.hidden);
  const AnyConstMatrix grad_y(layer.grad_y.data(), tokens, shape.hidden, shape.hidden);
  const AnyMatrix y(layer.y.data(), tokens, shape.hidden, shape.hidden);
  const Gradients grads = layer.gradients(shape, tokens);

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
  const char* name = argc > 1 ? argv[1] : "qwen3-30b-a3b";
  const index_t tokens = argc > 2 ? std::atoll(argv[2]) : 512;
  const char* kernel = argc > 3 ? argv[3] : "auto";
  const int threads = argc > 4 ? std::atoi(argv[4]) : parallel::default_num_threads();
  const int iterations = argc > 5 ? std::atoi(argv[5]) : 7;
  for (const LayerShape& shape : kShapes) {
    if (std::strcmp(shape.name, name) == 0) {
      bench_step(shape, tokens, kernel, threads, iterations);
      return 0;
    }
  }
  std::fprintf(stderr, "no shape %s; one of:", name);
  for (const LayerShape& shape : kShapes) std::fprintf(stderr, " %s", shape.name);
  std::fprintf(stderr, "\n");
  return 1;
}
