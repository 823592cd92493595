// A thread's private memory for GEMMs: staged rows of A, packed panels of B, blocks of C. It grows to what the
// largest task needs and stays.
#pragma once

#include <limits>
#include <new>

#include "amx_sft_moe/core/aligned_buffer.hpp"
#include "amx_sft_moe/core/kernel_state.hpp"
#include "amx_sft_moe/core/views.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace gemm {

// Untyped, so that layers with kernels of different element types can share a workspace.
class Buffer {
 public:
  // At least `count` elements; what was there before is lost when the buffer has to grow. std::bad_alloc: it is as it was.
  template <class T>
  T* as(index_t count) {
    constexpr index_t kSize = sizeof(T);
    if (count < 0 || count > std::numeric_limits<index_t>::max() / kSize) throw std::bad_alloc();
    bytes_.reserve(count * kSize);
    return reinterpret_cast<T*>(bytes_.data());
  }
  index_t bytes() const { return bytes_.bytes(); }
  void grow_to(index_t bytes) { bytes_.reserve(bytes); }

 private:
  AlignedBuffer<std::byte> bytes_;
};

struct Scratch {
  Buffer a_rows;        // rows of A that could not be used where they lie, K adjacent, zeros behind
  Buffer a_transposed;  // gemm_tn: A^T
  Buffer b_rows;        // rows of B that could not be used where they lie
  Buffer b_panels;      // or strips
  Buffer c_blocks;      // fp32
  Buffer rows;          // a caller's own rows on their way to a GEMM
  Buffer sums;          // fp32: a caller's own sums of several GEMMs
  KernelStateSlot kernel_state;

  // At least as large as `other`, buffer by buffer.
  void grow_to(const Scratch& other) {
    a_rows.grow_to(other.a_rows.bytes());
    a_transposed.grow_to(other.a_transposed.bytes());
    b_rows.grow_to(other.b_rows.bytes());
    b_panels.grow_to(other.b_panels.bytes());
    c_blocks.grow_to(other.c_blocks.bytes());
    rows.grow_to(other.rows.bytes());
    sums.grow_to(other.sums.bytes());
    kernel_state.grow_to(other.kernel_state);
  }

  index_t bytes() const {
    return a_rows.bytes() + a_transposed.bytes() + b_rows.bytes() + b_panels.bytes() + c_blocks.bytes() +
           rows.bytes() + sums.bytes() + kernel_state.bytes();
  }
};

}  // namespace gemm
AMX_SFT_MOE_NAMESPACE_END
