// What the replay and the cost model rest on: the lists hold the operator's work, and the counting kernel counts what
// the AMX kernel executes.
#pragma once

#include <cmath>
#include <cstdio>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "run_step.hpp"
#ifdef BENCH_HAS_AMX_EMULATOR
#include "amx_emulator.hpp"
#endif

namespace bench {

class Checks {
 public:
  void equal(const char* what, std::int64_t expected, std::int64_t got) {
    if (expected == got) return;
    ++failures_;
    std::printf("%s: expected %lld, got %lld\n", what, static_cast<long long>(expected),
                static_cast<long long>(got));
  }
  int failures() const { return failures_; }

 private:
  int failures_ = 0;
};

// Sum of 2 rows cols k over the tasks of a kind.
inline std::int64_t flop_of(const ListedRegion& region, int kind, index_t k) {
  std::int64_t flop = 0;
  for (const ListedTask& task : region.tasks) {
    if (task.kind == kind) flop += 2 * task.rows * task.cols * k;
  }
  return flop;
}

// FLOP of the listed rectangles against profile/work.hpp.
inline void check_work(Checks& checks, const LayerShape& s, index_t rank, const StepRun& step) {
  using namespace amx_sft_moe::moe;  // NOLINT(google-build-using-namespace)
  using amx_sft_moe::Phase;
  const auto& r = step.regions;
  const auto& forward = step.forward.work;
  const auto& backward = step.backward.work;
  const index_t h = s.hidden, i = s.intermediate;
  checks.equal("regions", static_cast<std::int64_t>(kRegionNames.size()), static_cast<std::int64_t>(r.size()));
  checks.equal("gather", forward.flop_of(Phase::kLoraAForward), flop_of(r[0], 0, 2 * h * rank));
  checks.equal("gate_up", forward.flop_of(Phase::kGateUpGemm), flop_of(r[1], 0, 2 * (h + rank)));
  checks.equal("down", forward.flop_of(Phase::kDownGemm), flop_of(r[2], 0, i + rank));
  checks.equal("grad_down", backward.flop_of(Phase::kD3Gemm), flop_of(r[5], kDownGemm, h + rank));
  checks.equal("LoRA of grad_down", backward.flop_of(Phase::kD4LoraGrad),
               flop_of(r[4], 0, h * rank) + flop_of(r[5], kDownGradA, rank) + flop_of(r[5], kDownGradB, rank));
  checks.equal("grad_gate_up", backward.flop_of(Phase::kGuBasePass), flop_of(r[7], kBasePass, 2 * (i + rank)));
  checks.equal("LoRA of grad_gate_up",
               backward.flop_of(Phase::kGuLoraGate) + backward.flop_of(Phase::kGuLoraUp),
               flop_of(r[6], 0, 2 * i * rank) + flop_of(r[7], kGradA, 2 * rank) +
                   flop_of(r[7], kGradBGate, rank) + flop_of(r[7], kGradBUp, rank));
  for (const std::size_t region : {3, 8}) {
    std::int64_t tokens = 0;
    for (const ListedTask& task : r[region].tasks) tokens += task.rows;
    checks.equal("tokens summed", step.forward.tokens, tokens);
  }
}

#ifdef BENCH_HAS_AMX_EMULATOR
inline TileCounts emulated_counts() {
  const amx_emulator::Counts c = amx_emulator::counts();
  auto count = [](std::uint64_t n) { return static_cast<std::int64_t>(n); };
  TileCounts counts;
  counts.tdpbf16ps = count(c.tdpbf16ps);
  counts.tileloadd = count(c.tileloadd + c.tileloaddt1);
  counts.tilestored = count(c.tilestored);
  counts.tilezero = count(c.tilezero);
  counts.ldtilecfg = count(c.ldtilecfg);
  counts.tilerelease = count(c.tilerelease);
  return counts;
}

// Each phase of a whole step, counted and executed.
inline void check_counts(Checks& checks, const Layer& layer) {
  const StepRun counted = ObservedLayer(layer, CountingAmx::kName, 1).run();
  const StepRun executed = ObservedLayer(layer, amx_sft_moe::kernels::AmxBf16::kName, 1, emulated_counts).run();
  TileCounts all;
  for (std::size_t r = 0; r < kRegionNames.size(); ++r) {
    const auto& expected = executed.regions[r].phases;
    const auto& got = counted.regions[r].phases;
    checks.equal("phases", static_cast<std::int64_t>(expected.size()), static_cast<std::int64_t>(got.size()));
    for (std::size_t p = 0; p < expected.size() && p < got.size(); ++p) {
      const TileCounts& plain = got[p].second.counts;
      const TileCounts& executed_here = expected[p].second.counts;
      const char* name = amx_sft_moe::info_of(expected[p].first).name.data();
      checks.equal(name, executed_here.tdpbf16ps, plain.tdpbf16ps);
      checks.equal(name, executed_here.tileloadd, plain.tileloadd);
      checks.equal(name, executed_here.ldtilecfg, plain.ldtilecfg);
      checks.equal(name, 1, executed_here.same_instructions(plain) ? 1 : 0);
      all += plain;
    }
  }
  std::printf("a step under the emulator: %lld products, %lld loads, %lld configurations, as counted\n",
              static_cast<long long>(all.tdpbf16ps), static_cast<long long>(all.tileloadd),
              static_cast<long long>(all.ldtilecfg));
}

// Returns why nothing was counted; empty: all was.
inline std::string check_all_counts(Checks& checks, std::span<const LayerShape> shapes) {
  if (!amx_emulator::install()) return "this CPU has AMX, and the emulator, which counts, gets none";
  for (const LayerShape& shape : shapes) check_counts(checks, Layer(shape, 18, {.spread = Spread::kZipf}));
  amx_emulator::uninstall();
  return "";
}
#else
inline std::string check_all_counts(Checks& /*checks*/, std::span<const LayerShape> /*shapes*/) {
  return "this program was built without the emulator";
}
#endif

// All that a step writes, as bytes. What it leaves out is NaN, and not what an earlier step wrote there.
inline std::vector<unsigned char> results(Checks& checks, Layer& layer, const LayerShape& shape, index_t tokens,
                                          const char* kernel, int threads) {
  std::vector<unsigned char> bytes;
  auto each = [&](auto&& work) {
    work(layer.y, tokens * shape.hidden);
    work(layer.grad_x, tokens * shape.hidden);
    work(layer.grad_weights, tokens * shape.top_k);
    for (int f = 0; f < 6; ++f) work(layer.grads[f], layer.factor_size(f));
  };
  each([](auto& buffer, index_t size) { fill(buffer, size, std::numeric_limits<float>::quiet_NaN(), 1); });
  ObservedLayer(layer, kernel, threads).run();
  std::int64_t left_out = 0;
  each([&](const auto& buffer, index_t size) {
    for (index_t i = 0; i < size; ++i) left_out += std::isnan(amx_sft_moe::to_float(buffer[i])) ? 1 : 0;
    const auto* begin = reinterpret_cast<const unsigned char*>(buffer.data());
    bytes.insert(bytes.end(), begin, begin + size * static_cast<index_t>(sizeof(buffer[0])));
  });
  checks.equal("elements left out", 0, left_out);
  return bytes;
}

// The same with one thread and with many: lists that depend on the number of threads change no bit.
inline void check_threads(Checks& checks, const LayerShape& shape) {
  constexpr index_t kTokens = 40;
  Layer layer(shape, kTokens, {.spread = Spread::kZipf});
  for (const char* kernel : {"avx512", "avx512_bf16"}) {
    const auto one = results(checks, layer, shape, kTokens, kernel, 1);
    const auto many = results(checks, layer, shape, kTokens, kernel, 60);
    checks.equal("bytes that depend on the threads", 0, one == many ? 0 : 1);
  }
}

// Returns the number of failures. What this CPU or this build left out is said as "not checked: what: why". Where all
// was left out it is "nothing checked: why", which CTest takes for a test that was skipped.
inline int check_all() {
  if (!CountingAmx::available()) {
    std::printf("nothing checked: %s\n", CountingAmx::refusal().c_str());
    return 0;
  }
  const auto not_checked = [](const char* what, const std::string& why) {
    std::printf("not checked: %s: %s\n", what, why.c_str());
  };
  Checks checks;
  const LayerShape shapes[] = {{"a", 6, 2, 160, 96}, {"b", 4, 2, 224, 70}};
  for (const LayerShape& shape : shapes) {
    for (const Spread spread : {Spread::kUniform, Spread::kZipf}) {
      for (const char* kernel : {"auto", CountingAmx::kName.data()}) {
        const Layer layer(shape, 40, {.spread = spread});
        check_work(checks, shape, kRank, ObservedLayer(layer, kernel, 1).run());
      }
    }
  }
  if (amx_sft_moe::arch::cpu_features().avx512_bf16) {
    for (const LayerShape& shape : shapes) check_threads(checks, shape);
  } else {
    not_checked("results with many threads", "this CPU has no AVX512-BF16");
  }
  const std::string why = check_all_counts(checks, shapes);
  if (!why.empty()) not_checked("counts of tile instructions", why);
  std::printf("%d failures\n", checks.failures());
  return checks.failures();
}

}  // namespace bench
