// Routes sorted by expert: which rows an expert has, which token each row is, and back.
#pragma once

#include <algorithm>
#include <limits>
#include <span>

#include "amx_sft_moe/arch/operands.hpp"
#include "amx_sft_moe/core/aligned_buffer.hpp"
#include "amx_sft_moe/core/views.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace moe {

// The rows of one expert. Panels hold 16 rows each and start anew for every expert.
struct ExpertRows {
  index_t expert;
  index_t row_begin;
  index_t rows;
  index_t panel_begin;
};

class RoutingTable {
 public:
  // A stable counting sort of the routes [tokens, top_k] by expert; ids outside [0, num_experts) are skipped.
  // Serial: some 5 ns a route.
  void build(const ExpertIds& ids, const AnyConstMatrix& weights, index_t tokens, index_t top_k,
             index_t num_experts) {
    const index_t routes = tokens * top_k;
    row_offsets_.reserve(num_experts + 1);
    token_of_row_.reserve(routes);
    weight_of_row_.reserve(routes);
    row_of_route_.reserve(routes);
    active_.reserve(num_experts);
    idle_.reserve(num_experts);
    count_rows(ids, tokens, top_k, num_experts);
    place_rows(weights, tokens, top_k);
    list_experts(num_experts);
  }

  index_t routed_rows() const { return routed_rows_; }  // S
  index_t panels() const { return panels_; }
  // Experts with rows, the busiest first: long tasks start early, and those that wait for memory are at the end, where half
  // of the threads begin (parallel/tasks.hpp).
  std::span<const ExpertRows> active() const { return {active_.data(), static_cast<std::size_t>(num_active_)}; }
  // Experts without rows.
  std::span<const index_t> idle() const { return {idle_.data(), static_cast<std::size_t>(num_idle_)}; }
  const std::int32_t* token_of_row() const { return token_of_row_.data(); }  // [S]
  const float* weight_of_row() const { return weight_of_row_.data(); }       // [S]
  const std::int32_t* row_of_route() const { return row_of_route_.data(); }  // [T, k], -1: skipped

  index_t bytes() const {
    return row_offsets_.bytes() + token_of_row_.bytes() + weight_of_row_.bytes() + row_of_route_.bytes() +
           active_.bytes() + idle_.bytes();
  }

 private:
  static bool routed(std::int64_t id, index_t num_experts) { return id >= 0 && id < num_experts; }

  // Leaves each route's expert, or -1, in row_of_route_: the caller's ids are read once, and whoever changes them
  // meanwhile gets wrong numbers, not rows beyond their expert's.
  void count_rows(const ExpertIds& ids, index_t tokens, index_t top_k, index_t num_experts) {
    std::fill_n(row_offsets_.data(), num_experts + 1, index_t{0});
    for (index_t t = 0; t < tokens; ++t) {
      for (index_t j = 0; j < top_k; ++j) {
        const std::int64_t id = ids.at(t, j);
        const bool is_routed = routed(id, num_experts);
        row_of_route_[t * top_k + j] = is_routed ? static_cast<std::int32_t>(id) : -1;
        if (is_routed) ++row_offsets_[id + 1];
      }
    }
    for (index_t e = 0; e < num_experts; ++e) row_offsets_[e + 1] += row_offsets_[e];
    routed_rows_ = row_offsets_[num_experts];
  }

  // Uses row_offsets_[e] as the next free row of e; afterwards it is e's end, which list_experts expects.
  void place_rows(const AnyConstMatrix& weights, index_t tokens, index_t top_k) {
    weights.visit([&](const auto* w) {
      for (index_t t = 0; t < tokens; ++t) {
        for (index_t j = 0; j < top_k; ++j) {
          std::int32_t& row_of_route = row_of_route_[t * top_k + j];
          if (row_of_route < 0) continue;
          const index_t row = row_offsets_[row_of_route]++;
          row_of_route = static_cast<std::int32_t>(row);
          token_of_row_[row] = static_cast<std::int32_t>(t);
          weight_of_row_[row] = to_float(w[t * weights.row_stride() + j * weights.col_stride()]);
        }
      }
    });
  }

  void list_experts(index_t num_experts) {
    num_active_ = num_idle_ = panels_ = 0;
    index_t begin = 0;
    for (index_t e = 0; e < num_experts; ++e) {
      const index_t rows = row_offsets_[e] - begin;
      if (rows > 0) {
        active_[num_active_++] = {e, begin, rows, panels_};
      } else {
        idle_[num_idle_++] = e;
      }
      panels_ += ceil_div(rows, arch::kPanelCols);
      begin = row_offsets_[e];
    }
    std::sort(active_.data(), active_.data() + num_active_, [](const ExpertRows& a, const ExpertRows& b) {
      return a.rows != b.rows ? a.rows > b.rows : a.expert < b.expert;
    });
  }

  AlignedBuffer<index_t> row_offsets_;        // [E + 1]
  AlignedBuffer<std::int32_t> token_of_row_;  // [S]
  AlignedBuffer<float> weight_of_row_;        // [S]
  AlignedBuffer<std::int32_t> row_of_route_;  // [T, k]
  AlignedBuffer<ExpertRows> active_;
  AlignedBuffer<index_t> idle_;
  index_t num_active_ = 0, num_idle_ = 0, panels_ = 0, routed_rows_ = 0;
};

}  // namespace moe
AMX_SFT_MOE_NAMESPACE_END
