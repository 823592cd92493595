// Executes one instruction of the set that it is asked for: shows that an emulated CPU without it refuses it.
#include <immintrin.h>

#include <string_view>

namespace {

volatile int zero = 0;  // so that nothing is computed beforehand

int sse3() {
  __asm__ volatile("haddps %%xmm0, %%xmm0" : : : "xmm0");  // GCC makes other code of the intrinsic
  return zero;
}
__attribute__((target("sse4.1"))) int sse41() {
  return _mm_extract_epi32(_mm_mullo_epi32(_mm_set1_epi32(zero), _mm_set1_epi32(zero)), 1);
}
__attribute__((target("avx2"))) int avx2() {
  const __m256i v = _mm256_set1_epi32(zero);
  return _mm256_extract_epi32(_mm256_sllv_epi32(v, v), 1);
}
__attribute__((target("avx512f"))) int avx512f() {
  return static_cast<int>(_mm512_test_epi32_mask(_mm512_set1_epi32(zero), _mm512_set1_epi32(zero)));
}

}  // namespace

int main(int count, char** arguments) {
  const std::string_view set = count == 2 ? arguments[1] : "";
  if (set == "sse2") return zero;
  if (set == "sse3") return sse3();
  if (set == "sse4.1") return sse41();
  if (set == "avx2") return avx2();
  if (set == "avx512f") return avx512f();
  return 2;
}
