// Trains a small Mixture-of-Experts language model, character by character, on real text: all in C++, with this
// library for the experts and a few hundred lines of our own (char_model/) for everything else.
//
// What is trained: embeddings, the linear mixer of the window, the routers, the output head, and the LoRA
// factors of the experts. What is not: the experts' base weights. The operator could train them too
// (Gradients::weights); here they stay random, as nobody pretrained them, and the experts learn within rank 32
// of that. It is no way to train a large model; it is an honest test that gradients of factors, inputs and
// routing weights are right: without the experts this model is linear but for its norms.
//
//     char_model [--steps N] [--kernel NAME] [--threads N] [--text FILE] [--seed N] [--check-only]
//
// First the gradients are compared with differences of the loss (fp32 weights); a deviation ends the program
// with status 1. The same seed and kernel give the same losses, whatever the number of threads.
#include <chrono>
#include <cstdlib>
#include <functional>
#include <iomanip>
#include <iostream>
#include <map>
#ifdef _OPENMP
#include <omp.h>
#endif

#include "char_model/gradient_check.hpp"
#include "command_line.hpp"

using namespace char_model;

namespace {

struct Options {
  int steps = 960;
  std::string kernel = "auto";
  int threads = 0;  // 0: as many as OpenMP chooses
  std::string text;
  std::uint64_t seed = 1;
  bool check_only = false;
};

Options parse(int argc, char** argv) {
  using command_line::number;
  Options options;
  const std::map<std::string, std::function<void(const std::string&)>> takers{
      {"--steps", [&](const std::string& value) { options.steps = number("--steps", value, 0); }},
      {"--kernel", [&](const std::string& value) { options.kernel = value; }},
      {"--threads", [&](const std::string& value) { options.threads = number("--threads", value, 0); }},
      {"--text", [&](const std::string& value) { options.text = value; }},
      {"--seed", [&](const std::string& value) { options.seed = number("--seed", value, std::uint64_t{0}); }},
  };
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "--check-only") {
      options.check_only = true;
    } else if (const auto taker = takers.find(name); taker != takers.end() && i + 1 < argc) {
      taker->second(argv[++i]);
    } else {
      throw std::invalid_argument(name + ": no such option, or its value is missing");
    }
  }
  return options;
}

// A kernel for bf16 weights trains on them; all others, "auto" included, on fp32.
sft::DType weights_for(std::string kernel) {
  const char* variable = std::getenv("AMX_SFT_MOE_KERNEL");
  if (kernel == "auto" && variable != nullptr) kernel = variable;
  bool fp32 = kernel == "auto", bf16 = false;
  for (const sft::KernelInfo& info : sft::list_kernels()) {
    if (info.name == kernel) (info.weights == sft::DType::kFp32 ? fp32 : bf16) = true;
  }
  return bf16 && !fp32 ? sft::DType::kBf16 : sft::DType::kFp32;
}

// The best for fp32 weights, whatever AMX_SFT_MOE_KERNEL says.
std::string fp32_kernel() {
  for (const sft::KernelInfo& info : sft::list_kernels()) {
    if (info.available && info.weights == sft::DType::kFp32) return std::string(info.name);
  }
  return "auto";
}

// Differences of the loss need fp32 weights, and factors B that are not zero: else no gradient reaches A.
bool gradients_agree(const ModelShape& shape, const Text& text, std::uint64_t seed) {
  constexpr double kAllowed = 1e-2;
  std::mt19937_64 random(seed);
  Model model(shape, random);
  for (Parameter* parameter : model.parameters()) {
    if (parameter->name.ends_with("lora_b")) fill_normal(parameter->value, 0.1F, random);
  }
  model.use_kernel(fp32_kernel(), sft::DType::kFp32);
  std::cout << "gradients against differences of the loss, kernel " << model.experts(0).kernel_name()
            << ", relative deviation:\n";
  const double worst = GradientCheck(model, text.training(24, random)).run();
  std::cout << "largest relative deviation " << worst << (worst <= kAllowed ? ": good\n" : ": WRONG\n");
  return worst <= kAllowed;
}

void train(Model& model, const Text& text, const Options& options, std::mt19937_64& random) {
  constexpr std::size_t kBatch = 512;
  const int every = std::max(1, options.steps / 12);
  const Batch held_out = text.held_out(2048);
  const AdamW optimizer;
  double training_loss = 0;
  auto begin = std::chrono::steady_clock::now();
  std::cout << "step 0: held-out " << model.loss(held_out) << " nats\n";
  for (int step = 1; step <= options.steps; ++step) {
    const Batch batch = text.training(kBatch, random);
    training_loss += model.loss(batch, Model::Mode::kTrain) / every;
    model.backward(batch);
    const float done = static_cast<float>(step) / static_cast<float>(options.steps);
    optimizer.update(model.parameters(), step, std::min(static_cast<float>(step) / 20.0F, 1.0F - 0.9F * done));
    if (step % every != 0) continue;
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    std::cout << "step " << step << ": training " << training_loss << ", held-out " << model.loss(held_out)
              << " nats, " << std::lround(static_cast<double>(kBatch) * every / took.count()) << " tokens/s"
              << std::endl;
    training_loss = 0;
    begin = std::chrono::steady_clock::now();
  }
}

// What the model writes, beginning where the held-out text does.
std::string write(Model& model, const Text& text, std::size_t length, std::mt19937_64& random) {
  std::vector<std::size_t> context = text.held_out(1).context;
  std::string written;
  for (std::size_t i = 0; i < length; ++i) {
    Floats probabilities = model.forward(context);
    softmax(probabilities.data(), probabilities.size());
    std::discrete_distribution<std::size_t> next(probabilities.begin(), probabilities.end());
    context.erase(context.begin());
    context.push_back(next(random));
    written += text.letter(context.back());
  }
  return written;
}

int run(const Options& options) {
#ifdef _OPENMP
  if (options.threads > 0) omp_set_num_threads(options.threads);  // the operator's too
#endif
  ModelShape shape;
  const Text text(options.text.empty() ? read_licences() : read_file(options.text), shape.window);
  shape.symbols = text.alphabet_size();
  std::cout << std::setprecision(5) << text.size() << " characters, " << shape.symbols << " symbols\n";
  if (!gradients_agree(shape, text, options.seed)) return 1;
  if (options.check_only) return 0;

  std::mt19937_64 random(options.seed);
  Model model(shape, random);
  model.use_kernel(options.kernel, weights_for(options.kernel));
  std::cout << "training with kernel " << model.experts(0).kernel_name() << ", "
            << name_of(model.experts(0).weight_dtype()) << " weights\n";
  train(model, text, options, random);
  std::cout << "it writes: " << write(model, text, 240, random) << "\n\nthe last backward of layer 0:\n"
            << text_dump(model.experts(0).last_backward(), {sft::StepKind::kBackward, "", ""});
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(parse(argc, argv));
  } catch (const std::exception& error) {
    std::cerr << "char_model: " << error.what() << "\n";
    return 2;
  }
}
