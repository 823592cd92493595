// The three GEMM forms beside the machine's measured limits and beside oneDNN, operands streamed from memory.
//
//   bench_gemm [threads] [kernel] [out in [m ...]]
//
// Default: all OpenMP threads, all kernels on bf16 weights, weights [1536, 2048], 1 to 512 rows. Kernels on fp32
// weights are named KERNEL_fp32, all of them all_fp32.
//
// Each measurement walks over enough distinct weight matrices (1.5 GiB at most) that none is found in a cache. Not so
// gemm_tn of few tokens: its 16384 products at most read 64 MiB of x with m = 1 and 256 MiB with m = 4 (2048 columns of
// bf16), each turn the same, much of which a large cache keeps.
// gemm_tn is the LoRA gradient's shape, r = 16 rows; gemm_tn_full the gradient of a base weight, by the operator's own
// tasks. Where oneDNN was found, every form takes turns with `onednn_alone`, its matmul on the same work without this
// library: ours, oneDNN, ours, ... `ours / oneDNN` is the median of the ratios of the times of a turn. Where the CPU
// has no AVX512-BF16, oneDNN has no bf16 products and gets the same work in fp32, named so: onednn_alone_fp32.
//
// Machines are shared and a kernel takes minutes: the machine's limits are measured before the first kernel and again
// behind each one, and the best values so far count for its shares. So its lines appear when it is done, below those.
#include <algorithm>
#include <array>
#include <cstdio>
#include <exception>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "../examples/command_line.hpp"
#include "gemm_forms.hpp"
#include "kernels.hpp"
#ifdef BENCH_HAS_ONEDNN
#include "onednn_alone.hpp"
#endif

namespace {

using namespace amx_sft_moe;  // NOLINT(google-build-using-namespace)
using bench::Form;
using bench::GemmMemory;
using bench::GemmShape;
using bench::Machine;

constexpr int kTurns = 5;

// Who multiplies.
struct Candidate {
  std::string name;
  double (*peak)(const Machine& machine);          // GFLOP/s of its instructions
  index_t element;                                 // bytes of an element of its operands
  std::function<double(Form, index_t m)> seconds;  // of one product
};

template <class W>
std::string with_type(std::string_view name) {
  return std::string(name) + (kDTypeOf<W> == DType::kFp32 ? "_fp32" : "");
}

template <class Kernel>
std::string label() {
  return with_type<typename Kernel::Weight>(Kernel::kName);
}

// Of its own instructions; oneDNN's are the fastest that fit its operands.
template <class Kernel>
double peak_of(const Machine& machine) {
  const bool onednn_in_fp32 = Kernel::kName == "onednn" && std::is_same_v<typename Kernel::Compute, float>;
  return onednn_in_fp32 ? bench::peak_of_fp32(machine) : machine.peak_of_kernel(Kernel::kName);
}

void report(const Candidate& who, Form form, index_t m, const GemmShape& shape, double seconds,
            const Machine& machine) {
  const bench::GemmWork work = bench::work_of(form, shape, m, who.element);
  const double peak = who.peak(machine);
  const double limit = std::max(work.flop / (peak * 1e9), work.bytes / (machine.bandwidth * 1e9));
  std::printf("%-17s %-12s m=%-5lld %8.0f GFLOP/s  %4.0f %% of peak  %7.1f GB/s  %4.0f %% of the limit",
              who.name.c_str(), bench::name_of(form), static_cast<long long>(m), work.flop / seconds * 1e-9,
              100 * work.flop / seconds * 1e-9 / peak, work.bytes / seconds * 1e-9, 100 * limit / seconds);
}

// Seconds of a product of each candidate, in each turn.
struct Turns {
  Form form;
  index_t m;
  std::vector<std::vector<double>> times;
};

// The first candidate and those that it is compared with, taking turns: machines are shared.
Turns take_turns(const std::vector<Candidate>& candidates, Form form, index_t m) {
  Turns turns{form, m, std::vector<std::vector<double>>(candidates.size())};
  for (int turn = 0; turn < kTurns; ++turn) {
    for (std::size_t c = 0; c < candidates.size(); ++c) {
      turns.times[c].push_back(candidates[c].seconds(form, m));
    }
  }
  return turns;
}

void report(const std::vector<Candidate>& candidates, const Turns& turns, const GemmShape& shape,
            const Machine& machine) {
  for (std::size_t c = 0; c < candidates.size(); ++c) {
    report(candidates[c], turns.form, turns.m, shape, bench::median(turns.times[c]), machine);
    if (c > 0) std::printf("  ours / oneDNN %.2f", bench::median_ratio(turns.times[0], turns.times[c]));
    std::printf("\n");
  }
}

// The machine's limits with that many threads, the best of all measurements so far.
struct Limits {
  int threads;
  Machine best{};

