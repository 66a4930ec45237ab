// The Python module boltzattn._C: importing it registers the operators of cpu/ops.cpp; what it
// offers itself is the build record and a few switches for tests.
#undef TORCH_TARGET_VERSION  // torch 2.10's copy of pybind11 refuses it; no other torch header here
#include <pybind11/pybind11.h>

#include "cpu/isa.h"
#include "layout.h"

namespace py = pybind11;

PYBIND11_MODULE(_C, m) {
  m.doc() = "Compiled kernels of boltzattn.";

  m.def("build_record", [] {
    py::dict record;
    record["torch"] = BOLTZATTN_TORCH_VERSION;
    record["compiler"] = __VERSION__;
    record["pybind11"] =
        PYBIND11_TOSTRING(PYBIND11_VERSION_MAJOR) "." PYBIND11_TOSTRING(PYBIND11_VERSION_MINOR);
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

  m.def(
      "layout",
      [](double t_min, double t_max, double s_min, double s_max, int64_t keys, int query_nodes,
         int key_nodes, double precision) {
        const boltzattn::Layout layout = boltzattn::make_layout({t_min, t_max, s_min, s_max, keys},
                                                                query_nodes, key_nodes, precision);
        py::list query, key;
        for (int k = 0; k < layout.query.panels; ++k)
          for (int i = 0; i < query_nodes; ++i) query.append(boltzattn::query_node(layout, k, i));
        for (int k = 0; k < layout.key.panels; ++k)
          for (int i = 0; i < key_nodes; ++i)
            key.append(boltzattn::key_node(layout, k, i) + layout.middle);
        py::dict result;
        result["query_panels"] = layout.query.panels;
        result["query_origin"] = layout.query.origin;
        result["query_half"] = layout.query.half;
        result["key_panels"] = layout.key.panels;
        result["key_origin"] = layout.key.origin;
        result["key_half"] = layout.key.half;
        result["tau"] = layout.tau;
        result["middle"] = layout.middle;
        result["radius"] = layout.radius;
        result["query_nodes"] = query;
        result["key_nodes"] = key;
        return result;
      },
      py::arg("t_min"), py::arg("t_max"), py::arg("s_min"), py::arg("s_max"), py::arg("keys"),
      py::arg("query_nodes"), py::arg("key_nodes"), py::arg("precision"),
      "Panels and node positions of a layout: what boltzattn.layout computes too.");
}
