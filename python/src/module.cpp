// The extension module `amx_sft_moe._core`: names, arguments and exceptions. What they mean to users is
// documented in the Python layer that wraps each of them.
#include <pybind11/gil_safe_call_once.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "info.hpp"
#include "kept_memory.hpp"
#include "machine.hpp"
#include "operator.hpp"
#include "text.hpp"
#include "times.hpp"

namespace py = pybind11;
using amx_sft_moe::Activation;
using amx_sft_moe::ArgumentError;
using amx_sft_moe::ClampedGlu;
using amx_sft_moe::Config;
using amx_sft_moe::GeluGlu;
using amx_sft_moe::GeluTanhGlu;
using amx_sft_moe::index_t;
using amx_sft_moe::KernelError;
using amx_sft_moe::SiluGlu;
using amx_sft_moe::StateError;
using amx_sft_moe::python::BiasObjects;
using amx_sft_moe::python::Factor;
using amx_sft_moe::python::kBiasCount;
using amx_sft_moe::python::KernelChoice;
using amx_sft_moe::python::kFactorCount;
using amx_sft_moe::python::LoraObjects;
using amx_sft_moe::python::LoraOptions;
using amx_sft_moe::python::Operator;
using amx_sft_moe::python::SharedWorkspace;
using amx_sft_moe::python::TypeMismatch;

namespace {

struct ErrorTypes {
  py::object argument, state, kernel;
};
PYBIND11_CONSTINIT py::gil_safe_call_once_and_store<ErrorTypes> error_types;

void raise(PyObject* type, const std::exception& error) {
  PyErr_SetObject(type, amx_sft_moe::python::as_str(error.what()).ptr());
}

// The classes are Python's own (amx_sft_moe.errors), so that they have documentation and can be pickled.
void register_errors() {
  error_types.call_once_and_store_result([] {
    const auto errors = py::module_::import("amx_sft_moe.errors");
    return ErrorTypes{errors.attr("ArgumentError"), errors.attr("StateError"), errors.attr("KernelError")};
  });
  // NOLINTNEXTLINE(performance-unnecessary-value-param): pybind11's signature
  py::register_local_exception_translator([](std::exception_ptr pointer) {
    const ErrorTypes& types = error_types.get_stored();
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const TypeMismatch& error) {
      raise(PyExc_TypeError, error);
    } catch (const ArgumentError& error) {
      raise(types.argument.ptr(), error);
    } catch (const StateError& error) {
      raise(types.state.ptr(), error);
    } catch (const KernelError& error) {
      raise(types.kernel.ptr(), error);
    }
  });
}

// (name, limit, alpha); the two numbers only matter to "gpt_oss".
Activation activation_of(const std::string& name, float limit, float alpha) {
  if (name == "silu") return SiluGlu{};
  if (name == "gelu") return GeluGlu{};
  if (name == "gelu_tanh") return GeluTanhGlu{};
  if (name == "gpt_oss") return ClampedGlu{limit, alpha};
  throw ArgumentError("activation: expected \"silu\", \"gelu\", \"gelu_tanh\" or \"gpt_oss\", got \"" + name +
                      "\"");
}

LoraObjects lora_objects(bool shared_a, const py::sequence& factors,
                         const std::array<std::optional<float>, 3>& scaling) {
  LoraObjects made;
  made.shared_a = shared_a;
  made.scaling = scaling;
  for (std::size_t f = 0; f < kFactorCount; ++f) made.factors[f] = factors[f];
  return made;
}

BiasObjects bias_objects(const py::sequence& tensors) {
  BiasObjects made;
  for (std::size_t b = 0; b < kBiasCount; ++b) made.tensors[b] = tensors[b];
  return made;
}

