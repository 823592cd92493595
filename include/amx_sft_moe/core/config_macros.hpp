// Helper macros of the library. Defined here, undefined in core/undef_macros.hpp (the umbrella header's last
// line), so that none of them leaks into a translation unit that includes amx_sft_moe.hpp. Not `#pragma once`:
// a kernel's header that is included behind the umbrella header defines them once more, and undefines them
// again.
#ifndef AMX_SFT_MOE_NAMESPACE_BEGIN

#if !defined(__x86_64__)
#error "amx_sft_moe is for x86-64"
#endif
#if __cplusplus < 202002L
#error "amx_sft_moe is C++20: compile with -std=c++20 or later"
#endif
#if !defined(__cpp_exceptions) || !defined(__cpp_rtti)
#error \
    "amx_sft_moe refuses wrong calls by exceptions and tells kernels' states by their types: no -fno-exceptions, no -fno-rtti"
#endif

#ifndef AMX_SFT_MOE_VERSION_STRING
#define AMX_SFT_MOE_VERSION_STRING "0.1.0"
#endif

// The inline namespace says what two translation units of one program could well have unlike: major and minor of the
// version (core/errors.hpp checks that they are those of the string), and the switches that change inline bodies.
// Units built with different ones never share a function body (an ODR violation without a diagnostic). Switches that no
// macro tells, such as -ffp-contract, have to be the same for all units.
//   AMX_SFT_MOE_NO_TIMER   compile the phase recorder and the NVTX ranges out
//   AMX_SFT_MOE_NO_NVTX    compile the NVTX ranges out; also the case where the NVTX headers are not found
//   _OPENMP                the compiler's own (-fopenmp): parallel/tasks.hpp has other bodies without it
//   -mavx, -mfma, -march=..., -ffast-math and its parts, and what implies them: all bodies are other ones, with other
//                          roundings or for other CPUs
#define AMX_SFT_MOE_ABI_VERSION v0_1
#if defined(AMX_SFT_MOE_NO_TIMER)
#define AMX_SFT_MOE_ABI_TIMER _no_timer
#else
#define AMX_SFT_MOE_ABI_TIMER _timer
#endif
#if !defined(AMX_SFT_MOE_NO_TIMER) && !defined(AMX_SFT_MOE_NO_NVTX) && __has_include(<nvtx3/nvtx3.hpp>)
#define AMX_SFT_MOE_HAS_NVTX 1
#define AMX_SFT_MOE_ABI_NVTX _nvtx
#else
#define AMX_SFT_MOE_HAS_NVTX 0
#define AMX_SFT_MOE_ABI_NVTX
#endif
#if defined(_OPENMP)
#define AMX_SFT_MOE_ABI_THREADS _openmp
#else
#define AMX_SFT_MOE_ABI_THREADS _serial
#endif
#if defined(__AVX512FP16__)
#define AMX_SFT_MOE_ABI_CPU _avx512fp16
#elif defined(__AVX512BF16__)
#define AMX_SFT_MOE_ABI_CPU _avx512bf16
#elif defined(__AVX512VL__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
#define AMX_SFT_MOE_ABI_CPU _avx512
#elif defined(__AVX512F__)
#define AMX_SFT_MOE_ABI_CPU _avx512f
#elif defined(__AVX2__) && defined(__FMA__)
#define AMX_SFT_MOE_ABI_CPU _avx2_fma
#elif defined(__AVX2__)
#define AMX_SFT_MOE_ABI_CPU _avx2
#elif defined(__FMA__)
#define AMX_SFT_MOE_ABI_CPU _fma
#elif defined(__AVX__)
#define AMX_SFT_MOE_ABI_CPU _avx
#else
#define AMX_SFT_MOE_ABI_CPU
#endif
// What lies between those steps: -march=x86-64-v2, -march=haswell, -march=icelake-server, AMD's of before Zen.
#if defined(__AVX512VBMI2__)
#define AMX_SFT_MOE_ABI_MORE _vbmi2
#elif defined(__AVX512VBMI__)
#define AMX_SFT_MOE_ABI_MORE _vbmi
#elif defined(__BMI2__)
#define AMX_SFT_MOE_ABI_MORE _bmi2
#elif defined(__FMA4__)
#define AMX_SFT_MOE_ABI_MORE _fma4
#elif defined(__BMI__)
#define AMX_SFT_MOE_ABI_MORE _bmi
#elif defined(__SSE4_1__) && !defined(__AVX__)
#define AMX_SFT_MOE_ABI_MORE _sse4
#elif defined(__SSSE3__) && !defined(__AVX__)
#define AMX_SFT_MOE_ABI_MORE _ssse3
#elif defined(__LZCNT__)
#define AMX_SFT_MOE_ABI_MORE _lzcnt
#else
#define AMX_SFT_MOE_ABI_MORE
#endif
#if defined(__FAST_MATH__)
#define AMX_SFT_MOE_ABI_MATH _fast_math
#elif defined(__ASSOCIATIVE_MATH__) || defined(__RECIPROCAL_MATH__)  // GCC's
#define AMX_SFT_MOE_ABI_MATH _unsafe_math
#else
#define AMX_SFT_MOE_ABI_MATH
#endif
#if defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__
#define AMX_SFT_MOE_ABI_FINITE _finite_math
#else
#define AMX_SFT_MOE_ABI_FINITE
#endif
#define AMX_SFT_MOE_JOIN_(a, b, c, d, e, f, g, h) a##b##c##d##e##f##g##h
#define AMX_SFT_MOE_JOIN(a, b, c, d, e, f, g, h) AMX_SFT_MOE_JOIN_(a, b, c, d, e, f, g, h)
#define AMX_SFT_MOE_ABI                                                                                      \
  AMX_SFT_MOE_JOIN(AMX_SFT_MOE_ABI_VERSION, AMX_SFT_MOE_ABI_TIMER, AMX_SFT_MOE_ABI_NVTX,                     \
                   AMX_SFT_MOE_ABI_THREADS, AMX_SFT_MOE_ABI_CPU, AMX_SFT_MOE_ABI_MORE, AMX_SFT_MOE_ABI_MATH, \
                   AMX_SFT_MOE_ABI_FINITE)
