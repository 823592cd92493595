// Whether a strided output writes one element twice. Outputs are written by several threads at once, in any
// order.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <numeric>

#include "amx_sft_moe/core/element.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN

// One dimension of a strided tensor.
struct Extent {
  index_t count;
  index_t stride;
};

namespace overlap {

// Whether i a + j b = 0 for some i, j, not both 0, with |i| < a.count and |j| < b.count.
inline bool pair(const Extent& a, const Extent& b) {
  if (a.stride == 0) return true;
  const index_t divisor = std::gcd(a.stride, b.stride);
  return b.stride / divisor < a.count && a.stride / divisor < b.count;
}

// Whether i a + j b = -offset for some i, j with |i| < a.count and |j| < b.count. Strides are above 0.
inline bool reaches(const Extent& a, const Extent& b, index_t offset) {
  for (index_t i = 1 - a.count; i < a.count; ++i) {
    const index_t rest = offset + i * a.stride;
    if (rest % b.stride == 0 && rest / b.stride < b.count && -(rest / b.stride) < b.count) return true;
  }
  return false;
}

}  // namespace overlap

// Exact. Slices and permutations of contiguous tensors are told at a glance, others by looking for two equal
// offsets, without the dimension of the most steps.
inline bool elements_overlap(std::array<Extent, 3> dims) {
  for (Extent& dim : dims) {
    if (dim.count == 0) return false;
    if (dim.count == 1) dim.stride = 0;
    dim.stride = std::abs(dim.stride);
  }
  std::sort(dims.begin(), dims.end(), [](const Extent& a, const Extent& b) { return a.stride < b.stride; });
  auto first = std::find_if(dims.begin(), dims.end(), [](const Extent& dim) { return dim.count > 1; });
  index_t reach = 0;  // offset of the last element of the dimensions inside
  bool nested = true;
  for (auto dim = first; dim != dims.end(); ++dim) {
    nested = nested && dim->stride > reach;
    reach += (dim->count - 1) * dim->stride;
  }
  if (nested) return false;
  if (first->stride == 0) return true;
  if (dims.end() - first == 2) return overlap::pair(first[0], first[1]);
  std::sort(first, dims.end(), [](const Extent& a, const Extent& b) { return a.count < b.count; });
  if (overlap::pair(dims[1], dims[2])) return true;
  for (index_t i = 1; i < dims[0].count; ++i) {
    if (overlap::reaches(dims[1], dims[2], i * dims[0].stride)) return true;
  }
  return false;
}

AMX_SFT_MOE_NAMESPACE_END
