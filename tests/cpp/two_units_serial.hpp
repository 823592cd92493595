// What the unit of test_two_units that is compiled without OpenMP says of itself, in types of no library.
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

}  // namespace sft_test
