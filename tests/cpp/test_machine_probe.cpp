// What the probe of the machine's limits refuses. Its figures are for benchmarks/.
#include <gtest/gtest.h>

#include "amx_sft_moe/kernels/machine_probe.hpp"
#include "refusal.hpp"

namespace sft_test {
namespace {

using amx_sft_moe::ArgumentError;
using amx_sft_moe::measure_machine;

TEST(MachineProbe, RefusesWhatIsNoNumberOfThreads) {
  expect_refused<ArgumentError>([] { measure_machine(0); }, {"threads", "1", "0"});
  expect_refused<ArgumentError>([] { measure_machine(-2); }, {"threads", "1", "-2"});
  expect_refused<ArgumentError>([] { measure_machine(4097); }, {"threads", "4096", "4097"});
}

TEST(MachineProbe, RefusesTooLittleMemory) {
  expect_refused<ArgumentError>([] { measure_machine(2, 8191); }, {"bandwidth_bytes", "8192", "8191"});
}

TEST(MachineProbe, MeasuresSomething) {
  EXPECT_GT(amx_sft_moe::probe::bandwidth_of(2, 1 << 20), 0);
  EXPECT_GT(amx_sft_moe::probe::peak_of(1, 1, amx_sft_moe::arch::peak::sse2_loop), 0);
}

}  // namespace
}  // namespace sft_test
