// Numbers from the command line, read strictly: all of the text, in the option's own type, and not too small. atoi and
// stoi would take 12x for 12 and 1.5 for 1.
#pragma once

#include <charconv>
#include <cmath>
#include <sstream>
#include <stdexcept>
#include <string>
#include <system_error>
#include <type_traits>

namespace command_line {

// Throws std::invalid_argument, naming the option, where `text` is no T of at least `least`.
template <class T>
T number(const std::string& option, const std::string& text, T least) {
  T value{};
  const char* const end = text.data() + text.size();
  const auto [stopped, error] = std::from_chars(text.data(), end, value);
  bool good = error == std::errc() && stopped == end && value >= least;
  if constexpr (std::is_floating_point_v<T>) good = good && std::isfinite(value);
  if (good) return value;
  std::ostringstream message;
  message << option << ": expected a " << (std::is_integral_v<T> ? "whole number" : "number") << " of at least "
          << least;
  if (error == std::errc::result_out_of_range) message << " that its type holds";
  message << ", got " << text;
  throw std::invalid_argument(message.str());
}

}  // namespace command_line
