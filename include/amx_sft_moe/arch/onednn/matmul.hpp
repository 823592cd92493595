// One compiled product of oneDNN, C = A B or C += A B, and all that differs between oneDNN 2 and 3.
#pragma once

#include <cstddef>
#include <dnnl.hpp>
#include <new>
#include <string>
#include <utility>

#include "amx_sft_moe/arch/operands.hpp"
#include "amx_sft_moe/core/errors.hpp"

// Products run on the thread that asks for them. With OpenMP that is what parallel::SingleThreaded makes of it;
// a oneDNN on another runtime would bring its own threads, and cut K by their number.
#if DNNL_CPU_THREADING_RUNTIME != DNNL_RUNTIME_OMP && DNNL_CPU_THREADING_RUNTIME != DNNL_RUNTIME_SEQ
#error "kernel onednn needs a oneDNN built with the CPU runtime OMP or SEQ"
#endif
// Whoever only reads it (clang-tidy) need not have OpenMP.
#if DNNL_CPU_THREADING_RUNTIME == DNNL_RUNTIME_OMP && !defined(_OPENMP) && !defined(__clang_analyzer__)
#error "kernel onednn with a oneDNN of the CPU runtime OMP: compile with -fopenmp"
#endif

AMX_SFT_MOE_NAMESPACE_BEGIN
namespace arch::onednn {

// How B [k, cols] lies. kPanel is this library's panel of 16 columns, byte for byte oneDNN's BA16a16b2a (bf16)
// or BA16a16b (fp32), kPairs are those of arch/onednn/rows.hpp; oneDNN's AVX512 and AMX code takes both as they
// are. kRows is for what it runs on other CPUs.
enum class Layout : std::uint8_t { kPanel, kPairs, kRows };

// A [rows, k] and C [rows, cols] are dense. C is fp32; cols is a multiple of 16, k of a cache line's elements.
struct Shape {
  index_t rows = 0, cols = 0, k = 0;
  DType type = DType::kFp32;
  Layout layout = Layout::kRows;
  bool accumulate = false;

  bool operator==(const Shape&) const = default;
  std::size_t hash() const {
    std::size_t h = 0;
    for (const index_t part : {rows, cols, k, static_cast<index_t>(type), static_cast<index_t>(layout),
                               static_cast<index_t>(accumulate)}) {
      h = (h ^ static_cast<std::size_t>(part)) * 0x9e3779b97f4a7c15U;
      h ^= h >> 29;
    }
    return h;
  }
};

// Calls f; what oneDNN throws becomes the library's own exceptions.
template <class F>
decltype(auto) translated(const Shape& shape, F&& f) {
  try {
    return std::forward<F>(f)();
  } catch (const dnnl::error& error) {
    if (error.status == dnnl_out_of_memory) throw std::bad_alloc();
    throw KernelError(concat("kernel onednn: matmul [", shape.rows, ", ", shape.k, "] x [", shape.k, ", ",
                             shape.cols, "] ", name_of(shape.type), ": ", error.what(), " (status ",
                             static_cast<int>(error.status), ")"));
  }
}

inline dnnl::engine make_engine() {
  return translated(Shape{}, [] { return dnnl::engine(dnnl::engine::kind::cpu, 0); });
}

// Instruction sets are bits of oneDNN's value, each with those that it implies. DNNL_MAX_CPU_ISA is respected.
inline bool has_isa(dnnl_cpu_isa_t wanted) {
  const auto bits = static_cast<unsigned>(wanted);
  return (static_cast<unsigned>(dnnl_get_effective_cpu_isa()) & bits) == bits;
}

// Empty where the library that was loaded is the one that this was compiled for.
inline std::string version_refusal() {
  const dnnl_version_t* loaded = dnnl_version();
  if (loaded->major == DNNL_VERSION_MAJOR) return {};
  return concat("it was compiled for oneDNN ", DNNL_VERSION_MAJOR, " and oneDNN ", loaded->major, ".",
                loaded->minor, " was loaded");
}

class Matmul {
 public:
  Matmul(const dnnl::engine& engine, const Shape& shape) : Matmul(engine, describe(engine, shape)) {}

