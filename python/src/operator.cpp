#include "operator.hpp"

#include <utility>

#include "allocate.hpp"
#include "times.hpp"

namespace amx_sft_moe::python {
namespace {

// An unknown kernel, or one that runs nowhere here, is refused when the operator is made and not at its first
// use.
void require_kernel(const KernelProvider& kernels, const std::string& kernel) {
  try {
    kernels.resolve(kernel, DType::kBf16);
  } catch (const KernelError&) {
    try {
      kernels.resolve(kernel, DType::kFp32);
      return;
    } catch (const KernelError&) {
    }
    throw;
  }
}

// The routing of one call; `ids` holds the ids where they had to be gathered.
struct RoutingTensors {
  Tensor expert_ids, weights;
  std::vector<std::int64_t> ids;
  Routing view;

  RoutingTensors(py::handle ids_object, py::handle weights_object, index_t tokens, index_t top_k)
      : expert_ids(read_tensor(ids_object, "expert_ids")),
        weights(read_tensor(weights_object, "routing_weights")) {
    view.tokens = tokens;
    view.expert_ids = input_ids(expert_ids, "expert_ids", tokens, top_k, ids);
    view.weights = input_matrix(weights, "routing_weights", tokens, top_k);
  }
  RoutingTensors(const RoutingTensors&) = delete;
  RoutingTensors& operator=(const RoutingTensors&) = delete;

  index_t routed_rows(index_t experts, index_t top_k) const {
    index_t rows = 0;
    for (index_t t = 0; t < view.tokens; ++t) {
      for (index_t slot = 0; slot < top_k; ++slot) {
        const std::int64_t e = view.expert_ids.at(t, slot);
        rows += e >= 0 && e < experts ? 1 : 0;
      }
    }
    return rows;
  }
};

Tensor read_rows(py::handle object, std::string_view argument, index_t tokens, index_t hidden) {
  Tensor tensor = read_tensor(object, argument);
  require_float(tensor, argument);
  require_shape(tensor, argument, {tokens, hidden});
  return tensor;
}

// Caller-owned activations in one flat tensor, each part on a cache line of its own.
class SavedLayout {
 public:
  SavedLayout(const AnySftMoe& moe, const LoraWeights& lora, index_t rows)
      : rows_(rows), dtype_(moe.stored_dtype()), inner_(moe.config().intermediate_size), lora_(lora) {}

  index_t elements() const {
    return 2 * extent(inner_) + extent(lora_.gate.rank()) + extent(lora_.up.rank()) + extent(lora_.down.rank());
  }
  DType dtype() const { return dtype_; }

  AnySavedActivations views(void* data) const {
    AnySavedActivations saved;
    index_t offset = 0;
    saved.gate = next(data, offset, inner_);
    saved.up = next(data, offset, inner_);
    saved.u_gate = next(data, offset, lora_.gate.rank());
    saved.u_up = next(data, offset, lora_.up.rank());
    saved.u_down = next(data, offset, lora_.down.rank());
    return saved;
  }

 private:
  static constexpr index_t kElementsPerLine = 32;
  index_t extent(index_t cols) const { return round_up(rows_ * cols, kElementsPerLine); }
  AnyMatrix next(void* data, index_t& offset, index_t cols) const {
    const index_t begin = std::exchange(offset, offset + extent(cols));
    if (cols == 0) return {};
    if (dtype_ == DType::kBf16) return {static_cast<bf16*>(data) + begin, rows_, cols, cols};
    return {static_cast<float*>(data) + begin, rows_, cols, cols};
  }

