// Dumps that a user asks for by environment, read when an operator is made:
//
//   AMX_SFT_MOE_TIMER=text|json     dump each step of each operator
//   AMX_SFT_MOE_TIMER_FILE=path     append there instead of writing to standard error; a named pipe needs its reader
//   AMX_SFT_MOE_TRACE=path          append each step as Chrome trace events (profile/trace_dump.hpp)
//   AMX_SFT_MOE_TRACE_LIMIT=MB      no file grows beyond this; default 256. An end mark says that it is full
#pragma once

#include <cstdlib>
#include <exception>
#include <locale>
#include <sstream>
#include <string>
#include <string_view>

#include "amx_sft_moe/core/errors.hpp"
#include "amx_sft_moe/profile/bounded_file.hpp"
#include "amx_sft_moe/profile/json_dump.hpp"
#include "amx_sft_moe/profile/trace_dump.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN

class TimerOutput {
 public:
  static TimerOutput from_environment() {
    TimerOutput output;
    output.form_ = form_from_environment();
    const std::int64_t limit = limit_from_environment();
    if (const char* path = variable("AMX_SFT_MOE_TIMER_FILE"); path != nullptr && output.form_ != Form::kNone) {
      output.dumps_ =
          output.form_ == Form::kJson
              ? BoundedFile(path, limit, "",
                            concat(R"({"format":"amx_sft_moe.end/1","limit_bytes":)", limit, "}\n"))
              : BoundedFile(path, limit, "", concat("[TIMER] ended: the file reached its ", limit, " bytes\n"),
                            text_lines());
      if (!output.dumps_.begin(/*regular=*/false))
        throw ArgumentError(concat("AMX_SFT_MOE_TIMER_FILE: expected a file to append to, got ", path));
    }
    if (const char* path = variable("AMX_SFT_MOE_TRACE"); path != nullptr) {
      output.trace_ = BoundedFile(path, limit, "[\n", "");
      output.limit_ = limit;
      if (!output.trace_.begin(/*regular=*/true))
        throw ArgumentError(concat("AMX_SFT_MOE_TRACE: expected a file to append to, got ", path));
      if (output.trace_.same_as(output.dumps_))
        throw ArgumentError(
            concat("AMX_SFT_MOE_TRACE: expected another file than AMX_SFT_MOE_TIMER_FILE, got ", path));
    }
    return output;
  }

  // Spans are recorded for those who write them.
  bool wants_spans() const { return form_ == Form::kJson || trace_.named(); }

  // One write() a step and file, so that steps of several operators, threads or processes do not mix. A dump
  // that cannot be written, or made, is lost: the step itself has succeeded.
  void write(const StepRecord& record, const StepLabel& label) noexcept {
    if ((form_ == Form::kNone && !trace_.named()) || record.empty()) return;
    const CancellationHeldBack not_cancelled;
    try {
      write_all(record, label);
    } catch (const std::exception&) {
      named_threads_ = 0;  // as where the trace cannot be written
    }
  }

 private:
  void write_all(const StepRecord& record, const StepLabel& label) {
    if (form_ != Form::kNone) {
      buffer_.clear();
      if (form_ == Form::kText) buffer_ = text_dump(record, label);
      if (form_ == Form::kJson) append_json_dump(buffer_, record, label);
      write_dump();
    }
    if (trace_.named()) {
      buffer_.clear();
      append_names(record.threads);
      append_trace(buffer_, record, label, lane_);
      trace_end_.clear();
      trace::append_end(trace_end_, lane_, record.end_ns, limit_);
      trace_.end_with(trace_end_);
      if (!trace_.append(buffer_)) named_threads_ = 0;  // their names are lost with it
    }
  }

  enum class Form : std::uint8_t { kNone, kText, kJson };

  // Null where unset or empty.
  static const char* variable(const char* name) {
    const char* value = std::getenv(name);
    return value == nullptr || *value == '\0' ? nullptr : value;
  }
  static Form form_from_environment() {
    const char* form = variable("AMX_SFT_MOE_TIMER");
    if (form == nullptr) return Form::kNone;
    const std::string_view wanted(form);
    if (wanted == "text") return Form::kText;
    if (wanted == "json") return Form::kJson;
    throw ArgumentError(concat("AMX_SFT_MOE_TIMER: expected text or json, got ", wanted));
  }
  static std::int64_t limit_from_environment() {
    constexpr double kMega = 1e6;
    constexpr double kMostMegabytes = 1e9;
    const char* text = variable("AMX_SFT_MOE_TRACE_LIMIT");
    if (text == nullptr) return static_cast<std::int64_t>(256 * kMega);
    const std::string_view wanted(text);
    // Neither nan nor inf, which comparisons may not see (-ffast-math).
    const bool digits = wanted.find_first_not_of("0123456789.eE+-") == std::string_view::npos;
    // Not std::from_chars, which libc++ has for floating point since LLVM 20 only.
    std::istringstream in{std::string(wanted)};
    in.imbue(std::locale::classic());
    double megabytes = 0;
    const bool read = digits && in >> megabytes && in.eof();
    if (!read || !(megabytes > 0) || megabytes > kMostMegabytes)
      throw ArgumentError(concat("AMX_SFT_MOE_TRACE_LIMIT: expected a number of MB above 0, got ", text));
    return static_cast<std::int64_t>(megabytes * kMega);
  }

  void write_dump() {
    if (!dumps_.named()) return standard_error_.write(buffer_);
    dumps_.append(buffer_);
  }

  // Once for each thread that calls, and again in the child of a fork or when the team has grown.
  void append_names(int threads) {
    const TraceLane lane = TraceLane::of_caller();
    if (lane == lane_ && threads <= named_threads_) return;
    trace::append_names(buffer_, lane, threads);
    lane_ = lane;
    named_threads_ = threads;
  }

  Form form_ = Form::kNone;
  BoundedFile dumps_;  // without a name: standard error
  StandardError standard_error_;
  BoundedFile trace_;
  std::int64_t limit_ = 0;          // of the trace
  std::string buffer_, trace_end_;  // kept, so that a steady state does not allocate
  TraceLane lane_;
  int named_threads_ = 0;
};

AMX_SFT_MOE_NAMESPACE_END
