// A StepRecord as text, in the form that users of this operator's published profiles compare by.
#pragma once

#include <array>
#include <string>
#include <string_view>

#include "amx_sft_moe/profile/json_text.hpp"
#include "amx_sft_moe/profile/last_line.hpp"
#include "amx_sft_moe/profile/step_record.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN

enum class StepKind : std::uint8_t { kForward, kBackward };

constexpr std::string_view name_of(StepKind kind) {
  return kind == StepKind::kForward ? "forward" : "backward";
}

// What a dump says about the operator that recorded the step.
struct StepLabel {
  StepKind kind = StepKind::kBackward;
  std::string_view name;  // of the layer, the caller's; may be empty
  std::string_view kernel;
  std::int64_t operator_number = 0;  // of the operator among those of the process, from 1
};

namespace dump {

inline std::string milliseconds(double ms) {
  std::string text;
  json_text::append_number(text, ms);
  return text;
}

inline bool belongs_to(PhaseGroup group, StepKind kind) {
  return (group >= PhaseGroup::kBackwardDown) == (kind == StepKind::kBackward);
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

// Calls f(name, prefix, value, kind) for each phase of the group, in the order of the dump: every published
// name, the sums GU1 and GU3 among them. `values` has one number a phase: milliseconds, FLOP, ...
template <class T, class F>
void for_each_line(const std::array<T, kPhaseCount>& values, PhaseGroup group, F&& f) {
  const auto value = [&values](Phase phase) { return values[static_cast<std::size_t>(phase)]; };
  for (std::size_t p = 0; p < kPhaseCount; ++p) {
    const PhaseInfo& info = kPhases[p];
    if (info.group != group) continue;
    const auto phase = static_cast<Phase>(p);
    f(info.name, info.prefix, value(phase), info.kind);
    if (phase == Phase::kGuBasePass) {
      f("GU1_base_passes_total", info.prefix, value(phase), PhaseKind::kMeasured);
    } else if (phase == Phase::kGuLoraUp) {
      f("GU3_lora_passes_total", info.prefix, value(Phase::kGuLoraGate) + value(phase), PhaseKind::kMeasured);
    }
  }
}

}  // namespace dump

// How lines of a text dump begin, the end mark's too, and what all but those of phases end with.
inline LineForm text_lines() {
  LineForm form{{"[FWD TIMER] ", "[BWD TIMER] ", "[TIMER] ended: "}, " ms)"};
  for (const PhaseInfo& info : kPhases) form.beginnings.emplace_back("[").append(info.prefix).append("] ");
  return form;
}

// [DOWN] D3_gemm: 41.123 ms
// [BWD TIMER] backward_down: 193.885 ms (total: 193.885 ms)
inline std::string text_dump(const StepRecord& record, const StepLabel& label) {
  std::string text;
  double total = 0;
  const PhaseTimes times = record.times();
  for (std::size_t g = 0; g < kPhaseGroupCount; ++g) {
    const auto group = static_cast<PhaseGroup>(g);
    if (!dump::belongs_to(group, label.kind)) continue;
    dump::for_each_line(
        times.ms, group,
        [&text, group](std::string_view name, std::string_view prefix, double ms, PhaseKind kind) {
          if (name == name_of(group)) return;  // a group of one phase: the group's line says it
          dump::append_line(text, prefix, name, ms, dump::remark(kind));
        });
    const double ms = times.group_ms(group);
    total += ms;
    const std::string_view prefix = label.kind == StepKind::kBackward ? "BWD TIMER" : "FWD TIMER";
    dump::append_line(text, prefix, name_of(group), ms, " (total: " + dump::milliseconds(total) + " ms)");
  }
  return text;
}

AMX_SFT_MOE_NAMESPACE_END
