// The three GEMM forms as a shared library, for compare_trees.py: compiled against the headers of one source tree and
// loaded beside that of another.
#include <cstdint>

#include "amx_sft_moe/amx_sft_moe.hpp"
#include "random_data.hpp"

#ifndef BENCH_KERNEL
#define BENCH_KERNEL amx_sft_moe::kernels::Avx512<amx_sft_moe::bf16>
#endif

namespace {

using namespace amx_sft_moe;  // NOLINT(google-build-using-namespace)
using Kernel = BENCH_KERNEL;
using W = typename Kernel::Weight;
using E = typename Kernel::Compute;

constexpr index_t kRank = 16;

struct Threads {
  std::vector<gemm::Scratch> scratch;
  std::vector<bench::CallersMemory<float>> results;

  Threads(int threads, index_t floats)
      : scratch(static_cast<std::size_t>(threads)), results(static_cast<std::size_t>(threads)) {
    for (auto& result : results) result.reserve(floats);
  }

  // work(thread context, result, task) for all tasks.
  template <class Work>
  void run(index_t tasks, Work&& work) {
    parallel::run_tasks(static_cast<int>(scratch.size()), tasks, [&](int thread) {
      const auto at = static_cast<std::size_t>(thread);
      return [&, at, context = gemm::ThreadContext<Kernel>(scratch[at])](index_t task) mutable {
        work(context, results[at].data(), task);
      };
    });
  }
};

void store(const gemm::Block& block, float* result, index_t stride) {
  const arch::BlockTarget<float> to{result + block.row * stride + block.col, stride, 1, false, 1.0F, nullptr};
  Kernel::Rows::store(block.c, block.stride, block.rows, block.cols, to);
}

}  // namespace

// `matrices` weights [out, in], one behind the other from `weights`, and activations [tokens, max(out, in)]: each
// product once, columns of its result cut into tasks as the operator cuts them; tokens, which the operator cuts too
// where they are many, are not. nt: x W^T. nn: grad W. tn: v^T x, with the weights' memory as x and r = 16.
extern "C" {

// Asks the operating system too, where the kernel needs its permission.
int is_available() {
  return Kernel::available() ? 1 : 0;
}

void run_nt(int threads, index_t tokens, const W* weights, index_t matrices, index_t out, index_t in,
            const W* activations) {
  Threads team(threads, tokens * out);
  const index_t stride = gemm::token_stride<Kernel>(in) * arch::kPanelCols;
  AlignedBuffer<E> packed(ceil_div(tokens, arch::kPanelCols) * stride);
  const gemm::TokenForm form = gemm::token_form<Kernel>(tokens);
  gemm::pack_operand<Kernel>(MatrixView<const W>{activations, tokens, in, in}, tokens, in, form,
                             {packed.data(), stride});
  const index_t wide =
      gemm::Blocking::of_this_machine().nt_rows<Kernel>(tokens, out, {matrices, matrices * tokens, threads});
  const index_t per_matrix = ceil_div(out, wide);
  team.run(matrices * per_matrix, [&](auto& context, float* result, index_t task) {
    const index_t first = task % per_matrix * wide;
    const MatrixView<const W> matrix{weights + task / per_matrix * out * in, out, in, in};
    const std::array<gemm::Term<E>, 1> terms{
        {{gemm::AnyRows(matrix).from(first, 0), in, {packed.data(), stride}}}};
    const std::array<std::span<const gemm::Term<E>>, 1> outputs{{terms}};
    gemm::gemm_nt<Kernel>(context, std::min(wide, out - first), tokens, form, outputs, [&](const auto& blocks) {
      const gemm::TokenBlock& block = blocks[0];
      gemm::store_tokens<Kernel>(block, result + block.token * out + first + block.out, out, 1.0F, nullptr);
    });
  });
}

void run_nn(int threads, index_t tokens, const W* weights, index_t matrices, index_t out, index_t in,
            const W* activations) {
  Threads team(threads, tokens * in);
  const index_t wide = gemm::Blocking::of_this_machine().nn_cols<Kernel>(
      out, tokens, in, {matrices, matrices * tokens, threads});
  const index_t per_matrix = ceil_div(in, wide);
  team.run(matrices * per_matrix, [&](auto& context, float* result, index_t task) {
    const index_t first = task % per_matrix * wide;
    const MatrixView<const W> matrix{weights + task / per_matrix * out * in, out, in, in};
    const MatrixView<const W> grad{activations, tokens, out, out};
    const std::array<gemm::NnTerm, 1> terms{{{grad, gemm::AnyRows(matrix).from(0, first), out}}};
    gemm::gemm_nn<Kernel>(context, tokens, std::min(wide, in - first), terms,
                          [&](const gemm::Block& block) { store(block, result + first, in); });
  });
}

void run_tn(int threads, index_t tokens, const W* weights, index_t matrices, index_t out, index_t in,
            const W* activations) {
  Threads team(threads, kRank * in);
  const index_t batches = matrices * out / tokens;
  const index_t wide =
      gemm::Blocking::of_this_machine().tn_cols<Kernel>(tokens, in, {batches, batches * tokens, threads});
  const index_t per_batch = ceil_div(in, wide);
  team.run(batches * per_batch, [&](auto& context, float* result, index_t task) {
    const index_t first = task % per_batch * wide;
    const index_t cols = std::min(wide, in - first);
    const arch::RowSource<W> x{weights + task / per_batch * tokens * in + first, in, 1, nullptr};
    const arch::RowSource<W> v{activations, kRank, 1, nullptr};
    const auto panels = gemm::pack_tokens<Kernel>(context, x, tokens, cols);
    gemm::gemm_tn<Kernel>(context, kRank, std::array<gemm::Factor, 1>{{{v, nullptr}}}, panels,
                          [&](const gemm::Block& block) { store(block, result + first, in); });
  });
}
}
