"""Versions of what this package runs on and with, without importing any of it."""

from __future__ import annotations

import importlib.metadata
import platform

# In the order of a report: what the package works with, then what else changes numbers or threads.
PACKAGES = (
    "numpy",
    "torch",
    "transformers",
    "peft",
    "accelerate",
    "safetensors",
    "trl",
    "datasets",
    "ml_dtypes",
    "pandas",
    "threadpoolctl",
)


def system_versions() -> dict[str, str]:
    """``python``, ``libc``, ``kernel`` and ``distribution``; empty strings where one is not known."""
    libc = " ".join(platform.libc_ver())
    try:
        distribution = platform.freedesktop_os_release().get("PRETTY_NAME", "")
    except OSError:
        distribution = ""
    return {
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "libc": libc.strip(),
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "distribution": distribution,
    }


def package_versions() -> dict[str, str | None]:
    """Version of each of :data:`PACKAGES` as its metadata says; ``None`` where it is not installed."""
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found
