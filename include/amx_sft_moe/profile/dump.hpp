// A StepRecord as text, in the form that users of this operator's published profiles compare by, or as one JSON
// line.
#pragma once

#include <array>
#include <cstdio>
#include <string>
#include <string_view>

#include "amx_sft_moe/profile/step_record.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN

enum class StepKind : std::uint8_t { kForward, kBackward };

// What a dump says about the operator that recorded the step.
struct StepLabel {
  StepKind kind = StepKind::kBackward;
  std::string_view name;  // of the layer, the caller's; may be empty
  std::string_view kernel;
};

namespace dump {

inline std::string milliseconds(double ms) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.3f", ms);
  return text.data();
}

inline bool belongs_to(PhaseGroup group, StepKind kind) {
  return (group >= PhaseGroup::kBackwardDown) == (kind == StepKind::kBackward);
}

inline double lora_passes_ms(const StepRecord& record) {
  return record.phase_ms(Phase::kGuLoraGate) + record.phase_ms(Phase::kGuLoraUp);
}

inline std::string_view remark(PhaseKind kind) {
  if (kind == PhaseKind::kFused) return " (fused)";
  return kind == PhaseKind::kNotNeeded ? " (not needed)" : "";
}

inline void append_line(std::string& text, std::string_view prefix, std::string_view name, double ms,
                        std::string_view remark) {
  text.append("[").append(prefix).append("] ").append(name).append(": ").append(milliseconds(ms)).append(" ms");
  text.append(remark).append("\n");
}

// Calls f(name, prefix, ms, remark) for each phase of the step, in the order of the dump: every published name,
// the sums GU1 and GU3 among them.
template <class F>
void for_each_line(const StepRecord& record, PhaseGroup group, F&& f) {
  for (std::size_t p = 0; p < kPhaseCount; ++p) {
    const PhaseInfo& info = kPhases[p];
    if (info.group != group) continue;
    const auto phase = static_cast<Phase>(p);
    const double ms = record.phase_ms(phase);
    f(info.name, info.prefix, ms, info.kind);
    if (phase == Phase::kGuBasePass) f("GU1_base_passes_total", info.prefix, ms, PhaseKind::kMeasured);
    if (phase == Phase::kGuLoraUp)
      f("GU3_lora_passes_total", info.prefix, lora_passes_ms(record), PhaseKind::kMeasured);
  }
}

inline void append_json_string(std::string& out, std::string_view value) {
  out += '"';
  for (const char c : value) {
    if (c == '"' || c == '\\') out += '\\';
    if (static_cast<unsigned char>(c) >= 0x20) out += c;
  }
  out += '"';
}

inline void append_json_threads(std::string& out, const RegionRecord& region) {
  out += "[";
  bool first = true;
  for (std::size_t t = 0; t < region.threads.size(); ++t) {
    const ThreadRecord& thread = region.threads[t];
    if (thread.begin_ns == 0) continue;
    out.append(first ? "" : ",").append("{\"thread\":").append(std::to_string(t));
    out.append(",\"begin_ns\":").append(std::to_string(thread.begin_ns));
    out.append(",\"end_ns\":").append(std::to_string(thread.end_ns)).append(",\"busy_ns\":{");
    bool first_phase = true;
    for (std::size_t p = 0; p < kPhaseCount; ++p) {
      if (thread.tasks[p] == 0) continue;
      if (!first_phase) out += ',';
      append_json_string(out, kPhases[p].name);
      out.append(":").append(std::to_string(thread.busy_ns[p]));
      first_phase = false;
    }
    out += "}}";
    first = false;
  }
  out += "]";
}

}  // namespace dump

// [DOWN] D3_gemm: 41.123 ms
// [BWD TIMER] backward_down: 193.885 ms (total: 193.885 ms)
inline std::string text_dump(const StepRecord& record, const StepLabel& label) {
  std::string text;
  double total = 0;
  for (std::size_t g = 0; g < kPhaseGroupCount; ++g) {
    const auto group = static_cast<PhaseGroup>(g);
    if (!dump::belongs_to(group, label.kind)) continue;
    dump::for_each_line(
        record, group,
        [&text, group](std::string_view name, std::string_view prefix, double ms, PhaseKind kind) {
          if (name == name_of(group)) return;  // a group of one phase: the group's line says it
          dump::append_line(text, prefix, name, ms, dump::remark(kind));
        });
    const double ms = record.group_ms(group);
    total += ms;
    const std::string_view prefix = label.kind == StepKind::kBackward ? "BWD TIMER" : "FWD TIMER";
    dump::append_line(text, prefix, name_of(group), ms, " (total: " + dump::milliseconds(total) + " ms)");
  }
  return text;
}

// One line: step, phases and groups in ms, and each region's threads in ns of the steady clock.
inline std::string json_dump(const StepRecord& record, const StepLabel& label) {
  std::string out =
      label.kind == StepKind::kForward ? "{\"step\":\"forward\",\"name\":" : "{\"step\":\"backward\",\"name\":";
  dump::append_json_string(out, label.name);
  out += ",\"kernel\":";
  dump::append_json_string(out, label.kernel);
  out.append(",\"tokens\":").append(std::to_string(record.tokens));
  out.append(",\"routed_rows\":").append(std::to_string(record.routed_rows));
  out.append(",\"begin_ns\":").append(std::to_string(record.begin_ns));
  out.append(",\"total_ms\":").append(dump::milliseconds(record.total_ms()));
  out.append(",\"sync_points\":").append(std::to_string(record.sync_points()));
  for (const bool phases : {true, false}) {
    out.append(phases ? ",\"phases_ms\":{" : ",\"groups_ms\":{");
    bool first = true;
    for (std::size_t g = 0; g < kPhaseGroupCount; ++g) {
      const auto group = static_cast<PhaseGroup>(g);
      if (!dump::belongs_to(group, label.kind)) continue;
      auto add = [&](std::string_view name, double ms) {
        if (!first) out += ',';
        dump::append_json_string(out, name);
        out.append(":").append(dump::milliseconds(ms));
        first = false;
      };
      if (phases) {
        dump::for_each_line(
            record, group,
            [&add](std::string_view name, std::string_view, double ms, PhaseKind) { add(name, ms); });
      } else {
        add(name_of(group), record.group_ms(group));
      }
    }
    out += "}";
  }
  out += ",\"regions\":[";
  for (std::size_t r = 0; r < record.regions().size(); ++r) {
    const RegionRecord& region = record.regions()[r];
    out.append(r == 0 ? "" : ",").append("{\"group\":");
    dump::append_json_string(out, name_of(region.group));
    out.append(",\"begin_ns\":").append(std::to_string(region.begin_ns));
    out.append(",\"end_ns\":").append(std::to_string(region.end_ns)).append(",\"threads\":");
    dump::append_json_threads(out, region);
    out += "}";
  }
  out += "]}\n";
  return out;
}

AMX_SFT_MOE_NAMESPACE_END
