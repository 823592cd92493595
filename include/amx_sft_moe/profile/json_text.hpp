// Pieces of JSON appended to a string: strings with their escapes, and numbers without a locale.
#pragma once

#include <array>
#include <charconv>
#include <cstdint>
#include <string>
#include <string_view>

#include "amx_sft_moe/core/config_macros.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace json {

inline void append_string(std::string& out, std::string_view value) {
  constexpr std::string_view kHex = "0123456789abcdef";
  out += '"';
  for (const char c : value) {
    const auto code = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out.append({'\\', c});
    } else if (code < 0x20) {
      out.append("\\u00").append({kHex[code >> 4U], kHex[code & 15U]});
    } else {
      out += c;
    }
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

}  // namespace json
AMX_SFT_MOE_NAMESPACE_END
