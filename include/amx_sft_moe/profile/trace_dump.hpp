// A StepRecord as Chrome trace events, for Perfetto (ui.perfetto.dev) and chrome://tracing.
//
// One event a line, each with its comma: "[" and any number of them are a trace, complete or cut off at any line
// (of the two JSON forms of the format this is the one that needs no end; Perfetto refuses the other one
// without its end). Times are microseconds of the steady clock. Tracks are threads of the team: on each the
// groups that it took part in, in them its phases, and around all of them, on the caller's, the pass.
//
// A span's FLOP and bytes are its share of its phase's by time: what a single task did is not known.
#pragma once

#include <cmath>
#include <utility>

#include "amx_sft_moe/profile/dump.hpp"
#include "amx_sft_moe/profile/json_text.hpp"
#include "amx_sft_moe/profile/trace_lane.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN

namespace trace {

inline void append_microseconds(std::string& out, std::string_view key, std::int64_t ns) {
  json_text::append_key(out, key);
  json_text::append_integer(out, ns / 1000);
  const auto rest = static_cast<int>(ns % 1000);
  out += '.';
  for (const int digit : {rest / 100, rest / 10 % 10, rest % 10}) out += static_cast<char>('0' + digit);
}

// An event up to its args, which the caller appends and closes.
inline void begin_event(std::string& out, std::string_view ph, std::string_view name, const TraceLane& lane,
                        std::size_t thread) {
  out += "{\"ph\":";
  json_text::append_string(out, ph);
  json_text::append_key(out, "name");
  json_text::append_string(out, name);
  json_text::append(out, "pid", lane.pid);
  json_text::append(out, "tid", lane.first_tid + static_cast<std::int64_t>(thread));
}
inline void begin_slice(std::string& out, std::string_view category, std::string_view name,
                        const TraceLane& lane, std::size_t thread, std::int64_t begin_ns, std::int64_t end_ns) {
  begin_event(out, "X", name, lane, thread);
  json_text::append_key(out, "cat");
  json_text::append_string(out, category);
  append_microseconds(out, "ts", begin_ns);
  append_microseconds(out, "dur", end_ns - begin_ns);
  out += ",\"args\":{";
}
inline void end_event(std::string& out) {
  out += "}},\n";
}
inline void append_work(std::string& out, double flop, double bytes) {
  json_text::append(out, "flop", std::llround(flop));
  json_text::append(out, "bytes", std::llround(bytes));
}

// FLOP and bytes of each phase per nanosecond of the threads' busy time.
struct Rates {
  std::array<double, kPhaseCount> flop{}, bytes{};

  explicit Rates(const StepRecord& record) {
    std::array<std::int64_t, kPhaseCount> busy{};
    for (const RegionRecord& region : record.regions()) {
      for (const ThreadRecord& thread : region.threads) {
        for (std::size_t p = 0; p < kPhaseCount; ++p) busy[p] += thread.busy_ns[p];
      }
    }
    for (std::size_t p = 0; p < kPhaseCount; ++p) {
      if (busy[p] == 0) continue;
      flop[p] = static_cast<double>(record.work.flop[p]) / static_cast<double>(busy[p]);
      bytes[p] = static_cast<double>(record.work.bytes[p]) / static_cast<double>(busy[p]);
    }
  }
};

struct Work {
  double flop = 0, bytes = 0;

