"""The compiled module: what its functions take and give. Tensors are of torch, numpy or ml_dtypes, or speak
DLPack; no type covers them all. tests/python/test_package.py compares this file with the module."""

from collections.abc import Sequence
from types import TracebackType
from typing import Any

__version__: str

class Biases:
    # gate_bias, up_bias, down_bias, gate_up_bias
    def __init__(self, tensors: Sequence[Any]) -> None: ...

class KernelChoice:
    # provider: of kernels that are not this module's own
    def __init__(self, kernel: str, provider: object) -> None: ...
    @property
    def requested(self) -> str: ...

class LoraFactors:
    # gate A and B, up A and B, down A and B; scaling of gate, up and down
    def __init__(
        self,
        shared_a: bool,
        factors: Sequence[Any],
        scaling: Sequence[float | None],
    ) -> None: ...

class Workspace:
    def __init__(self) -> None: ...

class NvtxRange:
    def __init__(self, name: str) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None, /
    ) -> None: ...

class SftMoe:
    def __init__(
        self,
        *,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        lora_rank: int,
        lora_alpha: float | None,
        max_tokens: int | None,
        cache_depth: int,
        activation: str,
        limit: float,
        alpha: float,
        kernel: KernelChoice,
        num_threads: int,
        workspace: Workspace | None,
        name: str = "",
        record_spans: bool = False,
    ) -> None: ...
    name: str
    ranges: Any
    @property
    def saved_depth(self) -> int: ...
    @property
    def kernel(self) -> str: ...
    @property
    def weight_dtype(self) -> str | None: ...
    def set_base(
        self, gate_proj: Any, up_proj: Any, down_proj: Any, gate_up_proj: Any, biases: Biases, /
    ) -> None: ...
    def set_lora(self, lora: LoraFactors, /) -> None: ...
    def forward_sft(
        self, x: Any, expert_ids: Any, routing_weights: Any, save_for_backward: bool, out: Any, /
    ) -> Any: ...
    def backward(
        self,
        grad_y: Any,
        accumulate: bool,
        scale: float,
        out: dict[str, Any],
        skip: set[str],
        bias_gradients: bool,
        weight_gradients: bool,
        /,
    ) -> dict[str, Any]: ...
    def forward_saved(
        self, x: Any, expert_ids: Any, routing_weights: Any, lora: LoraFactors, biases: Biases, save: bool, /
    ) -> tuple[Any, Any]: ...
    def backward_saved(
        self,
        x: Any,
        expert_ids: Any,
        routing_weights: Any,
        saved: Any,
        grad_y: Any,
        lora: LoraFactors,
        biases: Biases,
        needs: Sequence[bool],
        given: Sequence[Any],
        /,
    ) -> tuple[Any, ...]: ...
    def transpose(self, source: Any, target: Any, /) -> Any: ...
    def clear(self) -> None: ...
    def last_times(self, backward: bool, /) -> dict[str, Any]: ...
    def last_dump(self, backward: bool, json: bool, /) -> str: ...
    def collect_totals(self, wanted: bool, /) -> None: ...
    def take_totals(self) -> tuple[dict[str, Any], dict[str, Any]]: ...
    def memory(self) -> dict[str, int]: ...

def available_cpus() -> int: ...
def info(provider: object) -> dict[str, Any]: ...
def kept_memory() -> dict[str, int]: ...
def measure_machine(threads: int, bandwidth_bytes: int) -> dict[str, Any]: ...
def phase_groups() -> dict[str, str]: ...
def release_kept_memory() -> int: ...
