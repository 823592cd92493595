// oneDNN called alone, the yardstick of kernel onednn: one matmul per weight matrix, all operands in their
// plain layouts, fp32 results. A matrix is one thread's work, so no thread waits for another inside a product.
#pragma once

#include <dnnl.hpp>

#include "amx_sft_moe/amx_sft_moe.hpp"

namespace bench {

class OneDnnAlone {
 public:
  // C [rows, cols] = A [rows, k] B [k, cols]; transposed: it lies as [k, rows], [cols, k].
  struct Shape {
    index_t rows, cols, k;
    bool a_transposed, b_transposed;
  };

  explicit OneDnnAlone(const Shape& s)
      : desc_(describe(engine_,
                       Desc({s.rows, s.k}, dnnl::memory::data_type::bf16, s.a_transposed ? Tag::ba : Tag::ab),
                       Desc({s.k, s.cols}, dnnl::memory::data_type::bf16, s.b_transposed ? Tag::ba : Tag::ab),
                       Desc({s.rows, s.cols}, dnnl::memory::data_type::f32, Tag::ab))),
        matmul_(desc_),
        a_(desc_.src_desc(), engine_, nullptr),
        b_(desc_.weights_desc(), engine_, nullptr),
        c_(desc_.dst_desc(), engine_, nullptr) {}

  void operator()(const amx_sft_moe::bf16* a, const amx_sft_moe::bf16* b, float* c) {
    a_.set_data_handle(const_cast<amx_sft_moe::bf16*>(a));
    b_.set_data_handle(const_cast<amx_sft_moe::bf16*>(b));
    c_.set_data_handle(c);
    matmul_.execute(stream_, {{DNNL_ARG_SRC, a_}, {DNNL_ARG_WEIGHTS, b_}, {DNNL_ARG_DST, c_}});
    stream_.wait();
  }

 private:
  using Desc = dnnl::memory::desc;
  using Tag = dnnl::memory::format_tag;

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

}  // namespace bench
