// The three GEMM forms of the library, timed: products cut into tasks as the operator cuts them, and whatever is packed
// for a product packed inside the clock, as oneDNN alone gets plain operands. x of gemm_nt is packed once for each
// product, where the operator packs it once for gate and up together.
#pragma once

#include <numeric>
#include <span>
#include <utility>

#include "gemm_memory.hpp"
#include "machine.hpp"

namespace bench {

namespace arch = amx_sft_moe::arch;
namespace gemm = amx_sft_moe::gemm;
namespace moe = amx_sft_moe::moe;
namespace parallel = amx_sft_moe::parallel;
using amx_sft_moe::ceil_div;
using amx_sft_moe::MatrixView;

// A product with each matrix in pieces: rows of tokens, then columns of the result.
struct GemmTasks {
  index_t matrices, rows, cols;

  index_t count() const { return matrices * rows * cols; }
  index_t matrix(index_t task) const { return task / (rows * cols); }
  index_t row(index_t task) const { return task / cols % rows; }
  index_t col(index_t task) const { return task % cols; }
};

template <class Kernel>
class KernelForms {
 public:
  using W = typename Kernel::Weight;

  KernelForms(const GemmShape& shape, int threads, const GemmMemory<W>& memory)
      : shape_(shape), threads_(threads), memory_(memory), x_panels_(static_cast<std::size_t>(threads)) {
    work_.reserve_threads(threads);
    for (auto& panels : x_panels_) {
      panels.reserve(round_up(shape.most_rows(), arch::kPanelCols) * gemm::token_stride<Kernel>(shape.in));
    }
  }

  // Seconds of one product, of many.
  double seconds(Form form, index_t m) {
    const index_t products = memory_.products(form, shape_, m);
    return all_seconds(form, m, products) / static_cast<double>(products);
  }

 private:
  using E = typename Kernel::Compute;

  double all_seconds(Form form, index_t m, index_t products) {
    switch (form) {
      case Form::kNt:
        return nt_seconds(m, products);
      case Form::kNn:
        return nn_seconds(m, products);
      case Form::kTn:
        return tn_seconds(m, products);
      default:
        return base_gradient_seconds(m);
    }
  }

  // Runs work(thread context, result, task) for all tasks and returns seconds.
  template <class Work>
  double run(index_t tasks, Work&& work) {
    return seconds_of([&] {
      parallel::run_tasks(threads_, tasks, [&](int thread) {
        const auto at = static_cast<std::size_t>(thread);
        return [&, at, context = gemm::ThreadContext<Kernel>(work_.scratch[at])](index_t task) mutable {
          work(context, memory_.results[at].data(), task);
        };
      });
    });
  }

  gemm::AnyRows matrix(index_t i) const {
    return MatrixView<const W>{memory_.weights.data() + i * shape_.out * shape_.in, shape_.out, shape_.in,
                               shape_.in};
  }

  static void store(const gemm::Block& block, float* result, index_t stride) {
    const arch::BlockTarget<float> to{result + block.row * stride + block.col, stride, 1, false, 1.0F, nullptr};
    Kernel::Rows::store(block.c, block.stride, block.rows, block.cols, to);
  }

  // Packing x, `products` times, each thread into panels of its own: products read those of the first thread.
  double pack_seconds(index_t m, index_t products, gemm::TokenForm form, index_t stride) {
    const MatrixView<const W> x{memory_.activations.data(), m, shape_.in, shape_.in};
    const auto pack = [&](std::size_t thread) {
      gemm::pack_operand<Kernel>(x, m, shape_.in, form, {x_panels_[thread].data(), stride});
    };
    pack(0);  // which may get no task
    return seconds_of([&] {
      parallel::run_tasks(threads_, products, [&](int thread) {
        return [&pack, at = static_cast<std::size_t>(thread)](index_t) { pack(at); };
      });
    });
  }

  double nt_seconds(index_t m, index_t products) {
    const index_t stride = gemm::token_stride<Kernel>(shape_.in) * arch::kPanelCols;
    const gemm::Panels<E> x{x_panels_[0].data(), stride};
    const gemm::TokenForm form = gemm::token_form<Kernel>(m);
    const double packing = pack_seconds(m, products, form, stride);
    const index_t step = std::min(m, blocking_.template tokens_for<Kernel>(shape_.in, m));
    const index_t wide =
        blocking_.template nt_rows<Kernel>(step, shape_.out, {products, products * m, threads_});
    const GemmTasks tasks{products, ceil_div(m, step), ceil_div(shape_.out, wide)};
    const auto multiply = [&](auto& context, float* result, index_t task) {
      const index_t token = tasks.row(task) * step;
      const index_t tokens = std::min(step, m - token);
      const index_t first = tasks.col(task) * wide;
      const index_t rows = std::min(wide, shape_.out - first);
      const auto x_here = x.from_column(token);
      const std::array<gemm::Term<E>, 1> terms{
          {{matrix(tasks.matrix(task)).from(first, 0), shape_.in, {x_here.data, x_here.panel_stride}}}};
      const std::array<std::span<const gemm::Term<E>>, 1> outputs{{terms}};
      const auto store_block = [&](const std::array<gemm::TokenBlock, 1>& blocks) {
        const gemm::TokenBlock& block = blocks[0];
        gemm::store_tokens<Kernel>(block, result + (token + block.token) * shape_.out + first + block.out,
                                   shape_.out, 1.0F, nullptr);
      };
      gemm::gemm_nt<Kernel>(context, rows, tokens, form, outputs, store_block);
    };
    return packing + run(tasks.count(), multiply);
  }

