// What a task of each kind takes, by rows: measured on one thread, every expert having the same number of rows, the
// least of several steps. Prints JSON lines {"region", "kind", "rows", "columns", "ns"}: the time of all tasks of that
// kind and their columns together (tasks without columns count one each), so that ns / columns is a column's cost.
#pragma once

#include <cstdio>
#include <map>

#include "run_step.hpp"

namespace bench {

using amx_sft_moe::Phase;

// (region, kind) as replay.py names them; kind -1: LoRA's A of the down projection, once per group of gate_up tasks.
using TaskKind = std::pair<std::size_t, int>;
inline constexpr int kLoraADownKind = -1;

struct TaskCost {
  index_t columns = 0;
  std::int64_t ns = 0;
};
using TaskCosts = std::map<TaskKind, TaskCost>;

// Processor time of phases of a region.
inline std::int64_t busy_ns(const StepRun& step, std::size_t region, std::initializer_list<Phase> phases) {
  std::int64_t sum = 0;
  for (const auto& [phase, done] : step.regions[region].phases) {
    if (std::find(phases.begin(), phases.end(), phase) != phases.end()) sum += done.cpu_ns;
  }
  return sum;
}

// Columns of the tasks of a kind; 0 where they have not all `rows` rows (a task holds fewer than the expert has).
inline index_t columns_of(const ListedRegion& region, int kind, index_t rows) {
  index_t columns = 0;
  for (const ListedTask& task : region.tasks) {
    if (task.kind != kind) continue;
    if (task.rows != rows) return 0;
    columns += std::max<index_t>(task.cols, 1);
  }
  return columns;
}

inline void keep_least(TaskCosts& costs, TaskKind kind, index_t columns, std::int64_t ns) {
  if (columns == 0 || ns == 0) return;
  auto [found, added] = costs.try_emplace(kind, TaskCost{columns, ns});
  if (!added) found->second.ns = std::min(found->second.ns, ns);
}

// What one step says. LoRA's gradients of A and of B share a phase, so a step has only one of them.
inline void add_costs(TaskCosts& costs, const StepRun& step, index_t rows, bool of_a) {
  auto add = [&](std::size_t region, int kind, index_t task_rows, std::initializer_list<Phase> phases) {
    keep_least(costs, {region, kind}, columns_of(step.regions[region], kind, task_rows),
               busy_ns(step, region, phases));
  };
  add(0, 0, rows, {Phase::kGather, Phase::kLoraAForward});
  add(1, 0, rows, {Phase::kGateUpGemm});
  if (columns_of(step.regions[1], 0, rows) > 0) {
    const int groups = step.regions[1].tasks.back().group + 1;
    keep_least(costs, {1, kLoraADownKind}, groups, busy_ns(step, 1, {Phase::kLoraADownForward}));
  }
  add(2, 0, rows, {Phase::kDownGemm});
  add(4, 0, rows, {Phase::kD1Scatter, Phase::kD4LoraGrad});
  add(5, amx_sft_moe::moe::kDownGemm, rows, {Phase::kD3Gemm});
  add(6, 0, rows, {Phase::kSiluBackward, Phase::kGuLoraGate, Phase::kGuLoraUp});
  add(7, amx_sft_moe::moe::kBasePass, rows, {Phase::kGuBasePass});
  if (of_a) {
    add(5, amx_sft_moe::moe::kDownGradA, rows, {Phase::kD4LoraGrad});
    add(7, amx_sft_moe::moe::kGradA, rows, {Phase::kGuLoraGate, Phase::kGuLoraUp});
  } else {
    add(5, amx_sft_moe::moe::kDownGradB, rows, {Phase::kD4LoraGrad});
    add(7, amx_sft_moe::moe::kGradBGate, rows, {Phase::kGuLoraGate});
    add(7, amx_sft_moe::moe::kGradBUp, rows, {Phase::kGuLoraUp});
  }
  for (const auto& [region, phase] : {std::pair{3, Phase::kSumTokens}, {8, Phase::kGu4SumTokens}}) {
    index_t tokens = 0;  // a cost per token
    for (const ListedTask& task : step.regions[static_cast<std::size_t>(region)].tasks) tokens += task.rows;
    keep_least(costs, {region, 0}, tokens, busy_ns(step, static_cast<std::size_t>(region), {phase}));
  }
}

inline void print_cost(std::string_view region, int kind, index_t rows, index_t columns, std::int64_t ns) {
  std::printf(R"({"region": "%.*s", "kind": %d, "rows": %lld, "columns": %lld, "ns": %lld})"
              "\n",
              static_cast<int>(region.size()), region.data(), kind, static_cast<long long>(rows),
              static_cast<long long>(columns), static_cast<long long>(ns));
  std::fflush(stdout);
}

// As many experts as make 1.2 GB of weights, more than caches hold; fewer where 2048 rows are enough to measure.
inline index_t experts_to_measure(const LayerShape& shape, index_t rows) {
  const index_t expert_bytes = 6 * shape.hidden * shape.intermediate;
  const index_t most = std::min(shape.experts, amx_sft_moe::round_up(1200000000 / expert_bytes, 8));
  return std::clamp(2048 / rows / 8 * 8, std::min<index_t>(8, most), most);
}

// All kinds at `rows` rows an expert.
inline TaskCosts measure_costs(LayerShape shape, std::string_view kernel, index_t rows, int repeats) {
  shape.experts = experts_to_measure(shape, rows);
  const Layer layer(shape, shape.experts * rows / shape.top_k, {.spread = Spread::kEven});
  ObservedLayer observed(layer, kernel, 1);
  TaskCosts costs;
  for (int i = 0; i <= repeats; ++i) {  // the first warms up
    for (const bool of_a : {true, false}) {
      const StepRun step = observed.run(layer.gradients(of_a, !of_a));
      if (i > 0) add_costs(costs, step, rows, of_a);
    }
  }
  return costs;
}

// Zeros for an expert without tokens, kinds kDownIdle and kGateUpIdle: what a step with idle experts takes longer.
inline void measure_idle_costs(LayerShape shape, std::string_view kernel, int repeats) {
  shape.experts = std::max<index_t>(2 * shape.top_k, 64);
  const Layer layer(shape, 1, {.spread = Spread::kEven, .one_weight = true});
  ObservedLayer observed(layer, kernel, 1);
  auto busy = [&](bool idle) {
    amx_sft_moe::Gradients grads = layer.gradients();
    grads.accumulate = !idle;
    const StepRun step = observed.run(grads);
    return std::array{busy_ns(step, 5, {Phase::kD4LoraGrad}),
                      busy_ns(step, 7, {Phase::kGuLoraGate, Phase::kGuLoraUp})};
  };
  std::array<std::int64_t, 2> with = busy(true), without = busy(false);
  for (int i = 0; i < repeats; ++i) {
    const auto more_with = busy(true), more_without = busy(false);
    for (std::size_t r = 0; r < 2; ++r) {
      with[r] = std::min(with[r], more_with[r]);
      without[r] = std::min(without[r], more_without[r]);
    }
  }
  const index_t idle_experts = shape.experts - shape.top_k;
  print_cost(kRegionNames[5], amx_sft_moe::moe::kDownIdle, 0, idle_experts,
             std::max<std::int64_t>(with[0] - without[0], 1));
  print_cost(kRegionNames[7], amx_sft_moe::moe::kGateUpIdle, 0, idle_experts,
             std::max<std::int64_t>(with[1] - without[1], 1));
}

inline void print_costs(const LayerShape& shape, std::string_view kernel, index_t most_rows, int repeats) {
  for (const index_t rows : {1, 2, 4, 8, 9, 16, 32, 64, 128, 256, 512, 1024, 2048}) {
    if (rows > most_rows) break;
    for (const auto& [kind, cost] : measure_costs(shape, kernel, rows, repeats)) {
      print_cost(kRegionNames[kind.first], kind.second, rows, cost.columns, cost.ns);
    }
  }
  measure_idle_costs(shape, kernel, repeats);
}

}  // namespace bench
