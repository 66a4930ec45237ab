// The Python module boltzattn._C, for development alone: the numbers and layouts of csrc/spec,
// which tests compare with those of Python and Triton. `make` builds it; no wheel carries it.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "spec/scan.h"
#include "spec/tensor.h"

namespace py = pybind11;
using namespace pybind11::literals;

// {"float64": of(DType::kFloat64), ...}
template <class Of>
static py::dict for_dtypes(Of of) {
  using boltzattn::DType;
  return py::dict("float64"_a = of(DType::kFloat64), "float32"_a = of(DType::kFloat32),
                  "bfloat16"_a = of(DType::kBFloat16), "float16"_a = of(DType::kFloat16));
}

PYBIND11_MODULE(_C, m) {
  m.doc() = "csrc/spec as Python functions, for tests.";

  m.def(
      "tolerances",
      [] {
        using namespace boltzattn;
        return py::dict(
            "largest_product"_a = kLargestProduct, "largest_sum"_a = kLargestSum,
            "negligible"_a = kNegligible, "least_nodes"_a = kLeastNodes,
            "most_nodes"_a = kMostNodes, "node_step"_a = kNodeStep, "levels"_a = kLevels,
            "hope"_a = kHope, "hope_share"_a = kHopeShare, "hope_share_slopes"_a = kHopeShareSlopes,
            "rounding_of_product"_a = kRoundingOfProduct, "tolerance"_a = for_dtypes(tolerance_of),
            "rounding"_a = for_dtypes([](DType dtype) { return rounding_of(dtype, 0); }),
            "precision"_a = for_dtypes([](DType dtype) {
              py::list levels;
              for (int level = 0; level < kLevels; ++level)
                levels.append(precision_of(dtype, level));
              return levels;
            }),
            "most_key_nodes"_a = for_dtypes(most_key_nodes),
            "cuda_precision"_a = for_dtypes(cuda_precision_of),
            "cuda_nodes"_a = for_dtypes(cuda_nodes));
      },
      "Numbers of spec/tolerances.h by name; those that depend on the dtype are dicts, "
      "`precision` of a list by level.");

  m.def(
      "layout",
      [](double t_min, double t_max, double s_min, double s_max, int64_t keys, int query_nodes,
         int key_nodes, double precision) {
        using namespace boltzattn;
        const Layout layout =
            make_layout({t_min, t_max, s_min, s_max, keys}, query_nodes, key_nodes, precision);
        py::list query, key;
        for (int k = 0; k < layout.query.panels; ++k)
          for (int i = 0; i < query_nodes; ++i) query.append(query_node(layout, k, i));
        for (int k = 0; k < layout.key.panels; ++k)
          for (int i = 0; i < key_nodes; ++i) key.append(key_node(layout, k, i) + layout.middle);
        return py::dict("query_panels"_a = layout.query.panels,
                        "query_origin"_a = layout.query.origin, "query_half"_a = layout.query.half,
                        "key_panels"_a = layout.key.panels, "key_origin"_a = layout.key.origin,
                        "key_half"_a = layout.key.half, "tau"_a = layout.tau,
                        "middle"_a = layout.middle, "radius"_a = layout.radius,
                        "query_nodes"_a = query, "key_nodes"_a = key);
      },
      "t_min"_a, "t_max"_a, "s_min"_a, "s_max"_a, "keys"_a, "query_nodes"_a, "key_nodes"_a,
      "precision"_a,
      "Panels and node positions of a layout: what boltzattn.transform.layout computes, too.");

  m.def(
      "scan_layout",
      [](const std::string& dtype, double t_most, double extent, int64_t keys) {
        using namespace boltzattn;
        const py::dict dtypes = for_dtypes([](DType one) { return int(one); });
        const ScanLayout layout =
            make_scan_layout(DType(py::cast<int>(dtypes[dtype.c_str()])), t_most, extent, keys);
        py::list edges, nodes;
        for (int k = 0; k <= layout.levels; ++k) edges.append(layout.edge[k]);
        for (int p = 0; p < layout.panels(); ++p)
          for (int i = 0; i < layout.nodes; ++i) nodes.append(scan_node(layout, p, i));
        return py::dict("nodes"_a = layout.nodes, "levels"_a = layout.levels,
                        "ratio"_a = layout.ratio, "edges"_a = edges, "positions"_a = nodes);
      },
      "dtype"_a, "t_most"_a, "extent"_a, "keys"_a,
      "The layout of a scan: what boltzattn.transform.scan_layout computes, too.");

  m.def(
      "tensor_layout",
      [](const std::string& dtype, const std::vector<double>& t_most,
         const std::vector<double>& s_most, double tokens, int64_t dv, double rows) {
        using namespace boltzattn;
        const py::dict dtypes = for_dtypes([](DType one) { return int(one); });
        const int rank = int(t_most.size());
        const TensorLayout layout =
            choose_tensor_layout(DType(py::cast<int>(dtypes[dtype.c_str()])), rank, t_most.data(),
                                 s_most.data(), tokens, dv, rows);
        py::list query, key;
        for (int a = 0; a < rank; ++a)
          query.append(layout.query[a].panels), key.append(layout.key[a].panels);
        return py::dict("nodes"_a = layout.nodes, "kappa"_a = layout.kappa,
                        "query_panels"_a = query, "key_panels"_a = key, "cost"_a = layout.cost,
                        "chunk"_a = layout.chunk);
      },
      "dtype"_a, "t_most"_a, "s_most"_a, "tokens"_a, "dv"_a, "rows"_a = 0.0,
      "Nodes and panels of a head of rank 2 to 4: what boltzattn.transform.tensor computes, too.");
}
