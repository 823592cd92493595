// Whatever locale a process has, the dumps, their limits and the messages of errors are the same: other programs read
// them.
#include <gtest/gtest.h>

#include <clocale>
#include <cstdio>
#include <cstdlib>
#include <locale>
#include <string>

#include "amx_sft_moe/core/errors.hpp"
#include "amx_sft_moe/profile/backward_timer.hpp"
#include "amx_sft_moe/profile/dump.hpp"
#include "amx_sft_moe/profile/timer_output.hpp"
#include "environment.hpp"

namespace sft_test {
namespace {

using amx_sft_moe::concat;
using amx_sft_moe::Phase;
using amx_sft_moe::StepRecord;

// 1.234,5 as in German.
class CommasAndPoints : public std::numpunct<char> {
 protected:
  char do_decimal_point() const override { return ','; }
  char do_thousands_sep() const override { return '.'; }
  std::string do_grouping() const override { return "\3"; }
};

// A locale of the C library that writes 0,5: one that the system has, or one made from its sources. Null: there is
// none.
const char* c_locale_with_commas() {
  for (const char* name : {"de_DE.UTF-8", "fr_FR.UTF-8", "es_ES.UTF-8", "nl_NL.UTF-8"}) {
    if (std::setlocale(LC_ALL, name) != nullptr) return name;
  }
  const std::string folder = testing::TempDir() + "locales_of_the_test";
  const std::string make =
      "mkdir -p '" + folder + "' && localedef -i de_DE -f UTF-8 '" + folder + "/de_DE.UTF-8'";
  if (std::system((make + " > /dev/null 2>&1").c_str()) != 0) return nullptr;
  setenv("LOCPATH", folder.c_str(), 1);
  return std::setlocale(LC_ALL, "de_DE.UTF-8") != nullptr ? "de_DE.UTF-8" : nullptr;
}

// Of C++ streams by a facet of the test's own, and of C functions where the system can.
class Locale : public testing::Test {
 protected:
  void SetUp() override {
    static const char* const name = c_locale_with_commas();
    if (name == nullptr) std::puts("no locale of the C library has commas: C++ streams only");
    before_ = std::locale::global(std::locale(std::locale(), new CommasAndPoints));
    if (name != nullptr) std::setlocale(LC_ALL, name);
  }
  void TearDown() override {
    std::locale::global(before_);
    std::setlocale(LC_ALL, "C");
  }

 private:
  std::locale before_;
};

StepRecord step_of_41_ms() {
  StepRecord record;
  { const amx_sft_moe::StepTimer step(record, 1000, 2000, 1, Phase::kD1Scatter); }
  record.begin_ns = 1;
  record.end_ns = 41'123'457;
  record.threads = 1;
  return record;
}

TEST_F(Locale, NumbersInMessages) {
  EXPECT_EQ(concat("limit ", 256'000'000, " and ", 0.5), "limit 256000000 and 0.5");
}

TEST_F(Locale, NumbersInDumps) {
  EXPECT_EQ(amx_sft_moe::dump::milliseconds(41.1234), "41.123");
  EXPECT_EQ(amx_sft_moe::dump::milliseconds(0), "0.000");
  EXPECT_EQ(amx_sft_moe::dump::milliseconds(1234567.8996), "1234567.900");
  const std::string json = json_dump(step_of_41_ms(), {});
  EXPECT_NE(json.find(R"("total_ms":41.123,)"), std::string::npos) << json;
  EXPECT_NE(json.find(R"("tokens":1000,)"), std::string::npos) << json;
  const std::string text = text_dump(step_of_41_ms(), {});
  EXPECT_EQ(text.find(','), std::string::npos) << text;
}

TEST_F(Locale, LimitsAndTheMarksOfFullFiles) {
  const auto trace = fresh_file("locale_trace"), dumps = fresh_file("locale_dumps");
  const Variable form("AMX_SFT_MOE_TIMER", "json"), file("AMX_SFT_MOE_TIMER_FILE", dumps.string());
  const Variable limit("AMX_SFT_MOE_TRACE_LIMIT", "0.0015"), path("AMX_SFT_MOE_TRACE", trace.string());
  auto output = amx_sft_moe::TimerOutput::from_environment();
  for (int n = 0; n < 3; ++n) output.write(step_of_41_ms(), {});
  for (const std::string& text : {contents(trace), contents(dumps)}) {
    EXPECT_EQ(text.size(), 1500U);
    EXPECT_EQ(lines_with(text, "\"limit_bytes\":1500}"), 1U) << text;
  }
}

}  // namespace
}  // namespace sft_test
