// A file that several operators, threads and processes append records to, up to a limit.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include "amx_sft_moe/profile/last_line.hpp"
#include "amx_sft_moe/profile/pipe_writer.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN

// Opened anew for each record, so that nothing has to be closed or shared, and a process that is killed leaves
// every record that it finished. A line that the kill met is taken away by who writes next, whose record would be read as
// its rest; where files cannot be locked it stays, for it may be what another writes just now, and the record begins a
// new line. The file itself says how full it is: the record that would not fit is replaced by spaces and the end mark up
// to the limit, and whoever finds the file that large writes no more.
//
// The name may be a pipe's or a terminal's too (profile/pipe_writer.hpp): a step never waits for their reader to come,
// and not for long for one that does not read, or for one who keeps the file's lock. A pipe is open from begin() on as well:
// most readers (cat) leave when nobody has it open, as would be between two records.
class BoundedFile {
 public:
  BoundedFile() = default;
  // `head` opens an empty file, `end` is the end mark.
  BoundedFile(const std::string& path, std::int64_t limit_bytes, std::string head, std::string end,
              LineForm form = {})
      : path_(absolute(path)),
        limit_(limit_bytes),
        head_(std::move(head)),
        end_(std::move(end)),
        form_(std::move(form)) {}

  bool named() const { return !path_.empty(); }
  const std::string& path() const { return path_; }
  // Another end mark, of one length whoever writes: all of them keep that much free.
  void end_with(std::string_view end) { end_.assign(end); }

  // Whether both names are one file's, which has to exist.
  bool same_as(const BoundedFile& other) const {
    struct stat own {
    }, its{};
    return named() && other.named() && ::stat(path_.c_str(), &own) == 0 &&
           ::stat(other.path_.c_str(), &its) == 0 && own.st_dev == its.st_dev && own.st_ino == its.st_ino;
  }

  // Whether it can be opened, which a named pipe without a reader cannot; with `regular`, also whether it is a file and
  // not a terminal or a pipe.
  bool begin(bool regular) {
    const int file = open_file();
    if (file < 0) return false;
    auto open = std::make_shared<const OpenFile>(file);
    struct stat status {};
    const bool known = ::fstat(file, &status) == 0;
    if (known && S_ISFIFO(status.st_mode) && !regular) kept_open_ = std::move(open);
    return !regular || (known && S_ISREG(status.st_mode));
  }

  // One write() under the file's lock; whether there was one. A record that cannot be written whole is not written at all, but
  // for the beginning of one that a pipe's reader does not take, or that met a full disk where files cannot be locked.
  bool append(std::string_view record) {
    const int file = open_file();
    if (file < 0) return false;
    const OpenFile open(file);
    const FileLock lock(file, holder_stopped_);
    struct stat status {};
    if (lock.refused() || ::fstat(file, &status) != 0) return false;
    if (!S_ISREG(status.st_mode)) {
      pipe_.write(file, record);
      return true;
    }
    ::fcntl(file, F_SETFL, O_APPEND);  // a disk is waited for
    return append_to(file, status.st_size, record, lock.held());
  }

 private:
  // The file stays the same one when the process goes to another folder.
  static std::string absolute(const std::string& path) {
    std::error_code failed;
    std::string found = path.empty() ? path : std::filesystem::absolute(path, failed).string();
    return failed ? path : found;
  }

  // O_NONBLOCK: to open a pipe that nobody reads fails, instead of waiting until somebody does.
  int open_file() const {
    return ::open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NONBLOCK, 0644);
  }

  bool append_to(int file, std::int64_t size, std::string_view record, bool locked) const {
    if (size >= limit_) return false;
    const LastLine last(path_, file, size, record, form_);
    if (locked && last.is_piece() && ::ftruncate(file, last.begin()) == 0) size = last.begin();
    std::string_view head;
    if (size == 0) head = head_;
    if (last.begin() < size) head = "\n";  // behind the line of whoever else, or a piece that has to stay
    const std::int64_t left = limit_ - size - length(head);
    const bool fits = left >= length(record) + length(end_);
    if (fits && head.empty()) return write_whole(file, size, record, locked);
    std::string text(head);
    if (fits) {
      text += record;
    } else {
      if (left < length(end_)) return false;  // the limit was lowered, or is none
      text.append(static_cast<std::size_t>(left - length(end_)), ' ').append(end_);
    }
    return write_whole(file, size, text, locked);
  }
  static bool write_whole(int file, std::int64_t size, std::string_view text, bool locked) {
    const WriteSignalsHeldBack held_back;
    if (::write(file, text.data(), text.size()) == length(text)) return true;
    held_back.forget();
    if (!locked) return false;  // behind `size` may be what another has written since
    [[maybe_unused]] const int restored = ::ftruncate(file, size);
    return false;
  }
  static std::int64_t length(std::string_view text) { return static_cast<std::int64_t>(text.size()); }

  std::string path_;
  std::int64_t limit_ = 0;
  std::string head_, end_;
  LineForm form_;
  PipeWriter pipe_;
  std::shared_ptr<const OpenFile> kept_open_;  // of a pipe
  bool holder_stopped_ = false;
};

AMX_SFT_MOE_NAMESPACE_END
