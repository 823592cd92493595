// One forward and one backward of a small MoE layer with LoRA, and where the backward's time went.
#include <amx_sft_moe/amx_sft_moe.hpp>
#include <cstdint>
#include <iostream>
#include <vector>

using namespace amx_sft_moe;

int main() {
  constexpr index_t kTokens = 64, kExperts = 8, kTopK = 2, kHidden = 256, kIntermediate = 512, kRank = 8;
  const std::vector<bf16> gate(kExperts * kIntermediate * kHidden, to_bf16(0.01F));
  const std::vector<bf16> up(gate.size(), to_bf16(0.01F)), down(gate.size(), to_bf16(0.01F));
  const std::vector<float> a(kExperts * kRank * kHidden, 0.02F), b(kExperts * kIntermediate * kRank, 0.01F);
  const std::vector<float> x(kTokens * kHidden, 1.0F), grad_y(kTokens * kHidden, 0.1F);
  std::vector<float> y(x.size()), grad_x(x.size()), grad_a(a.size()), grad_b(b.size());
  const std::vector<float> weights(kTokens * kTopK, 0.5F);
  std::vector<std::int64_t> ids(kTokens * kTopK);
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int64_t>(i) % kExperts;

  const Config config{
      .num_experts = kExperts, .top_k = kTopK, .hidden_size = kHidden, .intermediate_size = kIntermediate};
  using Experts = ExpertMatrices<const bf16>;
  const BaseWeights<bf16> base{.gate = Experts::stacked(gate.data(), kIntermediate, kHidden),
                               .up = Experts::stacked(up.data(), kIntermediate, kHidden),
                               .down = Experts::stacked(down.data(), kHidden, kIntermediate)};
  LoraWeights lora;  // on the gate projection only, with scaling 2 = alpha / rank
  lora.gate = {AnyConstExpertTensor(a.data(), kExperts, kRank, kHidden),
               AnyConstExpertTensor(b.data(), kExperts, kIntermediate, kRank), 2.0F};
  const Routing routing{kTokens, ExpertIds(ids.data(), kTopK),
                        AnyConstMatrix(weights.data(), kTokens, kTopK, kTopK)};
  Gradients grads;
  grads.x = AnyMatrix(grad_x.data(), kTokens, kHidden, kHidden);
  grads.lora.gate_a = AnyExpertTensor(grad_a.data(), kExperts, kRank, kHidden);
  grads.lora.gate_b = AnyExpertTensor(grad_b.data(), kExperts, kIntermediate, kRank);

  const auto moe = make_sft_moe("auto", config, base, lora);  // or AMX_SFT_MOE<kernels::Avx512Bf16> moe(...)
  moe->forward_sft(routing, AnyConstMatrix(x.data(), kTokens, kHidden, kHidden),
                   AnyMatrix(y.data(), kTokens, kHidden, kHidden), /*save_for_backward=*/true);
  moe->backward(AnyConstMatrix(grad_y.data(), kTokens, kHidden, kHidden), grads);

  std::cout << "kernel " << moe->kernel_name() << ", y[0] = " << y[0] << ", grad_a[0] = " << grad_a[0] << "\n"
            << text_dump(moe->last_backward(), {StepKind::kBackward, "layer 0", moe->kernel_name()});
}
