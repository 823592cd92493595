// The whole library, every kernel instantiated: what clang-tidy reads (`make tidy`). Not part of any program.
#include "amx_sft_moe/amx_sft_moe.hpp"

std::unique_ptr<amx_sft_moe::AnySftMoe> every_kernel(const amx_sft_moe::Config& config,
                                                     const amx_sft_moe::AnyBaseWeights& weights) {
  return amx_sft_moe::make_sft_moe("auto", config, weights);
}
