// The three GEMM forms beside the machine's measured limits, weights streamed from memory.
//
//   bench_gemm [threads] [kernel] [out in [m ...]]
//
// Default: all OpenMP threads, all kernels, weights [1536, 2048], 1 to 512 rows.
//
// Each measurement walks over enough distinct weight matrices (1.5 GiB at most) that none is found in a cache.
// gemm_tn is the LoRA gradient's shape: r = 16 rows. Where oneDNN was found, `onednn_alone` is its matmul on
// the same work without this library.
#include <cstdio>
#include <exception>
#include <stdexcept>
#include <string>

#include "../examples/command_line.hpp"
#include "kernels.hpp"
#include "machine.hpp"
#include "random_data.hpp"
#ifdef BENCH_HAS_ONEDNN
#include "onednn_alone.hpp"
#endif

namespace {

using namespace amx_sft_moe;  // NOLINT(google-build-using-namespace)
using bench::Machine;

constexpr index_t kRank = 16;

struct Shape {
  index_t out = 1536, in = 2048;
  std::vector<index_t> rows{1, 4, 8, 16, 32, 64, 128, 256, 512};
};

// Matrices W [out, in] in one buffer, and enough activations for any form.
template <class Kernel>
struct Operands {
  using W = typename Kernel::Weight;
  AlignedBuffer<W> weights;
  AlignedBuffer<W> activations;  // [m, max(in, out)]
  AlignedBuffer<typename Kernel::Compute> x_panels;
  std::vector<AlignedBuffer<float>> results;
  std::vector<gemm::Scratch> scratch;
  index_t matrices = 0;

  Operands(const Shape& shape, index_t most_rows, int threads) : results(threads), scratch(threads) {
    matrices = (index_t{3} << 29) / (shape.out * shape.in * static_cast<index_t>(sizeof(W)));
    bench::fill(weights, matrices * shape.out * shape.in, 0.02F, 1);
    bench::fill(activations, most_rows * std::max(shape.in, shape.out), 1.0F, 2);
    for (auto& result : results) result.reserve(std::max(most_rows, kRank) * std::max(shape.in, shape.out));
    x_panels.reserve(round_up(most_rows, arch::kPanelCols) * gemm::token_stride<Kernel>(shape.in));
  }
  MatrixView<const W> matrix(index_t i, const Shape& shape) const {
    return {weights.data() + i * shape.out * shape.in, shape.out, shape.in, shape.in};
  }
};

template <class Kernel>
void store(const gemm::Block& block, float* result, index_t stride) {
  const arch::BlockTarget<float> to{result + block.row * stride + block.col, stride, 1, false, 1.0F, nullptr};
  Kernel::Rows::store(block.c, block.stride, block.rows, block.cols, to);
}

// Runs work(thread context, task) for all tasks and returns seconds.
template <class Kernel, class Work>
double run(Operands<Kernel>& operands, int threads, index_t tasks, Work&& work) {
  return bench::seconds_of([&] {
    parallel::run_tasks(threads, tasks, [&](int thread) {
      return [&, thread,
              context = gemm::ThreadContext<Kernel>(operands.scratch[static_cast<std::size_t>(thread)])](
                 index_t task) mutable {
        work(context, operands.results[static_cast<std::size_t>(thread)].data(), task);
      };
    });
  });
}

// A product with each matrix, cut as the operator cuts it: rows of tokens, then columns of the result.
struct Tasks {
  index_t matrices, rows, cols;

