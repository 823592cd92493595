// Groups and phases of a pass handed on to Python while it runs, for profilers that have ranges of their own.
#pragma once

#include <pybind11/pybind11.h>

#include <optional>
#include <utility>

#include "amx_sft_moe/amx_sft_moe.hpp"

namespace amx_sft_moe::python {

// Calls enter(name) and leave() of a Python object, some microseconds each. What they raise is printed and
// ignored: a pass does not fail because somebody watches it. Ctrl-C, which Python turns into an exception wherever
// it runs next, is kept until the pass is over; until then nothing is called any more.
class PythonRanges final : public StepObserver {
 public:
  explicit PythonRanges(const pybind11::object& ranges)
      : ranges_(ranges), enter_(ranges.attr("enter")), leave_(ranges.attr("leave")) {}

  const pybind11::object& object() const { return ranges_; }

  // Once the pass is over: whether Ctrl-C came during it.
  bool take_interrupt() { return std::exchange(interrupted_, false); }

  void group_begins(PhaseGroup group) noexcept override { enter(name_of(group)); }
  void phase_begins(Phase phase) noexcept override { enter(info_of(phase).name); }
  void phase_ends() noexcept override { leave(); }
  void group_ends() noexcept override { leave(); }

 private:
  void enter(std::string_view name) noexcept {
    call([&] { enter_(pybind11::str(name.data(), name.size())); });
  }
  void leave() noexcept {
    call([&] { leave_(); });
  }
  template <class F>
  void call(F&& f) noexcept {
    if (interrupted_) return;
    const pybind11::gil_scoped_acquire gil;
    try {
      f();
    } catch (pybind11::error_already_set& error) {
      interrupted_ = error.matches(PyExc_KeyboardInterrupt);
      if (!interrupted_) error.discard_as_unraisable("ranges of an amx_sft_moe pass");
    }
  }

  pybind11::object ranges_, enter_, leave_;
  bool interrupted_ = false;
};

// Python runs on while a pass does. Afterwards Ctrl-C that the pass' ranges have kept is given back to Python.
class WithoutGil {
 public:
  explicit WithoutGil(PythonRanges* ranges) : ranges_(ranges) { released_.emplace(); }
  ~WithoutGil() {
    released_.reset();
    if (ranges_ != nullptr && ranges_->take_interrupt()) PyErr_SetInterrupt();
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PythonRanges* ranges_;
  std::optional<pybind11::gil_scoped_release> released_;
};

}  // namespace amx_sft_moe::python
