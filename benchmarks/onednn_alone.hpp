// oneDNN called alone, the yardstick of all kernels: one matmul per product, all operands in their plain layouts. A
// product is one thread's work, so no thread waits for another inside it.
#pragma once

#include <dnnl.hpp>
#include <memory>

#include "amx_sft_moe/kernels/onednn.hpp"
#include "gemm_memory.hpp"
#include "machine.hpp"

namespace bench {

class OneDnnAlone {
 public:
  using DType = amx_sft_moe::DType;
  // C [rows, cols] = A [rows, k] B [k, cols]; transposed: it lies as [k, rows], [cols, k]. All but A are dense.
  struct Shape {
    index_t rows, cols, k;
    bool a_transposed;
    index_t a_stride;
    bool b_transposed;
    DType operands, result;
  };

  explicit OneDnnAlone(const Shape& s)
      : desc_(describe(engine_, lies(s.rows, s.k, s.operands, s.a_transposed, s.a_stride),
                       lies(s.k, s.cols, s.operands, s.b_transposed, s.b_transposed ? s.k : s.cols),
                       lies(s.rows, s.cols, s.result, false, s.cols))),
        matmul_(desc_),
        a_(desc_.src_desc(), engine_, nullptr),
        b_(desc_.weights_desc(), engine_, nullptr),
        c_(desc_.dst_desc(), engine_, nullptr) {}

  void operator()(const void* a, const void* b, void* c) {
    a_.set_data_handle(const_cast<void*>(a));
    b_.set_data_handle(const_cast<void*>(b));
    c_.set_data_handle(c);
    matmul_.execute(stream_, {{DNNL_ARG_SRC, a_}, {DNNL_ARG_WEIGHTS, b_}, {DNNL_ARG_DST, c_}});
    stream_.wait();
  }

 private:
  using Desc = dnnl::memory::desc;

  static Desc lies(index_t rows, index_t cols, DType type, bool transposed, index_t stride) {
    const dnnl::memory::dims strides =
        transposed ? dnnl::memory::dims{1, stride} : dnnl::memory::dims{stride, 1};
    const bool is_bf16 = type == DType::kBf16;
    return {{rows, cols}, is_bf16 ? dnnl::memory::data_type::bf16 : dnnl::memory::data_type::f32, strides};
  }

  static dnnl::matmul::primitive_desc describe(const dnnl::engine& engine, const Desc& a, const Desc& b,
                                               const Desc& c) {
#if DNNL_VERSION_MAJOR < 3
    return {dnnl::matmul::desc(a, b, c), engine};
#else
    return {engine, a, b, c};
#endif
  }

  dnnl::engine engine_{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream_{engine_};
  dnnl::matmul::primitive_desc desc_;
  dnnl::matmul matmul_;
  dnnl::memory a_, b_, c_;
};

// The forms of bench_gemm by oneDNN alone, on E's. Results are fp32; gradients of base weights E's, like ours.
template <class E>
class OneDnnForms {
 public:
  OneDnnForms(const GemmShape& shape, int threads, const GemmMemory<E>& memory)
      : shape_(shape), threads_(threads), memory_(memory) {}

  // Seconds of one product, of many.
  double seconds(Form form, index_t m) const {
    const index_t products = memory_.products(form, shape_, m);
    const BaseGradients<E> of = memory_.base_gradients(shape_, m);
    const index_t weight = shape_.out * shape_.in;
    const index_t b_size = form == Form::kTn || form == Form::kTnFull ? m * shape_.in : weight;
    const E* b = form == Form::kTnFull ? of.x : memory_.weights.data();
    const auto work = [&](OneDnnAlone& product, float* result, index_t i) {
      if (form != Form::kTnFull) return product(memory_.activations.data(), b + i * b_size, result);
      product(of.grad + i * m * of.grad_stride, b + i * b_size, of.to + i * weight);
    };
    return all_seconds(shape_of(form, m, of.grad_stride), products, work) / static_cast<double>(products);
  }

 private:
  OneDnnAlone::Shape shape_of(Form form, index_t m, index_t grad_stride) const {
    constexpr auto kType = amx_sft_moe::kDTypeOf<E>;
    constexpr auto kFp32 = amx_sft_moe::DType::kFp32;
    const index_t out = shape_.out, in = shape_.in;
    switch (form) {
      case Form::kNt:
        return {m, out, in, false, in, true, kType, kFp32};
      case Form::kNn:
        return {m, in, out, false, out, false, kType, kFp32};
      case Form::kTn:
        return {kGemmRank, in, m, true, kGemmRank, false, kType, kFp32};
      default:
        return {out, in, m, true, grad_stride, false, kType, kType};
    }
  }

  // Each task is one product: work(product, result, task).
  template <class Work>
  double all_seconds(const OneDnnAlone::Shape& shape, index_t tasks, Work&& work) const {
    namespace parallel = amx_sft_moe::parallel;
    std::vector<std::unique_ptr<OneDnnAlone>> products(static_cast<std::size_t>(threads_));
    const auto run_all = [&](index_t count, bool measured) {
      parallel::run_tasks(threads_, count, [&](int thread) {
        const auto at = static_cast<std::size_t>(thread);
        auto single = std::make_unique<parallel::SingleThreaded>();
        if (!products[at]) products[at] = std::make_unique<OneDnnAlone>(shape);
        return [&, at, measured, single = std::move(single)](index_t task) {
          if (measured) work(*products[at], memory_.results[at].data(), task);
        };
      });
    };
    run_all(threads_, false);  // compiles
    return seconds_of([&] { run_all(tasks, true); });
  }

  const GemmShape& shape_;
  int threads_;
  const GemmMemory<E>& memory_;
};

}  // namespace bench
