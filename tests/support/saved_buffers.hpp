// Saved activations that the caller owns, in guarded memory and filled with NaN, as an autograd layer has them.
#pragma once

#include "amx_sft_moe/moe/saved_activations.hpp"
#include "problem.hpp"
#include "tensor.hpp"

namespace sft_test {

// The routes of a batch that are not skipped: S.
inline index_t routed_rows(const Problem& problem) {
  index_t rows = 0;
  for (std::int64_t id : problem.batch().ids) rows += reference::is_skipped(problem.layer(), id) ? 0 : 1;
  return rows;
}

template <class T>
class SavedBuffers {
 public:
  // Room for `rows` rows, the elements of each followed by `padding` others.
  SavedBuffers(const Problem& problem, index_t rows, index_t padding = 0, Edge edge = Edge::kEnd) {
    const reference::Layer& layer = problem.layer();
    const auto make = [&](index_t cols) {
      return cols == 0 ? Tensor() : Tensor::matrix(amx_sft_moe::kDTypeOf<T>, rows, cols, padding, edge);
    };
    gate = make(layer.intermediate);
    up = make(layer.intermediate);
    u_gate = make(layer.lora_gate.rank);
    u_up = make(layer.lora_up.rank);
    u_down = make(layer.lora_down.rank);
  }
  explicit SavedBuffers(const Problem& problem) : SavedBuffers(problem, routed_rows(problem)) {}

  amx_sft_moe::SavedActivations<T> view() const {
    return {view_of(gate), view_of(up), view_of(u_gate), view_of(u_up), view_of(u_down)};
  }

  Tensor gate, up, u_gate, u_up, u_down;

 private:
  static amx_sft_moe::MatrixView<T> view_of(const Tensor& t) {
    if (t.memory_empty()) return {};
    return {t.data<T>(), t.extents().d1, t.extents().d2, t.matrix_view().row_stride()};
  }
};

}  // namespace sft_test
