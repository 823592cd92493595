// Plain data and a plain interface between the two builds of the library in recorder_cost.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace recorder_cost {

// A layer of Qwen3-30B-A3B with LoRA of rank 16; floating-point values as bits of bf16, routing weights in fp32.
struct Data {
  static constexpr std::int64_t kExperts = 128, kTopK = 8, kHidden = 2048, kIntermediate = 768, kRank = 16;
  std::int64_t tokens = 0;
  std::vector<std::uint16_t> gate, up, down;
  std::array<std::vector<std::uint16_t>, 6> factors, grads;
  std::vector<std::uint16_t> x, y, grad_y, grad_x;
  std::vector<float> weights, grad_weights;
  std::vector<std::int64_t> ids;
};

class Variant {
 public:
  Variant() = default;
  Variant(const Variant&) = delete;
  Variant& operator=(const Variant&) = delete;
  virtual ~Variant() = default;
  virtual double step() = 0;  // milliseconds of a forward and a backward
  virtual std::string kernel() const = 0;
};

std::unique_ptr<Variant> make_with_timer(Data& data, const std::string& kernel, int threads);
std::unique_ptr<Variant> make_without_timer(Data& data, const std::string& kernel, int threads);

// Microseconds that the dumps of one step, forward and backward, take by themselves: making text, a JSON line and a
// trace's events, and writing each to a file. `recorder` is of make_with_timer, has spans and has run.
struct DumpCosts {
  double text = 0, json = 0, trace = 0;
};
DumpCosts dump_costs(const Variant& recorder, const std::string& file);

}  // namespace recorder_cost
