// The measured limits of this machine, as benchmarks print them, and a clock.
#pragma once

#include <algorithm>
#include <cstdio>
#include <functional>
#include <vector>

#include "amx_sft_moe/amx_sft_moe.hpp"
#include "amx_sft_moe/kernels/machine_probe.hpp"

namespace bench {

using amx_sft_moe::index_t;
using amx_sft_moe::Machine;
using amx_sft_moe::measure_machine;
using amx_sft_moe::probe::seconds_of;

inline double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

// Of a[i] / b[i], which were measured one right after the other.
inline double median_ratio(const std::vector<double>& a, const std::vector<double>& b) {
  std::vector<double> ratios(a.size());
  std::transform(a.begin(), a.end(), b.begin(), ratios.begin(), std::divides<>());
  return median(ratios);
}

// GFLOP/s of the fastest instruction that multiplies fp32.
inline double peak_of_fp32(const Machine& machine) {
  return std::max({machine.fma512, machine.fma256, machine.sse2});
}

// What a shared machine loses comes back: the better value of each.
inline Machine better_of(const Machine& a, const Machine& b) {
  return {std::max(a.dpbf16, b.dpbf16), std::max(a.fma512, b.fma512), std::max(a.tdpbf16, b.tdpbf16),
          std::max(a.fma256, b.fma256), std::max(a.sse2, b.sse2),     std::max(a.bandwidth, b.bandwidth)};
}

inline void print(const Machine& machine, int threads) {
  std::printf(
      "machine, %d threads: VDPBF16PS %.0f, fp32 FMA (zmm) %.0f, fp32 FMA (ymm) %.0f, SSE2 mul + add %.0f, "
      "TDPBF16PS %.0f GFLOP/s; reads %.1f GB/s\n",
      threads, machine.dpbf16, machine.fma512, machine.fma256, machine.sse2, machine.tdpbf16,
      machine.bandwidth);
}

}  // namespace bench
