#include "openmp_counter.hpp"

#include <atomic>

namespace {

std::atomic<std::int64_t> g_sync_points{0};

}  // namespace

std::int64_t sft_test::sync_point_count() {
  return g_sync_points.load();
}

#if defined(_OPENMP) && defined(__GNUC__) && !defined(__clang__)

#include <dlfcn.h>
#include <omp.h>

bool sft_test::can_count_sync_points() {
  return true;
}

namespace {

template <class Function>
Function* next(const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, name));
}

}  // namespace

extern "C" {

void GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned flags) {
  static auto* const real = next<void(void (*)(void*), void*, unsigned, unsigned)>("GOMP_parallel");
  g_sync_points.fetch_add(1);
  real(body, data, threads, flags);
}

void GOMP_barrier() {
  static auto* const real = next<void()>("GOMP_barrier");
  if (omp_get_thread_num() == 0) g_sync_points.fetch_add(1);
  real();
}

void GOMP_loop_end() {
  static auto* const real = next<void()>("GOMP_loop_end");
  if (omp_get_thread_num() == 0) g_sync_points.fetch_add(1);
  real();
}

}  // extern "C"

#else

bool sft_test::can_count_sync_points() {
  return false;
}

#endif
