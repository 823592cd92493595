// The JSON of a safetensors header, read strictly and no more of it than such a header has:
//
//     {"__metadata__": {"key": "text"}, "name": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}}
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace mmap_safetensors {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Reads from the front of a text. Whatever is not as expected is an Error that says where.
class HeaderReader {
 public:
  explicit HeaderReader(std::string_view text) : text_(text) {}

  // Calls member(key) for each member of the object that stands here.
  template <class F>
  void object(F&& member) {
    expect('{');
    if (next_is('}')) return;
    do {
      const std::string key = string();
      expect(':');
      member(key);
    } while (next_is(','));
    expect('}');
  }

  std::vector<std::uint64_t> numbers() {
    std::vector<std::uint64_t> values;
    expect('[');
    if (next_is(']')) return values;
    do {
      values.push_back(number());
    } while (next_is(','));
    expect(']');
    return values;
  }

  std::string string() {
    expect('"');
    std::string value;
    for (;;) {
      const char c = take("a string");
      if (c == '"') return value;
      if (static_cast<unsigned char>(c) < 0x20) fail("a string without control characters");
      value += c == '\\' ? escaped() : std::string(1, c);
    }
  }

  void end() {
    skip_space();
    if (at_ != text_.size()) fail("the end of the header");
  }

 private:
  std::uint64_t number() {
    skip_space();
    const std::size_t begin = at_;
    std::uint64_t value = 0;
    for (; at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9'; ++at_) {
      const auto digit = static_cast<std::uint64_t>(text_[at_] - '0');
      if (value > (UINT64_MAX - digit) / 10) fail("a number below 2^64");
      value = 10 * value + digit;
    }
    if (at_ == begin) fail("a number");
    return value;
  }

  std::string escaped() {
    constexpr std::string_view kLetters = "\"\\/bfnrt", kMeanings = "\"\\/\b\f\n\r\t";
    const char letter = take("an escaped character");
    if (letter == 'u') return utf8(code_unit());
    const std::size_t i = kLetters.find(letter);
    if (i == std::string_view::npos) fail("an escaped character");
    return {kMeanings[i]};
  }
  std::uint32_t code_unit() {
    std::uint32_t value = 0;
    for (int i = 0; i < 4; ++i) {
      const std::size_t digit =
          std::string_view("0123456789abcdef0123456789ABCDEF").find(take("four hex digits"));
      if (digit == std::string_view::npos) fail("four hex digits");
      value = 16 * value + static_cast<std::uint32_t>(digit % 16);
    }
    return value;
  }
  std::string utf8(std::uint32_t code) {
    if (code >= 0xd800 && code < 0xe000) fail("a name in the basic plane of Unicode");
    const auto byte = [](std::uint32_t bits) { return static_cast<char>(static_cast<unsigned char>(bits)); };
    if (code < 0x80) return {byte(code)};
    if (code < 0x800) return {byte(0xc0 | code >> 6), byte(0x80 | (code & 0x3f))};
    return {byte(0xe0 | code >> 12), byte(0x80 | (code >> 6 & 0x3f)), byte(0x80 | (code & 0x3f))};
  }

  void skip_space() {
    while (at_ < text_.size() && std::string_view(" \t\r\n").find(text_[at_]) != std::string_view::npos) ++at_;
  }
  bool next_is(char c) {
    skip_space();
    const bool is = at_ < text_.size() && text_[at_] == c;
    if (is) ++at_;
    return is;
  }
  void expect(char c) {
    if (!next_is(c)) fail(std::string("'") + c + "'");
  }
  char take(const char* what) {
    if (at_ == text_.size()) fail(what);
    return text_[at_++];
  }
  [[noreturn]] void fail(const std::string& expected) const {
    throw Error("header: expected " + expected + " at byte " + std::to_string(at_) + " of " +
                std::to_string(text_.size()));
  }

  std::string_view text_;
  std::size_t at_ = 0;
};

}  // namespace mmap_safetensors