  // The same product for another thread: compiled code is shared, what an execution changes is not.
  Matmul for_another_thread() const { return Matmul(*this, a_.get_engine()); }

  index_t scratchpad_bytes() const { return scratchpad_bytes_; }

  void run(const void* a, const void* b, float* c, void* scratchpad) {
    a_.set_data_handle(const_cast<void*>(a));  // NOLINT(cppcoreguidelines-pro-type-const-cast): only read
    b_.set_data_handle(const_cast<void*>(b));  // NOLINT(cppcoreguidelines-pro-type-const-cast)
    c_.set_data_handle(c);
    scratchpad_.set_data_handle(scratchpad);
    // The C++ interface would make a map of these in each call.
    const dnnl_exec_arg_t arguments[] = {{DNNL_ARG_SRC, a_.get()},
                                         {DNNL_ARG_WEIGHTS, b_.get()},
                                         {DNNL_ARG_DST, c_.get()},
                                         {DNNL_ARG_SCRATCHPAD, scratchpad_.get()}};
    dnnl::error::wrap_c_api(dnnl_primitive_execute(primitive_.get(), stream_.get(), 4, arguments),
                            "could not execute a matmul");
    stream_.wait();
  }

 private:
  using Desc = dnnl::memory::desc;
  using Tag = dnnl::memory::format_tag;

  static Tag tag_of(Layout layout, bool bf16_type) {
    if (layout == Layout::kRows) return Tag::ab;
    if (layout == Layout::kPairs) return bf16_type ? Tag::BA16a32b2a : Tag::BA16a32b;
    return bf16_type ? Tag::BA16a16b2a : Tag::BA16a16b;
  }

  static dnnl::matmul::primitive_desc describe(const dnnl::engine& engine, const Shape& shape) {
    const bool bf16_type = shape.type == DType::kBf16;
    const auto type = bf16_type ? dnnl::memory::data_type::bf16 : dnnl::memory::data_type::f32;
    const Desc a({shape.rows, shape.k}, type, Tag::ab);
    const Desc b({shape.k, shape.cols}, type, tag_of(shape.layout, bf16_type));
    const Desc c({shape.rows, shape.cols}, dnnl::memory::data_type::f32, Tag::ab);
    dnnl::primitive_attr attributes;
    // One primitive may then run on several threads at once.
    attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
    if (shape.accumulate) {
      dnnl::post_ops sum;
      sum.append_sum(1.0F);
      attributes.set_post_ops(sum);
    }
#if DNNL_VERSION_MAJOR < 3
    return {dnnl::matmul::desc(a, b, c), attributes, engine};
#else
    return {engine, a, b, c, attributes};
#endif
  }

  Matmul(const dnnl::engine& engine, const dnnl::matmul::primitive_desc& desc)
      : primitive_(desc),
        stream_(engine),
        a_(desc.src_desc(), engine, nullptr),
        b_(desc.weights_desc(), engine, nullptr),
        c_(desc.dst_desc(), engine, nullptr),
        scratchpad_(desc.scratchpad_desc(), engine, nullptr),
        scratchpad_bytes_(static_cast<index_t>(desc.scratchpad_desc().get_size())) {}

  Matmul(const Matmul& other, const dnnl::engine& engine)
      : primitive_(other.primitive_),
        stream_(engine),
        a_(other.a_.get_desc(), engine, nullptr),
        b_(other.b_.get_desc(), engine, nullptr),
        c_(other.c_.get_desc(), engine, nullptr),
        scratchpad_(other.scratchpad_.get_desc(), engine, nullptr),
        scratchpad_bytes_(other.scratchpad_bytes_) {}

  dnnl::matmul primitive_;
  dnnl::stream stream_;
  dnnl::memory a_, b_, c_, scratchpad_;
  index_t scratchpad_bytes_;
};

}  // namespace arch::onednn
AMX_SFT_MOE_NAMESPACE_END
