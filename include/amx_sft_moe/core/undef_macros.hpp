// Undefines every helper macro of core/config_macros.hpp and profile/backward_timer.hpp, and gives a user's macros of
// the latter's names back; the version's stay. No include guard on purpose: it is the counterpart of a definition,
// included at the end of each header that users include.
#undef AMX_SFT_MOE_NAMESPACE_BEGIN
#undef AMX_SFT_MOE_NAMESPACE_END
#undef AMX_SFT_MOE_ABI
#undef AMX_SFT_MOE_ABI_TIMER
#undef AMX_SFT_MOE_ABI_NVTX
#undef AMX_SFT_MOE_ABI_THREADS
#undef AMX_SFT_MOE_ABI_CPU
#undef AMX_SFT_MOE_ABI_MORE
#undef AMX_SFT_MOE_ABI_MATH
#undef AMX_SFT_MOE_ABI_FINITE
#undef AMX_SFT_MOE_ABI_VERSION
#undef AMX_SFT_MOE_HAS_NVTX
#undef AMX_SFT_MOE_JOIN
#undef AMX_SFT_MOE_JOIN_
#undef AMX_SFT_MOE_TEXT
#undef AMX_SFT_MOE_TEXT_
#undef AMX_SFT_MOE_TARGET_AVX2
#undef AMX_SFT_MOE_TARGET_AVX512
#undef AMX_SFT_MOE_TARGET_AVX512_BF16
#undef AMX_SFT_MOE_INLINE
#undef AMX_SFT_MOE_HIDE_ORIGIN
#undef AMX_SFT_MOE_HIDE_ADDRESS
#undef AMX_SFT_MOE_UNROLL
#undef AMX_SFT_MOE_UNROLL_4
#ifdef AMX_SFT_MOE_USERS_TIMER_MACROS_ASIDE
#undef AMX_SFT_MOE_USERS_TIMER_MACROS_ASIDE
#pragma pop_macro("BACKWARD_TIMER_START")
#pragma pop_macro("BACKWARD_TIMER_CHECKPOINT")
#pragma pop_macro("BACKWARD_TIMER_END")
#endif