  double nn_seconds(index_t m, index_t products) {
    const index_t step = gemm::Blocking::nn_tokens<Kernel>(m);
    const index_t wide =
        blocking_.template nn_cols<Kernel>(shape_.out, step, shape_.in, {products, products * m, threads_});
    const GemmTasks tasks{products, ceil_div(m, step), ceil_div(shape_.in, wide)};
    return run(tasks.count(), [&](auto& context, float* result, index_t task) {
      const index_t row = tasks.row(task) * step;
      const index_t rows = std::min(step, m - row);
      const index_t first = tasks.col(task) * wide;
      const index_t cols = std::min(wide, shape_.in - first);
      const MatrixView<W> grad{memory_.activations.data() + row * shape_.out, rows, shape_.out, shape_.out};
      const std::array<gemm::NnTerm, 1> terms{{{grad, matrix(tasks.matrix(task)).from(0, first), shape_.out}}};
      gemm::gemm_nn<Kernel>(context, rows, cols, terms, [&](const gemm::Block& block) {
        store(block, result + row * shape_.in + first, shape_.in);
      });
    });
  }

  // One product, as the operator makes it of up to 512 tokens.
  double tn_seconds(index_t m, index_t products) {
    const index_t wide =
        blocking_.template tn_cols<Kernel>(m, shape_.in, {memory_.matrices, memory_.matrices * m, threads_});
    const index_t per_product = ceil_div(shape_.in, wide);
    return run(products * per_product, [&](auto& context, float* result, index_t task) {
      const index_t first = task % per_product * wide;
      const index_t cols = std::min(wide, shape_.in - first);
      const arch::RowSource<W> x{memory_.weights.data() + task / per_product * m * shape_.in + first, shape_.in,
                                 1, nullptr};
      const arch::RowSource<W> v{memory_.activations.data(), kGemmRank, 1, nullptr};
      const auto panels = gemm::pack_tokens<Kernel>(context, x, m, cols);
      gemm::gemm_tn<Kernel>(context, kGemmRank, std::array<gemm::Factor, 1>{{{v, nullptr}}}, panels,
                            [&](const gemm::Block& block) { store(block, result + first, shape_.in); });
    });
  }

  // Routes token t to expert t / m alone: an expert's rows are m tokens that lie one behind the other.
  void route(index_t experts, index_t m) {
    std::vector<std::int64_t> ids(static_cast<std::size_t>(experts * m));
    for (std::size_t t = 0; t < ids.size(); ++t) ids[t] = static_cast<std::int64_t>(t) / m;
    const std::vector<float> ones(ids.size(), 1.0F);
    const auto tokens = static_cast<index_t>(ids.size());
    work_.routing.build(amx_sft_moe::ExpertIds(ids.data(), 1),
                        amx_sft_moe::AnyConstMatrix(ones.data(), tokens, 1, 1), tokens, 1, experts);
  }

  // The operator's own tasks and code for grad_Wg, with nothing recorded: moe/weight_gradient.hpp.
  double base_gradient_seconds(index_t m) {
    const BaseGradients<W> of = memory_.base_gradients(shape_, m);
    const index_t tokens = of.products * m;
    route(of.products, m);
    amx_sft_moe::StepRecord record;
    amx_sft_moe::StepTimer timer(record, tokens, tokens, amx_sft_moe::now_ns(), amx_sft_moe::Phase::kD1Scatter);
    moe::Step<Kernel> step{shape_.in, shape_.out, 1, tokens, {}, {}, {}, blocking_, threads_, work_, timer, {}};
    work_.tasks.clear();
    for (const moe::ExpertRows& expert : work_.routing.active()) {
      moe::add_weight_tasks(step, moe::kGateWeight, expert, shape_.out, shape_.in);
    }
    const MatrixView<typename Kernel::Stored> grad{of.grad, tokens, shape_.out, of.grad_stride};
    const amx_sft_moe::AnyConstMatrix x(of.x, tokens, shape_.in, shape_.in);
    const amx_sft_moe::AnyExpertTensor to(of.to, of.products, shape_.out, shape_.in);
    const amx_sft_moe::Gradients overwritten;
    return seconds_of([&] {
      parallel::run_tasks(threads_, static_cast<index_t>(work_.tasks.size()), [&](int thread) {
        const auto at = static_cast<std::size_t>(thread);
        return [&, worker = moe::Worker<Kernel>(timer, thread, work_.scratch[at])](index_t i) mutable {
          moe::backward_gate_up_weight(step, worker, work_.tasks[static_cast<std::size_t>(i)], grad, x, to,
                                       overwritten);
        };
      });
    });
  }

  const GemmShape& shape_;
  int threads_;
  const GemmMemory<W>& memory_;
  gemm::Blocking blocking_ = gemm::Blocking::of_this_machine();
  amx_sft_moe::Workspace work_;
  std::vector<amx_sft_moe::AlignedBuffer<E>> x_panels_;  // one for each thread
};

}  // namespace bench
