// A list of kernels behind an interface without templates: what a module that is loaded apart hands to the code
// that makes operators.
#pragma once

#include <string>
#include <typeinfo>

#include "amx_sft_moe/operator/kernel_registry.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN

class KernelProvider {
 public:
  KernelProvider() = default;
  KernelProvider(const KernelProvider&) = delete;
  KernelProvider& operator=(const KernelProvider&) = delete;
  virtual ~KernelProvider() = default;

  virtual std::vector<KernelInfo> list() const = 0;
  virtual std::string resolve(std::string_view kernel, DType weights) const = 0;
  virtual std::unique_ptr<AnySftMoe> make(std::string_view kernel, const Config& config,
                                          const AnyBaseWeights& weights, const LoraWeights& lora,
                                          std::shared_ptr<Workspace> workspace) const = 0;

  // Only modules of the same version, build switches and compiler understand each other's objects; sizes tell two
  // states of the sources under one version apart.
  static std::string binary_interface() {
    return concat("amx_sft_moe ", AMX_SFT_MOE_VERSION_STRING, " ", typeid(KernelProvider).name(), " ",
                  __VERSION__, " ", sizeof(Config), " ", sizeof(AnyBaseWeights), " ", sizeof(LoraWeights), " ",
                  sizeof(Gradients), " ", sizeof(Workspace), " ", kPhaseCount);
  }
};

template <class List>
class ProviderOf final : public KernelProvider {
 public:
  std::vector<KernelInfo> list() const override { return list_kernels<List>(); }
  std::string resolve(std::string_view kernel, DType weights) const override {
    return resolve_kernel<List>(kernel, weights);
  }
  std::unique_ptr<AnySftMoe> make(std::string_view kernel, const Config& config, const AnyBaseWeights& weights,
                                  const LoraWeights& lora,
                                  std::shared_ptr<Workspace> workspace) const override {
    return make_sft_moe<List>(kernel, config, weights, lora, std::move(workspace));
  }
};

AMX_SFT_MOE_NAMESPACE_END
