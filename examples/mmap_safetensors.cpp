// Runs a layer's experts straight from a safetensors file: mapped read-only, read where they lie, by forward
// and backward alike. No byte of the weights is copied; what the layer does not touch is never loaded.
//
//     mmap_safetensors FILE [--layer N]                   bf16 or fp32, separate or fused tensors
//     mmap_safetensors --write FILE [--fused] [--fp32]    makes such a file of random experts, runs them
//                                                         from memory: both must print the same bits
#include <chrono>
#include <cmath>
#include <iostream>

#include "command_line.hpp"
#include "mmap_safetensors/write.hpp"

using namespace mmap_safetensors;
namespace sft = amx_sft_moe;

namespace {

struct Options {
  std::string file;
  index_t layer = 0;
  bool write = false, fused = false, fp32 = false;
};

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--write") {
      options.write = true;
    } else if (argument == "--fused") {
      options.fused = true;
    } else if (argument == "--fp32") {
      options.fp32 = true;
    } else if (argument == "--layer" && i + 1 < argc) {
      options.layer = command_line::number<index_t>("--layer", argv[++i], 0);
    } else if (options.file.empty() && argument.rfind("--", 0) != 0) {
      options.file = argument;
    } else {
      throw Error(argument + ": no such option");
    }
  }
  if (options.file.empty())
    throw Error("usage: mmap_safetensors [--write [--fused] [--fp32]] FILE [--layer N]");
  return options;
}

// Inputs of a step, the same for every run, and its results.
struct Step {
  static constexpr index_t kTokens = 32;
  index_t hidden, top_k;
  std::vector<float> x, grad_y, weights, y, grad_x;
  std::vector<std::int64_t> ids;

  static index_t top_k_of(const LayerShape& shape) { return std::min<index_t>(4, shape.experts); }

  explicit Step(const LayerShape& shape) : hidden(shape.hidden), top_k(top_k_of(shape)) {
    std::mt19937 random(2);
    std::normal_distribution<float> normal;
    const auto size = static_cast<std::size_t>(kTokens * hidden);
    for (std::size_t i = 0; i < size; ++i) x.push_back(normal(random));
    for (std::size_t i = 0; i < size; ++i) grad_y.push_back(normal(random));
    y.resize(size);
    grad_x.resize(size);
    for (index_t i = 0; i < kTokens * top_k; ++i) ids.push_back(i * 5 % shape.experts);
    weights.assign(ids.size(), 1.0F / static_cast<float>(top_k));
  }

  double run(sft::AnySftMoe& experts) {  // milliseconds
    const auto begin = std::chrono::steady_clock::now();
    const sft::Routing routing{kTokens, {ids.data(), top_k}, {weights.data(), kTokens, top_k, top_k}};
    experts.forward_sft(routing, {x.data(), kTokens, hidden, hidden}, {y.data(), kTokens, hidden, hidden},
                        /*save_for_backward=*/true);
    sft::Gradients grads;
    grads.x = {grad_x.data(), kTokens, hidden, hidden};
    experts.backward({grad_y.data(), kTokens, hidden, hidden}, grads);
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
  }
};

double norm(const std::vector<float>& values) {
  double sum = 0;
  for (const float value : values) sum += static_cast<double>(value) * static_cast<double>(value);
  return std::sqrt(sum);
}

// FNV-1a over the bits: equal where every element is.
std::uint64_t bits(const std::vector<float>& values) {
  std::uint64_t hash = 0xcbf29ce484222325U;
  for (const float value : values) hash = (hash ^ std::bit_cast<std::uint32_t>(value)) * 0x100000001b3U;
  return hash;
}

void run_layer(const LayerShape& shape, const sft::AnyBaseWeights& weights) {
  const sft::Config config{.num_experts = shape.experts,
                           .top_k = Step::top_k_of(shape),
                           .hidden_size = shape.hidden,
                           .intermediate_size = shape.intermediate};
  const auto experts =
      sft::make_sft_moe("auto", config, weights);  // refuses what no layer can have, before memory
  Step step(shape);
  std::cout << shape.experts << " experts, H " << shape.hidden << ", I " << shape.intermediate << ", "
            << shape.dtype << ", kernel " << experts->kernel_name() << "\n";
  const double first = step.run(*experts), second = step.run(*experts);
  std::cout << "norm of y " << norm(step.y) << ", of grad_x " << norm(step.grad_x) << ", bits " << std::hex
            << bits(step.y) << " " << bits(step.grad_x) << std::dec << "\n"
            << "first step " << first << " ms, second " << second << " ms\n";
}

template <class T>
void write(const Options& options) {
  const RandomExperts<T> experts(
      {options.fused, kDTypeName<T>, /*experts=*/8, /*intermediate=*/192, /*hidden=*/256});
  write_layer(options.file, options.layer, experts);
  run_layer(experts.shape, experts.weights());
}

template <class T>
void read(const SafetensorsFile& file, index_t layer) {
  const ExpertsOfLayer<T> experts(file, layer);
  run_layer(shape_of_layer(file, layer), experts.weights());
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const Options options = parse(argc, argv);
    if (options.write) {
      options.fp32 ? write<float>(options) : write<bf16>(options);
    } else {
      const SafetensorsFile file(options.file);
      const bool fp32 = shape_of_layer(file, options.layer).dtype == kDTypeName<float>;
      fp32 ? read<float>(file, options.layer) : read<bf16>(file, options.layer);
    }
  } catch (const std::exception& error) {
    std::cerr << "mmap_safetensors: " << error.what() << "\n";
    return 2;
  }
}
