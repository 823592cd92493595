// What a thread brings to a GEMM.
#pragma once

#include <type_traits>

#include "amx_sft_moe/gemm/scratch.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace gemm {

template <class Kernel>
struct ThreadContext {
  typename Kernel::Session session;
  Scratch& scratch;

  explicit ThreadContext(Scratch& of_thread)
      : session(make_session<typename Kernel::Session>(of_thread)), scratch(of_thread) {}

 private:
  // Sessions of kernels that keep something between regions find it in the scratch.
  template <class Session>
  static Session make_session(Scratch& of_thread) {
    if constexpr (std::is_constructible_v<Session, KernelStateSlot&>) {
      return Session(of_thread.kernel_state);
    } else {
      return Session{};
    }
  }
};

}  // namespace gemm
AMX_SFT_MOE_NAMESPACE_END
