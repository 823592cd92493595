"""Memory of large results that is kept for the next ones.

Gradients of parameters and saved activations of 64 KiB or more, of torch's kind and of numpy's, lie in
memory of this package. When the last tensor of one is gone (``zero_grad(set_to_none=True)``, the end of a
backward), its memory stays for the next one of about that size: the system would have to clear new memory
page by page, 5 to 10 ms a step and layer for LoRA's gradients of 128 experts. What is in use and what is idle
together are never more than what has been in use at one time.
"""

from __future__ import annotations

from amx_sft_moe import _core


def kept_memory() -> dict[str, int]:
    """Bytes of such memory in this process: ``in_use_bytes`` (tensors hold it) and ``idle_bytes`` (kept for the
    next ones)."""
    return _core.kept_memory()


def empty_cache() -> int:
    """Gives idle memory back to the system, as ``torch.cuda.empty_cache()`` does on a GPU: so many bytes.

    For what comes after training in the same process. Any thread may call it at any time.
    """
    return _core.release_kept_memory()
