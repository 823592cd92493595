#include "lora_tensors.hpp"

#include <cmath>

namespace amx_sft_moe::python {
namespace {

constexpr std::array<std::string_view, kFactorCount> kFactorNames{"gate_lora_a", "gate_lora_b", "up_lora_a",
                                                                  "up_lora_b",   "down_lora_a", "down_lora_b"};
constexpr std::array<std::string_view, 3> kScalings{"gate_scaling", "up_scaling", "down_scaling"};

// Reads A [E, r, in] and B [E, out, r] of one projection; false where it has no adapter.
bool read_pair(const LoraObjects& objects, LoraTensors& lora, std::size_t a, index_t experts, index_t in,
               index_t out) {
  const std::size_t b = a + 1;
  if (objects.factors[a].is_none() != objects.factors[b].is_none()) {
    const std::size_t missing = objects.factors[a].is_none() ? a : b;
    throw TypeMismatch(concat(objects.name(missing), ": expected a tensor, since ",
                              objects.name(missing == a ? b : a), " was given, got None"));
  }
  if (objects.factors[a].is_none()) return false;
  Tensor factor_a = read_tensor(objects.factors[a], objects.name(a));
  Tensor factor_b = read_tensor(objects.factors[b], objects.name(b));
  require_float(factor_a, objects.name(a));
  require_float(factor_b, objects.name(b));
  require_shape(factor_a, objects.name(a), {experts, kAnyExtent, in});
  require_shape(factor_b, objects.name(b), {experts, out, factor_a.shape[1]});
  lora.factors[a] = std::move(factor_a);
  lora.factors[b] = std::move(factor_b);
  return true;
}

// A rank of 0 is no adapter; its factors have no elements and their gradients neither.
LoraAdapter adapter(const Tensor& a, const Tensor& b, index_t row_begin, index_t rows,
                    std::optional<float> scaling, std::optional<float> alpha) {
  LoraAdapter made;
  const index_t rank = a.shape[1];
  if (rank == 0) return made;
  made.a = input_experts(a, 0, rank);
  made.b = input_experts(b, row_begin, rows);
  made.scaling = scaling.value_or(alpha.value_or(static_cast<float>(rank)) / static_cast<float>(rank));
  return made;
}

}  // namespace

void require_finite(std::string_view argument, std::optional<float> value) {
  if (value && !std::isfinite(*value)) {
    throw ArgumentError(concat(argument, ": expected a finite number, got ", *value));
  }
}

std::string_view LoraObjects::name(std::size_t factor) const {
  if (shared_a && factor == kGateA) return "gate_up_lora_a";
  if (shared_a && factor == kGateB) return "gate_up_lora_b";
  return kFactorNames[factor];
}

// NOLINTBEGIN(bugprone-unchecked-optional-access): read_pair() says whether both are there.
LoraTensors read_lora(const LoraObjects& objects, const Config& c, const LoraOptions& options) {
  LoraTensors lora;
  for (std::size_t p = 0; p < kScalings.size(); ++p) require_finite(kScalings[p], objects.scaling[p]);
  const index_t hidden = c.hidden_size;
  const index_t inner = c.intermediate_size;
  const auto [gate_scaling, up_scaling, down_scaling] = objects.scaling;
  if (objects.shared_a) {
    if (read_pair(objects, lora, kGateA, c.num_experts, hidden, 2 * inner)) {
      lora.views.gate =
          adapter(*lora.factors[kGateA], *lora.factors[kGateB], 0, inner, gate_scaling, options.alpha);
      lora.views.up =
          adapter(*lora.factors[kGateA], *lora.factors[kGateB], inner, inner, up_scaling, options.alpha);
    }
  } else {
    if (read_pair(objects, lora, kGateA, c.num_experts, hidden, inner)) {
      lora.views.gate =
          adapter(*lora.factors[kGateA], *lora.factors[kGateB], 0, inner, gate_scaling, options.alpha);
    }
    if (read_pair(objects, lora, kUpA, c.num_experts, hidden, inner)) {
      lora.views.up = adapter(*lora.factors[kUpA], *lora.factors[kUpB], 0, inner, up_scaling, options.alpha);
    }
  }
  if (read_pair(objects, lora, kDownA, c.num_experts, inner, hidden)) {
    lora.views.down =
        adapter(*lora.factors[kDownA], *lora.factors[kDownB], 0, hidden, down_scaling, options.alpha);
  }
  for (const std::size_t a : {kGateA, kUpA, kDownA}) {
    if (options.rank == 0 || !lora.factors[a] || lora.factors[a]->shape[1] == options.rank) continue;
    throw ArgumentError(concat(objects.name(a), ": expected a rank of lora_rank = ", options.rank, ", got ",
                               lora.factors[a]->shape[1]));
  }
  return lora;
}
// NOLINTEND(bugprone-unchecked-optional-access)

void bind_gradient(LoraGradients& gradients, const LoraObjects& objects, const LoraTensors& lora,
                   std::size_t factor, const Tensor& tensor, index_t intermediate) {
  const std::string name = concat("out.", objects.name(factor));
  // NOLINTNEXTLINE(bugprone-unchecked-optional-access): asked for where the factor is there
  const Tensor& parameter = *lora.factors[factor];
  require_float(tensor, name);
  require_shape(tensor, name, {parameter.shape[0], parameter.shape[1], parameter.shape[2]});
  if (tensor.elements() == 0) return;
  const index_t rows = tensor.shape[1];
  switch (factor) {
    case kGateA:
      gradients.gate_a = output_experts(tensor, name, 0, rows);
      break;
    case kGateB:
      gradients.gate_b = output_experts(tensor, name, 0, objects.shared_a ? intermediate : rows);
      if (objects.shared_a) gradients.up_b = output_experts(tensor, name, intermediate, intermediate);
      break;
    case kUpA:
      gradients.up_a = output_experts(tensor, name, 0, rows);
      break;
    case kUpB:
      gradients.up_b = output_experts(tensor, name, 0, rows);
      break;
    case kDownA:
      gradients.down_a = output_experts(tensor, name, 0, rows);
      break;
    default:
      gradients.down_b = output_experts(tensor, name, 0, rows);
  }
}

}  // namespace amx_sft_moe::python
