// Kernels by name: what this CPU can run, which one "auto" means, and an operator for it.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "amx_sft_moe/kernels/amx_bf16.hpp"
#include "amx_sft_moe/kernels/avx2.hpp"
#include "amx_sft_moe/kernels/avx512.hpp"
#include "amx_sft_moe/kernels/avx512_bf16.hpp"
#include "amx_sft_moe/kernels/kernel_list.hpp"
#include "amx_sft_moe/kernels/portable.hpp"
#include "amx_sft_moe/operator/any_sft_moe.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN

// The kernels that need nothing but a compiler. To add one, add its header and its line. Kernels that need a
// library (kernels/onednn.hpp) join this list where they are wanted:
// make_sft_moe<kernels::Joined<DefaultKernels, ...>>.
using DefaultKernels = kernels::KernelList<  //
    kernels::AmxBf16,                        //
    kernels::Avx512Bf16,                     //
    kernels::Avx512<bf16>,                   //
    kernels::Avx512<float>,                  //
    kernels::Avx2<bf16>,                     //
    kernels::Avx2<float>,                    //
    kernels::Portable<bf16>,                 //
    kernels::Portable<float>>;

// One kernel for one element type of the base weights.
struct KernelInfo {
  std::string_view name;
  DType weights;
  bool available = false;
  std::string why_not;  // empty where available
};

namespace registry {

template <class Kernel>
class TypedSftMoe final : public AnySftMoe {
 public:
  using Stored = typename Kernel::Stored;
  using Weight = typename Kernel::Weight;

  TypedSftMoe(const Config& config, const BaseWeights<Weight>& weights, const LoraWeights& lora,
              std::shared_ptr<Workspace> workspace)
      : moe_(config, weights, lora, std::move(workspace)) {}

  std::string_view kernel_name() const override { return Kernel::kName; }
  DType weight_dtype() const override { return kDTypeOf<Weight>; }
  DType stored_dtype() const override { return kDTypeOf<Stored>; }
  const Config& config() const override { return moe_.config(); }
  const LoraWeights& lora() const override { return moe_.lora(); }
  void set_base(const AnyBaseWeights& weights) override { moe_.set_base(typed(weights)); }
  void set_lora(const LoraWeights& lora) override { moe_.set_lora(lora); }

  void forward_sft(const Routing& routing, const AnyConstMatrix& x, const AnyMatrix& y, bool save) override {
    moe_.forward_sft(routing, x, y, save);
  }
  void backward(const AnyConstMatrix& grad_y, const Gradients& grads) override { moe_.backward(grad_y, grads); }
  void forward_sft(const Routing& routing, const AnyConstMatrix& x, const AnyMatrix& y,
                   const AnySavedActivations& saved) override {
    moe_.forward_sft(routing, x, y, typed(saved));
  }
  void backward(const Routing& routing, const AnyConstMatrix& x, const AnySavedActivations& saved,
                const AnyConstMatrix& grad_y, const Gradients& grads) override {
    moe_.backward(routing, x, typed(saved), grad_y, grads);
  }

  void clear() override { moe_.clear(); }
  index_t saved_depth() const override { return moe_.saved_depth(); }
  const StepRecord& last_forward() const override { return moe_.last_forward(); }
  const StepRecord& last_backward() const override { return moe_.last_backward(); }
  StepLabel label(StepKind kind) const override { return moe_.label(kind); }
  std::string backward_text() const override { return moe_.backward_text(); }
  void set_observer(StepObserver* observer) override { moe_.set_observer(observer); }
  void set_name(std::string name) override { moe_.set_name(std::move(name)); }
  MemoryReport memory() const override { return moe_.memory(); }
  void set_number(std::int64_t number) override { moe_.set_number(number); }

 private:
  static const BaseWeights<Weight>& typed(const AnyBaseWeights& weights) {
    if (const auto* fitting = std::get_if<BaseWeights<Weight>>(&weights)) return *fitting;
    const bool got_bf16 = std::holds_alternative<BaseWeights<bf16>>(weights);
    throw ArgumentError(concat("weights: expected ", name_of(kDTypeOf<Weight>), " for kernel ", Kernel::kName,
                               ", got ", name_of(got_bf16 ? DType::kBf16 : DType::kFp32)));
  }
  static MatrixView<Stored> typed(std::string_view name, const AnyMatrix& m) {
    if (m.empty()) return {nullptr, m.rows(), m.cols(), m.row_stride()};
    require_equal({name, ".dtype"}, name_of(kDTypeOf<Stored>), name_of(m.dtype()));
    require_equal({name, ".col_stride"}, index_t{1}, m.col_stride());
    MatrixView<Stored> view{nullptr, m.rows(), m.cols(), m.row_stride()};
    m.visit([&view](auto* data) {
      if constexpr (std::is_same_v<decltype(data), Stored*>) view.data = data;
    });
    return view;
  }
  static SavedActivations<Stored> typed(const AnySavedActivations& saved) {
    return {typed("saved.gate", saved.gate), typed("saved.up", saved.up), typed("saved.u_gate", saved.u_gate),
            typed("saved.u_up", saved.u_up), typed("saved.u_down", saved.u_down)};
  }

