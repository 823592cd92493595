// Runs the tests of a program, with AMX instructions emulated where the CPU has none and the emulator is
// linked.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "emulation.hpp"

#ifdef SFT_TEST_HAS_AMX_EMULATOR
#include "amx_emulator.hpp"
#else
namespace amx_emulator {
namespace {

bool install() {
  return false;
}
void uninstall() {}
bool installed() {
  return false;
}

}  // namespace
}  // namespace amx_emulator
#endif

namespace sft_test {

bool amx_is_emulated() {
  return amx_emulator::installed();
}

WithoutEmulation::WithoutEmulation() : was_emulated_(amx_is_emulated()) {
  amx_emulator::uninstall();
}

WithoutEmulation::~WithoutEmulation() {
  if (was_emulated_) amx_emulator::install();
}

}  // namespace sft_test

namespace {

// A developer's AMX_SFT_MOE_KERNEL or AMX_SFT_MOE_TIMER shall not decide what is tested; tests set their own.
void forget_inherited_variables() {
  std::vector<std::string> names;
  for (char** variable = environ; *variable != nullptr; ++variable) {
    const std::string_view text(*variable);
    if (text.starts_with("AMX_SFT_MOE_")) names.emplace_back(text.substr(0, text.find('=')));
  }
  for (const std::string& name : names) ::unsetenv(name.c_str());
}

}  // namespace

int main(int argc, char** argv) {
  forget_inherited_variables();
  amx_emulator::install();  // refuses where the CPU has AMX
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
