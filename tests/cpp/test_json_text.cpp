// Strings in JSON: escapes, and UTF-8 whatever bytes a layer's name has.
#include <gtest/gtest.h>

#include <string>
#include <string_view>

#include "amx_sft_moe/profile/json_text.hpp"

namespace sft_test {
namespace {

using namespace std::string_view_literals;

const std::string kReplacement = "\xef\xbf\xbd";  // U+FFFD

std::string in_json(std::string_view value) {
  std::string out;
  amx_sft_moe::json_text::append_string(out, value);
  EXPECT_EQ(out.front(), '"');
  EXPECT_EQ(out.back(), '"');
  return out.substr(1, out.size() - 2);
}

std::string replacements(int count) {
  std::string all;
  for (int n = 0; n < count; ++n) all += kReplacement;
  return all;
}

TEST(JsonText, Escapes) {
  EXPECT_EQ(in_json(""), "");
  EXPECT_EQ(in_json("layers.3 \"a\\b\""), R"(layers.3 \"a\\b\")");
  EXPECT_EQ(in_json("\t\n\x1f\0\x7f"sv), "\\u0009\\u000a\\u001f\\u0000\x7f");
}

// The first and the last character of each row of the Unicode Standard's table of well-formed sequences.
TEST(JsonText, KeepsUtf8) {
  for (const std::string_view text :
       {"\xc2\x80"sv, "\xdf\xbf"sv, "\xe0\xa0\x80"sv, "\xe0\xbf\xbf"sv, "\xe1\x80\x80"sv, "\xec\xbf\xbf"sv,
        "\xed\x80\x80"sv, "\xed\x9f\xbf"sv, "\xee\x80\x80"sv, "\xef\xbf\xbf"sv, "\xf0\x90\x80\x80"sv,
        "\xf0\xbf\xbf\xbf"sv, "\xf1\x80\x80\x80"sv, "\xf3\xbf\xbf\xbf"sv, "\xf4\x80\x80\x80"sv,
        "\xf4\x8f\xbf\xbf"sv}) {
    EXPECT_EQ(in_json(text), text);
    EXPECT_EQ(in_json("a" + std::string(text) + "b" + std::string(text)),
              "a" + std::string(text) + "b" + std::string(text));
  }
}

struct Malformed {
  std::string_view bytes;
  int replacements;  // as many as Python's errors="replace" makes
};

TEST(JsonText, ReplacesWhatIsNoUtf8) {
  for (const Malformed& c : {
           Malformed{"\xe4"sv, 1},             // Latin-1
           {"\x80"sv, 1},                      // a continuation without a beginning
           {"\xff"sv, 1},                      //
           {"\xfe\xff"sv, 2},                  //
           {"\xc0\x80"sv, 2},                  // overlong forms of NUL, /, U+07FF and U+FFFF
           {"\xc1\xaf"sv, 2},                  //
           {"\xe0\x9f\xbf"sv, 3},              //
           {"\xf0\x8f\xbf\xbf"sv, 4},          //
           {"\xed\xa0\x80"sv, 3},              // surrogates
           {"\xed\xbf\xbf"sv, 3},              //
           {"\xf4\x90\x80\x80"sv, 4},          // U+110000
           {"\xf5\x80\x80\x80"sv, 4},          //
           {"\xc3"sv, 1},                      // cut off
           {"\xe2\x82"sv, 1},                  //
           {"\xf0\x9f\x92"sv, 1},              //
           {"\xf0\x9f"sv, 1},                  //
           {"\xf0\x9f\x92\xf0\x9f\x92"sv, 2},  //
           {"\xe2\xc3"sv, 2},                  //
           {"\xf8\x88\x80\x80\x80"sv, 5},      // five bytes, as before 2003
       }) {
    const std::string bytes(c.bytes);
    EXPECT_EQ(in_json(bytes), replacements(c.replacements));
    EXPECT_EQ(in_json("l" + bytes + "r\xc3\xa4"), "l" + replacements(c.replacements) + "r\xc3\xa4");
    EXPECT_EQ(in_json(bytes + "\""), replacements(c.replacements) + "\\\"") << "nothing else is swallowed";
  }
}

}  // namespace
}  // namespace sft_test
