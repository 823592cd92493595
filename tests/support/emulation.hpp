// Whether AMX instructions are emulated in this process (main.cpp decides). They take microseconds each then,
// so that tests leave their larger cases out.
#pragma once

namespace sft_test {

bool amx_is_emulated();

// Takes the emulated instructions away for a scope: what the CPU itself lacks is missing there.
class WithoutEmulation {
 public:
  WithoutEmulation();
  WithoutEmulation(const WithoutEmulation&) = delete;
  WithoutEmulation& operator=(const WithoutEmulation&) = delete;
  ~WithoutEmulation();

 private:
  bool was_emulated_;
};

}  // namespace sft_test
