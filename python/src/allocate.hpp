// Fresh, uninitialised results of the caller's kind: torch.empty for torch callers, numpy.empty for everybody
// else (bfloat16 then needs ml_dtypes, since numpy has no bfloat16 of its own).
#pragma once

#include "tensor.hpp"

namespace amx_sft_moe::python {

Tensor allocate(Family family, DType dtype, std::initializer_list<index_t> shape, std::string_view argument);

// Tells torch that a tensor of the caller's was written, so that autograd notices where it had been saved.
void mark_written(const Tensor& tensor);

}  // namespace amx_sft_moe::python