#define AMX_SFT_MOE_TEXT_(name) #name
#define AMX_SFT_MOE_TEXT(name) AMX_SFT_MOE_TEXT_(name)

#define AMX_SFT_MOE_NAMESPACE_BEGIN \
  namespace amx_sft_moe {           \
  inline namespace AMX_SFT_MOE_ABI {
#define AMX_SFT_MOE_NAMESPACE_END \
  }                               \
  }

// Target attributes of the leaf functions in arch/. No -m flag is ever needed: one binary holds every
// instruction set and chooses at run time.
#define AMX_SFT_MOE_TARGET_AVX2 __attribute__((target("avx2,fma")))
#define AMX_SFT_MOE_TARGET_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma")))
#define AMX_SFT_MOE_TARGET_AVX512_BF16 \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma")))
#define AMX_SFT_MOE_INLINE inline __attribute__((always_inline))
// A vector whose origin the compiler shall not know: it is neither loaded nor broadcast again.
#define AMX_SFT_MOE_HIDE_ORIGIN(vector) __asm__("" : "+v"(vector))
// The same of a pointer: what it points to is not kept in registers, nor, in a loop, a pointer of each row that is addressed
// by it and a distance; of both there may be more than registers.
#define AMX_SFT_MOE_HIDE_ADDRESS(pointer) __asm__("" : "+r"(pointer))

#if defined(__clang__)
#define AMX_SFT_MOE_UNROLL _Pragma("clang loop unroll(full)")
#define AMX_SFT_MOE_UNROLL_4 _Pragma("clang loop unroll_count(4)")
#else
#define AMX_SFT_MOE_UNROLL _Pragma("GCC unroll 16")
#define AMX_SFT_MOE_UNROLL_4 _Pragma("GCC unroll 4")
#endif
#endif  // AMX_SFT_MOE_NAMESPACE_BEGIN
