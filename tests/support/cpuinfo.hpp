// What the operating system says about the CPU, to hold against what the library finds out by itself.
#pragma once

#include <fstream>
#include <optional>
#include <string>
#include <string_view>

namespace sft_test {

// The first value of this name in /proc/cpuinfo; nothing where there is no such file or line.
inline std::optional<std::string> cpuinfo(std::string_view name) {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const std::size_t colon = line.find(": ");
    if (colon == std::string::npos || line.substr(0, line.find_last_not_of("\t ", colon - 1) + 1) != name)
      continue;
    return line.substr(colon + 2);
  }
  return std::nullopt;
}

}  // namespace sft_test
