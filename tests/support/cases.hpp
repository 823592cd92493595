// The table of cases that every kernel has to get right: legal extremes and tails of every blocked dimension.
#pragma once

#include <array>
#include <ostream>

namespace sft_test {

enum class RoutingPattern {
  kDistinct,     // k different experts per token
  kDuplicates,   // ids drawn with repetition; token 0 has one id k times
  kSkipped,      // a third of the routes outside [0, E): negative, E, beyond 32 bits where the type allows
  kAllSkipped,   // no route at all
  kOneExpert,    // every route to the last expert
  kIdleExperts,  // experts with an odd number receive nothing
  kSkewed,       // expert 0 in every token, the others at random
};

enum class Form { kSilu, kClamped, kGelu, kGeluTanh };  // of the gated activation

struct Ranks {
  int gate = 0, up = 0, down = 0;
};

// The projections with a bias.
struct WhichBiases {
  bool gate = false, up = false, down = false;
};

struct Case {
  const char* name;
  int tokens, top_k, experts, hidden, intermediate;
  Ranks ranks;
  RoutingPattern routing = RoutingPattern::kDistinct;
  bool shared_a = false;
  Form form = Form::kSilu;
  bool emulate = true;  // few enough tile instructions for the emulated AMX kernel (7 us each)
  WhichBiases biases = {};
  bool trains_base = false;
};

constexpr Case with_biases(Case c, WhichBiases biases = {true, true, true}) {
  c.biases = biases;
  return c;
}

constexpr Case with_trained_base(Case c) {
  c.trains_base = true;
  return c;
}

inline std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << c.name;
}

using enum RoutingPattern;
using enum Form;