  index_t rows_;
  DType dtype_;
  index_t inner_;
  const LoraWeights& lora_;
};

}  // namespace

Guard::Guard(std::atomic_flag& in_use, std::string_view call) : in_use_(in_use) {
  if (in_use_.test_and_set(std::memory_order_acquire)) {
    throw StateError(
        concat(call, ": expected an SftMoe that no other call is using, got one in use by another thread"));
  }
}

Operator::Operator(const Config& config, std::string kernel, std::optional<float> lora_alpha,
                   const std::optional<SharedWorkspace>& workspace, py::object provider)
    : config_(config),
      requested_kernel_(std::move(kernel)),
      provider_(std::move(provider)),
      kernels_(kernels_of(provider_)),
      lora_alpha_(lora_alpha),
      workspace_(workspace ? workspace->get() : nullptr) {
  require_at_least("num_experts", index_t{1}, config.num_experts);
  require_at_least("top_k", index_t{1}, config.top_k);
  require_at_least("hidden_size", index_t{1}, config.hidden_size);
  require_at_least("intermediate_size", index_t{1}, config.intermediate_size);
  require_at_least("cache_depth", index_t{1}, config.cache_depth);
  require_at_least("num_threads", 0, config.num_threads);
  if (config.max_tokens) require_at_least("max_tokens", index_t{0}, *config.max_tokens);
  require_kernel(kernels_, requested_kernel_);
}

AnySftMoe& Operator::ready() {
  if (!moe_) throw StateError("SftMoe: expected base weights, got none: call set_base first");
  return *moe_;
}

void Operator::set_base(py::handle gate_proj, py::handle up_proj, py::handle down_proj,
                        py::handle gate_up_proj) {
  const Guard guard(in_use_, "set_base");
  BaseTensors base = read_base(config_, gate_proj, up_proj, down_proj, gate_up_proj);
  if (!moe_ || moe_->weight_dtype() != base.dtype) {
    if (!entries_.empty()) {
      throw StateError(concat("set_base: expected ", name_of(moe_->weight_dtype()), " weights while ",
                              entries_.size(), " forwards wait for their backward, got ", name_of(base.dtype)));
    }
    moe_ = kernels_.make(requested_kernel_, config_, base.views, {}, workspace_);
  } else {
    moe_->set_base(base.views);
  }
  base_ = std::move(base);
}

void Operator::set_lora(const LoraObjects& lora) {
  const Guard guard(in_use_, "set_lora");
  read_lora(lora, config_, lora_alpha_);  // refuses what does not fit, before anything changes
  lora_ = lora;
}

py::object Operator::forward_sft(py::handle x_object, py::handle expert_ids, py::handle routing_weights,
                                 bool save_for_backward, py::handle out) {
  const Guard guard(in_use_, "forward_sft");
  AnySftMoe& moe = ready();
  const index_t hidden = config_.hidden_size;
  const Tensor x = read_rows(x_object, "x", kAnyExtent, hidden);
  const index_t tokens = x.shape[0];
  const AnyConstMatrix x_view = input_matrix(x, "x", tokens, hidden);
  const RoutingTensors routing(expert_ids, routing_weights, tokens, config_.top_k);
  const LoraTensors lora = read_lora(lora_, config_, lora_alpha_);
  const Tensor y =
      out.is_none() ? allocate(x.family, x.dtype(), {tokens, hidden}, "y") : read_tensor(out, "out");
  const AnyMatrix y_view = output_matrix(y, "out", tokens, hidden);
  {
    const py::gil_scoped_release release;
    moe.set_lora(lora.views);
    moe.forward_sft(routing.view, x_view, y_view, save_for_backward);
  }
  if (save_for_backward) entries_.push_back({tokens, x.dtype(), routing.weights.dtype()});
  if (!out.is_none()) mark_written(y);
  return out.is_none() ? y.owner : py::reinterpret_borrow<py::object>(out);
}

py::dict Operator::backward(py::handle grad_y_object, bool accumulate, float scale, const py::dict& out,
                            const py::set& skip) {
  const Guard guard(in_use_, "backward");
  AnySftMoe& moe = ready();
  if (entries_.empty()) {
    throw StateError("backward: expected a forward_sft(save_for_backward=True) that waits for it, got none");
  }
  const Entry& entry = entries_.back();
  const Tensor grad_y = read_rows(grad_y_object, "grad_y", entry.tokens, config_.hidden_size);
  const AnyConstMatrix grad_y_view = input_matrix(grad_y, "grad_y", entry.tokens, config_.hidden_size);
  const LoraTensors lora = read_lora(lora_, config_, lora_alpha_);

  py::dict results;
  py::set unknown(py::object(out.attr("keys")()));
  Gradients grads;
  grads.accumulate = accumulate;
  grads.scale = scale;
  std::vector<Tensor> given;  // the caller's own, kept until they are written
  // Takes the tensor of `out`, or allocates one; nothing where the name is skipped.
  const auto result = [&](std::string_view name, DType dtype, std::initializer_list<index_t> shape, bool adds) {
    const py::str key(name.data(), name.size());
    unknown.attr("discard")(key);
    std::optional<Tensor> tensor;
    if (out.contains(key)) {
      tensor = read_tensor(out[key], concat("out.", name));
      given.push_back(*tensor);
      results[key] = out[key];
    } else if (!skip.contains(key)) {
      if (adds) {
        throw ArgumentError(
            concat("accumulate: expected out to hold ", name,
                   ", the tensor that this gradient is added to, got none (skip it if not wanted)"));
      }
      tensor = allocate(grad_y.family, dtype, shape, name);
      results[key] = tensor->owner;
    }
    return tensor;
  };
  if (const auto t = result("grad_x", entry.x, {entry.tokens, config_.hidden_size}, false)) {
    grads.x = output_matrix(*t, "out.grad_x", entry.tokens, config_.hidden_size);
  }
  if (const auto t =
          result("grad_routing_weights", entry.routing_weights, {entry.tokens, config_.top_k}, false)) {
    grads.routing_weights = output_matrix(*t, "out.grad_routing_weights", entry.tokens, config_.top_k);
  }
  LoraGradients lora_grads;
  for (std::size_t f = 0; f < kFactorCount; ++f) {
    const auto& factor = lora.factors[f];
    if (!factor || (f == kUpA && lora.views.gate_up_share_a())) continue;
    const std::initializer_list<index_t> shape{factor->shape[0], factor->shape[1], factor->shape[2]};
    if (const auto t = result(lora_.name(f), factor->dtype(), shape, accumulate)) {
      bind_gradient(lora_grads, lora_, lora, f, *t, config_.intermediate_size);
    }
  }
  if (!unknown.empty()) {
    throw ArgumentError(concat("out: expected the names of gradients that this operator has, got also ",
                               py::cast<std::string>(py::str(py::list(unknown)))));
  }
  grads.lora = lora_grads;
  {
    const py::gil_scoped_release release;
    moe.set_lora(lora.views);
    moe.backward(grad_y_view, grads);
  }
  entries_.pop_back();
  for (const Tensor& tensor : given) mark_written(tensor);
  return results;
}

py::tuple Operator::forward_saved(py::handle x_object, py::handle expert_ids, py::handle routing_weights,
                                  const LoraObjects& lora_objects, bool save) {
  const Guard guard(in_use_, "forward");
  AnySftMoe& moe = ready();
  const index_t hidden = config_.hidden_size;
  const Tensor x = read_rows(x_object, "x", kAnyExtent, hidden);
  const index_t tokens = x.shape[0];
  const AnyConstMatrix x_view = input_matrix(x, "x", tokens, hidden);
  const RoutingTensors routing(expert_ids, routing_weights, tokens, config_.top_k);
  const LoraTensors lora = read_lora(lora_objects, config_, lora_alpha_);
  const Tensor y = allocate(x.family, x.dtype(), {tokens, hidden}, "y");
  const AnyMatrix y_view = output_matrix(y, "y", tokens, hidden);
  std::optional<Tensor> saved;
  AnySavedActivations saved_views;
  if (save) {
    const SavedLayout layout(moe, lora.views, routing.routed_rows(config_.num_experts, config_.top_k));
    saved = allocate(x.family, layout.dtype(), {layout.elements()}, "saved activations");
    saved_views = layout.views(saved->data);
  }
  {
    const py::gil_scoped_release release;
    moe.set_lora(lora.views);
    if (save) {
      moe.forward_sft(routing.view, x_view, y_view, saved_views);
    } else {
      moe.forward_sft(routing.view, x_view, y_view, false);
    }
  }
  return py::make_tuple(y.owner, saved ? saved->owner : py::object(py::none()));
}

py::tuple Operator::backward_saved(py::handle x_object, py::handle expert_ids, py::handle routing_weights,
                                   py::handle saved_object, py::handle grad_y_object,
                                   const LoraObjects& lora_objects, const std::array<bool, 8>& needs) {
  const Guard guard(in_use_, "backward");
  AnySftMoe& moe = ready();
  const index_t hidden = config_.hidden_size;
  const Tensor x = read_rows(x_object, "x", kAnyExtent, hidden);
  const index_t tokens = x.shape[0];
  const AnyConstMatrix x_view = input_matrix(x, "x", tokens, hidden);
  const RoutingTensors routing(expert_ids, routing_weights, tokens, config_.top_k);
  const Tensor grad_y = read_rows(grad_y_object, "grad_y", tokens, hidden);
  const AnyConstMatrix grad_y_view = input_matrix(grad_y, "grad_y", tokens, hidden);
  const LoraTensors lora = read_lora(lora_objects, config_, lora_alpha_);
  const SavedLayout layout(moe, lora.views, routing.routed_rows(config_.num_experts, config_.top_k));
  const Tensor saved = read_tensor(saved_object, "saved activations");
  require_element(saved, "saved activations", layout.dtype());
  require_shape(saved, "saved activations", {layout.elements()});

  Gradients grads;
  py::list results;
  for (int i = 0; i < 8; ++i) results.append(py::none());
  if (needs[0]) {
    const Tensor t = allocate(grad_y.family, x.dtype(), {tokens, hidden}, "grad_x");
    grads.x = output_matrix(t, "grad_x", tokens, hidden);
    results[0] = t.owner;
  }
  if (needs[1]) {
    const Tensor t =
        allocate(grad_y.family, routing.weights.dtype(), {tokens, config_.top_k}, "grad_routing_weights");
    grads.routing_weights = output_matrix(t, "grad_routing_weights", tokens, config_.top_k);
    results[1] = t.owner;
  }
  LoraGradients lora_grads;
  for (std::size_t f = 0; f < kFactorCount; ++f) {
    const auto& factor = lora.factors[f];
    if (!needs[f + 2] || !factor || (f == kUpA && lora.views.gate_up_share_a())) continue;
    const Tensor t = allocate(grad_y.family, factor->dtype(),
                              {factor->shape[0], factor->shape[1], factor->shape[2]}, lora_objects.name(f));
    bind_gradient(lora_grads, lora_objects, lora, f, t, config_.intermediate_size);
    results[f + 2] = t.owner;
  }
  grads.lora = lora_grads;
  {
    const py::gil_scoped_release release;
    moe.set_lora(lora.views);
    moe.backward(routing.view, x_view, layout.views(saved.data), grad_y_view, grads);
  }
  return py::tuple(results);
}

void Operator::clear() {
  const Guard guard(in_use_, "clear");
  if (moe_) moe_->clear();
  entries_.clear();
}

index_t Operator::saved_depth() {
  const Guard guard(in_use_, "saved_depth");
  return static_cast<index_t>(entries_.size());
}

py::dict Operator::last_times(bool backward) {
  const Guard guard(in_use_, "last times");
  return step_times(moe_ ? (backward ? &moe_->last_backward() : &moe_->last_forward()) : nullptr, backward);
}

std::string Operator::last_dump(bool backward, bool json) {
  const Guard guard(in_use_, "last dump");
  if (!moe_) return {};
  const StepRecord& record = backward ? moe_->last_backward() : moe_->last_forward();
  if (record.empty()) return {};
  const StepLabel label{backward ? StepKind::kBackward : StepKind::kForward, {}, moe_->kernel_name()};
  return json ? json_dump(record, label) : text_dump(record, label);
}

py::dict Operator::memory() {
  const Guard guard(in_use_, "memory");
  const MemoryReport report = moe_ ? moe_->memory() : MemoryReport{};
  py::dict result;
  result["workspace_bytes"] = report.workspace_bytes;
  result["saved_bytes"] = report.saved_bytes;
  return result;
}

std::string Operator::kernel() const {
  return moe_ ? std::string(moe_->kernel_name()) : requested_kernel_;
}

py::object Operator::weight_dtype() const {
  if (!moe_) return py::none();
  return py::str(moe_->weight_dtype() == DType::kBf16 ? "bfloat16" : "float32");
}

}  // namespace amx_sft_moe::python