  index_t count() const { return matrices * rows * cols; }
  index_t matrix(index_t task) const { return task / (rows * cols); }
  index_t row(index_t task) const { return task / cols % rows; }
  index_t col(index_t task) const { return task % cols; }
};

template <class Kernel>
double nt_seconds(Operands<Kernel>& operands, const Shape& shape, index_t m, int threads) {
  using E = typename Kernel::Compute;
  const index_t stride = gemm::token_stride<Kernel>(shape.in) * arch::kPanelCols;
  const gemm::Panels<E> x{operands.x_panels.data(), stride};
  gemm::pack_operand<Kernel>(
      MatrixView<const typename Kernel::Weight>{operands.activations.data(), m, shape.in, shape.in}, m,
      shape.in, x);
  const index_t step = std::min(m, gemm::Blocking::of_this_machine().tokens_for<Kernel>(shape.in, m));
  const Tasks tasks{operands.matrices, ceil_div(m, step),
                    ceil_div(shape.out, gemm::Blocking::kOutRows<Kernel>)};
  return run<Kernel>(operands, threads, tasks.count(), [&](auto& context, float* result, index_t task) {
    const index_t token = tasks.row(task) * step;
    const index_t tokens = std::min(step, m - token);
    const index_t first = tasks.col(task) * gemm::Blocking::kOutRows<Kernel>;
    const index_t rows = std::min(gemm::Blocking::kOutRows<Kernel>, shape.out - first);
    const auto weight = gemm::AnyRows(operands.matrix(tasks.matrix(task), shape)).from(first, 0);
    const auto x_here = x.from_column(token);
    const std::array<gemm::Term<E>, 1> terms{{{weight, shape.in, {x_here.data, x_here.panel_stride}}}};
    const std::array<std::span<const gemm::Term<E>>, 1> outputs{{terms}};
    const auto store_block = [&](const std::array<gemm::TokenBlock, 1>& blocks) {
      const gemm::TokenBlock& block = blocks[0];
      gemm::store_tokens<Kernel>(block, result + (token + block.token) * shape.out + first + block.out,
                                 shape.out, 1.0F, nullptr);
    };
    gemm::gemm_nt<Kernel>(context, rows, tokens, m, outputs, store_block);
  });
}

template <class Kernel>
double nn_seconds(Operands<Kernel>& operands, const Shape& shape, index_t m, int threads) {
  const index_t step = std::min(m, gemm::Blocking::even_tokens(m, gemm::Blocking::kTokensPerTask));
  const index_t wide =
      gemm::Blocking::of_this_machine().cols_for<Kernel>(shape.out, step, shape.in, operands.matrices, threads);
  const Tasks tasks{operands.matrices, ceil_div(m, step), ceil_div(shape.in, wide)};
  return run<Kernel>(operands, threads, tasks.count(), [&](auto& context, float* result, index_t task) {
    const index_t row = tasks.row(task) * step;
    const index_t rows = std::min(step, m - row);
    const index_t first = tasks.col(task) * wide;
    const index_t cols = std::min(wide, shape.in - first);
    const auto weight = gemm::AnyRows(operands.matrix(tasks.matrix(task), shape)).from(0, first);
    const MatrixView<typename Kernel::Weight> grad{operands.activations.data() + row * shape.out, rows,
                                                   shape.out, shape.out};
    const std::array<gemm::NnTerm, 1> terms{{{grad, weight, shape.out}}};
    gemm::gemm_nn<Kernel>(context, rows, cols, terms, [&](const gemm::Block& block) {
      store<Kernel>(block, result + row * shape.in + first, shape.in);
    });
  });
}

// grad_A [r, in] = v^T x: `m` tokens of x are the streamed operand, taken from the weights' memory.
template <class Kernel>
double tn_seconds(Operands<Kernel>& operands, const Shape& shape, index_t m, int threads, index_t* products) {
  const index_t wide =
      gemm::Blocking::of_this_machine().cols_for<Kernel>(m, m, shape.in, operands.matrices, threads);
  const index_t per_batch = ceil_div(shape.in, wide);
  const index_t batches = std::min<index_t>(operands.matrices * shape.out / m, 1 << 14);
  *products = batches;
  return run<Kernel>(operands, threads, batches * per_batch, [&](auto& context, float* result, index_t task) {
    const index_t first = task % per_batch * wide;
    const index_t cols = std::min(wide, shape.in - first);
    const arch::RowSource<typename Kernel::Weight> x{
        operands.weights.data() + task / per_batch * m * shape.in + first, shape.in, 1, nullptr};
    const arch::RowSource<typename Kernel::Weight> v{operands.activations.data(), kRank, 1, nullptr};
    const auto panels = gemm::pack_tokens<Kernel>(context, x, m, cols);
    gemm::gemm_tn<Kernel>(context, kRank, std::array<gemm::Factor, 1>{{{v, nullptr}}}, panels,
                          [&](const gemm::Block& block) { store<Kernel>(block, result + first, shape.in); });
  });
}

// Peak and limit are of the kernel's own instructions.
void report(std::string_view kernel, const char* form, index_t m, double flop, double bytes, double seconds,
            const Machine& machine) {
  const double peak = machine.peak_of_kernel(kernel);
  const double limit = std::max(flop / (peak * 1e9), bytes / (machine.bandwidth * 1e9));
  std::printf("%-12s %-8s m=%-5lld %8.0f GFLOP/s  %4.0f %% of peak  %7.1f GB/s  %4.0f %% of the limit\n",
              kernel.data(), form, static_cast<long long>(m), flop / seconds * 1e-9,
              100 * flop / seconds * 1e-9 / peak, bytes / seconds * 1e-9, 100 * limit / seconds);
}

#ifdef BENCH_HAS_ONEDNN
using Alone = kernels::OneDnnBf16;

// Seconds for all tasks, each one product of this shape by oneDNN alone: work(product, result, task).
template <class Work>
double alone_seconds(Operands<Alone>& operands, const bench::OneDnnAlone::Shape& shape, int threads,
                     index_t tasks, Work&& work) {
  std::vector<std::unique_ptr<bench::OneDnnAlone>> products(static_cast<std::size_t>(threads));
  const auto run_all = [&](index_t count, bool measured) {
    parallel::run_tasks(threads, count, [&](int thread) {
      auto& product = products[static_cast<std::size_t>(thread)];
      auto single = std::make_unique<parallel::SingleThreaded>();
      if (!product) product = std::make_unique<bench::OneDnnAlone>(shape);
      return [&, thread, measured, single = std::move(single)](index_t task) {
        if (measured) work(*product, operands.results[static_cast<std::size_t>(thread)].data(), task);
      };
    });
  };
  run_all(threads, false);  // compiles
  return bench::seconds_of([&] { run_all(tasks, true); });
}

void measure_alone(Operands<Alone>& operands, const Shape& shape, index_t m, int threads, index_t products,
                   std::array<std::vector<double>, 3>& times) {
  // Operands B of this many elements lie one behind the other in the weights' memory.
  const auto streamed = [&operands](index_t elements) {
    return [&operands, elements](bench::OneDnnAlone& product, float* result, index_t task) {
      product(operands.activations.data(), operands.weights.data() + task * elements, result);
    };
  };
  const auto weights = streamed(shape.out * shape.in);
  const index_t matrices = operands.matrices;
  times[0].push_back(
      alone_seconds(operands, {m, shape.out, shape.in, false, true}, threads, matrices, weights));
  times[1].push_back(
      alone_seconds(operands, {m, shape.in, shape.out, false, false}, threads, matrices, weights));
  times[2].push_back(
      alone_seconds(operands, {kRank, shape.in, m, true, false}, threads, products, streamed(m * shape.in)));
}
#endif

// Medians of one kernel's times.
void report_forms(const char* kernel, const Shape& shape, index_t m, index_t matrices, index_t products,
                  index_t element_bytes, const std::array<std::vector<double>, 3>& times,
                  const Machine& machine) {
  const double weights = static_cast<double>(matrices * shape.out * shape.in);
  const double inputs = static_cast<double>(m * shape.in * products);
  const double size = static_cast<double>(element_bytes);
  const double flop = 2.0 * static_cast<double>(m) * weights;
  report(kernel, "gemm_nt", m, flop, weights * size, bench::median(times[0]), machine);
  report(kernel, "gemm_nn", m, flop, weights * size, bench::median(times[1]), machine);
  report(kernel, "gemm_tn", m, 2.0 * kRank * inputs, inputs * size, bench::median(times[2]), machine);
}

template <class Kernel>
void bench_kernel(const Shape& shape, int threads, const Machine& machine) {
  Operands<Kernel> operands(shape, *std::max_element(shape.rows.begin(), shape.rows.end()), threads);
  for (const index_t m : shape.rows) {
    index_t products = 0;
    std::array<std::vector<double>, 3> times;
    std::array<std::vector<double>, 3> alone;
    for (int repeat = 0; repeat < 3; ++repeat) {  // alternating: machines are shared
      times[0].push_back(nt_seconds(operands, shape, m, threads));
      times[1].push_back(nn_seconds(operands, shape, m, threads));
      times[2].push_back(tn_seconds(operands, shape, m, threads, &products));
#ifdef BENCH_HAS_ONEDNN
      if constexpr (std::is_same_v<Kernel, Alone>) measure_alone(operands, shape, m, threads, products, alone);
#endif
    }
    constexpr index_t kElement = sizeof(typename Kernel::Weight);
    report_forms(Kernel::kName.data(), shape, m, operands.matrices, products, kElement, times, machine);
    if (alone[0].empty()) continue;
    report_forms("onednn_alone", shape, m, operands.matrices, products, kElement, alone, machine);
  }
}

// Calls work for each kernel that is timed: on bf16 weights, with instructions of this CPU.
template <class Work>
void for_each_timed(Work&& work) {
  std::string_view done;
  bench::Kernels::for_each([&]<class Kernel>() {
    if constexpr (std::is_same_v<typename Kernel::Weight, bf16>) {
      // Of kernels that share a name the one that it stands for here.
      if (!Kernel::available() || done == Kernel::kName) return;
      if (arch::cpu_features().amx_emulated && Kernel::kName == "amx_bf16") return;
      done = Kernel::kName;
      work.template operator()<Kernel>();
    }
  });
}

struct Options {
  int threads = parallel::default_num_threads();
  std::string only = "all";
  Shape shape;
};

Options parse(int argc, char** argv) {
  using command_line::number;
  Options options;
  if (argc > 1) options.threads = number("threads", argv[1], 1);
  if (argc > 2) options.only = argv[2];
  if (argc == 4) throw std::invalid_argument("out in: expected both or none, got " + std::string(argv[3]));
  if (argc > 4) {
    options.shape.out = number<index_t>("out", argv[3], 1);
    options.shape.in = number<index_t>("in", argv[4], 1);
  }
  if (argc > 5) options.shape.rows.clear();
  for (int i = 5; i < argc; ++i) options.shape.rows.push_back(number<index_t>("m", argv[i], 1));

  std::string names = "all";
  bool known = options.only == "all";
  for_each_timed([&]<class Kernel>() {
    names += " " + std::string(Kernel::kName);
    known = known || options.only == Kernel::kName;
  });
  if (!known) throw std::invalid_argument("kernel: expected one of " + names + ", got " + options.only);
  return options;
}

void run(const Options& options) {
  const Shape& shape = options.shape;
  const Machine machine = bench::measure_machine(options.threads);
  bench::print(machine, options.threads);
  std::printf("weights [%lld, %lld] streamed from memory\n", static_cast<long long>(shape.out),
              static_cast<long long>(shape.in));
  for_each_timed([&]<class Kernel>() {
    if (options.only == "all" || options.only == Kernel::kName)
      bench_kernel<Kernel>(shape, options.threads, machine);
  });
}

}  // namespace

int main(int argc, char** argv) {
  try {
    run(parse(argc, argv));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_gemm: %s\n", error.what());
    return 2;
  }
}
