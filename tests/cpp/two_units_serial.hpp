// What the units of test_two_units that are compiled without OpenMP, or with other flags, say of themselves, in types of no
// library.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace sft_test {

struct SerialUnit {
  int (*default_num_threads)();
  std::size_t size_of_single_threaded;
  std::string provider_type;
};

std::vector<float> run_tiny_layer_serially();
SerialUnit serial_unit();
const char* provider_type_with_flags();
// Runs on CPUs with AVX2. By reference: clang takes it for granted that no argument by value is NaN.
bool takes_nan_with_flags(const float& nan);
bool stores_nans_with_flags();

}  // namespace sft_test
