// How a file of records ends: a writer that is killed inside of its write() leaves a line without its end.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "amx_sft_moe/core/config_macros.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN

// Closes a file, unless it could not be opened.
class OpenFile {
 public:
  explicit OpenFile(int file) : file_(file) {}
  OpenFile(const OpenFile&) = delete;
  OpenFile& operator=(const OpenFile&) = delete;
  ~OpenFile() {
    if (file_ >= 0) ::close(file_);
  }

 private:
  int file_;
};

// How lines begin and end, where they are not all like a record's first one.
struct LineForm {
  std::vector<std::string> beginnings;
  std::string end;
};

// Of a file that nobody writes meanwhile, or that may have grown since. One that cannot be read counts as one whose last line has its end.
class LastLine {
 public:
  // `file` is open for writing and has `size` bytes; it is opened once more, by its name, to be read.
  LastLine(const std::string& path, int file, std::int64_t size, std::string_view record, const LineForm& form)
      : begin_(size) {
    const int read = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    const OpenFile open(read);
    if (read < 0 || !same_file(read, file)) return;
    begin_ = find_begin(read, size);
    is_piece_ = begin_ < size && is_piece_of_one_like(record, form, read, size);
  }

  // Where it begins: the file's size where it has its end.
  std::int64_t begin() const { return begin_; }

  // Whether it is no more than the beginning of what a line of `form`, or `record`'s first line, could be, by
  // the first bytes of both. A whole line that has lost nothing but its end, to an editor say, is more.
  bool is_piece() const { return is_piece_; }

 private:
  // {"ph":" of every trace event, and enough of a JSON line's {"format":"amx_sft_moe.
  static constexpr std::size_t kFirstBytes = 7;
  static constexpr std::int64_t kBlock = 1 << 14;

  // The name may be another file's since `file` was opened.
  static bool same_file(int one, int other) {
    struct stat its {
    }, others{};
    return ::fstat(one, &its) == 0 && ::fstat(other, &others) == 0 && its.st_dev == others.st_dev &&
           its.st_ino == others.st_ino;
  }

  bool is_piece_of_one_like(std::string_view record, const LineForm& form, int read, std::int64_t size) const {
    if (record.size() < 2) return false;
    const std::string_view first_bytes = record.substr(0, kFirstBytes),
                           last_byte = record.substr(record.size() - 2, 1);
    bool ours = form.beginnings.empty() && begins_like(first_bytes, read, size);
    for (const std::string& beginning : form.beginnings) ours = ours || begins_like(beginning, read, size);
    std::string line;
    if (!ours || !read_at(read, begin_, size - begin_, line)) return false;
    return !(closes_braces(line) && line.ends_with(form.end.empty() ? last_byte : form.end));
  }

  // As far as it goes.
  bool begins_like(std::string_view beginning, int read, std::int64_t size) const {
    std::string bytes;
    const auto count = std::min(size - begin_, static_cast<std::int64_t>(beginning.size()));
    return read_at(read, begin_, count, bytes) && beginning.starts_with(bytes);
  }

  // Whether every brace of a JSON text is closed again.
  static bool closes_braces(std::string_view text) {
    std::int64_t open = 0;
    bool in_string = false;
    for (std::size_t at = 0; at < text.size(); ++at) {
      const char byte = text[at];
      if (in_string && byte == '\\') ++at;
      if (byte == '"') in_string = !in_string;
      if (!in_string) open += (byte == '{' ? 1 : 0) - (byte == '}' ? 1 : 0);
    }
    return open == 0 && !in_string;
  }

  static std::int64_t find_begin(int read, std::int64_t size) {
    std::string bytes;
    std::int64_t begin = size;
    for (std::size_t end_before = std::string::npos; begin > 0 && end_before == std::string::npos;) {
      const std::int64_t block = begin == size ? 1 : std::min(begin, kBlock);  // mostly the last byte tells
      if (!read_at(read, begin - block, block, bytes)) return size;
      end_before = bytes.rfind('\n');
      begin -= end_before == std::string::npos ? block : block - static_cast<std::int64_t>(end_before) - 1;
    }
    return begin;
  }

  static bool read_at(int file, std::int64_t begin, std::int64_t count, std::string& bytes) {
    bytes.resize(static_cast<std::size_t>(count));
    return ::pread(file, bytes.data(), bytes.size(), begin) == count;
  }

  std::int64_t begin_;
  bool is_piece_ = false;
};

AMX_SFT_MOE_NAMESPACE_END
