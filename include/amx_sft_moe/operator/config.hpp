// What a caller hands to the operator: its dimensions and options, and the routing of a call.
#pragma once

#include <algorithm>
#include <optional>
#include <string>

#include "amx_sft_moe/core/activation.hpp"
#include "amx_sft_moe/core/views.hpp"
#include "amx_sft_moe/parallel/tasks.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN

// E experts, k = top_k, H hidden, I intermediate.
struct Config {
  index_t num_experts = 0;                 // 1 <= E < 2^31
  index_t top_k = 0;                       // 1 <= k; k > E is legal where ids repeat or are skipped
  index_t hidden_size = 0;                 // H >= 1
  index_t intermediate_size = 0;           // I >= 1
  std::optional<index_t> max_tokens = {};  // refuse more tokens a call than this; unset: buffers grow
  index_t cache_depth = 1;  // how many forwards may wait for their backward; memory grows with use
  Activation activation = SiluGlu{};
  int num_threads = 0;    // at most kMaxThreads; 0: as many of them as OpenMP would use at the time of the call
  std::string name = {};  // of the layer, for dumps
  // Record what each thread did, task by task; on in any case where a trace or a JSON dump writes it.
  bool record_spans = false;
};

// Threads of a call that begins now.
inline int threads_of(const Config& config) {
  return config.num_threads > 0 ? config.num_threads : std::min(parallel::default_num_threads(), kMaxThreads);
}

struct Routing {
  index_t tokens = 0;      // T >= 0
  ExpertIds expert_ids;    // [T, k]; an id outside [0, E) skips the route: no contribution, zero gradient
  AnyConstMatrix weights;  // routing_weights [T, k], fp32 or bf16
};

AMX_SFT_MOE_NAMESPACE_END
