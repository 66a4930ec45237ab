// The Python module boltzattn._C: importing it registers the operators of cpu/ops.cpp; what it
// offers itself is the build record and a few switches for tests.
#include <pybind11/pybind11.h>

#include "cpu/isa.h"

namespace py = pybind11;

PYBIND11_MODULE(_C, m) {
  m.doc() = "Compiled kernels of boltzattn.";

  m.def("build_record", [] {
    py::dict record;
    record["torch"] = BOLTZATTN_TORCH_VERSION;
    record["compiler"] = __VERSION__;
    record["pybind11"] = PYBIND11_TOSTRING(PYBIND11_VERSION_MAJOR) "." PYBIND11_TOSTRING(
        PYBIND11_VERSION_MINOR);
    return record;
  });
  m.def(
      "isa", [] { return boltzattn::kernels().name; }, "The instruction set the kernels run with.");
  m.def(
      "supported_isas",
      [] {
        py::list names;
        for (const auto* table : {&boltzattn::kAvx512, &boltzattn::kAvx2, &boltzattn::kPortable})
          if (table->supported()) names.append(table->name);
        return names;
      },
      "The instruction sets this machine can run, best first.");
  m.def(
      "force_isa",
      [](const py::object& name) {
        const std::string wanted = name.is_none() ? "" : py::cast<std::string>(name);
        if (const char* error = boltzattn::force_isa(name.is_none() ? nullptr : wanted.c_str()))
          throw py::value_error(wanted + ": " + error);
      },
      py::arg("name"), "Run the kernels with another instruction set; None for the best.");
}
