// Loops of nothing but one instruction on registers, or of reads: what a machine can do at most. For
// kernels/machine_probe.hpp.
#pragma once

#include "amx_sft_moe/arch/amx/tile.hpp"
#include "amx_sft_moe/core/config_macros.hpp"
#include "amx_sft_moe/core/element.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace arch::peak {

// Compilers do not see what inline assembly does: SSE code that runs with dirty upper halves waits for them.
__attribute__((target("avx"))) inline void clear_upper_halves() {
  __asm__ volatile("vzeroupper" ::
                       : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9",
                         "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15");
}

// Denormal numbers left in the registers would be slow.
__attribute__((target("avx512f"))) inline void clear_zmm() {
  __asm__ volatile(
      ".irp r,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,30,31\n\t"
      "vpxord %%zmm\\r, %%zmm\\r, %%zmm\\r\n\t"
      ".endr" ::
          : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11",
            "xmm12", "xmm13", "xmm14", "xmm15", "xmm16", "xmm17", "xmm18", "xmm19", "xmm20", "xmm21", "xmm22",
            "xmm23", "xmm30", "xmm31");
}

// 24 independent accumulators: more than latency times rate of any CPU so far.
__attribute__((target("avx512f,avx512bf16"))) inline void dpbf16_loop(index_t rounds) {
  clear_zmm();
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
  clear_zmm();
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

// As many as the 16 registers of VEX and SSE encodings allow.
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

// Sums of 16 lanes in a chain for each of some streams side by side: at any -O level the loads, not the additions, are the
// limit. Asks: each line is asked for twice, far ahead into L2 and near into L1.
template <int Streams, bool Asks>
float read_streams(const float* data, index_t count) {
  using Vector = float __attribute__((vector_size(64)));
  Vector sum[std::size_t{Streams}] = {};
  constexpr index_t kNear = 128, kFar = 1024;  // 512 bytes, 4 KiB
  const index_t part = count / (Streams * 16) * 16;
  for (index_t i = 0; i < part; i += 16) {
    for (int v = 0; v < Streams; ++v) {
      const float* line = data + v * part + i;
      if constexpr (Asks) {
        __builtin_prefetch(line + (i + kNear < part ? kNear : 0), 0, 3);
        __builtin_prefetch(line + (i + kFar < part ? kFar : 0), 0, 2);
      }
      sum[v] += *reinterpret_cast<const Vector*>(line);
    }
  }
  for (int v = 1; v < Streams; ++v) sum[0] += sum[v];
  return sum[0][0];
}

// The ways to read memory that were the quickest somewhere. Loads and the hardware's prefetchers alone leave a quarter of
// some machines' bandwidth unused; on others (AMD Zen 5) a quarter of it goes where more than two streams are read and asked for.
inline constexpr float (*kReadAll[])(const float*, index_t) = {&read_streams<4, true>, &read_streams<2, false>};

}  // namespace arch::peak
AMX_SFT_MOE_NAMESPACE_END
