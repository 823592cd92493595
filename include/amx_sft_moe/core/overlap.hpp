// Whether a strided output writes one element twice, and whether two tensors share memory. Outputs are written by
// several threads at once, in any order.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <numeric>
#include <optional>
#include <span>
#include <utility>

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

// Whether a tensor of such strides, in elements, fits in an address space: what goes on with offsets in bytes relies on
// it; and, where strides of 0 repeat elements, a copy of it too. Virtual addresses of x86-64 have 57 bits.
inline bool addressable(const std::array<Extent, 3>& dims) {
  constexpr index_t kMost = index_t{1} << 57;
  index_t reach = 0, elements = 1;
  for (const Extent& dim : dims) {
    if (dim.count <= 1) continue;
    if (dim.count > kMost / elements) return false;
    elements *= dim.count;
    const index_t most = (kMost - reach) / (dim.count - 1);
    if (dim.stride > most || dim.stride < -most) return false;
    reach += (dim.count - 1) * std::abs(dim.stride);
  }
  return true;
}

// The memory of a strided tensor. Strides and sizes count bytes.
struct Footprint {
  std::uintptr_t begin = 0;  // lowest address
  index_t element = 0;       // 0: no memory at all
  std::array<Extent, 3> dims{};

  Footprint() = default;
  Footprint(const void* data, index_t element_size, std::array<Extent, 3> elements)
      : begin(reinterpret_cast<std::uintptr_t>(data)), element(element_size), dims(elements) {
    // Of nothing strides may be anything: no number is made of them.
    if (std::any_of(dims.begin(), dims.end(), [](const Extent& dim) { return dim.count <= 0; })) {
      *this = {};
      return;
    }
    for (Extent& dim : dims) {
      dim.stride = dim.count > 1 ? dim.stride * element_size : 0;
      if (dim.stride >= 0) continue;
      begin -= static_cast<std::uintptr_t>(-dim.stride * (dim.count - 1));
      dim.stride = -dim.stride;
    }
  }

  std::uintptr_t end() const {
    index_t bytes = element;
    for (const Extent& dim : dims) bytes += (dim.count - 1) * dim.stride;
    return begin + static_cast<std::uintptr_t>(bytes);
  }
  // One index of the first dimension.
  Footprint slice(index_t index) const {
    Footprint part = *this;
    part.begin += static_cast<std::uintptr_t>(index * dims[0].stride);
    part.dims[0] = {1, 0};
    return part;
  }
};

