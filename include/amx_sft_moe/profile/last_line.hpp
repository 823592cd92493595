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

#include "amx_sft_moe/core/config_macros.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN

// Of a file that nobody writes meanwhile. One that cannot be read counts as one whose last line has its end.
class LastLine {
 public:
  // `file` is open for writing and has `size` bytes; it is opened once more, by its name, to be read.
  LastLine(const std::string& path, int file, std::int64_t size) : begin_(size) {
    const int read = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (read < 0) return;
    if (same_file(read, file)) find(read, size);
    ::close(read);
  }

  // Where it begins: the file's size where it has its end.
  std::int64_t begin() const { return begin_; }

  // Whether it is a piece of what `record`'s first line could be, by the first bytes of both.
  bool begins_like(std::string_view record) const {
    return !first_bytes_.empty() && record.substr(0, first_bytes_.size()) == first_bytes_;
  }

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

  void find(int read, std::int64_t size) {
    std::string bytes;
    std::int64_t begin = size;
    for (std::size_t end_before = std::string::npos; begin > 0 && end_before == std::string::npos;) {
      const std::int64_t block = begin == size ? 1 : std::min(begin, kBlock);  // mostly the last byte tells
      if (!read_at(read, begin - block, block, bytes)) return;
      end_before = bytes.rfind('\n');
      begin -= end_before == std::string::npos ? block : block - static_cast<std::int64_t>(end_before) - 1;
    }
    if (begin == size || !read_at(read, begin, std::min<std::int64_t>(size - begin, kFirstBytes), bytes))
      return;
    begin_ = begin;
    first_bytes_ = bytes;
  }

  static bool read_at(int file, std::int64_t begin, std::int64_t count, std::string& bytes) {
    bytes.resize(static_cast<std::size_t>(count));
    return ::pread(file, bytes.data(), bytes.size(), begin) == count;
  }

  std::int64_t begin_;
  std::string first_bytes_;
};

AMX_SFT_MOE_NAMESPACE_END
