// What bench_gemm's candidates multiply: operands of which no cache holds much, and the FLOP and bytes of each form.
#pragma once

#include <algorithm>
#include <array>
#include <stdexcept>
#include <string>
#include <vector>

#include "amx_sft_moe/amx_sft_moe.hpp"
#include "random_data.hpp"

namespace bench {

using amx_sft_moe::index_t;
using amx_sft_moe::round_up;

enum class Form : std::uint8_t {
  kNt,      // [m, in] x W^T
  kNn,      // [m, out] x W
  kTn,      // LoRA's grad_A [r, in] = v^T x: x, m tokens of it, is what is streamed
  kTnFull,  // a base weight's gradient [out, in] = grad^T x: both read and the gradient written
};
inline constexpr std::array<Form, 4> kForms{Form::kNt, Form::kNn, Form::kTn, Form::kTnFull};
inline constexpr std::array<const char*, 4> kFormNames{"gemm_nt", "gemm_nn", "gemm_tn", "gemm_tn_full"};
inline constexpr index_t kGemmRank = 16;

constexpr const char* name_of(Form form) {
  return kFormNames[static_cast<std::size_t>(form)];
}

struct GemmShape {
  index_t out = 1536, in = 2048;
  std::vector<index_t> rows{1, 4, 8, 16, 32, 64, 128, 256, 512};

  index_t most_rows() const { return *std::max_element(rows.begin(), rows.end()); }
};

// Of one product: each tensor that is streamed counts once, as in profile/work.hpp.
struct GemmWork {
  double flop, bytes;
};

inline GemmWork work_of(Form form, const GemmShape& shape, index_t m, index_t element) {
  const index_t weight = shape.out * shape.in;
  const auto work = [element](index_t products, index_t elements) {
    return GemmWork{2.0 * static_cast<double>(products), static_cast<double>(elements * element)};
  };
  if (form == Form::kTn) return work(kGemmRank * m * shape.in, m * shape.in);
  if (form == Form::kTnFull) return work(m * weight, m * (shape.out + shape.in) + weight);
  return work(m * weight, weight);
}

// Gradients of base weights: a product's m rows of grad and of x lie behind those of the product before it.
template <class E>
struct BaseGradients {
  index_t products;
  E* grad;  // [products m, out], rows grad_stride apart, as in the operator
  index_t grad_stride;
  E* x;   // [products m, in]
  E* to;  // [products, out, in]
};

// 1.5 GiB of matrices W [out, in] in one buffer, and activations for any form. Gradients of base weights are written
// to the second half of the matrices and made from the first.
template <class E>
struct GemmMemory {
  CallersMemory<E> weights;
  CallersMemory<E> activations;               // [m, max(in, out)]
  std::vector<CallersMemory<float>> results;  // one for each thread
  index_t matrices;

  GemmMemory(const GemmShape& shape, int threads)
      : results(static_cast<std::size_t>(threads)),
        matrices((index_t{3} << 29) / static_cast<index_t>(sizeof(E)) / (shape.out * shape.in)) {
    if (matrices == 0) {
      throw std::invalid_argument("weights: expected at most 1.5 GiB, got [" + std::to_string(shape.out) +
                                  ", " + std::to_string(shape.in) + "]");
    }
    const index_t widest = std::max(shape.in, shape.out);
    fill(weights, matrices * shape.out * shape.in, 0.02F, 1);
    fill(activations, shape.most_rows() * widest, 1.0F, 2);
    for (auto& result : results) result.reserve(std::max(shape.most_rows(), kGemmRank) * widest);
  }

  index_t products(Form form, const GemmShape& shape, index_t m) const {
    index_t count = matrices;
    if (form == Form::kTn) count = std::min<index_t>(matrices * shape.out / m, 1 << 14);
    if (form == Form::kTnFull) count = base_gradients(shape, m).products;
    if (count > 0) return count;
    throw std::invalid_argument(std::string(name_of(form)) + ": the memory is too small for m = " +
                                std::to_string(m) + " and these weights");
  }

  BaseGradients<E> base_gradients(const GemmShape& shape, index_t m) const {
    const index_t weight = shape.out * shape.in;
    const index_t stride = amx_sft_moe::spread_row_stride<E>(shape.out);
    const index_t half = matrices / 2;
    const index_t products = std::min(half, half * weight / (m * (stride + shape.in)));
    return {products, weights.data(), stride, weights.data() + products * m * stride,
            weights.data() + half * weight};
  }
};

}  // namespace bench
