// Text for Python that may quote what is not UTF-8: names of files and values of environment variables are bytes.
#pragma once

#include <pybind11/pybind11.h>

#include <string_view>

namespace amx_sft_moe::python {

namespace py = pybind11;

// A str of `text`, with \xff for a byte that is no UTF-8.
inline py::str as_str(std::string_view text) {
  PyObject* made = PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "backslashreplace");
  if (made == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::str>(made);
}

}  // namespace amx_sft_moe::python
