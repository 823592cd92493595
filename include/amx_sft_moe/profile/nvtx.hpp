// NVTX ranges in the library's own domain. Without the NVTX headers, or with AMX_SFT_MOE_NO_TIMER or
// AMX_SFT_MOE_NO_NVTX, nothing is left of them. With no tool attached a range costs some 0.03 us.
#pragma once

#include <optional>
#include <utility>

#include "amx_sft_moe/profile/phases.hpp"

#if AMX_SFT_MOE_HAS_NVTX
#include <nvtx3/nvtx3.hpp>
#endif

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace nvtx {

#if AMX_SFT_MOE_HAS_NVTX

inline constexpr bool kCompiledIn = true;

struct Domain {
  static constexpr char const* name{"amx_sft_moe"};
};
using RegisteredString = ::nvtx3::v1::registered_string_in<Domain>;

template <std::size_t... At>
std::array<RegisteredString, sizeof...(At)> register_names(const auto& names, std::index_sequence<At...>) {
  return {RegisteredString{names[At].data()}...};
}

// Registered once a process, as NVTX asks: tables of constants, not state of an operator. The names are
// literals, so their data() ends in a null.
inline const RegisteredString& registered(Phase phase) {
  constexpr auto kNames = [] {
    std::array<std::string_view, kPhaseCount> names{};
    for (std::size_t i = 0; i < kPhaseCount; ++i) names[i] = kPhases[i].name;
    return names;
  }();
  static const auto table = register_names(kNames, std::make_index_sequence<kPhaseCount>{});
  return table[static_cast<std::size_t>(phase)];
}
inline const RegisteredString& registered(PhaseGroup group) {
  static const auto table = register_names(kPhaseGroups, std::make_index_sequence<kPhaseGroupCount>{});
  return table[static_cast<std::size_t>(group)];
}

// One range at a time on the thread that owns it; open() closes what was open, the destructor too, so that
// ranges stay balanced when an exception passes. By scoped_range_in, which nvtx3.hpp has had since 1.0, as CUDA 13.0
// brings it; functions that push and pop are of later releases.
class Range {
 public:
  Range() = default;
  template <class Name>
  explicit Range(Name name) {
    open(name);
  }

  template <class Name>
  void open(Name name) {
    range_.emplace(::nvtx3::v1::event_attributes{registered(name)});
  }
  // A driver's own range, such as forward_only around the passes that it times.
  void open(const char* name) { range_.emplace(::nvtx3::v1::event_attributes{name}); }
  void close() { range_.reset(); }

 private:
  std::optional<::nvtx3::v1::scoped_range_in<Domain>> range_;
};

#else

inline constexpr bool kCompiledIn = false;

class Range {
 public:
  Range() = default;
  template <class Name>
  explicit Range(Name) {}
  template <class Name>
  void open(Name) {}
  void close() {}
};

#endif

}  // namespace nvtx
AMX_SFT_MOE_NAMESPACE_END
