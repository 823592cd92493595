// One build of the library for recorder_cost: compiled twice, with and without AMX_SFT_MOE_NO_TIMER. Its switches
// are in the inline namespace, so that both fit into one program.
#include <chrono>

#include "amx_sft_moe/amx_sft_moe.hpp"
#include "amx_sft_moe/profile/bounded_file.hpp"
#include "recorder_cost.hpp"

namespace recorder_cost {
namespace {

using namespace amx_sft_moe;  // NOLINT(google-build-using-namespace)

template <class T>
auto* as_bf16(T& bits) {
  if constexpr (std::is_const_v<T>) {
    return reinterpret_cast<const bf16*>(bits.data());
  } else {
    return reinterpret_cast<bf16*>(bits.data());
  }
}

// Compiled twice: the cost is not the kernel's.
using Kernels = kernels::KernelList<kernels::Avx512Bf16, kernels::Avx2<bf16>, kernels::Portable<bf16>>;

class Operator final : public Variant {
 public:
  Operator(Data& data, const std::string& kernel, int threads) : data_(data) {
    Config config;
    config.num_experts = Data::kExperts;
    config.top_k = Data::kTopK;
    config.hidden_size = Data::kHidden;
    config.intermediate_size = Data::kIntermediate;
    config.num_threads = threads;
    config.name = "layers.0";
    const auto experts = [](const std::vector<std::uint16_t>& weight, index_t rows, index_t cols) {
      return ExpertMatrices<const bf16>::stacked(as_bf16(weight), rows, cols);
    };
    const BaseWeights<bf16> base{experts(data.gate, Data::kIntermediate, Data::kHidden),
                                 experts(data.up, Data::kIntermediate, Data::kHidden),
                                 experts(data.down, Data::kHidden, Data::kIntermediate)};
    const auto factor = [&data](int f) {
      return AnyConstExpertTensor(as_bf16(std::as_const(data.factors[static_cast<std::size_t>(f)])),
                                  Data::kExperts, rows(f), cols(f));
    };
    const LoraWeights lora{
        {factor(0), factor(1), 2.0F}, {factor(2), factor(3), 2.0F}, {factor(4), factor(5), 2.0F}};
    moe_ = make_sft_moe<Kernels>(kernel, config, base, lora);
    const auto grad = [&data](int f) {
      return AnyExpertTensor(as_bf16(data.grads[static_cast<std::size_t>(f)]), Data::kExperts, rows(f),
                             cols(f));
    };
    grads_.x = rows_of(data.grad_x);
    grads_.routing_weights = {data.grad_weights.data(), data.tokens, Data::kTopK, Data::kTopK};
    grads_.lora = {grad(0), grad(1), grad(2), grad(3), grad(4), grad(5)};
  }

  double step() override {
    const Routing routing{data_.tokens,
                          {data_.ids.data(), Data::kTopK},
                          {data_.weights.data(), data_.tokens, Data::kTopK, Data::kTopK}};
    const auto begin = std::chrono::steady_clock::now();
    moe_->forward_sft(routing, rows_of(std::as_const(data_.x)), rows_of(data_.y), true);
    moe_->backward(rows_of(std::as_const(data_.grad_y)), grads_);
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
  }
  const AnySftMoe& moe() const { return *moe_; }
  std::string kernel() const override { return std::string(moe_->kernel_name()); }

 private:
  // Of factor f: gate a, b, up a, b, down a, b.
  static index_t rows(int f) { return f % 2 == 0 ? Data::kRank : f < 4 ? Data::kIntermediate : Data::kHidden; }
  static index_t cols(int f) { return f % 2 == 1 ? Data::kRank : f < 4 ? Data::kHidden : Data::kIntermediate; }
  AnyConstMatrix rows_of(const std::vector<std::uint16_t>& bits) const {
    return {as_bf16(bits), data_.tokens, Data::kHidden, Data::kHidden};
  }
  AnyMatrix rows_of(std::vector<std::uint16_t>& bits) const {
    return {as_bf16(bits), data_.tokens, Data::kHidden, Data::kHidden};
  }

  Data& data_;
  std::unique_ptr<AnySftMoe> moe_;
  Gradients grads_;
};

}  // namespace

#ifdef AMX_SFT_MOE_NO_TIMER
std::unique_ptr<Variant> make_without_timer(Data& data, const std::string& kernel, int threads) {
  return std::make_unique<Operator>(data, kernel, threads);
}
#else
std::unique_ptr<Variant> make_with_timer(Data& data, const std::string& kernel, int threads) {
  return std::make_unique<Operator>(data, kernel, threads);
}

DumpCosts dump_costs(const Variant& recorder, const std::string& file) {
  constexpr int kRepeats = 200;
  const AnySftMoe& moe = dynamic_cast<const Operator&>(recorder).moe();
  BoundedFile out(file, std::int64_t{1} << 40, "", "");
  std::string buffer;
  const auto time = [&](auto&& append_dump) {
    const auto begin = std::chrono::steady_clock::now();
    for (int n = 0; n < kRepeats; ++n) {
      for (const StepKind kind : {StepKind::kForward, StepKind::kBackward}) {
        buffer.clear();
        append_dump(kind == StepKind::kForward ? moe.last_forward() : moe.last_backward(), moe.label(kind));
        out.append(buffer);
      }
    }
    return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count() /
           kRepeats;
  };
  DumpCosts costs;
  costs.text = time([&](const StepRecord& r, const StepLabel& label) { buffer = text_dump(r, label); });
  costs.json = time([&](const StepRecord& r, const StepLabel& label) { append_json_dump(buffer, r, label); });
  costs.trace = time([&](const StepRecord& r, const StepLabel& label) {
    append_trace(buffer, r, label, TraceLane::of_caller());
  });
  return costs;
}
#endif

}  // namespace recorder_cost
