// The third unit of test_two_units, compiled without OpenMP: another library as far as the linker knows, although the
// headers are the same.
#ifdef _OPENMP
#error "expected to be compiled without -fopenmp"
#endif
#define sft_test sft_test_serial  // what this unit makes of the shared header is its own
#include "two_units.hpp"
#undef sft_test
#include "two_units_serial.hpp"

namespace sft_test {

std::vector<float> run_tiny_layer_serially() {
  return sft_test_serial::run_tiny_layer_here();
}

SerialUnit serial_unit() {
  return {&amx_sft_moe::parallel::default_num_threads, sizeof(amx_sft_moe::parallel::SingleThreaded),
          typeid(amx_sft_moe::KernelProvider).name()};
}

}  // namespace sft_test
