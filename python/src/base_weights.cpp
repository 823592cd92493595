#include "base_weights.hpp"

#include <utility>

namespace amx_sft_moe::python {
namespace {

// [E, rows, cols] in either of its forms, the element type still open.
struct UntypedExperts {
  const void* base = nullptr;
  std::vector<const void*> pointers;
  index_t expert_stride = 0;
  index_t row_stride = 0;
  DType dtype = DType::kBf16;
};

bool is_sequence(py::handle object) {
  return py::isinstance<py::list>(object) || py::isinstance<py::tuple>(object);
}

void require_same_dtype(const Tensor& tensor, std::string_view argument, bool first, DType& dtype) {
  if (first) {
    require_float(tensor, argument);
    dtype = tensor.dtype();
  } else {
    require_element(tensor, argument, dtype);
  }
}

void require_adjacent(const Tensor& tensor, std::string_view argument) {
  const auto last = static_cast<std::size_t>(tensor.dims - 1);
  if (tensor.shape[last] > 1 && tensor.strides[last] != 1) {
    throw ArgumentError(concat(argument,
                               ": expected adjacent elements in the last dimension (stride 1), got stride ",
                               tensor.strides[last]));
  }
}

void require_rows_apart(index_t rows, index_t cols, index_t row_stride, std::string_view argument) {
  if (rows > 1 && row_stride < cols) {
    throw ArgumentError(
        concat(argument, ": expected rows at least ", cols, " elements apart, got stride ", row_stride));
  }
}

UntypedExperts read_experts(py::handle object, std::string_view argument, index_t experts, index_t rows,
                            index_t cols, BaseTensors& keep, bool first) {
  UntypedExperts found;
  if (is_sequence(object)) {
    const auto sequence = py::reinterpret_borrow<py::sequence>(object);
    require_equal(concat(argument, " (number of tensors)"), experts, static_cast<index_t>(sequence.size()));
    for (index_t e = 0; e < experts; ++e) {
      const std::string name = concat(argument, "[", e, "]");
      const Tensor tensor = read_tensor(sequence[static_cast<std::size_t>(e)], name);
      require_same_dtype(tensor, name, first && e == 0, keep.dtype);
      require_shape(tensor, name, {rows, cols});
      require_adjacent(tensor, name);
      const index_t row_stride = rows > 1 ? tensor.strides[0] : cols;
      require_rows_apart(rows, cols, row_stride, name);
      if (e == 0) found.row_stride = row_stride;
      if (row_stride != found.row_stride) {
        throw ArgumentError(concat(name, ": expected the row stride of ", argument, "[0], ", found.row_stride,
                                   ", got ", row_stride));
      }
      found.pointers.push_back(tensor.data);
      keep.owners.push_back(tensor.owner);
    }
  } else {
    const Tensor tensor = read_tensor(object, argument);
    require_same_dtype(tensor, argument, first, keep.dtype);
    require_shape(tensor, argument, {experts, rows, cols});
    require_adjacent(tensor, argument);
    found.base = tensor.data;
    found.expert_stride = experts > 1 ? tensor.strides[0] : rows * cols;
    found.row_stride = rows > 1 ? tensor.strides[1] : cols;
    require_rows_apart(rows, cols, found.row_stride, argument);
    keep.owners.push_back(tensor.owner);
  }
  found.dtype = keep.dtype;
  return found;
}

// A view of `rows` rows of each expert, from `row_begin` on.
template <class T>
ExpertMatrices<const T> typed(const UntypedExperts& from, index_t row_begin, index_t rows, index_t cols,
                              BaseTensors& keep) {
  ExpertMatrices<const T> view{nullptr, nullptr, from.expert_stride, rows, cols, from.row_stride};
  const index_t offset = row_begin * from.row_stride;
  if (from.pointers.empty()) {
    view.base = static_cast<const T*>(from.base) + offset;
    return view;
  }
  std::vector<const T*>& pointers = std::get<BaseTensors::PointerLists<T>>(keep.pointers).emplace_back();
  for (const void* pointer : from.pointers) pointers.push_back(static_cast<const T*>(pointer) + offset);
  view.pointers = pointers.data();
  return view;
}

template <class T>
void assemble(const Config& c, const UntypedExperts& gate, const UntypedExperts& up, index_t up_begin,
              const UntypedExperts& down, BaseTensors& keep) {
  BaseWeights<T> views;
  views.gate = typed<T>(gate, 0, c.intermediate_size, c.hidden_size, keep);
  views.up = typed<T>(up, up_begin, c.intermediate_size, c.hidden_size, keep);
  views.down = typed<T>(down, 0, c.hidden_size, c.intermediate_size, keep);
  keep.views = views;
}

void require_given(py::handle object, std::string_view argument) {
  if (object.is_none()) throw TypeMismatch(concat("set_base: expected ", argument, ", got None"));
}

}  // namespace

BaseTensors read_base(const Config& c, py::handle gate_proj, py::handle up_proj, py::handle down_proj,
                      py::handle gate_up_proj) {
  BaseTensors keep;
  const index_t experts = c.num_experts;
  const index_t hidden = c.hidden_size;
  const index_t intermediate = c.intermediate_size;
  UntypedExperts gate;
  UntypedExperts up;
  const bool fused = keep.fused = !gate_up_proj.is_none();
  if (fused) {
    if (!gate_proj.is_none() || !up_proj.is_none()) {
      throw TypeMismatch("set_base: expected either gate_up_proj or gate_proj and up_proj, got both forms");
    }
    gate = read_experts(gate_up_proj, "gate_up_proj", experts, 2 * intermediate, hidden, keep, true);
    up = gate;
  } else {
    require_given(gate_proj, "gate_proj");
    require_given(up_proj, "up_proj");
    gate = read_experts(gate_proj, "gate_proj", experts, intermediate, hidden, keep, true);
    up = read_experts(up_proj, "up_proj", experts, intermediate, hidden, keep, false);
  }
  require_given(down_proj, "down_proj");
  const UntypedExperts down = read_experts(down_proj, "down_proj", experts, hidden, intermediate, keep, false);
  const index_t up_begin = fused ? intermediate : 0;
  if (keep.dtype == DType::kBf16) {
    assemble<bf16>(c, gate, up, up_begin, down, keep);
  } else {
    assemble<float>(c, gate, up, up_begin, down, keep);
  }
  return keep;
}

std::string_view name_of_weight(std::size_t weight) {
  constexpr std::array<std::string_view, kBaseWeightCount> kNames{"gate_proj", "up_proj", "down_proj",
                                                                  "gate_up_proj"};
  return kNames[weight];
}

std::array<index_t, 3> shape_of_weight(std::size_t weight, const Config& config) {
  if (weight == kDownProj) return {config.num_experts, config.hidden_size, config.intermediate_size};
  const index_t parts = weight == kGateUpProj ? 2 : 1;
  return {config.num_experts, parts * config.intermediate_size, config.hidden_size};
}

void bind_weight_gradient(WeightGradients& gradients, std::size_t weight, const Tensor& tensor,
                          const Config& config) {
  const std::string name = concat("out.", name_of_weight(weight));
  const auto [experts, rows, cols] = shape_of_weight(weight, config);
  require_float(tensor, name);
  require_shape(tensor, name, {experts, rows, cols});
  switch (weight) {
    case kGateProj:
      gradients.gate = output_experts(tensor, name, 0, rows);
      break;
    case kUpProj:
      gradients.up = output_experts(tensor, name, 0, rows);
      break;
    case kDownProj:
      gradients.down = output_experts(tensor, name, 0, rows);
      break;
    default:
      gradients.gate = output_experts(tensor, name, 0, rows / 2);
      gradients.up = output_experts(tensor, name, rows / 2, rows / 2);
  }
}

}  // namespace amx_sft_moe::python
