// Steps of the operator as a shared library, for compare_steps.py: compiled against the headers of one source tree and
// loaded beside that of another. Both work on the layer that one of them made, so that neither has better memory.
#include <chrono>
#include <exception>
#include <stdexcept>
#include <string>

#include "amx_sft_moe/amx_sft_moe.hpp"
#include "layer.hpp"

#ifndef BENCH_KERNEL
#define BENCH_KERNEL amx_sft_moe::kernels::Avx512<amx_sft_moe::bf16>
#endif

namespace {

using namespace amx_sft_moe;  // NOLINT(google-build-using-namespace)
using Kernel = BENCH_KERNEL;
using Operator = AMX_SFT_MOE<Kernel>;

struct Stepper {
  const bench::Layer& layer;
  Operator op;

  Stepper(const bench::Layer& of, int threads) : layer(of), op(of.config(threads), of.base(), of.adapters()) {}
};

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

void step(Stepper& stepper, double* seconds) {
  const bench::Layer& layer = stepper.layer;
  auto begin = std::chrono::steady_clock::now();
  stepper.op.forward_sft(layer.routing(), layer.const_rows(layer.x), layer.rows(layer.y), true);
  seconds[0] = seconds_since(begin);
  begin = std::chrono::steady_clock::now();
  stepper.op.backward(layer.const_rows(layer.grad_y), layer.gradients());
  seconds[1] = seconds_since(begin);
}

std::string message_of_last;

// What make() returns, or a null where it throws: no exception gets through to C.
template <class Make>
auto or_null(Make&& make) -> decltype(make()) {
  message_of_last.clear();
  try {
    return make();
  } catch (const std::exception& error) {
    message_of_last = error.what();
  }
  return {};
}

}  // namespace

extern "C" {

// Asks the operating system too, where the kernel needs its permission.
int is_available() {
  return Kernel::available() ? 1 : 0;
}

// Why the last call returned a null or false; empty where it did not.
const char* last_error() {
  return message_of_last.c_str();
}

// A layer of a published model.
const bench::Layer* new_layer(const char* shape, index_t tokens, bool zipf) {
  return or_null([&]() -> const bench::Layer* {
    const bench::LayerShape* named = bench::shape_named(shape);
    if (named == nullptr) throw std::invalid_argument("no such layer in benchmarks/layer.hpp");
    bench::LayerOptions options;
    options.spread = zipf ? bench::Spread::kZipf : bench::Spread::kUniform;
    return new bench::Layer(*named, tokens, options);
  });
}

void free_layer(const bench::Layer* layer) {
  delete layer;
}

// An operator over that layer.
Stepper* new_stepper(const bench::Layer* layer, int threads) {
  return or_null([&] { return new Stepper(*layer, threads); });
}
void free_stepper(Stepper* stepper) {
  delete stepper;
}

// A step that brings caches and threads to this operator, and one that counts: seconds of its forward and its backward.
bool run_step(Stepper* stepper, double* seconds) {
  return or_null([&] {
    for (int i = 0; i < 2; ++i) step(*stepper, seconds);
    return true;
  });
}
}
