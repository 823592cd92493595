// A StepRecord as one line of JSON, the format "amx_sft_moe.step/1":
//
//   step, index, name, kernel, pid, operator    which pass of which operator
//   caller                                      whose team: its thread t is the process' caller + t
//                                               (profile/trace_lane.hpp)
//   tokens, routed_rows, threads                of the call
//   begin_ns, end_ns, total_ms, sync_points     of the pass; ns of the steady clock
//   phases_ms, groups_ms                        wall milliseconds by published name, up to the slowest thread
//   phases_flop, phases_bytes                   what each phase had to do (profile/work.hpp)
//   regions                                     in order: group, begin_ns, end_ns, parallel, and for each
//                                               thread that took part: begin_ns, end_ns, busy_ns by phase,
//                                               spans [phase, begin_ns, end_ns, tasks] and spans_dropped
#pragma once

#include "amx_sft_moe/profile/dump.hpp"
#include "amx_sft_moe/profile/json_text.hpp"
#include "amx_sft_moe/profile/trace_lane.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN

inline constexpr std::string_view kStepFormat = "amx_sft_moe.step/1";

namespace dump {

inline void append_value(std::string& out, double value) {
  json_text::append_number(out, value);
}
inline void append_value(std::string& out, std::int64_t value) {
  json_text::append_integer(out, value);
}

// ,"key":{"D3_gemm":...} over all phases of the pass.
template <class T>
void append_phases(std::string& out, std::string_view key, StepKind kind,
                   const std::array<T, kPhaseCount>& values) {
  json_text::append_key(out, key);
  char separator = '{';
  for (std::size_t g = 0; g < kPhaseGroupCount; ++g) {
    const auto group = static_cast<PhaseGroup>(g);
    if (!belongs_to(group, kind)) continue;
    for_each_line(values, group, [&](std::string_view name, std::string_view, T value, PhaseKind) {
      out += separator;
      separator = ',';
      json_text::append_string(out, name);
      out += ':';
      append_value(out, value);
    });
  }
  out += '}';
}

inline void append_groups(std::string& out, StepKind kind, const PhaseTimes& times) {
  json_text::append_key(out, "groups_ms");
  char separator = '{';
  for (std::size_t g = 0; g < kPhaseGroupCount; ++g) {
    const auto group = static_cast<PhaseGroup>(g);
    if (!belongs_to(group, kind)) continue;
    out += separator;
    separator = ',';
    json_text::append_string(out, name_of(group));
    out += ':';
    json_text::append_number(out, times.group_ms(group));
  }
  out += '}';
}

inline void append_thread(std::string& out, const RegionRecord& region, std::size_t t) {
  const ThreadRecord& thread = region.threads[t];
  out.append("{\"thread\":").append(std::to_string(t));
  json_text::append(out, "begin_ns", thread.begin_ns);
  json_text::append(out, "end_ns", thread.end_ns);
  out += ",\"busy_ns\":{";
  bool first = true;
  for (std::size_t p = 0; p < kPhaseCount; ++p) {
    if (thread.tasks[p] == 0) continue;
    if (!first) out += ',';
    first = false;
    json_text::append_string(out, kPhases[p].name);
    out += ':';
    json_text::append_integer(out, thread.busy_ns[p]);
  }
  out += "},\"spans\":[";
  first = true;
  for (const Span& span : region.spans_of(t)) {
    out += first ? "[" : ",[";
    first = false;
    json_text::append_string(out, info_of(span.phase).name);
    for (const std::int64_t value : {span.begin_ns, span.end_ns, std::int64_t{span.tasks}}) {
      out += ',';
      json_text::append_integer(out, value);
    }
    out += ']';
  }
  out += "]";
  json_text::append(out, "spans_dropped", thread.spans_dropped);
  out += '}';
}

inline void append_region(std::string& out, const RegionRecord& region) {
  out += "{\"group\":";
  json_text::append_string(out, name_of(region.group));
  json_text::append(out, "begin_ns", region.begin_ns);
  json_text::append(out, "end_ns", region.end_ns);
  out.append(",\"parallel\":").append(region.parallel ? "true" : "false").append(",\"threads\":[");
  bool first = true;
  for (std::size_t t = 0; t < region.threads.size(); ++t) {
    if (region.threads[t].begin_ns == 0) continue;  // took no part
    if (!first) out += ',';
    first = false;
    append_thread(out, region, t);
  }
  out += "]}";
}

}  // namespace dump

// Appends the line to `out`.
inline void append_json_dump(std::string& out, const StepRecord& record, const StepLabel& label) {
  const PhaseTimes times = record.times();
  out += "{\"format\":";
  json_text::append_string(out, kStepFormat);
  json_text::append_key(out, "step");
  json_text::append_string(out, name_of(label.kind));
  json_text::append(out, "index", record.index);
  json_text::append_key(out, "name");
  json_text::append_string(out, label.name);
  json_text::append_key(out, "kernel");
  json_text::append_string(out, label.kernel);
  const TraceLane lane = TraceLane::of_caller();
  json_text::append(out, "pid", lane.pid);
  json_text::append(out, "caller", lane.first_tid);
  json_text::append(out, "operator", label.operator_number);
  json_text::append(out, "tokens", record.tokens);
  json_text::append(out, "routed_rows", record.routed_rows);
  json_text::append(out, "threads", record.threads);
  json_text::append(out, "begin_ns", record.begin_ns);
  json_text::append(out, "end_ns", record.end_ns);
  json_text::append_key(out, "total_ms");
  json_text::append_number(out, record.total_ms());
  json_text::append(out, "sync_points", static_cast<std::int64_t>(record.sync_points()));
  dump::append_phases(out, "phases_ms", label.kind, times.ms);
  dump::append_groups(out, label.kind, times);
  dump::append_phases(out, "phases_flop", label.kind, record.work.flop);
  dump::append_phases(out, "phases_bytes", label.kind, record.work.bytes);
  out += ",\"regions\":[";
  for (std::size_t r = 0; r < record.regions().size(); ++r) {
    if (r > 0) out += ',';
    dump::append_region(out, record.regions()[r]);
  }
  out += "]}\n";
}

inline std::string json_dump(const StepRecord& record, const StepLabel& label) {
  std::string out;
  append_json_dump(out, record, label);
  return out;
}

AMX_SFT_MOE_NAMESPACE_END
