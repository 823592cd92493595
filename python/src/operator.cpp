#include "operator.hpp"

#include <utility>

#include "allocate.hpp"
#include "amx_sft_moe/operator/validate.hpp"
#include "caller_names.hpp"
#include "times.hpp"
#include "transpose.hpp"

namespace amx_sft_moe::python {
namespace {

// Gradients of parameters live from a backward to the optimizer's step; that of x is one more activation.
ResultMemory memory_of(std::size_t gradient) {
  return gradient == kGradX ? ResultMemory::kOfFramework : ResultMemory::kKept;
}

Tensor transposed_like(const Tensor& matrix) {
  require_float(matrix, "source");
  require_shape(matrix, "source", {kAnyExtent, kAnyExtent});
  return allocate(matrix.family, matrix.dtype(), {matrix.shape[1], matrix.shape[0]}, "target",
                  ResultMemory::kKept);
}

// Kernel onednn's module makes operators too, and each module's library counts its own.
std::int64_t next_number() {
  static std::atomic<std::int64_t> made{0};
  return made.fetch_add(1, std::memory_order_relaxed) + 1;
}

}  // namespace

Guard::Guard(std::atomic_flag& in_use, std::string_view call) : in_use_(in_use) {
  if (in_use_.test_and_set(std::memory_order_acquire)) {
    throw StateError(
        concat(call, ": expected an SftMoe that no other call is using, got one in use by another thread"));
  }
}

Operator::Operator(const Config& config, KernelChoice kernel, const LoraOptions& lora,
                   const std::optional<SharedWorkspace>& workspace)
    : config_(config),
      kernel_(std::move(kernel)),
      lora_(lora),
      workspace_(workspace ? workspace->get() : nullptr) {
  validate::config(config_);
  require_finite("lora_alpha", lora_.alpha);
}

AnySftMoe& Operator::ready() {
  if (!moe_) throw StateError("SftMoe: expected base weights, got none: call set_base first");
  return *moe_;
}

void Operator::set_base(py::handle gate_proj, py::handle up_proj, py::handle down_proj, py::handle gate_up_proj,
                        const BiasObjects& biases) {
  const Guard guard(in_use_, "set_base");
  BaseTensors base = read_base(config_, gate_proj, up_proj, down_proj, gate_up_proj);
  read_biases(biases, config_);  // refuses what does not fit, before anything changes
  if (!moe_ || moe_->weight_dtype() != base.dtype) {
    if (!entries_.empty()) {
      throw StateError(concat("set_base: expected ", name_of(moe_->weight_dtype()), " weights while ",
                              entries_.size(), " forwards wait for their backward, got ", name_of(base.dtype)));
    }
    moe_ = kernel_.kernels().make(kernel_.name_for(base.dtype), config_, base.views, {}, workspace_);
    moe_->set_number(next_number());
    moe_->set_observer(ranges_.get());
  } else {
    moe_->set_base(base.views);
  }
  base_ = std::move(base);
  parameters_.biases = biases;
}

void Operator::set_lora(const LoraObjects& lora) {
  const Guard guard(in_use_, "set_lora");
  read_lora(lora, config_, lora_);  // refuses what does not fit, before anything changes
  parameters_.lora = lora;
}

template <class Pass>
void Operator::run(const ParameterTensors& parameters, Pass&& pass) {
  const WithoutGil released(ranges_.get());
  with_caller_names(parameters.objects, base_, [&] {
    AnyBaseWeights views = base_.views;
    std::visit([&](auto& weights) { weights.biases = parameters.biases.views; }, views);
    moe_->set_base(views);
    moe_->set_lora(parameters.lora.views);
    pass();
  });
}

py::object Operator::forward_sft(py::handle x, py::handle expert_ids, py::handle routing_weights,
                                 bool save_for_backward, py::handle out) {
  const Guard guard(in_use_, "forward_sft");
  AnySftMoe& moe = ready();
  const InputTensors in(x, expert_ids, routing_weights, config_);
  const ParameterTensors parameters(parameters_, config_, lora_);
  const Tensor y = out.is_none() ? allocate(in.x.family, in.x.dtype(), {in.tokens(), config_.hidden_size}, "y",
                                            ResultMemory::kOfFramework)
                                 : read_tensor(out, "out");
  const AnyMatrix y_view = output_matrix(y, "out", in.tokens(), config_.hidden_size);
  entries_.reserve(entries_.size() + 1);  // nothing may fail once the library has saved its part
  run(parameters, [&] { moe.forward_sft(in.routing.view, in.x_view, y_view, save_for_backward); });
  count(StepKind::kForward);
  if (save_for_backward) entries_.push_back({in.tokens(), in.x.dtype(), in.routing.weights.dtype()});
  if (!out.is_none()) mark_written(y);
  return out.is_none() ? y.owner : py::reinterpret_borrow<py::object>(out);
}

py::dict Operator::backward(py::handle grad_y_object, bool accumulate, float scale, const py::dict& out,
                            const py::set& skip, bool bias_gradients, bool weight_gradients) {
  const Guard guard(in_use_, "backward");
  AnySftMoe& moe = ready();
  if (entries_.empty()) {
    throw StateError("backward: expected a forward_sft(save_for_backward=True) that waits for it, got none");
  }
  const GradientTypes& entry = entries_.back();
  const Tensor grad_y = read_rows(grad_y_object, "grad_y", entry.tokens, config_.hidden_size);
  const AnyConstMatrix grad_y_view = input_matrix(grad_y, "grad_y", entry.tokens, config_.hidden_size);
  const ParameterTensors parameters(parameters_, config_, lora_);

  // Those that are large, or of what mostly stays as it is.
  const auto unasked = [&](std::size_t slot) {
    if (slot >= kGradWeights) return !weight_gradients;
    return slot >= kGradBiases && !bias_gradients;
  };

  py::dict results;
  py::set unknown(py::object(out.attr("keys")()));
  std::vector<Tensor> given;  // the caller's own, kept until they are written
  // Takes the tensor of `out`, or allocates one; nothing where the gradient is not wanted.
  const auto source = [&](std::size_t slot, std::string_view name, DType dtype,
                          std::initializer_list<index_t> shape) -> std::optional<Tensor> {
    const py::str key(name.data(), name.size());
    unknown.attr("discard")(key);
    if (out.contains(key)) {
      results[key] = out[key];
      return given.emplace_back(read_tensor(out[key], concat("out.", name)));
    }
    if (skip.contains(key) || unasked(slot)) return std::nullopt;
    if (accumulate && slot >= kGradFactors) {
      throw ArgumentError(
          concat("accumulate: expected out to hold ", name,
                 ", the tensor that this gradient is added to, got none (skip it if not wanted)"));
    }
    const Tensor made = allocate(grad_y.family, dtype, shape, name, memory_of(slot));
    results[key] = made.owner;
    return made;
  };
  Gradients grads = bind_gradients(config_, entry, parameters, base_, source);
  if (!unknown.empty()) {
    throw ArgumentError(concat("out: expected the names of gradients that this operator has, got also ",
                               py::cast<std::string>(py::str(py::list(unknown)))));
  }
  grads.accumulate = accumulate;
  grads.scale = scale;
  run(parameters, [&] { moe.backward(grad_y_view, grads); });
  count(StepKind::kBackward);
  entries_.pop_back();
  for (const Tensor& tensor : given) mark_written(tensor);
  return results;
}

py::tuple Operator::forward_saved(py::handle x, py::handle expert_ids, py::handle routing_weights,
                                  const LoraObjects& lora, const BiasObjects& biases, bool save) {
  const Guard guard(in_use_, "forward");
  AnySftMoe& moe = ready();
  const InputTensors in(x, expert_ids, routing_weights, config_);
  const ParameterObjects objects{lora, biases};
  const ParameterTensors parameters(objects, config_, lora_);
  const Tensor y =
      allocate(in.x.family, in.x.dtype(), {in.tokens(), config_.hidden_size}, "y", ResultMemory::kOfFramework);
  const AnyMatrix y_view = output_matrix(y, "y", in.tokens(), config_.hidden_size);
  std::optional<Tensor> saved;
  AnySavedActivations saved_views;
  if (save) {
    const SavedLayout layout(moe, parameters.lora.views, in.routing.routed_rows(config_));
    saved =
        allocate(in.x.family, layout.dtype(), {layout.elements()}, "saved activations", ResultMemory::kKept);
    saved_views = layout.views(saved->data);
  }
  run(parameters, [&] {
    if (save) return moe.forward_sft(in.routing.view, in.x_view, y_view, saved_views);
    moe.forward_sft(in.routing.view, in.x_view, y_view, false);
  });
  count(StepKind::kForward);
  return py::make_tuple(y.owner, saved ? saved->owner : py::object(py::none()));
}

py::tuple Operator::backward_saved(py::handle x, py::handle expert_ids, py::handle routing_weights,
                                   py::handle saved_object, py::handle grad_y_object, const LoraObjects& lora,
                                   const BiasObjects& biases, const std::array<bool, kGradientCount>& needs,
                                   const std::array<py::object, kGradientCount>& given) {
  const Guard guard(in_use_, "backward");
  AnySftMoe& moe = ready();
  const InputTensors in(x, expert_ids, routing_weights, config_);
  const Tensor grad_y = read_rows(grad_y_object, "grad_y", in.tokens(), config_.hidden_size);
  const AnyConstMatrix grad_y_view = input_matrix(grad_y, "grad_y", in.tokens(), config_.hidden_size);
  const ParameterObjects objects{lora, biases};
  const ParameterTensors parameters(objects, config_, lora_);
  const SavedLayout layout(moe, parameters.lora.views, in.routing.routed_rows(config_));
  const Tensor saved = read_tensor(saved_object, "saved activations");
  require_element(saved, "saved activations", layout.dtype());
  require_shape(saved, "saved activations", {layout.elements()});
  if (layout.elements() > 1 && saved.strides[0] != 1) {  // of a hook on saved tensors
    throw ArgumentError(
        concat("saved activations: expected adjacent elements (stride 1), got stride ", saved.strides[0]));
  }

  py::list results;
  for (std::size_t slot = 0; slot < kGradientCount; ++slot) results.append(py::none());
  const auto source = [&](std::size_t slot, std::string_view name, DType dtype,
                          std::initializer_list<index_t> shape) -> std::optional<Tensor> {
    if (!needs[slot]) return std::nullopt;
    const Tensor target = given[slot].is_none() ? allocate(grad_y.family, dtype, shape, name, memory_of(slot))
                                                : read_tensor(given[slot], concat("out.", name));
    results[slot] = target.owner;
    return target;
  };
  const GradientTypes types{in.tokens(), in.x.dtype(), in.routing.weights.dtype()};
  const Gradients grads = bind_gradients(config_, types, parameters, base_, source);
  run(parameters,
      [&] { moe.backward(in.routing.view, in.x_view, layout.views(saved.data), grad_y_view, grads); });
  count(StepKind::kBackward);
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
  const StepKind kind = backward ? StepKind::kBackward : StepKind::kForward;
  return step_times(moe_ ? &last(kind) : nullptr, kind);
}

std::string Operator::last_dump(bool backward, bool json) {
  const Guard guard(in_use_, "last dump");
  const StepKind kind = backward ? StepKind::kBackward : StepKind::kForward;
  if (!moe_ || last(kind).empty()) return {};
  return json ? json_dump(last(kind), moe_->label(kind)) : text_dump(last(kind), moe_->label(kind));
}

void Operator::count(StepKind kind) {
  if (collects_totals_) (kind == StepKind::kBackward ? backward_totals_ : forward_totals_).add(last(kind));
}

void Operator::collect_totals(bool wanted) {
  const Guard guard(in_use_, "collect totals");
  collects_totals_ = wanted;
}

py::tuple Operator::take_totals() {
  const Guard guard(in_use_, "totals");
  py::tuple result = py::make_tuple(total_times(std::exchange(forward_totals_, {}), StepKind::kForward),
                                    total_times(std::exchange(backward_totals_, {}), StepKind::kBackward));
  return result;
}

void Operator::set_ranges(const py::object& ranges) {
  const Guard guard(in_use_, "ranges");
  auto made = ranges.is_none() ? nullptr : std::make_unique<PythonRanges>(ranges);
  if (moe_) moe_->set_observer(made.get());
  ranges_ = std::move(made);
}

void Operator::set_name(const std::string& name) {
  const Guard guard(in_use_, "name");
  if (moe_) moe_->set_name(name);
  config_.name = name;
}

py::object Operator::transpose(py::handle source, py::handle target) const {
  const Tensor from = read_tensor(source, "source");
  const Tensor to = target.is_none() ? transposed_like(from) : read_tensor(target, "target");
  python::transpose(from, to, threads_of(config_));
  return to.owner;
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
  return moe_ ? std::string(moe_->kernel_name()) : kernel_.requested();
}

py::object Operator::weight_dtype() const {
  if (!moe_) return py::none();
  return py::str(moe_->weight_dtype() == DType::kBf16 ? "bfloat16" : "float32");
}

}  // namespace amx_sft_moe::python
