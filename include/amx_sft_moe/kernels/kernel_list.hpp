// Lists of kernels, for the choice at run time (operator/kernel_registry.hpp).
#pragma once

#include "amx_sft_moe/core/config_macros.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace kernels {

// Best first. Several kernels may share a name and a type of weights: the first that is available has it.
template <class... Kernels>
struct KernelList {
  // Calls f.template operator()<Kernel>() for each.
  template <class F>
  static void for_each(F&& f) {
    (f.template operator()<Kernels>(), ...);
  }
  template <class... More>
  static KernelList<Kernels..., More...> with(KernelList<More...>);
};

// The kernels of A, then those of B.
template <class A, class B>
using Joined = decltype(A::with(B{}));

}  // namespace kernels
AMX_SFT_MOE_NAMESPACE_END
