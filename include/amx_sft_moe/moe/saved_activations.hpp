// What a forward leaves for its backward beside its inputs: gate and up before the activation, and LoRA's r-wide
// products.
#pragma once

#include "amx_sft_moe/core/views.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN

// Rows are routed rows, sorted by expert, in the order of Routing's counting sort: S <= T k of them are used. T
// is the kernel's `Stored` type (bf16 for bf16 weights, float for fp32 weights). Buffers are the caller's.
template <class T>
struct SavedActivations {
  MatrixView<T> gate;    // g [S, I], before the activation
  MatrixView<T> up;      // u [S, I]
  MatrixView<T> u_gate;  // s x Ag^T [S, r_gate]; empty without an adapter
  MatrixView<T> u_up;    // s x Au^T [S, r_up]
  MatrixView<T> u_down;  // w s h Ad^T [S, r_down], w the row's routing weight

  // The first `rows` of each, S of which are all that a pass uses.
  SavedActivations first_rows(index_t rows) const {
    SavedActivations first = *this;
    for (MatrixView<T>* m : {&first.gate, &first.up, &first.u_gate, &first.u_up, &first.u_down}) m->rows = rows;
    return first;
  }
};

AMX_SFT_MOE_NAMESPACE_END