namespace overlap {

inline bool ranges_meet(const Footprint& a, const Footprint& b) {
  return a.element > 0 && b.element > 0 && a.begin < b.end() && b.begin < a.end();
}

// Elements side by side as one longer element.
inline Footprint with_runs_as_elements(Footprint memory) {
  for (bool joined = true; joined;) {
    joined = false;
    for (Extent& dim : memory.dims) {
      if (dim.count <= 1 || dim.stride != memory.element) continue;
      memory.element *= dim.count;
      dim = {1, 0};
      joined = true;
    }
  }
  return memory;
}

// One dimension of two tensors: those of one stride are one, and one that only one of them has counts 1 in the other.
struct CommonExtent {
  index_t stride = 0, count_a = 1, count_b = 1;
};

// Whether they share a byte where b begins `offset` bytes behind a. Dimensions come with the largest stride first, and
// none of the two reaches further inside one than its stride: so of all distances between an index of a and one of b only
// two are near enough to matter.
inline bool nested_share(std::span<const CommonExtent> dims, index_t offset, index_t element_a,
                         index_t element_b) {
  if (dims.empty()) return offset < element_a && -offset < element_b;
  const CommonExtent& dim = dims.front();
  const index_t rest = (offset % dim.stride + dim.stride) % dim.stride;
  const index_t apart = (rest - offset) / dim.stride;  // b's index less a's
  const auto shares = [&](index_t indices, index_t inside) {
    const bool exists = indices > -dim.count_a && indices < dim.count_b;
    return exists && nested_share(dims.subspan(1), inside, element_a, element_b);
  };
  return shares(apart, rest) || shares(apart - 1, rest - dim.stride);
}

// The dimensions of both, the largest stride first; those that count 1 in both come last.
inline std::array<CommonExtent, 6> common_extents(const Footprint& a, const Footprint& b) {
  std::array<CommonExtent, 6> common;
  std::size_t used = 0;
  for (const Extent& dim : a.dims) {
    if (dim.count > 1) common[used++] = {dim.stride, dim.count, 1};
  }
  for (const Extent& dim : b.dims) {
    if (dim.count <= 1) continue;
    const auto same = std::find_if(common.begin(), common.begin() + used, [&](const CommonExtent& other) {
      return other.stride == dim.stride && other.count_b == 1;
    });
    if (same != common.begin() + used) {
      same->count_b = dim.count;
    } else {
      common[used++] = {dim.stride, 1, dim.count};
    }
  }
  std::sort(common.begin(), common.end(),
            [](const CommonExtent& x, const CommonExtent& y) { return x.stride > y.stride; });
  return common;
}

// Whether two tensors share a byte, where each dimension lies beyond the reach of those inside it in both, such as gate and
// up rows of one tensor or matrices side by side in the rows of a buffer; nothing where that is not so.
inline std::optional<bool> share_by_strides(const Footprint& whole_a, const Footprint& whole_b) {
  const Footprint a = with_runs_as_elements(whole_a), b = with_runs_as_elements(whole_b);
  const std::array<CommonExtent, 6> dims = common_extents(a, b);
  std::size_t used = 0;
  while (used < dims.size() && std::max(dims[used].count_a, dims[used].count_b) > 1) ++used;
  index_t reach_a = a.element, reach_b = b.element;
  for (std::size_t d = used; d-- > 0;) {
    if (dims[d].stride < std::max(reach_a, reach_b)) return std::nullopt;
    reach_a += (dims[d].count_a - 1) * dims[d].stride;
    reach_b += (dims[d].count_b - 1) * dims[d].stride;
  }
  return nested_share(std::span(dims.data(), used), static_cast<index_t>(b.begin - a.begin), a.element,
                      b.element);
}

// Of b's slices those, [first, last), that may meet a's range: an expert's matrix in a buffer of all its factors lies
// among many slices of the others, and all pairs of them would be many.
inline std::pair<index_t, index_t> slices_met(const Footprint& a, const Footprint& b) {
  const index_t count = b.dims[0].count;
  const index_t stride = b.dims[0].stride;
  if (stride == 0) return {0, count};
  const auto distance = [](std::uintptr_t from, std::uintptr_t to) { return static_cast<index_t>(to - from); };
  const Footprint slice = b.slice(0);
  const index_t first = distance(slice.end(), a.begin) / stride;
  const index_t last = distance(b.begin, a.end()) / stride + 1;
  return {std::clamp<index_t>(first, 0, count), std::clamp<index_t>(last, 0, count)};
}

}  // namespace overlap

// Whether two tensors share a byte. Exact where their ranges do not meet, where their strides tell, and where that
// holds for each pair of slices of the first dimension; others that lie among each other count as sharing.
inline bool memory_overlaps(const Footprint& a, const Footprint& b) {
  if (!overlap::ranges_meet(a, b)) return false;
  if (const auto known = overlap::share_by_strides(a, b)) return *known;
  if (a.dims[0].count == 1 && b.dims[0].count == 1) return true;
  for (index_t i = 0; i < a.dims[0].count; ++i) {
    const Footprint of_a = a.slice(i);
    const auto [first, last] = overlap::slices_met(of_a, b);
    for (index_t j = first; j < last; ++j) {
      const Footprint of_b = b.slice(j);
      if (overlap::ranges_meet(of_a, of_b) && overlap::share_by_strides(of_a, of_b).value_or(true)) return true;
    }
  }
  return false;
}

AMX_SFT_MOE_NAMESPACE_END
