// The measured limits of this machine: peak of each multiply-add instruction and memory bandwidth, with the
// number of threads of the benchmark. Peaks are of registers only; bandwidth is of reading 1 GiB once.
#pragma once

#include <algorithm>
#include <cstdio>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "amx_sft_moe/amx_sft_moe.hpp"

namespace bench {

using amx_sft_moe::index_t;

inline double seconds_of(const std::function<void()>& work) {
  const auto begin = amx_sft_moe::now_ns();
  work();
  return static_cast<double>(amx_sft_moe::now_ns() - begin) * 1e-9;
}

inline double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

// Compilers do not see what inline assembly does: SSE code that runs with dirty upper halves waits for them.
__attribute__((target("avx"))) inline void clear_upper_halves() {
  __asm__ volatile("vzeroupper" ::
                       : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9",
                         "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15");
}

// 24 independent accumulators: more than latency times rate of any CPU so far. The registers hold zeros.
__attribute__((target("avx512f,avx512bf16"))) inline void dpbf16_loop(index_t rounds) {
  for (index_t i = 0; i < rounds; ++i) {
    __asm__ volatile(
        ".irp r,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23\n\t"
        "vdpbf16ps %%zmm30, %%zmm31, %%zmm\\r\n\t"
        ".endr" ::
            : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11",
              "xmm12", "xmm13", "xmm14", "xmm15", "xmm16", "xmm17", "xmm18", "xmm19", "xmm20", "xmm21", "xmm22",
              "xmm23");
  }
  clear_upper_halves();
}

__attribute__((target("avx512f"))) inline void fma512_loop(index_t rounds) {
  for (index_t i = 0; i < rounds; ++i) {
    __asm__ volatile(
        ".irp r,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23\n\t"
        "vfmadd231ps %%zmm30, %%zmm31, %%zmm\\r\n\t"
        ".endr" ::
            : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11",
              "xmm12", "xmm13", "xmm14", "xmm15", "xmm16", "xmm17", "xmm18", "xmm19", "xmm20", "xmm21", "xmm22",
              "xmm23");
  }
  clear_upper_halves();
}

// As many as the 16 registers of VEX and SSE encodings allow. They are set to zero: denormal numbers left in them
// would be slow.
__attribute__((target("avx2,fma"))) inline void fma256_loop(index_t rounds) {
  __asm__ volatile("vzeroall" ::
                       : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9",
                         "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15");
  for (index_t i = 0; i < rounds; ++i) {
    __asm__ volatile(
        ".irp r,0,1,2,3,4,5,6,7,8,9,10,11\n\t"
        "vfmadd231ps %%ymm14, %%ymm15, %%ymm\\r\n\t"
        ".endr" ::
            : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11");
  }
  clear_upper_halves();
}

// SSE2 has no FMA: as many multiplications as additions, independent of each other.
inline void sse2_loop(index_t rounds) {
  __asm__ volatile(
      ".irp r,0,1,2,3,4,5,6,7,8,9,10,11,12,13,15\n\t"
      "xorps %%xmm\\r, %%xmm\\r\n\t"
      ".endr" ::
          : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11",
            "xmm12", "xmm13", "xmm15");
  for (index_t i = 0; i < rounds; ++i) {
    __asm__ volatile(
        ".irp r,0,1,2,3,4,5,6\n\t"
        "addps %%xmm15, %%xmm\\r\n\t"
        ".endr\n\t"
        ".irp r,7,8,9,10,11,12,13\n\t"
        "mulps %%xmm15, %%xmm\\r\n\t"
        ".endr" ::
            : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11",
              "xmm12", "xmm13");
  }
}

// Four accumulators, two tiles of A and two of B, as the microkernel's 2 x 2 blocks have them.
inline void tdpbf16_loop(index_t rounds) {
  using namespace amx_sft_moe::arch;  // NOLINT(google-build-using-namespace)
  amx::TileConfig config;
  for (int t = 0; t < amx::kTiles; ++t) {
    config.rows[t] = amx::kTileRows;
    config.row_bytes[t] = amx::kTileBytes;
  }
  amx::load_config(config);
  for (index_t i = 0; i < rounds; ++i) {
    amx::dpbf16<0, 4, 6>();
    amx::dpbf16<1, 4, 7>();
    amx::dpbf16<2, 5, 6>();
    amx::dpbf16<3, 5, 7>();
  }
  amx::release();
}

// Sums of 16 lanes in four chains: at any -O level the loads, not the additions, are the limit.
inline float read_all(const float* data, index_t count) {
  using Vector = float __attribute__((vector_size(64)));
  Vector sum[4] = {};
  for (index_t i = 0; i + 64 <= count; i += 64) {
    for (int v = 0; v < 4; ++v) sum[v] += *reinterpret_cast<const Vector*>(data + i + 16 * v);
  }
  const Vector all = sum[0] + sum[1] + sum[2] + sum[3];
  return all[0];
}

struct Machine {
  // GFLOP/s, 0 where there is no such instruction
  double dpbf16 = 0, fma512 = 0, tdpbf16 = 0, fma256 = 0, sse2 = 0;
  double bandwidth = 0;  // GB/s

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

inline double peak_of(int threads, double flop_per_round, const std::function<void(index_t)>& loop) {
  constexpr index_t kRounds = 2'000'000;
  double best = 0;
  for (int repeat = 0; repeat < 5; ++repeat) {
    const double seconds = seconds_of([&] {
      amx_sft_moe::parallel::run_tasks(threads, threads, [&](int) { return [&](index_t) { loop(kRounds); }; });
    });
    best = std::max(best, flop_per_round * static_cast<double>(kRounds) * threads / seconds * 1e-9);
  }
  return best;
}

inline double bandwidth_of(int threads) {
  constexpr index_t kCount = index_t{1} << 28;
  const amx_sft_moe::AlignedBuffer<float> data(kCount);
  std::fill_n(data.data(), kCount, 0.0F);
  const index_t parts = threads * 16;
  double best = 0;
  volatile float sink = 0;
  for (int repeat = 0; repeat < 5; ++repeat) {
    const double seconds = seconds_of([&] {
      amx_sft_moe::parallel::run_tasks(threads, parts, [&](int) {
        return [&](index_t part) {
          const index_t size = kCount / parts / 64 * 64;
          sink = read_all(data.data() + part * size, size);
        };
      });
    });
    best = std::max(best, static_cast<double>(kCount) * 4 / seconds * 1e-9);
  }
  (void)sink;
  return best;
}

inline Machine measure_machine(int threads) {
  Machine machine;
  const auto cpu = amx_sft_moe::arch::cpu_features();
  if (cpu.avx512_bf16) machine.dpbf16 = peak_of(threads, 24 * 64, dpbf16_loop);
  if (cpu.avx512) machine.fma512 = peak_of(threads, 24 * 32, fma512_loop);
  if (cpu.avx2) machine.fma256 = peak_of(threads, 12 * 16, fma256_loop);
  machine.sse2 = peak_of(threads, 14 * 4, sse2_loop);
  if (amx_sft_moe::kernels::AmxBf16::available() && !cpu.amx_emulated) {
    machine.tdpbf16 = peak_of(threads, 4.0 * 16 * 16 * 64, tdpbf16_loop);
  }
  machine.bandwidth = bandwidth_of(threads);
  return machine;
}

inline void print(const Machine& machine, int threads) {
  std::printf(
      "machine, %d threads: VDPBF16PS %.0f, fp32 FMA (zmm) %.0f, fp32 FMA (ymm) %.0f, SSE2 mul + add %.0f, "
      "TDPBF16PS %.0f GFLOP/s; reads %.1f GB/s\n",
      threads, machine.dpbf16, machine.fma512, machine.fma256, machine.sse2, machine.tdpbf16,
      machine.bandwidth);
}

}  // namespace bench
