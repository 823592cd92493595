// Dumps that a user asks for by environment, read when an operator is made:
//
//   AMX_SFT_MOE_TIMER=text|json     dump each step of each operator
//   AMX_SFT_MOE_TIMER_FILE=path     append there instead of writing to standard error
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

#include "amx_sft_moe/core/errors.hpp"
#include "amx_sft_moe/profile/dump.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN

class TimerOutput {
 public:
  static TimerOutput from_environment() {
    TimerOutput output;
    const char* form = std::getenv("AMX_SFT_MOE_TIMER");
    if (form == nullptr || *form == '\0') return output;
    const std::string_view wanted(form);
    if (wanted == "text") {
      output.form_ = Form::kText;
    } else if (wanted == "json") {
      output.form_ = Form::kJson;
    } else {
      throw ArgumentError(concat("AMX_SFT_MOE_TIMER: expected text or json, got ", wanted));
    }
    if (const char* path = std::getenv("AMX_SFT_MOE_TIMER_FILE"); path != nullptr) output.path_ = path;
    if (!output.path_.empty()) output.check_path();
    return output;
  }

  bool enabled() const { return form_ != Form::kNone; }

  // One write() a step, so that lines of several operators, threads or processes do not mix. A dump that cannot
  // be written is lost: the step itself has succeeded.
  void write(const StepRecord& record, const StepLabel& label) const {
    if (!enabled() || record.empty()) return;
    const std::string text = form_ == Form::kText ? text_dump(record, label) : json_dump(record, label);
    const int file = path_.empty() ? STDERR_FILENO : open_file();
    if (file < 0) return;
    [[maybe_unused]] const ssize_t written = ::write(file, text.data(), text.size());
    if (!path_.empty()) ::close(file);
  }

 private:
  enum class Form : std::uint8_t { kNone, kText, kJson };

  int open_file() const { return ::open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644); }
  void check_path() const {
    const int file = open_file();
    if (file < 0)
      throw ArgumentError(concat("AMX_SFT_MOE_TIMER_FILE: expected a file to append to, got ", path_));
    ::close(file);
  }

  Form form_ = Form::kNone;
  std::string path_;
};

AMX_SFT_MOE_NAMESPACE_END
