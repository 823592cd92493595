#include "times.hpp"

#include <algorithm>
#include <string>

namespace amx_sft_moe::python {

namespace py = pybind11;

namespace {

constexpr double kMsPerNs = 1e-6;

py::str text(std::string_view view) {
  return {view.data(), view.size()};
}

std::string_view kind_name(PhaseKind kind) {
  switch (kind) {
    case PhaseKind::kFused:
      return "fused";
    case PhaseKind::kNotNeeded:
      return "not needed";
    default:
      return "measured";
  }
}

template <class F>
void for_each_group(StepKind kind, F&& f) {
  for (std::size_t g = 0; g < kPhaseGroupCount; ++g) {
    const auto group = static_cast<PhaseGroup>(g);
    if (dump::belongs_to(group, kind)) f(group);
  }
}

// By published name, the sums GU1 and GU3 among them.
template <class T>
py::dict by_phase(const std::array<T, kPhaseCount>& values, StepKind kind) {
  py::dict result;
  for_each_group(kind, [&](PhaseGroup group) {
    dump::for_each_line(values, group, [&](std::string_view name, std::string_view, T value, PhaseKind) {
      result[text(name)] = value;
    });
  });
  return result;
}

py::dict by_group(const PhaseTimes& times, StepKind kind) {
  py::dict result;
  for_each_group(kind, [&](PhaseGroup group) { result[text(name_of(group))] = times.group_ms(group); });
  return result;
}

py::dict kinds_of(StepKind kind) {
  py::dict result;
  for_each_group(kind, [&](PhaseGroup group) {
    dump::for_each_line(PhaseTimes().ms, group,
                        [&](std::string_view name, std::string_view, double, PhaseKind of_phase) {
                          // Sums of other phases, published under names of their own.
                          result[text(name)] = text(name.ends_with("_total") ? "total" : kind_name(of_phase));
                        });
  });
  return result;
}

// What one thread did in all regions that it took part in; nothing where there are none.
struct ThreadSum {
  bool took_part = false;
  std::int64_t busy = 0, waiting = 0, spans_dropped = 0;
  std::array<std::int64_t, kPhaseCount> busy_ns{}, tasks{};
  py::list spans;

  ThreadSum(const StepRecord& record, std::size_t t) {
    for (const RegionRecord& region : record.regions()) {
      if (t >= region.threads.size() || region.threads[t].begin_ns == 0) continue;
      const ThreadRecord& thread = region.threads[t];
      took_part = true;
      waiting += region.end_ns - thread.end_ns;
      spans_dropped += thread.spans_dropped;
      for (std::size_t p = 0; p < kPhaseCount; ++p) {
        busy += thread.busy_ns[p];
        busy_ns[p] += thread.busy_ns[p];
        tasks[p] += thread.tasks[p];
      }
      for (const Span& span : region.spans_of(t)) {
        spans.append(py::make_tuple(text(info_of(span.phase).name), span.begin_ns, span.end_ns, span.tasks));
      }
    }
  }
};

py::list thread_times(const StepRecord& record) {
  std::size_t threads = 0;
  for (const RegionRecord& region : record.regions()) threads = std::max(threads, region.threads.size());
  py::list result;
  for (std::size_t t = 0; t < threads; ++t) {
    const ThreadSum sum(record, t);
    if (!sum.took_part) continue;
    py::dict phases;
    py::dict tasks;
    for (std::size_t p = 0; p < kPhaseCount; ++p) {
      if (sum.tasks[p] == 0) continue;
      phases[text(kPhases[p].name)] = static_cast<double>(sum.busy_ns[p]) * kMsPerNs;
      tasks[text(kPhases[p].name)] = sum.tasks[p];
    }
    py::dict one;
    one["thread"] = t;
    one["busy_ms"] = static_cast<double>(sum.busy) * kMsPerNs;
    one["waiting_ms"] = static_cast<double>(sum.waiting) * kMsPerNs;
    one["phases"] = phases;
    one["tasks"] = tasks;
    one["spans"] = sum.spans;
    one["spans_dropped"] = sum.spans_dropped;
    result.append(one);
  }
  return result;
}

}  // namespace

py::dict step_times(const StepRecord* record, StepKind kind) {
  py::dict result;
  if (record == nullptr || record->empty()) return result;
  const PhaseTimes times = record->times();
  result["index"] = record->index;
  result["begin_ns"] = record->begin_ns;
  result["end_ns"] = record->end_ns;
  result["total_ms"] = record->total_ms();
  result["tokens"] = record->tokens;
  result["routed_rows"] = record->routed_rows;
  result["sync_points"] = record->sync_points();
  result["groups"] = by_group(times, kind);
  result["phases"] = by_phase(times.ms, kind);
  result["kinds"] = kinds_of(kind);
  result["flop"] = by_phase(record->work.flop, kind);
  result["bytes"] = by_phase(record->work.bytes, kind);
  result["threads"] = thread_times(*record);
  return result;
}

py::dict total_times(const StepTotals& totals, StepKind kind) {
  py::dict result;
  result["passes"] = totals.passes;
  result["tokens"] = totals.tokens;
  result["routed_rows"] = totals.routed_rows;
  result["total_ms"] = totals.total_ms;
  result["busy_ms"] = totals.busy_ms;
  result["waiting_ms"] = totals.waiting_ms;
  result["groups"] = by_group(totals.times, kind);
  result["phases"] = by_phase(totals.times.ms, kind);
  result["flop"] = by_phase(totals.work.flop, kind);
  result["bytes"] = by_phase(totals.work.bytes, kind);
  return result;
}

py::dict phase_groups() {
  py::dict result;
  for (const PhaseInfo& phase : kPhases) result[text(phase.name)] = text(name_of(phase.group));
  return result;
}

}  // namespace amx_sft_moe::python