void bind_operator(py::module_& m) {
  using std::optional;
  py::class_<SharedWorkspace>(m, "Workspace",
                              "Scratch memory that operators which run one after another may share.")
      .def(py::init<>());

  py::class_<KernelChoice>(m, "KernelChoice")
      .def(py::init<std::string, py::object>(), py::arg("kernel"), py::arg("provider"))
      .def_property_readonly("requested", &KernelChoice::requested);

  py::class_<LoraObjects>(m, "LoraFactors")
      .def(py::init(&lora_objects), py::arg("shared_a"), py::arg("factors"), py::arg("scaling"));

  // gate_bias, up_bias, down_bias, gate_up_bias
  py::class_<BiasObjects>(m, "Biases").def(py::init(&bias_objects), py::arg("tensors"));

  py::class_<Operator>(m, "SftMoe")
      .def(py::init([](index_t num_experts, index_t top_k, index_t hidden_size, index_t intermediate_size,
                       index_t lora_rank, optional<float> lora_alpha, optional<index_t> max_tokens,
                       index_t cache_depth, const std::string& activation, float limit, float alpha,
                       const KernelChoice& kernel, int num_threads, const optional<SharedWorkspace>& workspace,
                       std::string name, bool record_spans) {
             Config config;
             config.num_experts = num_experts;
             config.top_k = top_k;
             config.hidden_size = hidden_size;
             config.intermediate_size = intermediate_size;
             config.max_tokens = max_tokens;
             config.cache_depth = cache_depth;
             config.activation = activation_of(activation, limit, alpha);
             config.num_threads = num_threads;
             config.name = std::move(name);
             config.record_spans = record_spans;
             return std::make_unique<Operator>(config, kernel, LoraOptions{lora_rank, lora_alpha}, workspace);
           }),
           py::kw_only(), py::arg("num_experts"), py::arg("top_k"), py::arg("hidden_size"),
           py::arg("intermediate_size"), py::arg("lora_rank"), py::arg("lora_alpha"), py::arg("max_tokens"),
           py::arg("cache_depth"), py::arg("activation"), py::arg("limit"), py::arg("alpha"), py::arg("kernel"),
           py::arg("num_threads"), py::arg("workspace"), py::arg("name") = "", py::arg("record_spans") = false)
      .def("set_base", &Operator::set_base)
      .def("set_lora", &Operator::set_lora)
      .def("forward_sft", &Operator::forward_sft)
      .def("backward", &Operator::backward)
      .def("forward_saved", &Operator::forward_saved)
      .def("backward_saved", &Operator::backward_saved)
      .def("transpose", &Operator::transpose)
      .def("clear", &Operator::clear)
      .def("last_times", &Operator::last_times)
      .def("last_dump", &Operator::last_dump)
      .def("collect_totals", &Operator::collect_totals)
      .def("take_totals", &Operator::take_totals)
      .def("memory", &Operator::memory)
      .def_property("ranges", &Operator::ranges, &Operator::set_ranges)
      .def_property("name", &Operator::name, &Operator::set_name)
      .def_property_readonly("saved_depth", &Operator::saved_depth)
      .def_property_readonly("kernel", &Operator::kernel)
      .def_property_readonly("weight_dtype", &Operator::weight_dtype);
}

void bind_kept_memory(py::module_& m) {
  m.def("kept_memory", [] {
    const auto usage = amx_sft_moe::python::kept_memory()->usage();
    py::dict result;
    result["in_use_bytes"] = usage.in_use_bytes;
    result["idle_bytes"] = usage.idle_bytes;
    return result;
  });
  m.def("release_kept_memory", [] { return amx_sft_moe::python::kept_memory()->release(); });
}

}  // namespace

PYBIND11_MODULE(_core, m) {
  m.doc() = "Bindings of the C++ library amx_sft_moe.";
  m.attr("__version__") = AMX_SFT_MOE_VERSION_STRING;
  register_errors();
  bind_operator(m);
  amx_sft_moe::python::bind_machine(m);
  bind_kept_memory(m);
  m.def("phase_groups", &amx_sft_moe::python::phase_groups);
  m.def("info", &amx_sft_moe::python::info, py::arg("provider"));
  m.def("available_cpus", &amx_sft_moe::python::available_cpus);
}