// name, T, k, E, H, I, {ranks of gate, up, down}, ...
inline constexpr std::array kCases = {
    // The smallest of everything.
    Case{"one_of_everything", 1, 1, 1, 1, 1, {1, 1, 1}},
    Case{"one_of_everything_no_lora", 1, 1, 1, 1, 1, {0, 0, 0}},
    Case{"no_tokens", 0, 2, 4, 32, 48, {4, 4, 4}},
    Case{"one_token", 1, 2, 4, 32, 48, {4, 4, 4}},
    Case{"one_token_one_expert_of_many", 1, 1, 8, 64, 32, {8, 8, 8}},
    Case{"two_tokens", 2, 2, 3, 17, 33, {2, 2, 2}},
    // Tails of the token dimension, all tokens on one expert so that T is the expert's m.
    Case{"rows_15", 15, 1, 1, 32, 32, {16, 16, 16}},
    Case{"rows_16", 16, 1, 1, 32, 32, {16, 16, 16}},
    Case{"rows_17", 17, 1, 1, 32, 32, {16, 16, 16}},
    Case{"rows_31", 31, 1, 1, 33, 31, {3, 3, 3}},
    Case{"rows_33", 33, 1, 1, 48, 37, {7, 7, 7}},
    Case{"rows_64", 64, 1, 2, 64, 64, {16, 16, 16}, kOneExpert},
    Case{"rows_65", 65, 1, 1, 64, 96, {8, 8, 8}},
    Case{"rows_131", 131, 1, 1, 33, 48, {5, 5, 5}},
    Case{"rows_701", 701, 1, 2, 48, 33, {5, 5, 5}, kOneExpert},
    // Tails of H and I: below, at and above 16, 32 and 64; odd; primes.
    Case{"hidden_1", 5, 2, 3, 1, 32, {4, 4, 4}},
    Case{"intermediate_1", 5, 2, 3, 32, 1, {4, 4, 4}},
    Case{"hidden_7_intermediate_17", 9, 2, 4, 7, 17, {3, 3, 3}},
    Case{"hidden_17_intermediate_7", 9, 2, 4, 17, 7, {3, 3, 3}},
    Case{"hidden_31_intermediate_33", 16, 2, 4, 31, 33, {8, 8, 8}},
    Case{"hidden_33_intermediate_31", 16, 2, 4, 33, 31, {8, 8, 8}},
    Case{"primes_37_53", 33, 3, 5, 37, 53, {7, 7, 7}},
    Case{"hidden_48_intermediate_80", 16, 2, 4, 48, 80, {16, 16, 16}},
    Case{"hidden_63_intermediate_65", 20, 2, 4, 63, 65, {16, 16, 16}},
    Case{"hidden_64_intermediate_96", 20, 2, 4, 64, 96, {16, 16, 16}},
    Case{"hidden_97_intermediate_128", 24, 2, 4, 97, 128, {8, 8, 8}},
    Case{"hidden_128_intermediate_97", 24, 2, 4, 128, 97, {8, 8, 8}},
    Case{"primes_127_131", 20, 2, 3, 127, 131, {13, 13, 13}},
    Case{"long_contraction", 6, 1, 2, 1031, 40, {8, 8, 8}},
    Case{"long_intermediate", 6, 1, 2, 40, 1031, {8, 8, 8}},
    Case{"wide", 9, 1, 2, 577, 545, {17, 17, 17}},
    // Few rows of each of many experts: tasks as wide as a row, more than what of C stays in L1.
    Case{"few_rows_very_wide", 64, 2, 16, 1601, 37, {5, 5, 5}, kDistinct, false, kSilu, false},
    Case{"few_rows_very_wide_and_deeper", 24, 2, 8, 1601, 75, {5, 5, 5}, kDistinct, false, kSilu, false},
    Case{"wide_and_high", 150, 1, 1, 545, 290, {65, 33, 17}, kDistinct, false, kSilu, false},
    // Ranks: none, one, odd, one tile, more than a tile's K, more than H and I; different; one projection only.
    Case{"rank_0", 16, 2, 4, 64, 64, {0, 0, 0}},
    Case{"rank_1", 16, 2, 4, 64, 64, {1, 1, 1}},
    Case{"rank_7", 16, 2, 4, 64, 64, {7, 7, 7}},
    Case{"rank_33", 16, 2, 4, 64, 64, {33, 33, 33}},
    Case{"rank_64", 16, 2, 4, 64, 48, {64, 64, 64}},
    Case{"rank_above_sizes", 9, 2, 3, 7, 17, {64, 64, 64}},
    Case{"ranks_differ", 16, 2, 4, 48, 64, {4, 17, 9}},
    // More rows of a factor's gradient than one product makes, of one chunk of tokens and of two.
    Case{"rank_300", 20, 1, 2, 40, 33, {300, 257, 270}},
    Case{"rank_300_rows_521", 521, 1, 2, 9, 7, {300, 0, 257}, kOneExpert},
    Case{"rank_300_shared_a", 20, 1, 2, 40, 33, {300, 300, 0}, kDistinct, true},
    Case{"ranks_differ_with_absent", 16, 2, 4, 48, 64, {0, 32, 1}},
    Case{"only_gate_adapted", 16, 2, 4, 48, 64, {8, 0, 0}},
    Case{"only_up_adapted", 16, 2, 4, 48, 64, {0, 8, 0}},
    Case{"only_down_adapted", 16, 2, 4, 48, 64, {0, 0, 8}},
    Case{"shared_a", 16, 2, 4, 48, 64, {8, 8, 8}, kDistinct, true},
    Case{"shared_a_odd", 17, 2, 3, 37, 29, {5, 5, 0}, kSkipped, true},
    Case{"shared_a_rank_33", 19, 2, 3, 64, 48, {33, 33, 33}, kDistinct, true},
    Case{"shared_a_rank_1", 16, 2, 4, 48, 64, {1, 1, 1}, kDistinct, true},
    // Routing.
    Case{"every_expert", 7, 5, 5, 32, 32, {8, 8, 8}},
    Case{"duplicate_ids", 16, 4, 4, 32, 48, {8, 8, 8}, kDuplicates},
    Case{"more_slots_than_experts", 7, 5, 2, 32, 48, {8, 8, 8}, kDuplicates},
    Case{"skipped_ids", 33, 3, 5, 32, 48, {8, 8, 8}, kSkipped},
    Case{"all_skipped", 16, 2, 4, 32, 48, {8, 8, 8}, kAllSkipped},
    Case{"all_on_one_expert", 48, 1, 16, 32, 48, {8, 8, 8}, kOneExpert},
    Case{"all_slots_on_one_expert", 17, 3, 4, 32, 48, {8, 8, 8}, kOneExpert},
    Case{"idle_experts", 16, 2, 8, 32, 48, {8, 8, 8}, kIdleExperts},
    Case{"skewed", 64, 4, 8, 64, 48, {8, 8, 8}, kSkewed},
    Case{"many_experts_few_tokens", 3, 2, 64, 32, 32, {4, 4, 4}},
    Case{"qwen3_like_small", 64, 8, 16, 96, 48, {16, 16, 16}},
    // gpt-oss's clamped activation.
    Case{"clamped", 33, 2, 4, 48, 64, {8, 8, 8}, kDistinct, false, kClamped},
    Case{"clamped_primes_shared_a", 17, 2, 3, 37, 53, {7, 7, 7}, kSkipped, true, kClamped},
    Case{"clamped_one_of_everything", 1, 1, 1, 1, 1, {1, 1, 1}, kDistinct, false, kClamped},
    // GELU, by erf and by tanh.
    Case{"gelu", 33, 2, 4, 48, 64, {8, 8, 8}, kDistinct, false, kGelu},
    Case{"gelu_primes", 17, 2, 3, 37, 53, {7, 7, 7}, kSkipped, false, kGelu},
    Case{"gelu_tanh", 33, 2, 4, 48, 64, {8, 8, 8}, kDistinct, false, kGeluTanh},
    Case{"gelu_tanh_primes", 17, 2, 3, 37, 53, {7, 7, 7}, kSkipped, false, kGeluTanh},
    // Biases, and gpt-oss's combination.
    with_biases({"biases", 33, 2, 4, 48, 64, {8, 8, 8}}),
    with_biases({"biases_primes_skipped", 17, 3, 5, 37, 53, {7, 3, 5}, kSkipped}),
    with_biases({"biases_no_lora", 20, 2, 4, 63, 65, {0, 0, 0}}),
    with_biases({"biases_one_of_everything", 1, 1, 1, 1, 1, {1, 1, 1}}),
    with_biases({"biases_no_tokens", 0, 2, 4, 32, 48, {4, 4, 4}}),
    with_biases({"biases_idle_experts", 16, 2, 8, 32, 48, {8, 8, 8}, kIdleExperts}),
    // Each projection's bias is a bias of its own.
    with_biases({"biases_not_of_up", 17, 3, 5, 37, 53, {7, 3, 5}, kSkipped}, {true, false, true}),
    with_biases({"bias_of_up_alone", 16, 2, 8, 33, 48, {0, 0, 8}, kIdleExperts}, {false, true, false}),
    with_biases({"bias_of_down_alone", 16, 2, 8, 33, 48, {8, 8, 0}, kIdleExperts}, {false, false, true}),
    // Gradients in several blocks of rows and of columns, of few tokens.
    with_biases(
        {"biases_few_rows_wide_ranks", 64, 2, 16, 601, 37, {33, 17, 20}, kDistinct, false, kSilu, false}),
    with_biases({"biases_rows_131", 131, 1, 1, 33, 48, {5, 5, 5}}),
    with_biases({"gpt_oss_like", 40, 4, 8, 90, 90, {16, 16, 16}, kDistinct, true, kClamped}),
    // As many tokens as some kernels still have dot products for, and as few as they have panels for, of long rows; LoRA's
    // second term with few steps and with many.
    Case{"rows_14_long_gate_up", 14, 1, 1, 2801, 70, {7, 0, 66}},
    Case{"rows_15_long_gate_up", 15, 1, 1, 2801, 70, {7, 0, 66}},
    Case{"rows_15_long_down", 15, 1, 1, 70, 2801, {66, 7, 5}},
    // More of x, and of h, than tiles keep in L2 while they read weights in streams.
    Case{"rows_300_long_gate_up", 300, 1, 1, 1900, 35, {4, 4, 4}, kDistinct, false, kSilu, false},
    Case{"rows_300_long_down", 300, 1, 1, 35, 1900, {4, 4, 4}, kDistinct, false, kSilu, false},
    // The last task of gemm_nt has 6 tokens, as few as an expert would have read in place.
    Case{"rows_4230", 4230, 1, 2, 16, 18, {3, 2, 4}, kOneExpert},
    // Gradients of the base weights: tails of every dimension, more rows than one sum takes, more rows and columns
    // than one task makes, beside LoRA and biases and alone.
    with_trained_base({"base_one_of_everything", 1, 1, 1, 1, 1, {1, 1, 1}}),
    with_trained_base({"base_no_tokens", 0, 2, 4, 32, 48, {4, 4, 4}}),
    with_trained_base({"base_one_token", 1, 2, 4, 32, 48, {0, 0, 0}}),
    with_trained_base({"base_primes_skipped", 33, 3, 5, 37, 53, {7, 3, 5}, kSkipped}),
    with_trained_base({"base_rows_131", 131, 1, 1, 33, 48, {0, 0, 0}}),
    with_trained_base({"base_rows_512", 512, 1, 1, 17, 33, {0, 0, 0}}),
    with_trained_base({"base_rows_1031", 1031, 1, 2, 33, 17, {0, 0, 0}, kOneExpert}),
    with_trained_base({"base_wide", 6, 1, 1, 577, 70, {0, 0, 0}}),
    with_trained_base({"base_rows_130_wide", 130, 1, 1, 577, 70, {0, 0, 0}}),
    with_trained_base({"base_rows_257_wide", 257, 1, 1, 200, 136, {0, 0, 0}}),
    with_trained_base({"base_whole_lines", 130, 1, 1, 320, 192, {0, 0, 0}}),
    with_trained_base({"base_rows_600_wide", 600, 1, 1, 130, 70, {0, 0, 0}}),
    with_trained_base({"base_hidden_1", 5, 2, 3, 1, 32, {0, 4, 0}}),
    with_trained_base({"base_intermediate_1", 5, 2, 3, 32, 1, {4, 4, 4}}),
    with_trained_base({"base_idle_experts", 16, 2, 8, 32, 48, {8, 8, 8}, kIdleExperts}),
    with_trained_base({"base_duplicate_ids", 16, 4, 4, 32, 48, {0, 0, 0}, kDuplicates}),
    with_trained_base({"base_gelu", 17, 2, 3, 37, 53, {0, 0, 0}, kSkipped, false, kGelu}),
    with_trained_base(with_biases({"base_everything", 40, 4, 8, 45, 61, {5, 5, 5}, kSkewed, true, kClamped})),
};

}  // namespace sft_test
