// The library's exceptions. Every message names the argument and says both values: what was wanted and what
// came.
#pragma once

#include <cstddef>
#include <locale>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>

#include "amx_sft_moe/core/config_macros.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN

namespace abi {

// Whether `name` (v0_1) says major and minor of `version` (0.1.0).
constexpr bool names_version(std::string_view name, std::string_view version) {
  std::size_t at = 0;
  for (const char c : name.substr(1)) {
    if (at == version.size() || version[at++] != (c == '_' ? '.' : c)) return false;
  }
  return name.front() == 'v' && at == version.find('.', version.find('.') + 1);
}
static_assert(names_version(AMX_SFT_MOE_TEXT(AMX_SFT_MOE_ABI_VERSION), AMX_SFT_MOE_VERSION_STRING),
              "AMX_SFT_MOE_ABI_VERSION: expected v<major>_<minor> of AMX_SFT_MOE_VERSION_STRING");

}  // namespace abi

// A wrong shape, dtype, stride, null pointer or option. Nothing was changed by the refused call.
class ArgumentError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// A call that does not fit the object's state: an empty pop, a full stack, a call into an object in use.
class StateError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A kernel that this CPU or this binary does not have; or, in a pass, a product that oneDNN refuses.
class KernelError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Numbers as C++ writes them, whatever the process' locale is: the text goes into JSON too.
template <class... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream text;
  text.imbue(std::locale::classic());
  (text << ... << parts);
  return text.str();
}

// The name of an argument or of a part of it ("x", ".rows"), put together only where it is printed: checks run
// in every step and allocate nothing.
struct ArgumentName {
  std::string_view whole;
  std::string_view part;

  ArgumentName(std::string_view name, std::string_view of_it = {})  // NOLINT(google-explicit-constructor)
      : whole(name), part(of_it) {}
  ArgumentName(const char* name) : whole(name) {}         // NOLINT(google-explicit-constructor)
  ArgumentName(const std::string& name) : whole(name) {}  // NOLINT(google-explicit-constructor)

  friend std::ostream& operator<<(std::ostream& out, const ArgumentName& name) {
    return out << name.whole << name.part;
  }
};

template <class Wanted, class Got>
void require_equal(const ArgumentName& argument, const Wanted& wanted, const Got& got) {
  if (wanted != got) throw ArgumentError(concat(argument, ": expected ", wanted, ", got ", got));
}

template <class Low, class Got>
void require_at_least(const ArgumentName& argument, const Low& low, const Got& got) {
  if (got < low) throw ArgumentError(concat(argument, ": expected at least ", low, ", got ", got));
}

template <class High, class Got>
void require_at_most(const ArgumentName& argument, const High& high, const Got& got) {
  if (got > high) throw ArgumentError(concat(argument, ": expected at most ", high, ", got ", got));
}

// Of what an argument points to, or a view of it.
inline void require_memory(const ArgumentName& argument, bool there) {
  if (!there) throw ArgumentError(concat(argument, ": expected a non-null pointer, got null"));
}

AMX_SFT_MOE_NAMESPACE_END
