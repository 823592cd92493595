#include "times.hpp"

#include <algorithm>
#include <string>

namespace amx_sft_moe::python {

namespace py = pybind11;

namespace {

constexpr double kMsPerNs = 1e-6;

bool is_backward(PhaseGroup group) {
  return group >= PhaseGroup::kBackwardDown;
}

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

// Busy and waiting time of each thread, summed over the regions that it took part in.
py::list thread_times(const StepRecord& record, bool backward) {
  std::size_t threads = 0;
  for (const RegionRecord& region : record.regions()) threads = std::max(threads, region.threads.size());
  py::list result;
  for (std::size_t t = 0; t < threads; ++t) {
    ThreadRecord sum;
    std::int64_t busy = 0;
    std::int64_t waiting = 0;
    bool took_part = false;
    for (const RegionRecord& region : record.regions()) {
      if (t >= region.threads.size() || region.threads[t].begin_ns == 0) continue;
      const ThreadRecord& thread = region.threads[t];
      took_part = true;
      waiting += region.end_ns - thread.end_ns;
      for (std::size_t p = 0; p < kPhaseCount; ++p) {
        busy += thread.busy_ns[p];
        sum.busy_ns[p] += thread.busy_ns[p];
        sum.tasks[p] += thread.tasks[p];
      }
    }
    if (!took_part) continue;
    py::dict phases;
    py::dict tasks;
    for (std::size_t p = 0; p < kPhaseCount; ++p) {
      if (is_backward(kPhases[p].group) != backward || sum.tasks[p] == 0) continue;
      phases[text(kPhases[p].name)] = static_cast<double>(sum.busy_ns[p]) * kMsPerNs;
      tasks[text(kPhases[p].name)] = sum.tasks[p];
    }
    py::dict one;
    one["busy_ms"] = static_cast<double>(busy) * kMsPerNs;
    one["waiting_ms"] = static_cast<double>(waiting) * kMsPerNs;
    one["phases"] = phases;
    one["tasks"] = tasks;
    result.append(one);
  }
  return result;
}

}  // namespace

py::dict step_times(const StepRecord* record, bool backward) {
  py::dict result;
  if (record == nullptr || record->empty()) return result;
  py::dict phases;
  py::dict kinds;
  py::dict groups;
  for (std::size_t g = 0; g < kPhaseGroupCount; ++g) {
    const auto group = static_cast<PhaseGroup>(g);
    if (is_backward(group) != backward) continue;
    groups[text(name_of(group))] = record->group_ms(group);
    dump::for_each_line(*record, group,
                        [&](std::string_view name, std::string_view, double ms, PhaseKind kind) {
                          phases[text(name)] = ms;
                          // Sums of other phases, published under names of their own.
                          kinds[text(name)] = text(name.ends_with("_total") ? "total" : kind_name(kind));
                        });
  }
  result["total_ms"] = record->total_ms();
  result["tokens"] = record->tokens;
  result["routed_rows"] = record->routed_rows;
  result["sync_points"] = record->sync_points();
  result["groups"] = groups;
  result["phases"] = phases;
  result["kinds"] = kinds;
  result["threads"] = thread_times(*record, backward);
  return result;
}

}  // namespace amx_sft_moe::python
