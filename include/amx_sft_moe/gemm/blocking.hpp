// Every block size of the operator, in one place, with its derivation. They change speed, never bits.
#pragma once

#include <unistd.h>

#include <algorithm>

#include "amx_sft_moe/arch/operands.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace gemm {

struct Blocking {
  // Half of L2 for packed B; the other half is for the rows of A passing by and for C. 1 MiB where the system
  // does not say (virtual machines): the smallest L2 of a server CPU with AVX512-BF16.
  index_t panel_bytes = index_t{1} << 19;

  // gemm_nt: rows of a weight per task. A multiple of every kernel's block (48, 32, 96): no tail but the last.
  // Small, so that few experts still make enough tasks.
  static constexpr index_t kOutRows = 96;
  // Rows of an expert that one task packs, projects or differentiates; a multiple of a panel's columns.
  static constexpr index_t kRowChunk = 64;
  // gemm_nn and gemm_nt: tokens of a task at most. From here on packing a panel of weights (once per task)
  // costs less than 2 % of its products, and a single expert with all tokens still makes tasks for many
  // threads.
  static constexpr index_t kTokensPerTask = 256;
  static constexpr index_t kMinCols = 32;
  // Wider panels than this make too few tasks; reading 512 bytes of each row is enough for the prefetchers.
  static constexpr index_t kMaxCols = 256;
  // Tokens whose sum one task makes.
  static constexpr index_t kTokenChunk = 16;

  static Blocking of_this_machine() {
    Blocking blocking;
    const long l2 = sysconf(_SC_LEVEL2_CACHE_SIZE);
    if (l2 > 0) blocking.panel_bytes = std::max<index_t>(l2 / 2, index_t{1} << 17);
    return blocking;
  }

  // Columns of B that stay in L2 while k steps of them are used.
  template <class E>
  index_t cols_for(index_t k) const {
    const index_t fit = panel_bytes / (std::max<index_t>(k, 1) * static_cast<index_t>(sizeof(E)));
    return std::clamp(fit / kMinCols * kMinCols, kMinCols, kMaxCols);
  }
  template <class E>
  index_t tokens_for(index_t k) const {
    return std::min(cols_for<E>(k), kTokensPerTask);
  }
};

}  // namespace gemm
AMX_SFT_MOE_NAMESPACE_END
