"""pandas and matplotlib, imported when they are first needed, with a message of our own where they are
missing."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from .errors import TimelineError


def _load(name: str) -> ModuleType:
    try:
        return import_module(name)
    except ImportError as error:
        raise TimelineError(
            f"this needs {name.partition('.')[0]}, which is not installed ({error}); "
            "install the package with its extra [profile] (pip install '.[profile]' in a clone)"
        ) from error


def pandas() -> ModuleType:
    """The module pandas; raises TimelineError where it is missing."""
    return _load("pandas")


def matplotlib(part: str) -> ModuleType:
    """The submodule ``part`` of matplotlib, such as ``"figure"``; raises TimelineError where it is missing."""
    return _load(f"matplotlib.{part}")