  void measure() {
    best = bench::better_of(best, bench::measure_machine(threads));
    bench::print(best, threads);
  }
};

void bench_all(const std::vector<Candidate>& candidates, const GemmShape& shape, Limits& limits) {
  std::vector<Turns> all;
  for (const index_t m : shape.rows) {
    for (const Form form : bench::kForms) all.push_back(take_turns(candidates, form, m));
  }
  limits.measure();
  for (const Turns& turns : all) report(candidates, turns, shape, limits.best);
  std::fflush(stdout);
}

template <class Kernel>
Candidate ours(bench::KernelForms<Kernel>& forms) {
  return {label<Kernel>(), peak_of<Kernel>, sizeof(typename Kernel::Weight),
          [&forms](Form form, index_t m) { return forms.seconds(form, m); }};
}

#ifdef BENCH_HAS_ONEDNN
template <class E>
Candidate onednn_alone(bench::OneDnnForms<E>& forms) {
  const auto peak = [](const Machine& machine) {
    return kDTypeOf<E> == DType::kFp32 ? bench::peak_of_fp32(machine) : machine.peak();
  };
  return {with_type<E>("onednn_alone"), peak, sizeof(E),
          [&forms](Form form, index_t m) { return forms.seconds(form, m); }};
}

bool onednn_multiplies_bf16() {
  return kernels::OneDnnBf16::available();
}

template <class Kernel>
void bench_kernel(const GemmShape& shape, Limits& limits) {
  using W = typename Kernel::Weight;
  const int threads = limits.threads;
  const GemmMemory<W> memory(shape, threads);
  bench::KernelForms<Kernel> forms(shape, threads, memory);
  if (kDTypeOf<W> == DType::kFp32 || onednn_multiplies_bf16()) {
    bench::OneDnnForms<W> theirs(shape, threads, memory);
    return bench_all({ours(forms), onednn_alone(theirs)}, shape, limits);
  }
  const GemmMemory<float> in_fp32(shape, threads);
  bench::OneDnnForms<float> theirs(shape, threads, in_fp32);
  bench_all({ours(forms), onednn_alone(theirs)}, shape, limits);
}

void print_onednn() {
  const dnnl_version_t* version = dnnl_version();
  std::printf(
      "onednn_alone: oneDNN %d.%d.%d, beside bf16 weights with %s\n", version->major, version->minor,
      version->patch,
      onednn_multiplies_bf16() ? "bf16 operands" : "fp32 operands (it has no bf16 products on this CPU)");
}
#else
template <class Kernel>
void bench_kernel(const GemmShape& shape, Limits& limits) {
  const GemmMemory<typename Kernel::Weight> memory(shape, limits.threads);
  bench::KernelForms<Kernel> forms(shape, limits.threads, memory);
  bench_all({ours(forms)}, shape, limits);
}

void print_onednn() {
  std::printf("onednn_alone: not there, this program was built without oneDNN\n");
}
#endif

// Calls work for each kernel that is timed: with instructions of this CPU.
template <class Work>
void for_each_timed(Work&& work) {
  std::vector<std::string> done;
  bench::AllKernels::for_each([&]<class Kernel>() {
    // Of kernels that share a name and a type the one that they stand for here.
    const std::string name = label<Kernel>();
    if (!Kernel::available() || std::find(done.begin(), done.end(), name) != done.end()) return;
    if (arch::cpu_features().amx_emulated && Kernel::kName == "amx_bf16") return;
    done.push_back(name);
    work.template operator()<Kernel>();
  });
}

struct Options {
  int threads = parallel::default_num_threads();
  std::string only = "all";
  GemmShape shape;

  template <class Kernel>
  bool wants() const {
    return only == label<Kernel>() || only == with_type<typename Kernel::Weight>("all");
  }
};

Options parse(int argc, char** argv) {
  using command_line::number;
  Options options;
  if (argc > 1) options.threads = number("threads", argv[1], 1);
  if (argc > 2) options.only = argv[2];
  if (argc == 4) throw std::invalid_argument("out in: expected both or none, got " + std::string(argv[3]));
  if (argc > 4) {
    // As int, so that no product of sizes overflows an index_t.
    options.shape.out = number("out", argv[3], 1);
    options.shape.in = number("in", argv[4], 1);
  }
  if (argc > 5) options.shape.rows.clear();
  for (int i = 5; i < argc; ++i) options.shape.rows.push_back(number("m", argv[i], 1));

  std::string names = "all all_fp32";
  bool known = false;
  for_each_timed([&]<class Kernel>() {
    names += " " + label<Kernel>();
    known = known || options.wants<Kernel>();
  });
  if (!known) throw std::invalid_argument("kernel: expected one of " + names + ", got " + options.only);
  return options;
}

void run(const Options& options) {
  const GemmShape& shape = options.shape;
  Limits limits{options.threads};
  limits.measure();
  print_onednn();
  std::printf("weights [%lld, %lld] streamed from memory, medians of %d turns; ours / oneDNN: of times\n",
              static_cast<long long>(shape.out), static_cast<long long>(shape.in), kTurns);
  std::fflush(stdout);
  for_each_timed([&]<class Kernel>() {
    if (options.wants<Kernel>()) bench_kernel<Kernel>(shape, limits);
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
