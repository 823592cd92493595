// The operator's stack by itself: its depth is a number, entries come with their first use and stay where they are.
#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "amx_sft_moe/operator/saved_stack.hpp"
#include "refusal.hpp"

namespace sft_test {
namespace {

using amx_sft_moe::index_t;
using amx_sft_moe::SavedForward;
using Stack = amx_sft_moe::SavedStack<float>;

constexpr index_t kNoLimit = std::numeric_limits<index_t>::max();

amx_sft_moe::Config tiny_config() {
  amx_sft_moe::Config config;
  config.num_experts = config.top_k = config.hidden_size = config.intermediate_size = 1;
  return config;
}

void push_tokens(Stack& stack, index_t tokens) {
  amx_sft_moe::Routing routing;
  routing.tokens = tokens;
  stack.next().reserve(routing, tiny_config(), {});
  stack.push();
}

TEST(SavedStack, DepthCostsNothing) {
  Stack stack(kNoLimit);
  EXPECT_EQ(stack.bytes(), 0);
  push_tokens(stack, 3);
  EXPECT_EQ(stack.size(), 1);
  EXPECT_GT(stack.bytes(), 0);
}

TEST(SavedStack, EntriesStayWhereTheyAre) {
  constexpr index_t kForwards = 1000;
  Stack stack(kForwards);
  std::vector<const SavedForward<float>*> entries;
  for (index_t n = 0; n < kForwards; ++n) {
    push_tokens(stack, n + 1);
    entries.push_back(&stack.top());
  }
  for (index_t n = kForwards; n-- > 0; stack.pop()) {
    EXPECT_EQ(&stack.top(), entries[static_cast<std::size_t>(n)]);
    EXPECT_EQ(stack.top().routing().tokens, n + 1);
  }
}

TEST(SavedStack, ReusesWhatWasPopped) {
  Stack stack(kNoLimit);
  for (int n = 0; n < 4; ++n) push_tokens(stack, 5);
  const index_t bytes = stack.bytes();
  const SavedForward<float>* top = &stack.top();
  for (int round = 0; round < 3; ++round) {
    round == 0 ? stack.pop() : stack.clear();
    while (stack.size() < 4) push_tokens(stack, 5);
    EXPECT_EQ(stack.bytes(), bytes);
    EXPECT_EQ(&stack.top(), top);
  }
}

TEST(SavedStack, RefusesAsBefore) {
  Stack stack(2);
  expect_refused<amx_sft_moe::StateError>([&] { stack.top(); }, {"backward", "a saved forward", "depth 0"});
  push_tokens(stack, 1);
  push_tokens(stack, 1);
  for (int n = 0; n < 2; ++n) {
    expect_refused<amx_sft_moe::StateError>([&] { stack.next(); },
                                            {"save_for_backward", "at most cache_depth = 2", "got one more"});
    EXPECT_EQ(stack.size(), 2);
  }
  stack.pop();
  push_tokens(stack, 1);
  EXPECT_EQ(stack.size(), 2);
}

}  // namespace
}  // namespace sft_test
