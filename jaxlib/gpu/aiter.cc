// SPDX-License-Identifier: Apache-2.0

// The Python module `_aiter`: FFI handlers to register, and what is there.
//
// Importing it needs no GPU and no driver.

#include <cstdint>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "aiter/device.h"
#include "aiter/gemm.h"
#include "aiter/status.h"
#include "jaxlib/gpu/operation.h"
#include "jaxlib/gpu/vendor.h"
#include "nanobind/nanobind.h"
#include "nanobind/stl/string.h"
#include "nanobind/stl/vector.h"
#include "xla/ffi/api/ffi.h"

namespace nb = nanobind;

namespace jax::JAX_GPU_NAMESPACE {
namespace {

// Makes what a call remembers.
XLA_FFI_Error* Instantiate(XLA_FFI_CallFrame* frame) {
  static auto* handler =
      ffi::Ffi::BindInstantiate()
          .Attrs()
          .To([](ffi::Dictionary) -> ffi::ErrorOr<std::unique_ptr<Loaded>> {
            return std::make_unique<Loaded>();
          })
          .release();
  return handler->Call(frame);
}

nb::dict Stages(const Target& target) {
  nb::dict stages;
  stages["instantiate"] = nb::capsule(reinterpret_cast<void*>(&Instantiate));
  stages["initialize"] =
      nb::capsule(reinterpret_cast<void*>(target.initialize));
  stages["execute"] = nb::capsule(reinterpret_cast<void*>(target.execute));
  return stages;
}

// Type name -> its capsules, for jax.ffi.register_ffi_type.
nb::dict Types() {
  static constexpr XLA_FFI_TypeInfo kInfo = ffi::MakeTypeInfo<Loaded>();
  nb::dict loaded;
  loaded["type_id"] = nb::capsule(&Loaded::id);
  loaded["type_info"] = nb::capsule(&kInfo);
  nb::dict types;
  types[JAX_GPU_PREFIX "_aiter_loaded"] = loaded;
  return types;
}

// Calls `visit` for the targets of all families.
template <typename Visit>
void ForEachTarget(Visit visit) {
  for (const Family* f = Family::first(); f != nullptr; f = f->next()) {
    for (const Target& target : f->targets()) visit(target);
  }
}

// Target name -> stage -> capsule, for jax.ffi.register_ffi_target.
nb::dict Registrations() {
  nb::dict targets;
  ForEachTarget([&targets](const Target& target) {
    targets[(std::string(JAX_GPU_PREFIX "_aiter_") + target.op).c_str()] =
        Stages(target);
  });
  return targets;
}

void ThrowIfError(const aiter::Status& status) {
  if (status.ok()) return;
  if (status.code() == aiter::StatusCode::kInvalidArgument ||
      status.code() == aiter::StatusCode::kUnimplemented) {
    throw nb::value_error(status.message().c_str());
  }
  throw std::runtime_error(status.message());
}

nb::list Table() {
  nb::list rows;
  for (const aiter::KernelDescription& k : aiter::list_kernels()) {
    nb::dict row;
    row["symbol"] = k.symbol;
    row["op"] = k.op;
    row["grade"] = k.grade;
    row["arch"] = k.arch;
    row["dtype"] = k.data_type;
    row["dims"] = nb::tuple(nb::cast(k.dims));
    row["tile_m"] = k.tile_m;
    row["tile_n"] = k.tile_n;
    row["tile_k"] = k.tile_k;
    rows.append(row);
  }
  return rows;
}

std::vector<std::string> Kernels(const std::string& op, const std::string& arch,
                                 const std::string& dtype,
                                 const std::vector<int64_t>& dims,
                                 const std::vector<std::string>& features) {
  const Target* found = nullptr;
  std::set<std::string> known;
  ForEachTarget([&](const Target& target) {
    if (op == target.op) found = &target;
    known.insert(target.op);
  });
  if (found == nullptr) {
    std::string text = "op is " + op + ", but must be of";
    for (const std::string& name : known) text += " " + name;
    throw nb::value_error(text.c_str());
  }
  std::vector<std::string> names;
  ThrowIfError(found->kernels({dtype, dims, features}, arch, &names));
  return names;
}

std::vector<std::string> Architectures() {
  std::set<std::string> archs;
  for (const aiter::KernelDescription& k : aiter::list_kernels()) {
    archs.insert(k.arch);
  }
  return {archs.begin(), archs.end()};
}

int DeviceCount() {
  int count = 0;
  ThrowIfError(aiter::device_count(&count));
  return count;
}

std::string DeviceArch(int ordinal) {
  std::string arch;
  ThrowIfError(aiter::device_arch(ordinal, &arch));
  return arch;
}

nb::list GemmChoices(const std::string& arch, const std::string& dtype,
                     const std::vector<int64_t>& dims,
                     const std::vector<std::string>& features) {
  std::vector<aiter::GemmChoice> choices;
  ThrowIfError(aiter::gemm_choices({dtype, dims, features}, arch, &choices));
  nb::list pairs;
  for (const aiter::GemmChoice& choice : choices) {
    pairs.append(nb::make_tuple(choice.kernel, choice.splits));
  }
  return pairs;
}

}  // namespace

NB_MODULE(_aiter, m) {
  m.attr("PLATFORM") = JAX_GPU_PLATFORM;
  m.def("types", &Types,
        "FFI types of platform PLATFORM: name -> capsules. To be registered "
        "before the targets.");
  m.def("registrations", &Registrations,
        "FFI targets of platform PLATFORM: name -> stage -> capsule.");
  m.def("table", &Table, "Every embedded kernel, as a dict.");
  m.def(
      "kernels", &Kernels, nb::arg("op"), nb::arg("arch"), nb::arg("dtype"),
      nb::arg("dims"), nb::arg("features") = std::vector<std::string>(),
      "Symbols of the kernels that a call of `op` launches on `arch`, in that "
      "order; ValueError if none serves it. `dims` are the sizes that its "
      "kernels are chosen by, -1 if not known; `features` what it asks of "
      "them beside, by the names in kernels/*/family.py.");
  m.def("architectures", &Architectures,
        "Architectures that kernels are embedded for.");
  m.def("float8_type", &aiter::float8_type, nb::arg("arch"),
        "The float8 type of 4 exponent bits that an architecture multiplies, "
        "\"e4m3fn\" or \"e4m3fnuz\"; empty if none.");
  m.def("device_count", &DeviceCount,
        "Number of devices; RuntimeError without a driver.");
  m.def("device_arch", &DeviceArch, nb::arg("ordinal"),
        "Architecture of a device, such as gfx942 or sm_90.");
  m.def("gemm_choices", &GemmChoices, nb::arg("arch"), nb::arg("dtype"),
        nb::arg("dims"), nb::arg("features") = std::vector<std::string>(),
        "Every (kernel, splits) that serves a matrix product, told as to "
        "`kernels`; the library's own choice first.");
}

}  // namespace jax::JAX_GPU_NAMESPACE
