// The transpose of a matrix in memory, by many threads: factors that PEFT keeps with the expert last are turned by it.
#pragma once

#include "tensor.hpp"

namespace amx_sft_moe::python {

// target [cols, rows] = source [rows, cols] transposed, on `threads` threads; both bf16 or both fp32, columns of a row
// adjacent. Releases the GIL.
void transpose(const Tensor& source, const Tensor& target, int threads);

}  // namespace amx_sft_moe::python
