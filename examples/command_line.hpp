// Numbers from the command line, read strictly: all of the text, in the option's own type, and not too small. atoi and
// stoi would take 12x for 12 and 1.5 for 1.
#pragma once

#include <charconv>
#include <cmath>
#include <limits>
#include <locale>
#include <sstream>
#include <stdexcept>
#include <string>
#include <system_error>
#include <type_traits>

namespace command_line {

// All of `text`, or why not.
template <class T>
std::errc read(const std::string& text, T& value) {
  if constexpr (std::is_floating_point_v<T>) {  // std::from_chars has them in libc++ since LLVM 20 only
    if (text.find_first_not_of("0123456789.eE+-") != std::string::npos) return std::errc::invalid_argument;
    std::istringstream in(text);
    in.imbue(std::locale::classic());
    const bool begun = static_cast<bool>(in >> std::noskipws >> value);
    if (begun && in.peek() == std::istringstream::traits_type::eof()) return {};
    const bool too_large = std::fabs(value) >= std::numeric_limits<T>::max();
    return !begun && too_large ? std::errc::result_out_of_range : std::errc::invalid_argument;
  } else {
    const char* const end = text.data() + text.size();
    const auto [stopped, error] = std::from_chars(text.data(), end, value);
    return error == std::errc() && stopped != end ? std::errc::invalid_argument : error;
  }
}

// Throws std::invalid_argument, naming the option, where `text` is no T of at least `least`.
template <class T>
T number(const std::string& option, const std::string& text, T least) {
  T value{};
  const std::errc error = read(text, value);
  if (error == std::errc() && value >= least) return value;
  std::ostringstream message;
  message << option << ": expected a " << (std::is_integral_v<T> ? "whole number" : "number") << " of at least "
          << least;
  if (error == std::errc::result_out_of_range) message << " that its type holds";
  message << ", got " << text;
  throw std::invalid_argument(message.str());
}

}  // namespace command_line
