"""The dense part of a model, everything but its routed experts, in a dtype of its own.

torch multiplies bfloat16 at full speed on CPUs with AVX512 only. On others its loops are many times slower than
its fp32 ones (35 times in a product of [1024, 4096] by [4096, 256] on an AVX2 CPU, torch 2.13), and a model's
attention costs more than its experts.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from amx_sft_moe.checkpoints.plan import routed_experts

DenseDtype = torch.dtype | Literal["auto"] | None


def torch_multiplies_bf16() -> bool:
    """Whether torch's own bfloat16 products are fast on this CPU: by oneDNN, which has them from AVX512 on."""
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return bool(torch.backends.mkldnn.is_available() and (supported is None or supported()))


def dense_dtype_of(wanted: DenseDtype, dtype: torch.dtype) -> torch.dtype:
    """The dtype of the dense part of a model loaded in ``dtype``: as wanted; ``None``: the same; ``"auto"``:
    the same, but float32 for bfloat16 where :func:`torch_multiplies_bf16` says no.

    Raises:
        TypeError: neither of these, float32 nor ``dtype``.
    """
    if wanted == "auto":
        return torch.float32 if dtype == torch.bfloat16 and not torch_multiplies_bf16() else dtype
    if wanted is None:
        return dtype
    if wanted not in (dtype, torch.float32):
        known = '"auto" or' if dtype == torch.float32 else '"auto", torch.float32 or'
        raise TypeError(f"dense_dtype: expected {known} {dtype} as dtype says, got {wanted}")
    return wanted


def cast_dense(model: nn.Module, dtype: torch.dtype, to: torch.dtype) -> None:
    """Turns parameters and buffers of ``dtype`` outside the routed experts into ``to``, in place. Tied weights
    stay tied."""
    if dtype == to:
        return
    of_experts = {id(part) for _, module in routed_experts(model) for part in module.parameters()}
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.dtype == dtype and id(tensor) not in of_experts:
            tensor.data = tensor.data.to(to)