  void add(const Rates& rates, const ThreadRecord& thread) {
    for (std::size_t p = 0; p < kPhaseCount; ++p) {
      flop += rates.flop[p] * static_cast<double>(thread.busy_ns[p]);
      bytes += rates.bytes[p] * static_cast<double>(thread.busy_ns[p]);
    }
  }
};

inline void append_names(std::string& out, const TraceLane& lane, int threads) {
  begin_event(out, "M", "process_name", lane, 0);
  out.append(",\"args\":{\"name\":\"amx_sft_moe " AMX_SFT_MOE_VERSION_STRING "\"");
  end_event(out);
  for (int t = 0; t < threads; ++t) {
    begin_event(out, "M", "thread_name", lane, static_cast<std::size_t>(t));
    out.append(",\"args\":{\"name\":\"thread ").append(std::to_string(t));
    if (lane.first_tid != 0) out.append(" of another caller");
    out += '"';
    end_event(out);
  }
}

inline void append_counter(std::string& out, std::string_view name, const TraceLane& lane, std::int64_t ns,
                           double value) {
  begin_event(out, "C", name, lane, 0);
  if (lane.first_tid != 0) json_text::append(out, "id", lane.first_tid);  // a track of this caller's own
  append_microseconds(out, "ts", ns);
  out += ",\"args\":{\"value\":";
  json_text::append_number(out, value);
  end_event(out);
}

// An instant: `limit_bytes` of the file are full. Numbers are filled up with blanks, so that all writers know
// how much room it takes.
inline void append_end(std::string& out, const TraceLane& lane, std::int64_t ns, std::int64_t limit_bytes) {
  constexpr std::size_t kWidest = 20;  // of an integer; one of microseconds has a point, but fewer digits
  const auto fill_up = [&out](std::size_t key_at, std::string_view key) {
    out.resize(key_at + key.size() + kWidest, ' ');
  };
  out += R"({"ph":"i","s":"g","name":"amx_sft_moe trace ended")";
  for (const auto& [key, number] : {std::pair{"pid", lane.pid}, std::pair{"tid", lane.first_tid}}) {
    const std::size_t at = out.size();
    json_text::append(out, key, number);
    fill_up(at, R"(,"pid":)");
  }
  const std::size_t at = out.size();
  append_microseconds(out, "ts", ns);
  fill_up(at, R"(,"ts":)");
  out += R"(,"args":{"limit_bytes":)";
  json_text::append_integer(out, limit_bytes);
  end_event(out);
}

inline void append_step(std::string& out, const StepRecord& record, const StepLabel& label,
                        const TraceLane& lane) {
  std::string name(label.name);
  name.append(name.empty() ? "" : " ").append(name_of(label.kind));
  begin_slice(out, "step", name, lane, 0, record.begin_ns, record.end_ns);
  out += "\"layer\":";
  json_text::append_string(out, label.name);
  json_text::append(out, "operator", label.operator_number);
  json_text::append(out, "step", record.index);
  json_text::append(out, "tokens", record.tokens);
  json_text::append(out, "routed_rows", record.routed_rows);
  json_text::append_key(out, "kernel");
  json_text::append_string(out, label.kernel);
  std::int64_t flop = 0;
  std::int64_t bytes = 0;
  for (std::size_t p = 0; p < kPhaseCount; ++p) {
    flop += record.work.flop[p];
    bytes += record.work.bytes[p];
  }
  append_work(out, static_cast<double>(flop), static_cast<double>(bytes));
  end_event(out);
}

// A thread's part in a region: the group, and in it the phases.
inline void append_thread(std::string& out, const StepRecord& record, const StepLabel& label,
                          const RegionRecord& region, std::size_t t, const Rates& rates,
                          const TraceLane& lane) {
  const ThreadRecord& thread = region.threads[t];
  // The caller is in the group from its beginning to its end; what it waits is in there.
  begin_slice(out, "group", name_of(region.group), lane, t, t == 0 ? region.begin_ns : thread.begin_ns,
              t == 0 ? region.end_ns : thread.end_ns);
  out += "\"layer\":";
  json_text::append_string(out, label.name);
  json_text::append(out, "step", record.index);
  Work work;
  work.add(rates, thread);
  append_work(out, work.flop, work.bytes);
  if (thread.spans_dropped > 0) json_text::append(out, "spans_dropped", thread.spans_dropped);
  end_event(out);
  for (const Span& span : region.spans_of(t)) {
    const auto p = static_cast<std::size_t>(span.phase);
    begin_slice(out, "phase", kPhases[p].name, lane, t, span.begin_ns, span.end_ns);
    out += "\"tasks\":";
    json_text::append_integer(out, span.tasks);
    const auto ns = static_cast<double>(span.end_ns - span.begin_ns);
    append_work(out, rates.flop[p] * ns, rates.bytes[p] * ns);
    end_event(out);
  }
}

}  // namespace trace

// Appends the events of a pass to `out`.
inline void append_trace(std::string& out, const StepRecord& record, const StepLabel& label,
                         const TraceLane& lane) {
  const trace::Rates rates(record);
  trace::append_step(out, record, label, lane);
  for (const RegionRecord& region : record.regions()) {
    trace::Work work;
    for (std::size_t t = 0; t < region.threads.size(); ++t) {
      if (region.threads[t].begin_ns == 0) continue;  // took no part
      work.add(rates, region.threads[t]);
      trace::append_thread(out, record, label, region, t, rates, lane);
    }
    // FLOP and bytes per nanosecond are GFLOP and GB per second.
    const auto ns = static_cast<double>(std::max<std::int64_t>(region.end_ns - region.begin_ns, 1));
    trace::append_counter(out, "GFLOP/s", lane, region.begin_ns, work.flop / ns);
    trace::append_counter(out, "GB/s", lane, region.begin_ns, work.bytes / ns);
  }
  for (const std::string_view name : {"GFLOP/s", "GB/s"})
    trace::append_counter(out, name, lane, record.end_ns, 0);
}

AMX_SFT_MOE_NAMESPACE_END
