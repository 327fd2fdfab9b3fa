// dg_core.backends.cuda._C: the native launcher, as backends/cuda/launch.py uses it.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "callable.h"
#include "driver.h"
#include "format.h"
#include "plan.h"

namespace py = pybind11;

namespace {

using namespace dg::host;

// Goes up with every change of what Python passes, so that a module that was built from older sources is told
// from a good one.
constexpr int kInterface = 2;

using Triple = std::array<unsigned, 3>;
// offset, slot, type, rank, sizes, strides, box, swizzle, l2_promotion, what: the members of MapSpec. The
// numbers of type, swizzle and l2_promotion are the driver's.
using MapFields = std::tuple<std::size_t, std::size_t, int, unsigned, std::array<std::uint64_t, kMaxRank>,
                             std::array<std::uint64_t, kMaxRank - 1>, std::array<std::uint32_t, kMaxRank>,
                             int, int, std::string>;
using PointerFields = std::tuple<std::size_t, std::size_t>;

Handle handle(std::uint64_t value) {
    return reinterpret_cast<Handle>(value);
}

py::object plan(const std::string& library, std::string name, std::uint64_t function, std::uint64_t context,
                const Triple& grid, const Triple& block, const Triple& cluster, unsigned shared_bytes,
                bool pdl, const py::bytes& parameters, const std::vector<MapFields>& maps,
                const std::vector<PointerFields>& pointers, const py::object& error,
                const py::object& refuse) {
    PlanSpec spec{std::move(name),
                  handle(function),
                  handle(context),
                  grid,
                  block,
                  cluster,
                  shared_bytes,
                  pdl,
                  parameters,
                  {},
                  {}};
    for (const auto& [offset, slot, type, rank, sizes, strides, box, swizzle, l2_promotion, what] : maps)
        spec.maps.push_back({offset, slot, type, rank, sizes, strides, box, swizzle, l2_promotion, what});
    for (const auto& [offset, slot] : pointers)
        spec.pointers.push_back({offset, slot});
    auto made = std::make_unique<Plan>(std::move(spec), open_driver(library));
    PyObject* object = new_callable(std::move(made), error.ptr(), refuse.ptr());
    if (object == nullptr)
        throw py::error_already_set();
    return py::reinterpret_steal<py::object>(object);
}

}  // namespace

PYBIND11_MODULE(_C, module) {
    module.doc() = "The native launcher of the CUDA backend.";
    module.attr("INTERFACE") = kInterface;
    module.attr("FORMATTER") = formatter();
    module.attr("PYBIND11") =
        format("{}.{}.{}", PYBIND11_VERSION_MAJOR, PYBIND11_VERSION_MINOR, PYBIND11_VERSION_MICRO);
    module.attr("MAX_PARAMETER_BYTES") = kMaxParameterBytes;
    module.attr("MAX_SLOTS") = kMaxSlots;
    module.def("plan", &plan, py::kw_only(), py::arg("library"), py::arg("name"), py::arg("function"),
               py::arg("context"), py::arg("grid"), py::arg("block"), py::arg("cluster"),
               py::arg("shared_bytes"), py::arg("pdl"), py::arg("parameters"), py::arg("maps"),
               py::arg("pointers"), py::arg("error"), py::arg("refuse"),
               "A launch that is called as plan(addresses, stream).");
}
