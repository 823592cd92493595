#include "machine.hpp"

#include <pybind11/stl.h>

#include <string>

#include "amx_sft_moe/amx_sft_moe.hpp"
#include "amx_sft_moe/kernels/machine_probe.hpp"

namespace amx_sft_moe::python {

namespace py = pybind11;

namespace {

// GFLOP/s by instruction and by kernel, where there are any; GB/s of reads.
py::dict measured(int threads, index_t bandwidth_bytes) {
  Machine machine;
  {
    const py::gil_scoped_release release;
    machine = measure_machine(threads, bandwidth_bytes);
  }
  py::dict instructions;
  const auto add = [](py::dict& to, const char* name, double gflops) {
    if (gflops > 0) to[name] = gflops;
  };
  add(instructions, "TDPBF16PS", machine.tdpbf16);
  add(instructions, "VDPBF16PS", machine.dpbf16);
  add(instructions, "fp32 FMA (zmm)", machine.fma512);
  add(instructions, "fp32 FMA (ymm)", machine.fma256);
  add(instructions, "SSE2 mul + add", machine.sse2);
  py::dict kernels;
  for (const char* name : {"amx_bf16", "avx512_bf16", "avx512", "avx2", "portable", "onednn"}) {
    add(kernels, name, machine.peak_of_kernel(name));
  }
  py::dict result;
  result["instructions"] = instructions;
  result["kernels"] = kernels;
  result["bandwidth"] = machine.bandwidth;
  return result;
}

class NamedRange {
 public:
  explicit NamedRange(std::string name) : name_(std::move(name)) {}
  void enter() { range_.open(name_.c_str()); }
  void exit(const py::args&) { range_.close(); }

 private:
  std::string name_;
  nvtx::Range range_;
};

}  // namespace

void bind_machine(py::module_& m) {
  m.def("measure_machine", &measured, py::arg("threads"), py::arg("bandwidth_bytes"));
  py::class_<NamedRange>(m, "NvtxRange")
      .def(py::init<std::string>(), py::arg("name"))
      .def("__enter__", &NamedRange::enter)
      .def("__exit__", &NamedRange::exit);
}

}  // namespace amx_sft_moe::python
