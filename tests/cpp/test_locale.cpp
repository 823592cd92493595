// Whatever locale a process has, the dumps, their limits and the messages of errors are the same: other programs read
// them.
#include <gtest/gtest.h>

#include <clocale>
#include <cstdio>
#include <cstdlib>
#include <locale>
#include <optional>
#include <sstream>
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

// Has C++ streams write 1.234,5 in a test, by a facet of its own: what every system can do.
class LocaleOfStreams : public testing::Test {
 protected:
  void SetUp() override {
    before_ = std::locale::global(std::locale(std::locale::classic(), new CommasAndPoints));
    std::ostringstream text;
    text << 1234.5;
    ASSERT_EQ(text.str(), "1.234,5");
  }
  void TearDown() override { std::locale::global(before_); }

 private:
  std::locale before_;
};

// Has the C library's functions write 0,5 in a test, by a locale that the system has or one made from its
// sources.
class LocaleOfC : public testing::Test {
 protected:
  void SetUp() override {
    if (!set_one_with_commas()) GTEST_SKIP() << "no locale of the C library has commas, and none could be made";
    char text[8];
    std::snprintf(text, sizeof text, "%.1f", 0.5);
    ASSERT_STREQ(text, "0,5");
  }
  void TearDown() override {
    std::setlocale(LC_ALL, "C");
    path_.reset();
  }

 private:
  bool set_one_with_commas() {
    for (const char* name : {"de_DE.UTF-8", "fr_FR.UTF-8", "es_ES.UTF-8", "nl_NL.UTF-8"}) {
      if (std::setlocale(LC_ALL, name) != nullptr) return true;
    }
    static const std::optional<std::string> made = make_german();
    if (!made) return false;
    path_.emplace("LOCPATH", *made);
    return std::setlocale(LC_ALL, "de_DE.UTF-8") != nullptr;
  }
  // The folder with the locale.
  static std::optional<std::string> make_german() {
    const std::string folder = fresh_file("locales").string();
    const std::string make =
        "mkdir '" + folder + "' && localedef -i de_DE -f UTF-8 '" + folder + "/de_DE.UTF-8'";
    if (std::system((make + " > /dev/null 2>&1").c_str()) != 0) return std::nullopt;
    return folder;
  }

  std::optional<Variable> path_;
};

StepRecord step_of_41_ms() {
  StepRecord record;
  { const amx_sft_moe::StepTimer step(record, 1000, 2000, 1, Phase::kD1Scatter); }
  record.begin_ns = 1;
  record.end_ns = 41'123'457;
  record.threads = 1;
  return record;
}

void expect_plain_messages() {
  EXPECT_EQ(concat("limit ", 256'000'000, " and ", 0.5), "limit 256000000 and 0.5");
}

void expect_plain_dumps() {
  EXPECT_EQ(amx_sft_moe::dump::milliseconds(41.1234), "41.123");
  EXPECT_EQ(amx_sft_moe::dump::milliseconds(0), "0.000");
  EXPECT_EQ(amx_sft_moe::dump::milliseconds(1234567.8996), "1234567.900");
  const std::string json = json_dump(step_of_41_ms(), {});
  EXPECT_NE(json.find(R"("total_ms":41.123,)"), std::string::npos) << json;
  EXPECT_NE(json.find(R"("tokens":1000,)"), std::string::npos) << json;
  const std::string text = text_dump(step_of_41_ms(), {});
  EXPECT_EQ(text.find(','), std::string::npos) << text;
}

void expect_limits_and_marks_of_full_files() {
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

TEST_F(LocaleOfStreams, NumbersInMessages) {
  expect_plain_messages();
}
TEST_F(LocaleOfStreams, NumbersInDumps) {
  expect_plain_dumps();
}
TEST_F(LocaleOfStreams, LimitsAndTheMarksOfFullFiles) {
  expect_limits_and_marks_of_full_files();
}

TEST_F(LocaleOfC, NumbersInMessages) {
  expect_plain_messages();
}
TEST_F(LocaleOfC, NumbersInDumps) {
  expect_plain_dumps();
}
TEST_F(LocaleOfC, LimitsAndTheMarksOfFullFiles) {
  expect_limits_and_marks_of_full_files();
}

}  // namespace
}  // namespace sft_test
