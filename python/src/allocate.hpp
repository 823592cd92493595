// Uninitialised results of the caller's kind: torch's for torch callers, numpy's for everybody else (bfloat16 then needs
// ml_dtypes, since numpy has no bfloat16 of its own).
#pragma once

#include "tensor.hpp"

namespace amx_sft_moe::python {

// Where a result lies: in memory of the framework, which its users may grow or free within the tensor, or, where it is large
// and goes to an optimizer or to a backward, in memory that is kept for the next one (kept_memory.hpp).
enum class ResultMemory : std::uint8_t { kOfFramework, kKept };

Tensor allocate(Family family, DType dtype, std::initializer_list<index_t> shape, std::string_view argument,
                ResultMemory memory);

// Tells torch that a tensor of the caller's was written, so that autograd notices where it had been saved.
void mark_written(const Tensor& tensor);

}  // namespace amx_sft_moe::python
