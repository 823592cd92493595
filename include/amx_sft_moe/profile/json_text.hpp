// Pieces of JSON appended to a string: strings with their escapes, and numbers without a locale.
#pragma once

#include <array>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "amx_sft_moe/core/config_macros.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace json_text {

// What a text begins with: one character in UTF-8, or bytes that are none.
struct Utf8Sequence {
  std::size_t bytes;
  bool valid;
};

// Second bytes tell overlong forms, surrogates and what lies beyond U+10FFFF (the Unicode Standard, table 3-7). Of a
// malformed sequence its longest beginning of a character is one, as the standard advises and Python has it.
inline Utf8Sequence first_utf8_sequence(std::string_view text) {
  const auto byte = [text](std::size_t i) {
    return i < text.size() ? static_cast<unsigned char>(text[i]) : 0U;
  };
  const unsigned lead = byte(0);
  if (lead < 0x80) return {1, true};
  if (lead < 0xc2 || lead > 0xf4) return {1, false};
  const unsigned lowest = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
  const unsigned highest = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
  if (byte(1) < lowest || byte(1) > highest) return {1, false};
  const std::size_t length = lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
  for (std::size_t i = 2; i < length; ++i) {
    if ((byte(i) & 0xc0U) != 0x80U) return {i, false};
  }
  return {length, true};
}

// JSON is UTF-8, and one name in another encoding would make a whole file unreadable: each malformed sequence becomes
// U+FFFD.
inline void append_string(std::string& out, std::string_view value) {
  constexpr std::string_view kHex = "0123456789abcdef";
  constexpr std::string_view kReplacement = "\xef\xbf\xbd";
  out += '"';
  while (!value.empty()) {
    const char c = value.front();
    const auto code = static_cast<unsigned char>(c);
    const Utf8Sequence sequence = first_utf8_sequence(value);
    if (c == '"' || c == '\\') {
      out.append({'\\', c});
    } else if (code < 0x20) {
      out.append("\\u00").append({kHex[code >> 4U], kHex[code & 15U]});
    } else {
      out.append(sequence.valid ? value.substr(0, sequence.bytes) : kReplacement);
    }
    value.remove_prefix(sequence.bytes);
  }
  out += '"';
}

inline void append_integer(std::string& out, std::int64_t value) {
  std::array<char, 24> text;
  const auto end = std::to_chars(text.data(), text.data() + text.size(), value);
  out.append(text.data(), end.ptr);
}

// With three decimals.
inline void append_number(std::string& out, double value) {
  std::array<char, 352> text;  // the longest double in this form
  const auto end = std::to_chars(text.data(), text.data() + text.size(), value, std::chars_format::fixed, 3);
  out.append(text.data(), end.ptr);
}

// ,"key":
inline void append_key(std::string& out, std::string_view key) {
  out += ',';
  append_string(out, key);
  out += ':';
}
inline void append(std::string& out, std::string_view key, std::int64_t value) {
  append_key(out, key);
  append_integer(out, value);
}

}  // namespace json_text
AMX_SFT_MOE_NAMESPACE_END
