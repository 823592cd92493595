// A thread's compiled products. Making one takes 0.1 to 0.5 ms, finding it some 50 ns.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>

#include "amx_sft_moe/arch/onednn/matmul.hpp"
#include "amx_sft_moe/core/aligned_buffer.hpp"
#include "amx_sft_moe/core/kernel_state.hpp"

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace arch::onednn {

class MatmulCache final : public KernelState {
 public:
  void run(const Shape& shape, const void* a, const void* b, float* c) {
    translated(shape, [&] {
      Matmul& matmul = find(shape);
      scratchpad_.reserve(matmul.scratchpad_bytes());
      matmul.run(a, b, c, scratchpad_.data());
    });
  }

  // Room for operands in another layout.
  float* extra(index_t count) {
    extra_.reserve(count);
    return extra_.data();
  }

  index_t bytes() const override {
    return scratchpad_.bytes() + extra_.bytes() + static_cast<index_t>(matmuls_.size() * sizeof(Matmul));
  }
  std::unique_ptr<KernelState> make_empty() const override { return std::make_unique<MatmulCache>(); }
  void grow_to(const KernelState& other) override {
    const auto& theirs = static_cast<const MatmulCache&>(other);
    scratchpad_.reserve(theirs.scratchpad_.bytes());
    extra_.reserve(theirs.extra_.capacity());
    // One that started anew is not filled again with what the others still hold: they start anew after it.
    if (generation_ < theirs.generation_) start_anew(theirs.generation_);
    if (generation_ > theirs.generation_ || signature_ == theirs.signature_) return;
    for (const auto& [shape, matmul] : theirs.matmuls_) {
      if (matmuls_.size() >= kMost) return;
      if (matmuls_.contains(shape)) continue;
      translated(shape, [&, &key = shape, &from = matmul] { add(key, from.for_another_thread()); });
    }
  }

 private:
  // A layer needs some 50 to 300: row counts are cut into few sizes (microkernel.hpp), columns come in pairs of
  // panels.
  static constexpr std::size_t kMost = 1024;

  struct Hash {
    std::size_t operator()(const Shape& shape) const { return shape.hash(); }
  };

  Matmul& find(const Shape& shape) {
    if (const auto found = matmuls_.find(shape); found != matmuls_.end()) return found->second;
    if (matmuls_.size() >= kMost) start_anew(generation_ + 1);  // shapes that keep changing
    return add(shape, Matmul(engine_, shape));
  }

  void start_anew(std::uint64_t generation) {
    matmuls_.clear();
    signature_ = 0;
    generation_ = generation;
  }

  Matmul& add(const Shape& shape, Matmul&& matmul) {
    Matmul& added = matmuls_.emplace(shape, std::move(matmul)).first->second;
    signature_ ^= shape.hash();
    return added;
  }

  dnnl::engine engine_ = make_engine();
  std::unordered_map<Shape, Matmul, Hash> matmuls_;
  std::size_t signature_ = 0;     // of the set of shapes: equal sets, equal signatures
  std::uint64_t generation_ = 0;  // how often it, or the one that it follows, started anew
  AlignedBuffer<std::byte> scratchpad_;
  AlignedBuffer<float> extra_;
};

}  // namespace arch::onednn
AMX_SFT_MOE_NAMESPACE_END
