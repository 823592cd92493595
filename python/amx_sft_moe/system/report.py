"""The dict of :func:`amx_sft_moe.info` as lines for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

_NOT_SETS = ("amx_emulated", "slow_dpbf16")  # beside the instruction sets, no sets themselves
_LABEL = 18  # columns of the labels
_WIDTH = 100  # columns of a line, where a word does not need more


def as_text(found: Mapping[str, Any]) -> str:
    """Labels to the left, values to the right, long values on several lines."""
    lines = [f"amx_sft_moe {found['version']}"]
    for rows in (_build(found), _machine(found), _threads(found), _versions(found)):
        lines += [line for label, value in rows if value for line in _row(label, value)]
        lines.append("")
    lines += ["kernels, best first:", *_kernels(found), ""]
    for dtype, kernel in found["auto_kernel"].items():
        reason = found["auto_reason"][dtype]
        lines += _row(f"auto, {dtype}", f"{kernel}: {reason}" if reason else kernel)
    for number, finding in enumerate(found["findings"] or ["none"]):
        lines += _row("" if number else "findings", finding)
    return "\n".join(lines)


def _row(label: str, value: str) -> list[str]:
    return textwrap.wrap(
        value,
        _WIDTH,
        initial_indent=f"{label:<{_LABEL}}",
        subsequent_indent=" " * _LABEL,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _size(count: int) -> str:
    """Bytes as people say them."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.3g} {units[0]}" if value < 1000 else f"{value:.0f} {units[0]}"


def _plural(count: int, one: str) -> str:
    return f"{count} {one}" if count == 1 else f"{count} {one}s"


def _build(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    nvtx = "NVTX ranges" if found["nvtx"] else "no NVTX ranges"
    yield "built with", f"{found['compiler']}, {nvtx}"
    sets = found["instruction_sets"]
    names = [name for name, have in sets.items() if have is True and name not in _NOT_SETS]
    yield "instruction sets", ", ".join(names) or "none beyond SSE2"
    yield "AMX", sets["amx"]
    yield "AMX permission", found["amx_permission"]


def _machine(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "CPU", found["cpu"]
    topology = found["topology"]
    if topology:
        yield (
            "",
            f"{_plural(topology['sockets'], 'socket')}, {_plural(topology['cores'], 'core')}, "
            f"{_plural(topology['cpus'], 'thread')}; family-model-stepping {topology['model']}",
        )
    virtual = found["virtualised"]
    hypervisor = virtual["hypervisor"]
    kind = {None: "no", "unknown": "yes"}.get(hypervisor, f"yes ({hypervisor})")
    yield "virtual machine", kind + ("; in a container" if virtual["container"] else "")
    caches = (
        f"{cache['name']} {_size(cache['bytes'])}"
        + (f" for {cache['shared_by']} threads" if cache["shared_by"] > 1 else "")
        for cache in found["caches"]
    )
    yield "caches", ", ".join(caches)
    memory = found["memory"]
    words = (
        ("total", "{}"),
        ("available", "{} available"),
        ("cgroup_limit", "control group's limit {}"),
    )
    yield "memory", ", ".join(form.format(_size(memory[key])) for key, form in words if key in memory)
    yield "NUMA nodes", str(found["numa_nodes"])
    pages = found["huge_pages"]
    yield "huge pages", f"transparent: {pages['transparent']}; reserved: {pages['reserved']}"


def _threads(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    threads = found["threads"]
    quota = "none" if threads["cgroup_quota"] is None else f"{threads['cgroup_quota']:g} CPUs"
    yield (
        "threads",
        f"OpenMP {threads['openmp']}; may run on {_plural(threads['affinity'], 'CPU')} "
        f"(this thread on {threads['affinity_list']}); CPU quota {quota}",
    )
    yield "OpenMP libraries", ", ".join(found["openmp_libraries"]) or "none seen"
    variables = [f"{name}={value}" for name, value in found["environment"].items()] or ["nothing set"]
    for number, variable in enumerate(variables):
        yield ("environment" if number == 0 else ""), variable


def _versions(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    system = found["system"]
    yield (
        "system",
        ", ".join(
            filter(
                None,
                (
                    f"{system['implementation']} {system['python']}",
                    system["libc"],
                    system["kernel"],
                    system["distribution"],
                ),
            )
        ),
    )
    packages = dict(found["packages"], oneDNN=found["onednn"])
    yield "packages", ", ".join(f"{name} {version}" for name, version in packages.items() if version)
    yield "not installed", ", ".join(name for name, version in packages.items() if not version)


def _kernels(found: Mapping[str, Any]) -> Iterator[str]:
    for kernel in found["kernels"]:
        state = "available" if kernel["available"] else f"not available: {kernel['why_not']}"
        label = f"  {kernel['name']:<14}{kernel['weights']:<10}"
        yield from textwrap.wrap(
            label + state,
            _WIDTH,
            subsequent_indent=" " * len(label),
            break_on_hyphens=False,
        )
