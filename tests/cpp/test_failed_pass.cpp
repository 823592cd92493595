// What an operator says of its last pass after one that failed: each allocation of a pass that has to grow its buffers
// fails in turn.
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "allocation_counter.hpp"
#include "amx_sft_moe/amx_sft_moe.hpp"

namespace sft_test {
namespace {

using namespace amx_sft_moe;
using Moe = AMX_SFT_MOE<kernels::Portable<float>>;

constexpr index_t kHidden = 5, kIntermediate = 7, kFew = 2, kMany = 64;

// One expert, for which all tokens are meant.
struct Layer {
  std::vector<float> weights = std::vector<float>(kHidden * kIntermediate, 0.1F);
  std::vector<float> x = std::vector<float>(kMany * kHidden, 1.0F), y = x;
  std::vector<float> route_weights = std::vector<float>(kMany, 1.0F);
  std::vector<std::int64_t> ids = std::vector<std::int64_t>(kMany, 0);

  Moe make() const {
    Config config;
    config.num_experts = config.top_k = 1;
    config.hidden_size = kHidden;
    config.intermediate_size = kIntermediate;
    config.num_threads = 1;
    config.record_spans = true;
    using Experts = ExpertMatrices<const float>;
    const Experts in = Experts::stacked(weights.data(), kIntermediate, kHidden);
    return Moe(config, {in, in, Experts::stacked(weights.data(), kHidden, kIntermediate)});
  }
  void forward(Moe& moe, index_t tokens) {
    moe.forward_sft({tokens, {ids.data(), 1}, {route_weights.data(), tokens, 1, 1}},
                    AnyConstMatrix(x.data(), tokens, kHidden, kHidden), {y.data(), tokens, kHidden, kHidden});
  }
  void backward(Moe& moe, index_t tokens) {
    Gradients grads;
    grads.x = {y.data(), tokens, kHidden, kHidden};
    moe.backward({x.data(), tokens, kHidden, kHidden}, grads);
  }
};

// The record of the pass before, or none.
bool expect_no_half_record(const StepRecord& record) {
  EXPECT_EQ(record.index, 0);
  if (record.empty()) {
    EXPECT_TRUE(record.regions().empty());
    EXPECT_EQ(record.tokens, 0);
    EXPECT_EQ(record.threads, 0);
    return true;
  }
  EXPECT_EQ(record.tokens, kFew);
  EXPECT_FALSE(record.regions().empty());
  return false;
}

struct Outcomes {
  int empty = 0, earlier = 0;
};

// Takes a small step, then calls grow(moe) with one allocation after the other failing.
template <class Grow>
Outcomes fail_each_allocation(Layer& layer, StepKind kind, Grow&& grow) {
  Outcomes outcomes;
  for (int at = 0; at < 1000; ++at) {
    Moe moe = layer.make();
    layer.forward(moe, kFew);
    layer.backward(moe, kFew);
    if (kind == StepKind::kBackward) layer.forward(moe, kMany);
    const StepRecord& record = kind == StepKind::kForward ? moe.last_forward() : moe.last_backward();
    bool thrown = false;
    {
      const FailingAllocation failing(at);
      try {
        grow(moe);
      } catch (const std::bad_alloc&) {
        thrown = true;
      }
    }
    if (!thrown) {
      EXPECT_EQ(record.tokens, kMany);
      EXPECT_EQ(record.index, 1);
      return outcomes;
    }
    ++(expect_no_half_record(record) ? outcomes.empty : outcomes.earlier);
    grow(moe);
    EXPECT_EQ(record.tokens, kMany);
    EXPECT_EQ(record.index, 1) << "the one that failed is not counted";
  }
  ADD_FAILURE() << "no end of allocations";
  return outcomes;
}

TEST(FailedPass, ForwardLeavesNoHalfRecord) {
  Layer layer;
  const Outcomes outcomes =
      fail_each_allocation(layer, StepKind::kForward, [&](Moe& moe) { layer.forward(moe, kMany); });
  EXPECT_GT(outcomes.empty, 0);
  EXPECT_GT(outcomes.earlier, 0) << "what fails before the pass began leaves the record";
}

TEST(FailedPass, BackwardLeavesNoHalfRecord) {
  Layer layer;
  const Outcomes outcomes =
      fail_each_allocation(layer, StepKind::kBackward, [&](Moe& moe) { layer.backward(moe, kMany); });
  EXPECT_GT(outcomes.empty, 0);
}

}  // namespace
}  // namespace sft_test
