// The measured limits of this machine: peak of each multiply-add instruction and memory bandwidth, with a given
// number of threads. What benchmarks and profiles compare with. Not part of amx_sft_moe.hpp; include it before or
// behind.
#pragma once

#include "amx_sft_moe/core/config_macros.hpp"
// Behind the macros, what uses them.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <string_view>

#include "amx_sft_moe/arch/cpu_features.hpp"
#include "amx_sft_moe/arch/peak_loops.hpp"
#include "amx_sft_moe/core/aligned_buffer.hpp"
#include "amx_sft_moe/core/errors.hpp"
#include "amx_sft_moe/kernels/amx_bf16.hpp"
#include "amx_sft_moe/parallel/tasks.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN

// GFLOP/s of each multiply-add instruction with all threads, 0 where there is none.
struct Machine {
  double dpbf16 = 0, fma512 = 0, tdpbf16 = 0, fma256 = 0, sse2 = 0;
  double bandwidth = 0;  // GB/s of reads

  double peak() const { return std::max({dpbf16, fma512, tdpbf16, fma256, sse2}); }
  // Of the instructions that a kernel is made of.
  double peak_of_kernel(std::string_view kernel) const {
    if (kernel == "amx_bf16") return tdpbf16;
    if (kernel == "avx512_bf16") return dpbf16;
    if (kernel == "avx512") return fma512;
    if (kernel == "avx2") return fma256;
    if (kernel == "portable") return sse2;
    return peak();
  }
};

namespace probe {

inline double seconds_of(const std::function<void()>& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

inline double peak_of(int threads, double flop_per_round, const std::function<void(index_t)>& loop) {
  constexpr index_t kRounds = 2'000'000;
  double best = 0;
  for (int repeat = 0; repeat < 5; ++repeat) {
    const double seconds = seconds_of(
        [&] { parallel::run_tasks(threads, threads, [&](int) { return [&](index_t) { loop(kRounds); }; }); });
    best = std::max(best, flop_per_round * static_cast<double>(kRounds) * threads / seconds * 1e-9);
  }
  return best;
}

// Parts that threads read, and floats of which each reads a multiple.
constexpr index_t kPartsPerThread = 16;
constexpr index_t kPartFloats = 64;
constexpr index_t least_bytes(int threads) {
  return threads * kPartsPerThread * kPartFloats * 4;
}

// Read from huge pages where there are such (AlignedBuffer): what the memory gives, in whatever pages weights lie.
inline double bandwidth_of(int threads, index_t bytes) {
  const index_t parts = threads * kPartsPerThread;
  const index_t per_part = bytes / 4 / parts / kPartFloats * kPartFloats;
  const index_t count = per_part * parts;
  const AlignedBuffer<float> data(count);
  std::fill_n(data.data(), count, 0.0F);
  double best = 0;
  std::atomic<float> sink{0};  // for compilers: what is read is used
  for (int repeat = 0; repeat < 5; ++repeat) {
    for (const auto read_all : arch::peak::kReadAll) {
      const double seconds = seconds_of([&] {
        parallel::run_tasks(threads, parts, [&](int) {
          return [&](index_t part) {
            sink.store(read_all(data.data() + part * per_part, per_part), std::memory_order_relaxed);
          };
        });
      });
      best = std::max(best, static_cast<double>(count) * 4 / seconds * 1e-9);
    }
  }
  return best;
}

}  // namespace probe

// A second where nothing else runs. Bandwidth is that of reading `bandwidth_bytes` once, far more than caches hold.
// Throws ArgumentError for less than one thread, more than kMaxThreads, or less than 4 KiB of them for each.
inline Machine measure_machine(int threads, index_t bandwidth_bytes = index_t{1} << 30) {
  require_at_least("threads", 1, threads);
  require_at_most("threads", kMaxThreads, threads);
  require_at_least("bandwidth_bytes", probe::least_bytes(threads), bandwidth_bytes);
  Machine machine;
  const auto cpu = arch::cpu_features();
  if (cpu.avx512_bf16) machine.dpbf16 = probe::peak_of(threads, 24 * 64, arch::peak::dpbf16_loop);
  if (cpu.avx512) machine.fma512 = probe::peak_of(threads, 24 * 32, arch::peak::fma512_loop);
  if (cpu.avx2) machine.fma256 = probe::peak_of(threads, 12 * 16, arch::peak::fma256_loop);
  machine.sse2 = probe::peak_of(threads, 14 * 4, arch::peak::sse2_loop);
  if (kernels::AmxBf16::available() && !cpu.amx_emulated) {
    machine.tdpbf16 = probe::peak_of(threads, 4.0 * 16 * 16 * 64, arch::peak::tdpbf16_loop);
  }
  machine.bandwidth = probe::bandwidth_of(threads, bandwidth_bytes);
  return machine;
}

AMX_SFT_MOE_NAMESPACE_END

#include "amx_sft_moe/core/undef_macros.hpp"
