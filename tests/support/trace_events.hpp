// The slices of a trace file, one event a line, as trace_dump.hpp writes them.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <regex>
#include <string>
#include <vector>

#include "environment.hpp"

namespace sft_test {

struct TraceSlice {
  std::string category, name;
  std::int64_t pid = 0, tid = 0;
  std::int64_t begin_ns = 0, end_ns = 0;

  bool contains(const TraceSlice& other) const { return begin_ns <= other.begin_ns && other.end_ns <= end_ns; }
};

// The X events of a file in their order. Checks that every line is an event and its comma.
inline std::vector<TraceSlice> slices_of(const std::string& text) {
  static const std::regex event(
      R"re(\{"ph":"X","name":"([^"]*)","pid":(\d+),"tid":(\d+),"cat":"(\w+)","ts":(\d+)\.(\d{3}),"dur":(\d+)\.(\d{3}),"args":\{.*\}\},)re");
  std::vector<TraceSlice> slices;
  const std::vector<std::string> lines = lines_of(text);
  EXPECT_FALSE(lines.empty());
  for (std::size_t i = 0; i < lines.size(); ++i) {
    const std::string& line = lines[i];
    if (i == 0) {
      EXPECT_EQ(line, "[");
      continue;
    }
    EXPECT_TRUE(line.starts_with("{\"ph\":\"") && line.ends_with("}},")) << line;
    if (!line.starts_with("{\"ph\":\"X\"")) continue;
    std::smatch found;
    if (!std::regex_match(line, found, event)) {
      ADD_FAILURE() << line;
      continue;
    }
    const auto number = [&found](int group) {
      return std::stoll(found[static_cast<std::size_t>(group)].str());
    };
    const std::int64_t begin = number(5) * 1000 + number(6);
    slices.push_back({found[4], found[1], number(2), number(3), begin, begin + number(7) * 1000 + number(8)});
  }
  return slices;
}

}  // namespace sft_test
