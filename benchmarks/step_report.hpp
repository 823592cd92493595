// What bench_step measured of an operator, and what it prints of it.
#pragma once

#include <algorithm>
#include <cstdio>
#include <numeric>

#include "layer.hpp"
#include "machine.hpp"

namespace bench {

using amx_sft_moe::Phase;
using amx_sft_moe::StepRecord;

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
  const StepRecord& median_record() const { return records[middle()]; }
};

struct Step {
  Pass forward, backward;

  double median() const { return forward.median() + backward.median(); }
  std::vector<double> ms() const {
    std::vector<double> sums(forward.ms.size());
    std::transform(forward.ms.begin(), forward.ms.end(), backward.ms.begin(), sums.begin(), std::plus<>());
    return sums;
  }
};

// Useful FLOP of each pass, and the bytes of active weights that it reads.
struct StepNeeds {
  double forward_flop, backward_flop, bytes;

  StepNeeds(const LayerShape& shape, index_t tokens, index_t active) {
    const double routes = static_cast<double>(tokens * shape.top_k);
    const double base = 2 * routes * 3 * static_cast<double>(shape.hidden * shape.intermediate);
    const double lora = 2 * routes * 3 * kRank * static_cast<double>(shape.hidden + shape.intermediate);
    forward_flop = base + lora;
    backward_flop = base + 2 * lora;
    bytes = 2.0 * 3 * static_cast<double>(active * shape.hidden * shape.intermediate);
  }

  // The least milliseconds of a pass.
  double limit_ms(double flop, const Machine& machine) const {
    return 1e3 * std::max(flop / (machine.peak() * 1e9), bytes / (machine.bandwidth * 1e9));
  }
  double step_limit_ms(const Machine& machine) const {
    return limit_ms(forward_flop, machine) + limit_ms(backward_flop, machine);
  }
};

inline double lora_ms(const StepRecord& record) {
  double ms = 0;
  for (const Phase phase : {Phase::kLoraAForward, Phase::kLoraADownForward, Phase::kD4LoraGrad,
                            Phase::kGuLoraGate, Phase::kGuLoraUp}) {
    ms += record.phase_ms(phase);
  }
  return ms;
}

// Phases that multiply matrices, or those that do not.
inline double phases_ms(const StepRecord& record, bool multiply) {
  double ms = 0;
  for (std::size_t p = 0; p < amx_sft_moe::kPhaseCount; ++p) {
    const auto phase = static_cast<Phase>(p);
    if ((record.work.flop_of(phase) > 0) == multiply) ms += record.phase_ms(phase);
  }
  return ms;
}

inline void report_pass(const char* name, double ms, double flop, const StepNeeds& needs,
                        const Machine& machine) {
  const double limit = needs.limit_ms(flop, machine);
  std::printf(
      "  %-9s %9.2f ms   %7.0f GFLOP/s   %6.1f GB/s of weights   limit %8.2f ms, %3.0f %% of it reached\n",
      name, ms, flop / ms * 1e-6, needs.bytes / ms * 1e-6, limit, 100 * limit / ms);
}

inline void report_phases(const StepRecord& record, double step_ms) {
  using amx_sft_moe::kPhases;
  for (std::size_t p = 0; p < amx_sft_moe::kPhaseCount; ++p) {
    const double ms = record.phase_ms(static_cast<Phase>(p));
    if (ms > 0) {
      std::printf("    %-26.*s %-32s %9.3f ms  %5.1f %%\n", static_cast<int>(name_of(kPhases[p].group).size()),
                  name_of(kPhases[p].group).data(), kPhases[p].name.data(), ms, 100 * ms / step_ms);
    }
  }
}

// What is no GEMM phase, time outside of all phases too. What GEMM phases do on the way is theirs.
inline void report_other_than_gemms(const StepRecord& forward, const StepRecord& backward, double step_ms) {
  const double gemms = phases_ms(forward, true) + phases_ms(backward, true);
  const double others = phases_ms(forward, false) + phases_ms(backward, false);
  std::printf(
      "  other than GEMMs %.1f %% of the step: phases without a product %.2f ms, outside of phases %.2f ms\n"
      "    (GEMM phases keep what is fused into them: packing weights, biases, the forward's activation)\n",
      100 * (step_ms - gemms) / step_ms, others, step_ms - gemms - others);
}

// With, without: the operator with adapters and the one without, in turns.
inline void report_lora_cost(const Step& with, const Step& without) {
  std::printf(
      "  without adapters %.2f ms, forward %.2f, backward %.2f: LoRA's whole cost is %.1f %% of the step\n",
      without.median(), without.forward.median(), without.backward.median(),
      100 * (1 - median_ratio(without.ms(), with.ms())));
}

struct Threaded {
  int threads;
  const Step& step;
  double limit_ms;
};

inline void report_speedup(const Threaded& few, const Threaded& many) {
  const double measured = median_ratio(few.step.ms(), many.step.ms());
  const double allowed = few.limit_ms / many.limit_ms;
  std::printf("threads %d against %d: step %.2f times as fast, the limits allow %.2f: %.2f of it\n",
              many.threads, few.threads, measured, allowed, measured / allowed);
}

}  // namespace bench
