// SPDX-License-Identifier: Apache-2.0

// The Python module `_aiter`: FFI handlers to register, and what is there.
//
// Importing it needs no GPU and no driver.

#include <cstdint>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "aiter/device.h"
#include "aiter/gemm.h"
#include "aiter/mha.h"
#include "aiter/quant.h"
#include "aiter/status.h"
#include "jaxlib/gpu/aiter_gemm.h"
#include "jaxlib/gpu/aiter_mha.h"
#include "jaxlib/gpu/aiter_quant.h"
#include "jaxlib/gpu/operation.h"
#include "jaxlib/gpu/vendor.h"
#include "nanobind/nanobind.h"
#include "nanobind/stl/string.h"
#include "nanobind/stl/vector.h"
#include "xla/ffi/api/ffi.h"

namespace nb = nanobind;

namespace jax::JAX_GPU_NAMESPACE {
namespace {

nb::dict Stages(XLA_FFI_Handler* initialize, XLA_FFI_Handler* execute) {
  nb::dict stages;
  stages["initialize"] = nb::capsule(reinterpret_cast<void*>(initialize));
  stages["execute"] = nb::capsule(reinterpret_cast<void*>(execute));
  return stages;
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
  targets[JAX_GPU_PREFIX "_aiter_mha_fwd"] =
      Stages(AiterMhaFwdInitialize, AiterMhaFwd);
  targets[JAX_GPU_PREFIX "_aiter_mha_bwd"] =
      Stages(AiterMhaBwdInitialize, AiterMhaBwd);
  ForEachTarget([&targets](const Target& target) {
    targets[(std::string(JAX_GPU_PREFIX "_aiter_") + target.op).c_str()] =
        Stages(target.initialize, target.execute);
  });
  targets[JAX_GPU_PREFIX "_aiter_gemm"] =
      Stages(AiterGemmInitialize, AiterGemm);
  targets[JAX_GPU_PREFIX "_aiter_quant"] =
      Stages(AiterQuantInitialize, AiterQuant);
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

aiter::DataType DataTypeOf(const std::string& name) {
  static const std::map<std::string, aiter::DataType> kTypes = {
      {"fp16", aiter::DataType::kFp16},
      {"bf16", aiter::DataType::kBf16},
      {"fp32", aiter::DataType::kFp32},
      {"i8", aiter::DataType::kI8},
      {"e4m3fn", aiter::DataType::kE4m3fn},
      {"e4m3fnuz", aiter::DataType::kE4m3fnuz},
      {"e2m1", aiter::DataType::kE2m1},
  };
  auto found = kTypes.find(name);
  if (found != kTypes.end()) return found->second;
  throw nb::value_error(("dtype is " + name +
                         ", but must be fp16, bf16, fp32, i8, e4m3fn, "
                         "e4m3fnuz or e2m1")
                            .c_str());
}

std::vector<std::string> QuantKernels(int per, const std::string& arch,
                                      const std::string& dtype, int64_t cols) {
  if (per < 0 || per > 3) {
    throw nb::value_error(
        ("per is " + std::to_string(per) + ", but must be from 0 to 3")
            .c_str());
  }
  std::vector<std::string> names;
  ThrowIfError(aiter::quant_kernels(static_cast<aiter::QuantScale>(per),
                                    DataTypeOf(dtype), cols, arch, &names));
  return names;
}

// A GEMM of contiguous operands with 16-bit results, for kernel selection.
// layout and scaling count as the FFI target's attributes do.
aiter::gemm_args GemmArgs(int layout, int scaling, const std::string& a_dtype,
                          const std::string& b_dtype, int64_t batch, int64_t m,
                          int64_t n, int64_t k, int64_t max_splits) {
  alignas(16) static char present[16];  // Never read.
  if (layout < 0 || layout > 2) {
    throw nb::value_error(
        ("layout is " + std::to_string(layout) + ", but must be from 0 to 2")
            .c_str());
  }
  if (scaling < 0 || scaling > kTransposedBlocks) {
    throw nb::value_error(
        ("scaling is " + std::to_string(scaling) + ", but must be from 0 to 4")
            .c_str());
  }
  aiter::gemm_args args;
  args.layout = static_cast<aiter::GemmLayout>(layout);
  args.scaling = scaling == kTransposedBlocks
                     ? aiter::GemmScaling::kBlock
                     : static_cast<aiter::GemmScaling>(scaling);
  args.a_type = DataTypeOf(a_dtype);
  args.b_type = DataTypeOf(b_dtype);
  args.batch = batch;
  args.m = m;
  args.n = n;
  args.k = k;
  int64_t row = args.a_type == aiter::DataType::kE2m1 ? k / 2 : k;
  args.stride_a = args.layout == aiter::GemmLayout::kTN ? m : row;
  args.stride_b = args.layout == aiter::GemmLayout::kNT ? row : n;
  if (batch > 1) {
    args.batch_stride_a = m * row;
    args.batch_stride_b = n * row;
  }
  if (args.scaling != aiter::GemmScaling::kNone) {
    args.a_scale_ptr = args.b_scale_ptr = present;
    args.k_stride_a_scale = args.k_stride_b_scale = 1;
  }
  if (max_splits > 1) {
    args.workspace_ptr = present;
    args.workspace_bytes = 4 * max_splits * batch * m * n;
  }
  return args;
}

std::vector<std::string> GemmKernels(int layout, int scaling,
                                     const std::string& arch,
                                     const std::string& a_dtype,
                                     const std::string& b_dtype, int64_t batch,
                                     int64_t m, int64_t n, int64_t k,
                                     int64_t max_splits) {
  std::vector<std::string> names;
  ThrowIfError(aiter::gemm_kernels(
      GemmArgs(layout, scaling, a_dtype, b_dtype, batch, m, n, k, max_splits),
      arch, &names));
  return names;
}

nb::list GemmChoices(int layout, int scaling, const std::string& arch,
                     const std::string& a_dtype, const std::string& b_dtype,
                     int64_t batch, int64_t m, int64_t n, int64_t k,
                     int64_t max_splits) {
  std::vector<aiter::GemmChoice> choices;
  ThrowIfError(aiter::gemm_choices(
      GemmArgs(layout, scaling, a_dtype, b_dtype, batch, m, n, k, max_splits),
      arch, &choices));
  nb::list pairs;
  for (const aiter::GemmChoice& choice : choices) {
    pairs.append(nb::make_tuple(choice.kernel, choice.splits));
  }
  return pairs;
}

// A problem of one row each with the given features, for kernel selection.
std::vector<std::string> MhaKernels(bool backward, const std::string& arch,
                                    const std::string& dtype, bool packed,
                                    int64_t hdim_q, int64_t hdim_v,
                                    const std::vector<std::string>& features) {
  static char present[16];  // Never read: an address that is not null.
  std::set<std::string> unused(features.begin(), features.end());
  auto has = [&unused](const char* name) { return unused.erase(name) > 0; };
  auto given = [&has](const char* name) -> void* {
    return has(name) ? present : nullptr;
  };

  aiter::mha_bwd_args args;
  args.data_type = DataTypeOf(dtype);
  args.is_group_mode = packed;
  args.batch = args.seqlen_q = args.seqlen_k = args.nhead_q = args.nhead_k = 1;
  args.hdim_q = hdim_q;
  args.hdim_v = hdim_v;
  args.bias_batch = args.bias_nhead = 1;
  args.bias_is_f32 = has("bias_f32");
  args.bias_ptr = given("bias");
  if (args.bias_is_f32) args.bias_ptr = present;
  args.alibi_slopes_ptr = given("alibi");
  args.sink_ptr = given("sink");
  args.dropout_state_ptr = given("dropout");
  args.p_drop = args.dropout_state_ptr != nullptr ? 0.5f : 0.0f;
  if (packed) args.seqstart_q_ptr = args.seqstart_k_ptr = present;
  args.cu_seqlen_q_ptr = args.cu_seqlen_k_ptr = given("cu_seqlens");
  args.is_top_left = has("top_left");
  args.logits_soft_cap = has("soft_cap") ? 1.0f : 0.0f;
  bool sink_tokens = has("sink_tokens");
  bool window = has("window");
  if (window || sink_tokens) args.window_size_left = 1;
  args.sink_size = sink_tokens ? 1 : 0;
  args.min_seqlen_q = has("min_seqlen") ? 1 : 0;
  args.dlse_ptr = given("dlse");
  args.dbias_ptr = given("dbias");
  args.d_sink_ptr = given("dsink");
  has("dslopes");
  args.d_slopes_ptr = args.alibi_slopes_ptr != nullptr ? present : nullptr;
  if (!unused.empty()) {
    throw nb::value_error(
        ("features has " + *unused.begin() +
         ", but must be of bias, bias_f32, alibi, sink, dropout, cu_seqlens, "
         "top_left, soft_cap, sink_tokens, window, min_seqlen, dlse, dbias, "
         "dsink, dslopes")
            .c_str());
  }

  std::vector<std::string> names;
  if (backward) {
    ThrowIfError(aiter::mha_bwd_kernels(args, arch, &names));
  } else {
    aiter::mha_fwd_args fwd;
    static_cast<aiter::mha_args&>(fwd) = args;
    ThrowIfError(aiter::mha_fwd_kernels(fwd, arch, &names));
  }
  return names;
}

}  // namespace

NB_MODULE(_aiter, m) {
  m.attr("PLATFORM") = JAX_GPU_PLATFORM;
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
  m.def("device_count", &DeviceCount,
        "Number of devices; RuntimeError without a driver.");
  m.def("device_arch", &DeviceArch, nb::arg("ordinal"),
        "Architecture of a device, such as gfx942 or sm_90.");
  m.def("mha_kernels", &MhaKernels, nb::arg("backward"), nb::arg("arch"),
        nb::arg("dtype"), nb::arg("packed"), nb::arg("hdim_q"),
        nb::arg("hdim_v"), nb::arg("features"),
        "Kernels of an attention call, in launch order; ValueError if none.");
  m.def("quant_kernels", &QuantKernels, nb::arg("per"), nb::arg("arch"),
        nb::arg("dtype"), nb::arg("cols"),
        "Kernels of a quantiser, in launch order; ValueError if none.");
  m.def("gemm_kernels", &GemmKernels, nb::arg("layout"), nb::arg("scaling"),
        nb::arg("arch"), nb::arg("a_dtype"), nb::arg("b_dtype"),
        nb::arg("batch"), nb::arg("m"), nb::arg("n"), nb::arg("k"),
        nb::arg("max_splits") = 1,
        "Kernels of a matrix product, in launch order; ValueError if none.");
  m.def("gemm_choices", &GemmChoices, nb::arg("layout"), nb::arg("scaling"),
        nb::arg("arch"), nb::arg("a_dtype"), nb::arg("b_dtype"),
        nb::arg("batch"), nb::arg("m"), nb::arg("n"), nb::arg("k"),
        nb::arg("max_splits") = 1,
        "Every (kernel, splits) that serves a matrix product; the library's "
        "own choice first.");
}

}  // namespace jax::JAX_GPU_NAMESPACE
