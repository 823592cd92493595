// AMX_SFT_MOE<Kernel> behind a wall: same members, but instantiated once per kernel (moe_<kernel>.cpp) instead
// of in every file of tests. And the kernels that typed tests run on.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "amx_sft_moe/amx_sft_moe.hpp"
#ifdef SFT_TEST_HAS_ONEDNN
#include "amx_sft_moe/kernels/onednn.hpp"
#endif

namespace sft_test {

template <class Kernel>
class Moe {
 public:
  using Weight = typename Kernel::Weight;
  using Stored = typename Kernel::Stored;
  using Saved = amx_sft_moe::SavedActivations<Stored>;

  explicit Moe(const amx_sft_moe::Config& config, const amx_sft_moe::BaseWeights<Weight>& weights,
               const amx_sft_moe::LoraWeights& lora = {},
               std::shared_ptr<amx_sft_moe::Workspace> workspace = nullptr);
  ~Moe();
  Moe(Moe&&) noexcept;

  void set_base(const amx_sft_moe::BaseWeights<Weight>& weights);
  void set_lora(const amx_sft_moe::LoraWeights& lora);
  void forward_sft(const amx_sft_moe::Routing& routing, const amx_sft_moe::AnyConstMatrix& x,
                   const amx_sft_moe::AnyMatrix& y, bool save_for_backward = true);
  void backward(const amx_sft_moe::AnyConstMatrix& grad_y, const amx_sft_moe::Gradients& grads);
  void forward_sft(const amx_sft_moe::Routing& routing, const amx_sft_moe::AnyConstMatrix& x,
                   const amx_sft_moe::AnyMatrix& y, const Saved& saved);
  void backward(const amx_sft_moe::Routing& routing, const amx_sft_moe::AnyConstMatrix& x, const Saved& saved,
                const amx_sft_moe::AnyConstMatrix& grad_y, const amx_sft_moe::Gradients& grads);
  void clear();
  amx_sft_moe::index_t saved_depth() const;
  const amx_sft_moe::Config& config() const;
  const amx_sft_moe::LoraWeights& lora() const;
  const amx_sft_moe::StepRecord& last_forward() const;
  const amx_sft_moe::StepRecord& last_backward() const;
  std::string backward_text() const;
  void set_observer(amx_sft_moe::StepObserver* observer);
  void set_name(const std::string& name);
  void set_number(std::int64_t number);
  amx_sft_moe::MemoryReport memory() const;

 private:
  std::unique_ptr<amx_sft_moe::AMX_SFT_MOE<Kernel>> moe_;
};

using PortableBf16 = amx_sft_moe::kernels::Portable<amx_sft_moe::bf16>;
using PortableFp32 = amx_sft_moe::kernels::Portable<float>;
using Avx2Bf16 = amx_sft_moe::kernels::Avx2<amx_sft_moe::bf16>;
using Avx2Fp32 = amx_sft_moe::kernels::Avx2<float>;
using Avx512Bf16 = amx_sft_moe::kernels::Avx512Bf16;
using Avx512WidenedBf16 = amx_sft_moe::kernels::Avx512<amx_sft_moe::bf16>;
using Avx512Fp32 = amx_sft_moe::kernels::Avx512<float>;
using AmxBf16 = amx_sft_moe::kernels::AmxBf16;

#ifdef SFT_TEST_HAS_ONEDNN
// Of the seven kernels named onednn five: every way of packing and row operation, each with one type of weights,
// and what fp32 weights get on a CPU with AVX2 alone.
using OneDnnBf16 = amx_sft_moe::kernels::OneDnnBf16;
using OneDnnFp32 = amx_sft_moe::kernels::OneDnn<float, amx_sft_moe::kernels::OneDnnWithAvx512>;
using OneDnnWidenedBf16 = amx_sft_moe::kernels::OneDnn<amx_sft_moe::bf16, amx_sft_moe::kernels::OneDnnWithAvx2>;
using OneDnnAvx2Fp32 = amx_sft_moe::kernels::OneDnn<float, amx_sft_moe::kernels::OneDnnWithAvx2>;
using OneDnnPlainFp32 = amx_sft_moe::kernels::OneDnn<float, amx_sft_moe::kernels::OneDnnAnywhere>;
#define SFT_TEST_ONEDNN_KERNELS , OneDnnBf16, OneDnnFp32, OneDnnWidenedBf16, OneDnnAvx2Fp32, OneDnnPlainFp32
using ListedKernels =
    amx_sft_moe::kernels::Joined<amx_sft_moe::DefaultKernels, amx_sft_moe::kernels::OneDnnKernels>;
#else
#define SFT_TEST_ONEDNN_KERNELS
using ListedKernels = amx_sft_moe::DefaultKernels;
#endif

using AllKernels = testing::Types<PortableBf16, PortableFp32, Avx2Bf16, Avx2Fp32, Avx512Bf16, Avx512WidenedBf16,
                                  Avx512Fp32, AmxBf16 SFT_TEST_ONEDNN_KERNELS>;
#undef SFT_TEST_ONEDNN_KERNELS

template <class Kernel>
inline constexpr amx_sft_moe::DType kWeightDType = amx_sft_moe::kDTypeOf<typename Kernel::Weight>;

// Products by oneDNN, which allocates in each.
template <class Kernel>
inline constexpr bool kIsOneDnn = Kernel::kName == "onednn";

// "portable_fp32", "onednn_plain_fp32"; also names the instances of typed tests.
template <class Kernel>
std::string kernel_label() {
  std::string label(Kernel::kName);
  if constexpr (requires { Kernel::kVariant; }) label += "_" + std::string(Kernel::kVariant);
  return label + "_" + std::string(amx_sft_moe::name_of(kWeightDType<Kernel>));
}

struct KernelLabels {
  template <class Kernel>
  static std::string GetName(int) {
    return kernel_label<Kernel>();
  }
};

// A fixture whose tests are skipped where the CPU (or the emulator) does not have the kernel.
template <class Kernel>
class KernelTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!Kernel::available()) {
      GTEST_SKIP() << Kernel::kName
                   << " is not available: this CPU lacks the instructions, and no emulator of them is"
                   << " linked and installed";
    }
  }
};

}  // namespace sft_test
