// A program that uses the library and nothing else: built as a package user, by each compiler, without OpenMP,
// and run on other CPUs. One step of a tiny problem by every kernel that this CPU runs; results of one type of
// weights must agree. Prints for each kernel the hash of its results' bits, so that machines can be compared.
#include <amx_sft_moe/amx_sft_moe.hpp>
#include <amx_sft_moe/kernels/machine_probe.hpp>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#ifdef CONSUMER_HAS_ONEDNN
#include <amx_sft_moe/kernels/onednn.hpp>
#endif

#if defined(__SSE3__) && !defined(CONSUMER_MAY_HAVE_FLAGS)
#error "an -m flag reached the library's user"
#endif
#if defined(AMX_SFT_MOE_NAMESPACE_BEGIN) || defined(AMX_SFT_MOE_UNROLL) || defined(BACKWARD_TIMER_START)
#error "a helper macro of the library reached its user"
#endif

// A name that users have often, as nlohmann::json: none of the library's.
using json = std::string;

namespace {

using namespace amx_sft_moe;
static_assert(std::is_same_v<json, std::string>);

#ifdef CONSUMER_HAS_ONEDNN
using Kernels = kernels::Joined<DefaultKernels, kernels::OneDnnKernels>;
#else
using Kernels = DefaultKernels;
#endif

constexpr index_t kTokens = 9, kExperts = 4, kTopK = 2, kHidden = 70, kIntermediate = 50, kRank = 3;

using Floats = std::vector<float>;

Floats random_floats(index_t count, float scale, unsigned seed) {
  std::mt19937 random(seed);  // its numbers are the standard's, the same everywhere
  Floats values(static_cast<std::size_t>(count));
  for (float& value : values) value = scale * (static_cast<float>(random() >> 8) / 8388608.0F - 1.0F);
  return values;
}

struct Results {
  Floats y = Floats(kTokens * kHidden), grad_x = y, grad_weights = Floats(kTokens * kTopK);
  Floats grad_a = Floats(kExperts * kRank * kHidden), grad_b = Floats(kExperts * kIntermediate * kRank);

  std::vector<const Floats*> all() const { return {&y, &grad_x, &grad_weights, &grad_a, &grad_b}; }
  std::uint64_t hash() const {  // FNV-1a over the bits
    std::uint64_t hash = 0xcbf29ce484222325U;
    for (const Floats* tensor : all()) {
      for (const float value : *tensor) hash = (hash ^ std::bit_cast<std::uint32_t>(value)) * 0x100000001b3U;
    }
    return hash;
  }
};

template <class T>
Results step(const std::string& kernel) {
  std::vector<std::vector<T>> base(3);
  for (unsigned p = 0; p < 3; ++p) {
    for (const float w : random_floats(kExperts * kIntermediate * kHidden, 0.2F, p))
      base[p].push_back(from_float<T>(w));
  }
  const Floats a = random_floats(kExperts * kRank * kHidden, 0.2F, 3);
  const Floats b = random_floats(kExperts * kIntermediate * kRank, 0.2F, 4);
  const Floats x = random_floats(kTokens * kHidden, 1.0F, 5),
               grad_y = random_floats(kTokens * kHidden, 1.0F, 6);
  const Floats weights(kTokens * kTopK, 0.5F);
  std::vector<std::int32_t> ids(kTokens * kTopK);
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int32_t>(i * 3 % kExperts);

  Config config;
  config.num_experts = kExperts;
  config.top_k = kTopK;
  config.hidden_size = kHidden;
  config.intermediate_size = kIntermediate;
  using Experts = ExpertMatrices<const T>;
  BaseWeights<T> experts;
  experts.gate = Experts::stacked(base[0].data(), kIntermediate, kHidden);
  experts.up = Experts::stacked(base[1].data(), kIntermediate, kHidden);
  experts.down = Experts::stacked(base[2].data(), kHidden, kIntermediate);
  LoraWeights lora;
  lora.gate = {{a.data(), kExperts, kRank, kHidden}, {b.data(), kExperts, kIntermediate, kRank}, 2.0F};
  const auto moe = make_sft_moe<Kernels>(kernel, config, experts, lora);

  Results r;
  moe->forward_sft({kTokens, {ids.data(), kTopK}, {weights.data(), kTokens, kTopK, kTopK}},
                   {x.data(), kTokens, kHidden, kHidden}, {r.y.data(), kTokens, kHidden, kHidden}, true);
  Gradients grads;
  grads.x = {r.grad_x.data(), kTokens, kHidden, kHidden};
  grads.routing_weights = {r.grad_weights.data(), kTokens, kTopK, kTopK};
  grads.lora.gate_a = {r.grad_a.data(), kExperts, kRank, kHidden};
  grads.lora.gate_b = {r.grad_b.data(), kExperts, kIntermediate, kRank};
  moe->backward({grad_y.data(), kTokens, kHidden, kHidden}, grads);
  return r;
}

// The largest of |a - b| / |b| over the tensors.
double deviation(const Results& a, const Results& b) {
  double worst = 0;
  for (std::size_t t = 0; t < a.all().size(); ++t) {
    double difference = 0, size = 0;
    for (std::size_t i = 0; i < a.all()[t]->size(); ++i) {
      const double x = static_cast<double>((*a.all()[t])[i]), y = static_cast<double>((*b.all()[t])[i]);
      difference += (x - y) * (x - y);
      size += y * y;
    }
    const double relative = std::sqrt(difference / size);
    if (std::isnan(relative) || relative > worst) worst = relative;  // nothing is above a NaN: it stays
  }
  return worst;
}

template <class T>
bool check(DType dtype) {
  const double allowed = dtype == DType::kFp32 ? 1e-5 : 1e-2;
  const Results expected = step<T>("portable");
  bool good = true;
  for (const KernelInfo& kernel : list_kernels<Kernels>()) {
    if (kernel.weights != dtype) continue;
    std::cout << kernel.name << " " << name_of(dtype) << ": ";
    if (!kernel.available) {
      std::cout << "refused, " << kernel.why_not << "\n";
      continue;
    }
    const Results got = step<T>(std::string(kernel.name));
    const double off = deviation(got, expected);
    good = good && off <= allowed;
    std::cout << "bits " << std::hex << got.hash() << std::dec << ", off portable by " << off << "\n";
  }
  std::cout << "auto " << name_of(dtype) << ": " << resolve_kernel<Kernels>("auto", dtype) << "\n";
  return good && step<T>("auto").hash() == step<T>(resolve_kernel<Kernels>("auto", dtype)).hash();
}

}  // namespace

int main() {
  const bool fp32 = check<float>(DType::kFp32), bf16_weights = check<bf16>(DType::kBf16);
  if (fp32 && bf16_weights) return 0;
  std::cout << "kernels disagree\n";
  return 1;
}
