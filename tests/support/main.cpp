// Runs the tests of a program, with AMX instructions emulated where the CPU has none and the emulator is
// linked.
#include <gtest/gtest.h>

#include "emulation.hpp"

#ifdef SFT_TEST_HAS_AMX_EMULATOR
#include "amx_emulator.hpp"

bool sft_test::amx_is_emulated() {
  return amx_emulator::installed();
}
#else
bool sft_test::amx_is_emulated() {
  return false;
}
#endif

int main(int argc, char** argv) {
#ifdef SFT_TEST_HAS_AMX_EMULATOR
  amx_emulator::install();  // refuses where the CPU has AMX
#endif
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