  AMX_SFT_MOE<Kernel> moe_;
};

// Adds a kernel, or makes it what its name stands for where the one listed under it is not available.
inline void list_kernel(std::vector<KernelInfo>& kernels, KernelInfo kernel) {
  for (KernelInfo& listed : kernels) {
    if (listed.name != kernel.name || listed.weights != kernel.weights) continue;
    if (!listed.available && kernel.available) listed = std::move(kernel);
    return;
  }
  kernels.push_back(std::move(kernel));
}

// Where VDPBF16PS has half the peak of fp32 FMA (Intel), FMA goes before it; on AMD it has twice the peak.
inline void put_fma_before_slow_dots(std::vector<KernelInfo>& kernels, const CpuFeatures& cpu) {
  if (!cpu.slow_dpbf16) return;
  const auto place_of = [&kernels](std::string_view name) {
    return std::find_if(kernels.begin(), kernels.end(), [name](const KernelInfo& kernel) {
      return kernel.name == name && kernel.weights == DType::kBf16;
    });
  };
  const auto dot = place_of(kernels::Avx512Bf16::kName);
  const auto fma = place_of(kernels::Avx512<bf16>::kName);
  if (dot != kernels.end() && fma != kernels.end() && dot < fma) std::swap(*dot, *fma);
}

// Those for which wanted(name, weights), the best for `cpu` first; the others are not asked whether they are
// available here.
template <class List, class Wanted>
std::vector<KernelInfo> kernels_that_are(Wanted&& wanted, const CpuFeatures& cpu = arch::cpu_features()) {
  std::vector<KernelInfo> kernels;
  List::for_each([&]<class Kernel>() {
    constexpr DType kWeights = kDTypeOf<typename Kernel::Weight>;
    if (!wanted(Kernel::kName, kWeights)) return;
    std::string why = Kernel::refusal();
    list_kernel(kernels, {Kernel::kName, kWeights, why.empty(), std::move(why)});
  });
  put_fma_before_slow_dots(kernels, cpu);
  return kernels;
}

// What there is for these weights, and why `wanted`, a name or "auto", is not.
template <class List>
std::string expected_kernels(std::string_view wanted, DType weights) {
  std::string names, why = wanted == "auto" ? "none is available" : "no such kernel";
  List::for_each([&]<class Kernel>() {
    if (wanted == Kernel::kName) why = concat("it does not take ", name_of(weights), " weights");
  });
  const auto takes_these = [&](std::string_view, DType of) { return of == weights; };
  for (const KernelInfo& kernel : kernels_that_are<List>(takes_these)) {
    if (kernel.available) names += concat(names.empty() ? "" : ", ", kernel.name);
    if (wanted == kernel.name) why = kernel.why_not;
  }
  return concat("expected one of ", names, " (for ", name_of(weights), " weights on this CPU) or auto, got ",
                wanted, ": ", why);
}

}  // namespace registry

// All kernels, the best for this CPU first. On a CPU with AMX the process has the permission for its tiles afterwards, as
// their kernel tells by asking for it (arch/cpu_features.hpp).
template <class List = DefaultKernels>
std::vector<KernelInfo> list_kernels() {
  return registry::kernels_that_are<List>([](std::string_view, DType) { return true; });
}

// A name of list_kernels(). `kernel` is such a name or "auto": then the environment variable AMX_SFT_MOE_KERNEL
// where it is set, else the best available. Throws KernelError, which lists what is available. The permission for AMX's
// tiles is asked for where "auto" is for bf16 weights, AMX is named, or no kernel for bf16 weights is found.
template <class List = DefaultKernels>
std::string resolve_kernel(std::string_view kernel, DType weights) {
  std::string wanted(kernel);
  std::string_view source = "kernel";
  if (wanted == "auto") {
    const char* variable = std::getenv("AMX_SFT_MOE_KERNEL");
    if (variable != nullptr && *variable != '\0') {
      wanted = variable;
      source = "AMX_SFT_MOE_KERNEL";
    }
  }
  const auto asked = [&](std::string_view name, DType of) {
    return of == weights && (wanted == "auto" || wanted == name);
  };
  for (const KernelInfo& info : registry::kernels_that_are<List>(asked)) {
    if (info.available) return std::string(info.name);
  }
  throw KernelError(concat(source, ": ", registry::expected_kernels<List>(wanted, weights)));
}

// An operator for `kernel` (see resolve_kernel) and the type of `weights`. Only kernels for that type are compiled.
template <class List = DefaultKernels, class Weight>
std::unique_ptr<AnySftMoe> make_sft_moe(std::string_view kernel, const Config& config,
                                        const BaseWeights<Weight>& weights, const LoraWeights& lora = {},
                                        std::shared_ptr<Workspace> workspace = nullptr) {
  const std::string name = resolve_kernel<List>(kernel, kDTypeOf<Weight>);
  std::unique_ptr<AnySftMoe> made;
  List::for_each([&]<class Kernel>() {
    if constexpr (std::is_same_v<typename Kernel::Weight, Weight>) {
      if (made || Kernel::kName != name || !Kernel::available()) return;
      made = std::make_unique<registry::TypedSftMoe<Kernel>>(config, weights, lora, workspace);
    }
  });
  return made;
}

// The same for weights whose type is known at run time.
template <class List = DefaultKernels>
std::unique_ptr<AnySftMoe> make_sft_moe(std::string_view kernel, const Config& config,
                                        const AnyBaseWeights& weights, const LoraWeights& lora = {},
                                        std::shared_ptr<Workspace> workspace = nullptr) {
  const auto make = [&](const auto& typed) {
    return make_sft_moe<List>(kernel, config, typed, lora, std::move(workspace));
  };
  return std::visit(make, weights);
}

AMX_SFT_MOE_NAMESPACE_END
