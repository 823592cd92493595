#include "problem.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "random.hpp"

namespace sft_test {

namespace {

std::vector<double> slice(const std::vector<double>& values, std::size_t begin, std::size_t count) {
  const auto first = values.begin() + static_cast<std::ptrdiff_t>(begin);
  return {first, first + static_cast<std::ptrdiff_t>(count)};
}

Tensor contiguous(DType dtype, Extents extents, const std::vector<double>& values, Edge edge) {
  Tensor tensor(dtype, extents, Strides::rows(extents), edge);
  tensor.store(values);
  return tensor;
}

void round_all(DType dtype, std::vector<double>& values) {
  for (double& value : values) value = rounded(dtype, value);
}

}  // namespace

BaseStore::BaseStore(DType dtype, WeightLayout layout, const reference::Layer& layer, Edge edge)
    : layout_(layout), hidden_(layer.hidden), intermediate_(layer.intermediate) {
  if (layout == WeightLayout::kPerExpert) {
    store_per_expert(dtype, layer, edge);
    return;
  }
  const Extents gate{layer.experts, intermediate_, hidden_};
  const Extents down{layer.experts, hidden_, intermediate_};
  if (layout == WeightLayout::kStacked) {
    tensors_.push_back(contiguous(dtype, gate, layer.gate, edge));
    tensors_.push_back(contiguous(dtype, gate, layer.up, edge));
  } else {
    std::vector<double> fused;
    const auto block = static_cast<std::size_t>(intermediate_ * hidden_);
    for (int e = 0; e < layer.experts; ++e) {
      for (const std::vector<double>* half : {&layer.gate, &layer.up}) {
        const std::vector<double> rows = slice(*half, static_cast<std::size_t>(e) * block, block);
        fused.insert(fused.end(), rows.begin(), rows.end());
      }
    }
    tensors_.push_back(contiguous(dtype, {layer.experts, 2 * intermediate_, hidden_}, fused, edge));
  }
  tensors_.push_back(contiguous(dtype, down, layer.down, edge));
}

void BaseStore::store_per_expert(DType dtype, const reference::Layer& layer, Edge edge) {
  const std::vector<double>* sources[] = {&layer.gate, &layer.up, &layer.down};
  for (std::size_t projection = 0; projection < 3; ++projection) {
    const index_t rows = projection == 2 ? hidden_ : intermediate_;
    const index_t cols = projection == 2 ? intermediate_ : hidden_;
    const auto block = static_cast<std::size_t>(rows * cols);
    for (int e = 0; e < layer.experts; ++e) {
      Tensor matrix = Tensor::matrix(dtype, rows, cols, kRowPadding, edge);
      matrix.store(slice(*sources[projection], static_cast<std::size_t>(e) * block, block));
      bf16_pointers_[projection].push_back(matrix.data<const bf16>());
      float_pointers_[projection].push_back(matrix.data<const float>());
      tensors_.push_back(std::move(matrix));
    }
  }
}

template <>
const bf16* const* BaseStore::pointers<bf16>(std::size_t projection) const {
  return bf16_pointers_[projection].data();
}
template <>
const float* const* BaseStore::pointers<float>(std::size_t projection) const {
  return float_pointers_[projection].data();
}

void BaseStore::protect_read_only() {
  for (Tensor& tensor : tensors_) tensor.memory().protect(PROT_READ);
}

Problem::Problem(const Storage& storage, DType weights, reference::Layer layer, reference::Batch batch)
    : storage_(storage), weight_dtype_(weights), layer_(std::move(layer)), batch_(std::move(batch)) {
  round_values();
  base_ = BaseStore(weights, storage.weights, layer_, storage.edge);
  x_ = Tensor::matrix(storage.activations, batch_.tokens, layer_.hidden, storage.padding, storage.edge);
  grad_y_ = Tensor::matrix(storage.activations, batch_.tokens, layer_.hidden, storage.padding, storage.edge);
  routing_weights_ =
      Tensor::matrix(storage.routing, batch_.tokens, batch_.top_k, storage.padding, storage.edge);
  x_.store(batch_.x);
  grad_y_.store(batch_.grad_y);
  routing_weights_.store(batch_.weights);
  make_factors();
  make_biases();
  store_ids();
}

void Problem::round_values() {
  for (auto* values : {&layer_.gate, &layer_.up, &layer_.down}) round_all(weight_dtype_, *values);
  for (auto* values : {&layer_.gate_bias, &layer_.up_bias, &layer_.down_bias})
    round_all(storage_.factors, *values);
  for (reference::Adapter* lora : {&layer_.lora_gate, &layer_.lora_up, &layer_.lora_down}) {
    round_all(storage_.factors, lora->a);
    round_all(storage_.factors, lora->b);
    lora->scaling = rounded(DType::kFp32, lora->scaling);
  }
  if (layer_.shared_a) layer_.lora_up.a = layer_.lora_gate.a;
  layer_.glu.limit = rounded(DType::kFp32, layer_.glu.limit);
  layer_.glu.alpha = rounded(DType::kFp32, layer_.glu.alpha);
  round_all(storage_.activations, batch_.x);
  round_all(storage_.activations, batch_.grad_y);
  round_all(storage_.routing, batch_.weights);
}

Tensor Problem::make_factor(const reference::Adapter& lora, bool is_b, index_t in, index_t out) const {
  if (lora.rank == 0) return {};
  const Extents extents =
      is_b ? Extents{layer_.experts, out, lora.rank} : Extents{layer_.experts, lora.rank, in};
  Strides strides = Strides::rows(extents);
  if (storage_.lora == LoraLayout::kPeft) {
    strides = is_b ? Strides{1, lora.rank * extents.d0, extents.d0} : Strides{lora.rank * in, in, 1};
  }
  return Tensor(storage_.factors, extents, strides, storage_.edge);
}

void Problem::make_factors() {
  const index_t h = layer_.hidden;
  const index_t i = layer_.intermediate;
  gate_a_ = make_factor(layer_.lora_gate, false, h, i);
  gate_b_ = make_factor(layer_.lora_gate, true, h, i);
  if (!layer_.shared_a) up_a_ = make_factor(layer_.lora_up, false, h, i);
  up_b_ = make_factor(layer_.lora_up, true, h, i);
  down_a_ = make_factor(layer_.lora_down, false, i, h);
  down_b_ = make_factor(layer_.lora_down, true, i, h);
  replace_factors(layer_.lora_gate, layer_.lora_up, layer_.lora_down);
}

void Problem::make_biases() {
  const DType dtype = storage_.factors;
  const auto matrix = [&](index_t cols, const std::vector<double>& values) -> Tensor {
    if (values.empty()) return {};
    Tensor tensor = Tensor::matrix(dtype, layer_.experts, cols, storage_.padding, storage_.edge);
    tensor.store(values);
    return tensor;
  };
  down_bias_ = matrix(layer_.hidden, layer_.down_bias);
  if (storage_.weights != WeightLayout::kFused) {
    gate_bias_ = matrix(layer_.intermediate, layer_.gate_bias);
    up_bias_ = matrix(layer_.intermediate, layer_.up_bias);
    return;
  }
  // Where one of the two is missing, its places hold what shows if it is read.
  std::vector<double> by_turns(2 * std::max(layer_.gate_bias.size(), layer_.up_bias.size()), std::nan(""));
  for (std::size_t n = 0; n < layer_.gate_bias.size(); ++n) by_turns[2 * n] = layer_.gate_bias[n];
  for (std::size_t n = 0; n < layer_.up_bias.size(); ++n) by_turns[2 * n + 1] = layer_.up_bias[n];
  gate_bias_ = matrix(2 * layer_.intermediate, by_turns);
}

namespace {

// Every second column of `m`, from `first` on.
amx_sft_moe::AnyConstMatrix every_second(const amx_sft_moe::AnyConstMatrix& m, index_t first) {
  return m.visit([&](const auto* data) -> amx_sft_moe::AnyConstMatrix {
    return {data + first, m.rows(), m.cols() / 2, m.row_stride(), 2};
  });
}

}  // namespace

amx_sft_moe::ExpertBiases Problem::biases() const {
  const amx_sft_moe::AnyConstMatrix gate = gate_bias_.const_matrix_view();
  const amx_sft_moe::AnyConstMatrix down = down_bias_.const_matrix_view();
  if (storage_.weights != WeightLayout::kFused) return {gate, up_bias_.const_matrix_view(), down};
  amx_sft_moe::ExpertBiases biases{{}, {}, down};
  if (!layer_.gate_bias.empty()) biases.gate = every_second(gate, 0);
  if (!layer_.up_bias.empty()) biases.up = every_second(gate, 1);
  return biases;
}

void Problem::replace_factors(const reference::Adapter& gate, const reference::Adapter& up,
                              const reference::Adapter& down) {
  layer_.lora_gate = gate;
  layer_.lora_up = up;
  layer_.lora_down = down;
  round_values();
  gate_a_.store(layer_.lora_gate.a);
  gate_b_.store(layer_.lora_gate.b);
  if (!layer_.shared_a) up_a_.store(layer_.lora_up.a);
  up_b_.store(layer_.lora_up.b);
  down_a_.store(layer_.lora_down.a);
  down_b_.store(layer_.lora_down.b);
}

void Problem::store_ids() {
  const std::size_t stride = static_cast<std::size_t>(batch_.top_k + storage_.padding);
  const std::size_t used = batch_.ids.empty() ? 0
                                              : (static_cast<std::size_t>(batch_.tokens) - 1) * stride +
                                                    static_cast<std::size_t>(batch_.top_k);
  const std::size_t width = storage_.narrow_ids ? 4 : 8;
  ids_ = GuardedMemory(used * width, storage_.edge);
  std::vector<std::int64_t> padded(used, 0);  // a gap that is read would be taken for expert 0
  for (std::size_t n = 0; n < batch_.ids.size(); ++n) {
    const auto k = static_cast<std::size_t>(batch_.top_k);
    padded[n / k * stride + n % k] = batch_.ids[n];
  }
  for (std::size_t n = 0; n < used; ++n) {
    const auto narrow = static_cast<std::int32_t>(padded[n]);
    const void* source = storage_.narrow_ids ? static_cast<const void*>(&narrow) : &padded[n];
    std::memcpy(ids_.data() + n * width, source, width);
  }
}

void Problem::poison_ids() {
  if (ids_.bytes() > 0) std::memset(ids_.data(), 0x55, ids_.bytes());
}

amx_sft_moe::Config Problem::config() const {
  amx_sft_moe::Config config;
  config.num_experts = layer_.experts;
  config.top_k = batch_.top_k;
  config.hidden_size = layer_.hidden;
  config.intermediate_size = layer_.intermediate;
  config.num_threads = 2;
  const reference::Glu& glu = layer_.glu;
  if (glu.form == reference::Glu::kClamped) {
    config.activation = amx_sft_moe::ClampedGlu{static_cast<float>(glu.limit), static_cast<float>(glu.alpha)};
  } else if (glu.form == reference::Glu::kGelu) {
    config.activation = amx_sft_moe::GeluGlu{};
  } else if (glu.form == reference::Glu::kGeluTanh) {
    config.activation = amx_sft_moe::GeluTanhGlu{};
  }
  return config;
}

amx_sft_moe::LoraWeights Problem::lora() const {
  const auto scaling = [](const reference::Adapter& adapter) { return static_cast<float>(adapter.scaling); };
  const Tensor& up_a = layer_.shared_a ? gate_a_ : up_a_;
  return {{gate_a_.const_expert_view(), gate_b_.const_expert_view(), scaling(layer_.lora_gate)},
          {up_a.const_expert_view(), up_b_.const_expert_view(), scaling(layer_.lora_up)},
          {down_a_.const_expert_view(), down_b_.const_expert_view(), scaling(layer_.lora_down)}};
}

amx_sft_moe::Routing Problem::routing() const {
  amx_sft_moe::Routing routing;
  routing.tokens = batch_.tokens;
  const index_t stride = batch_.top_k + storage_.padding;
  if (storage_.narrow_ids) {
    routing.expert_ids = {reinterpret_cast<const std::int32_t*>(ids_.data()), stride};
  } else {
    routing.expert_ids = {reinterpret_cast<const std::int64_t*>(ids_.data()), stride};
  }
  routing.weights = routing_weights_.const_matrix_view();
  return routing;
}

namespace {

// A gradient laid out as the weight is: stacked, one of `fused` parts of each expert's rows, or with padded rows.
Tensor like_weight(const Problem& problem, index_t rows, index_t cols, index_t fused) {
  const Storage& s = problem.storage();
  const Extents extents{problem.layer().experts, rows, cols};
  Strides strides = Strides::rows(extents, s.weights == WeightLayout::kPerExpert ? 2 : 0);
  if (s.weights == WeightLayout::kFused) strides.s0 *= fused;
  return Tensor(s.factors, extents, strides, s.edge);
}

}  // namespace

Outputs::Outputs(const Problem& problem) {
  const Storage& s = problem.storage();
  const reference::Layer& layer = problem.layer();
  const index_t tokens = problem.batch().tokens;
  tensors_[reference::kY] = Tensor::matrix(s.activations, tokens, layer.hidden, s.padding, s.edge);
  tensors_[reference::kGradX] = Tensor::matrix(s.activations, tokens, layer.hidden, s.padding, s.edge);
  tensors_[reference::kGradW] = Tensor::matrix(s.routing, tokens, problem.batch().top_k, s.padding, s.edge);
  const auto like = [&](const reference::Adapter& lora, bool is_b, index_t in, index_t out) -> Tensor {
    if (lora.rank == 0) return {};
    const Extents e = is_b ? Extents{layer.experts, out, lora.rank} : Extents{layer.experts, lora.rank, in};
    // Gradients of B in PEFT's layout too, as autograd makes them for a parameter that is viewed like that.
    const bool peft = is_b && s.lora == LoraLayout::kPeft;
    return Tensor(s.factors, e, peft ? Strides{1, lora.rank * e.d0, e.d0} : Strides::rows(e), s.edge);
  };
  const index_t h = layer.hidden;
  const index_t i = layer.intermediate;
  tensors_[reference::kGateA] = like(layer.lora_gate, false, h, i);
  tensors_[reference::kGateB] = like(layer.lora_gate, true, h, i);
  if (!layer.shared_a) tensors_[reference::kUpA] = like(layer.lora_up, false, h, i);
  tensors_[reference::kUpB] = like(layer.lora_up, true, h, i);
  tensors_[reference::kDownA] = like(layer.lora_down, false, i, h);
  tensors_[reference::kDownB] = like(layer.lora_down, true, i, h);
  if (layer.trains_base) {
    tensors_[reference::kGateWeight] = like_weight(problem, i, h, 2);
    tensors_[reference::kUpWeight] = like_weight(problem, i, h, 2);
    tensors_[reference::kDownWeight] = like_weight(problem, h, i, 1);
  }
  const auto bias = [&](const reference::Vector& values, index_t out) {
    return values.empty() ? Tensor() : Tensor::matrix(s.factors, layer.experts, out, s.padding, s.edge);
  };
  tensors_[reference::kGateBias] = bias(layer.gate_bias, i);
  tensors_[reference::kUpBias] = bias(layer.up_bias, i);
  tensors_[reference::kDownBias] = bias(layer.down_bias, h);
}

amx_sft_moe::LoraGradients Outputs::lora_gradients() const {
  using namespace reference;
  return {tensors_[kGateA].expert_view(), tensors_[kGateB].expert_view(), tensors_[kUpA].expert_view(),
          tensors_[kUpB].expert_view(),   tensors_[kDownA].expert_view(), tensors_[kDownB].expert_view()};
}

amx_sft_moe::WeightGradients Outputs::weight_gradients() const {
  using namespace reference;
  return {tensors_[kGateWeight].expert_view(), tensors_[kUpWeight].expert_view(),
          tensors_[kDownWeight].expert_view()};
}

amx_sft_moe::Gradients Outputs::gradients() const {
  amx_sft_moe::Gradients grads;
  grads.x = tensors_[reference::kGradX].matrix_view();
  grads.routing_weights = tensors_[reference::kGradW].matrix_view();
  grads.lora = lora_gradients();
  grads.weights = weight_gradients();
  using namespace reference;
  grads.biases = {tensors_[kGateBias].matrix_view(), tensors_[kUpBias].matrix_view(),
                  tensors_[kDownBias].matrix_view()};
  return grads;
}

void Outputs::poison() {
  for (Tensor& tensor : tensors_) tensor.poison();
}

std::vector<std::vector<std::uint32_t>> Outputs::bits() const {
  std::vector<std::vector<std::uint32_t>> out;
  for (const Tensor& tensor : tensors_) out.push_back(tensor.bits());
  return out;
}

bool Outputs::gaps_are_poison() const {
  for (const Tensor& tensor : tensors_) {
    if (!tensor.gaps_are_poison()) return false;
  }
  return true;
}

Problem random_problem(const Case& c, const Storage& storage, DType weights, unsigned seed) {
  Random random(seed);
  reference::Layer layer = random_layer(random, c);
  reference::Batch batch = random_batch(random, c, c.tokens, storage.narrow_ids);
  return Problem(storage, weights, std::move(layer), std::move(batch));
}

Problem another_batch(const Problem& problem, const Case& c, int tokens, unsigned seed) {
  Random random(seed);
  return Problem(problem.storage(), problem.weight_dtype(), problem.layer(),
                 random_batch(random, c, tokens, problem.storage().narrow_ids));
}

}  // namespace sft_test
