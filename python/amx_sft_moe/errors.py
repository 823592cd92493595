"""Exceptions of the library. Every message names the argument and says both values: wanted and given.

A wrong element type, an object that is no tensor, arguments that are missing or exclude each other, and options
that are not for a function are Python's own ``TypeError``. A refused call changes nothing: the object stays as
it was and usable. A pass that breaks off half way (``MemoryError``, or :class:`KernelError` of kernel
``onednn``) leaves the object usable, but may have written a part of its results.
"""


class ArgumentError(ValueError):
    """A wrong shape, stride, device, size or option."""


class StateError(RuntimeError):
    """A call that does not fit the object's state: nothing to pop, a full stack, an object in use
    elsewhere."""


class KernelError(RuntimeError):
    """A kernel that this CPU or this build does not have, and the message lists those available; or, in a pass
    of kernel ``onednn``, a product that oneDNN refuses."""


def cause_of(reason: BaseException) -> str:
    """Type and first line of any exception, for a message of ours; some have no message."""
    lines = str(reason).strip().splitlines()
    return f"{type(reason).__name__}: {lines[0][:200]}" if lines else type(reason).__name__


# Tracebacks and pickles name them where users import them from.
for _error in (ArgumentError, StateError, KernelError):
    _error.__module__ = "amx_sft_moe"
