// Arguments by the names that callers in Python gave them: the library's messages have those of C++ ("grads.lora.gate_a"),
// and which tensor of the caller's that is depends on the form of what was set (gate_up_lora_a, gate_lora_a).
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "amx_sft_moe/core/errors.hpp"
#include "call_tensors.hpp"

namespace amx_sft_moe::python {

class CallerNames {
 public:
  CallerNames(const ParameterObjects& objects, const BaseTensors& base);

  // `message` with the names of C++ replaced: those of what read_tensor() and its like have not refused already.
  std::string in(std::string_view message) const;

 private:
  void add_parameter(std::string_view of_library, std::string_view of_gradient, std::string_view of_caller);

  std::vector<std::pair<std::string, std::string>> names_;  // the library's, the caller's
};

// call(), whose ArgumentErrors have the caller's names. Needs no GIL.
template <class Call>
void with_caller_names(const ParameterObjects& objects, const BaseTensors& base, Call&& call) {
  try {
    std::forward<Call>(call)();
  } catch (const ArgumentError& error) {
    throw ArgumentError(CallerNames(objects, base).in(error.what()));
  }
}

}  // namespace amx_sft_moe::python
