"""What info() says about a machine, on machines that stand in a folder, and its text."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import amx_sft_moe
from amx_sft_moe.info import as_text, findings, why_chosen
from amx_sft_moe.system import cgroups, files, machine, process, versions

MIB, GIB = 2**20, 2**30


def write(root: Path, **contents: str) -> None:
    """Files by path, ``__`` for ``/``."""
    for name, text in contents.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def cpu(number: int, package: int, core: int) -> str:
    """One block of /proc/cpuinfo."""
    return (
        f"processor\t: {number}\ncpu family\t: 6\nmodel\t\t: 143\nmodel name\t: A CPU: of mine\nstepping\t: 8\n"
        f"physical id\t: {package}\ncore id\t\t: {core}\nflags\t\t: fpu amx_tile hypervisor\n"
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A virtual machine with 2 sockets of 3 cores of 2 threads, in a container."""
    blocks = [cpu(n, n // 6, n % 3) for n in range(12)]
    write(
        tmp_path,
        proc__cpuinfo="\n".join(blocks),
        proc__meminfo="MemTotal:  1048576 kB\nMemAvailable: 524288 kB\nHugePages_Total: 7\n",
        sys__class__dmi__id__sys_vendor="QEMU\n",
        sys__devices__system__node__has_memory="0-1,3\n",
        sys__kernel__mm__transparent_hugepage__enabled="always [madvise] never\n",
        **{".dockerenv": ""},
    )
    for n, (level, kind, size, shared) in enumerate(
        [
            (1, "Data", "48K", "0,6"),
            (1, "Instruction", "32K", "0,6"),
            (2, "Unified", "2048K", "0,6"),
            (3, "Unified", "30M", "0-5"),
        ]
    ):
        index = f"sys__devices__system__cpu__cpu0__cache__index{n}__"
        write(
            tmp_path,
            **{f"{index}level": f"{level}", f"{index}type": kind, f"{index}size": size},
            **{f"{index}shared_cpu_list": shared},
        )
    return tmp_path


def test_machine(root: Path) -> None:
    assert machine.cpu_name(root) == "A CPU: of mine"
    assert machine.cpu_topology(root) == {"cpus": 12, "cores": 6, "sockets": 2, "model": "6-143-8"}
    assert machine.caches(root) == [
        {"name": "L1d", "bytes": 48 * 1024, "shared_by": 2},
        {"name": "L2", "bytes": 2 * MIB, "shared_by": 2},
        {"name": "L3", "bytes": 30 * MIB, "shared_by": 6},
    ]
    assert machine.memory(root) == {"total": GIB, "available": GIB // 2}
    assert machine.numa_nodes(root) == 3
    assert machine.huge_pages(root) == {"transparent": "madvise", "reserved": 7}
    assert machine.virtualised(root) == {"hypervisor": "QEMU", "container": True}
    write(root, sys__hypervisor__type="xen\n")
    assert machine.virtualised(root)["hypervisor"] == "xen"


def test_machine_that_says_nothing(tmp_path: Path) -> None:
    assert machine.cpu_name(tmp_path)
    assert machine.cpu_topology(tmp_path) == {}
    assert machine.caches(tmp_path) == []
    assert machine.memory(tmp_path) == {}
    assert machine.numa_nodes(tmp_path) == 1
    assert machine.huge_pages(tmp_path) == {"transparent": "not supported", "reserved": 0}
    assert machine.virtualised(tmp_path) == {"hypervisor": None, "container": False}
    assert cgroups.cpu_quota(tmp_path) is None
    assert cgroups.memory_limit(tmp_path) is None
    assert process.openmp_libraries(tmp_path) == []


def test_control_groups_of_version_2(root: Path) -> None:
    group = "sys__fs__cgroup__"
    write(root, proc__self__cgroup="0::/a/b\n", **{f"{group}a__cpu.max": "150000 100000\n"})
    write(root, **{f"{group}a__b__cpu.max": "max 100000\n", f"{group}a__b__memory.max": "max\n"})
    assert cgroups.cpu_quota(root) == 1.5  # of the group above
    assert cgroups.memory_limit(root) is None
    write(root, **{f"{group}a__memory.max": f"{100 * MIB}\n", f"{group}a__b__memory.max": f"{64 * MIB}\n"})
    assert machine.memory(root)["cgroup_limit"] == 64 * MIB
    write(root, **{f"{group}a__b__memory.max": f"{4 * GIB}\n", f"{group}a__memory.max": f"{4 * GIB}\n"})
    assert "cgroup_limit" not in machine.memory(root)  # more than there is


def test_available_memory(root: Path) -> None:
    """The least that the system and the groups leave; page cache that can go counts as free."""
    assert machine.available_memory(root) == GIB // 2
    inner = {"sys__fs__cgroup__a__b__memory.max": f"{300 * MIB}\n", "proc__self__cgroup": "0::/a/b\n"}
    inner["sys__fs__cgroup__a__b__memory.current"] = f"{280 * MIB}\n"
    write(root, **inner)
    assert machine.available_memory(root) == 20 * MIB
    write(
        root,
        **{"sys__fs__cgroup__a__b__memory.stat": f"anon {MIB}\nactive_file 9\ninactive_file {200 * MIB}\n"},
    )
    assert machine.available_memory(root) == 220 * MIB
    outer = {"sys__fs__cgroup__a__memory.max": f"{400 * MIB}", "sys__fs__cgroup__a__memory.current": f"{GIB}"}
    write(root, **outer)
    assert machine.available_memory(root) == 0  # of the group above, which is over its limit


def test_available_memory_of_version_1(root: Path) -> None:
    group = "sys__fs__cgroup__memory__jobs__memory."
    write(root, proc__self__cgroup="4:memory:/jobs/1\n", **{f"{group}limit_in_bytes": f"{100 * MIB}"})
    assert machine.available_memory(root) == 100 * MIB
    write(root, **{f"{group}usage_in_bytes": f"{90 * MIB}"})
    # total_: with the groups below, as usage counts them.
    write(root, **{f"{group}stat": f"inactive_file {MIB}\ntotal_inactive_file {50 * MIB}\n"})
    assert machine.available_memory(root) == 60 * MIB


def test_control_groups_of_version_1(root: Path) -> None:
    """Inside a container: the path is the host's, and the group's own files are at the top."""
    write(root, proc__self__cgroup="4:memory:/docker/1\n1:cpu,cpuacct:/docker/1\n0::/\n")
    write(
        root,
        **{"sys__fs__cgroup__cpu__cpu.cfs_quota_us": "-1", "sys__fs__cgroup__cpu__cpu.cfs_period_us": "100000"},
    )
    write(root, **{"sys__fs__cgroup__memory__memory.limit_in_bytes": "9223372036854771712"})
    assert cgroups.cpu_quota(root) is None
    assert cgroups.memory_limit(root) is None
    write(root, **{"sys__fs__cgroup__cpu__cpu.cfs_quota_us": "250000"})
    write(root, **{"sys__fs__cgroup__memory__memory.limit_in_bytes": f"{GIB // 4}"})
    assert cgroups.cpu_quota(root) == 2.5
    assert cgroups.memory_limit(root) == GIB // 4


def test_openmp_libraries(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/srv/people/ada")
    line = "7f00-7f01 r-xp 00000000 08:01 42   {}\n"
    paths = (
        "/usr/lib/libgomp.so.1.0.0",
        "/usr/lib/libgomp.so.1.0.0",
        "/srv/people/ada/env/lib/libgomp-a34b3233.so.1",
        "/home/ada/my env/libiomp5.so",
        "/opt/libomp.so.5",
        "/usr/lib/libcompare.so.1",
        "/usr/lib/libgompertz.so",
    )
    write(root, proc__self__maps="".join(map(line.format, paths)) + "7f02-7f03 rw-p 00000000 00:00 0\n")
    assert process.openmp_libraries(root) == [
        "/usr/lib/libgomp.so.1.0.0",
        "~/env/lib/libgomp-a34b3233.so.1",
        "~/my env/libiomp5.so",
        "/opt/libomp.so.5",
    ]


def test_environment_has_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/srv/people/ada")
    given = {
        "AMX_SFT_MOE_TRACE": "/srv/people/ada/trace.json",
        "LD_PRELOAD": "/home/bob/lib/a.so:/usr/lib/libiomp5.so",
        "KMP_AFFINITY": "compact",
        "OMP_NUM_THREADS": "4",
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        "THP_MEM_ALLOC_ENABLE": "1",
        "HF_TOKEN": "secret",
        "USER": "ada",
        "HOME": "/srv/people/ada",
        "MY_OMP_KEY": "secret",
    }
    assert process.environment(given) == {
        "AMX_SFT_MOE_TRACE": "~/trace.json",
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        "KMP_AFFINITY": "compact",
        "LD_PRELOAD": "~/lib/a.so:/usr/lib/libiomp5.so",
        "OMP_NUM_THREADS": "4",
        "THP_MEM_ALLOC_ENABLE": "1",
    }


def test_lists_of_numbers() -> None:
    for text, numbers in (("", set()), ("3", {3}), ("0-2,5", {0, 1, 2, 5}), ("0,2,4-5", {0, 2, 4, 5})):
        assert files.as_list(numbers) == text
        assert files.count_of_list(text) == len(numbers)


def test_threads_of_this_process(root: Path) -> None:
    found = process.threads(3, root)
    assert found["openmp"] == 3
    assert found["affinity"] == len(os.sched_getaffinity(0)) == files.count_of_list(found["affinity_list"])
    assert found["cgroup_quota"] is None


@pytest.mark.parametrize("first", ["amx_sft_moe", "torch"])
@pytest.mark.parametrize("variable", ["OMP_PROC_BIND=true", "OMP_PLACES=cores"])
def test_threads_that_openmp_binds(first: str, variable: str) -> None:
    """The OpenMP library binds the thread that loads it to one CPU: the process has all of them."""
    program = (
        f"import {first}, amx_sft_moe, os; from amx_sft_moe.system import process; "
        "print(process.default_threads(), process.threads(2)['affinity'], len(process.openmp_libraries()))"
    )
    name, _, value = variable.partition("=")
    environment = {key: text for key, text in os.environ.items() if not key.startswith(("OMP_", "GOMP_"))}
    found = subprocess.run(
        [sys.executable, "-c", program],
        env=environment | {name: value},
        capture_output=True,
        text=True,
        check=True,
    )
    cpus = len(os.sched_getaffinity(0))
    quota = cgroups.cpu_quota(Path("/"))
    threads = cpus if quota is None else max(min(cpus, math.ceil(quota)), 1)
    *numbers, libraries = found.stdout.split()
    if libraries != "1":
        pytest.skip("torch has an OpenMP library of its own, which binds before ours counts")
    assert numbers == [str(threads), str(cpus)]


def test_default_threads(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "available_cpus", lambda: 4)
    for wanted, expected in (
        ("3", 3),
        ("6,2", 6),
        (" 5 ", 5),
        ("", 4),
        ("0", 4),
        ("many", 4),
        ("-2", 4),
        (",3", 4),
    ):
        assert process.default_threads(root, {"OMP_NUM_THREADS": wanted}) == expected
    write(root, proc__self__cgroup="0::/\n")
    for quota, expected in (("max", 4), ("800000", 4), ("150000", 2), ("200000", 2), ("5000", 1)):
        write(root, **{"sys__fs__cgroup__cpu.max": f"{quota} 100000\n"})
        assert process.default_threads(root, {}) == expected
    assert process.default_threads(root, {"OMP_NUM_THREADS": "3"}) == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "9")
    assert process.default_threads(root) == 9


def test_versions() -> None:
    found = versions.package_versions()
    assert found["numpy"] == __import__("numpy").__version__
    assert set(found) == set(versions.PACKAGES)
    assert amx_sft_moe.info()["system"]["python"] == sys.version.split()[0]


def test_torch_is_not_imported_and_need_not_exist() -> None:
    """Neither are the others; where an import of any is an error, info() still works and says so."""
    code = (
        "import sys\n"
        "absent = ('torch', 'transformers', 'peft', 'accelerate', 'safetensors', 'pandas', 'threadpoolctl')\n"
        "sys.modules.update(dict.fromkeys(absent))\n"
        "import importlib.metadata as metadata\n"
        "version = metadata.version\n"
        "def lacking(name):\n"
        "    if name in absent: raise metadata.PackageNotFoundError(name)\n"
        "    return version(name)\n"
        "metadata.version = lacking\n"
        "from amx_sft_moe.__main__ import main\n"
        "main(['info'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("not installed"))
    assert "torch, transformers, peft, accelerate, safetensors" in line


# Why a kernel is chosen.

LISTED = [
    {"name": "amx_bf16", "weights": "bfloat16", "available": False, "why_not": "no AMX here"},
    {"name": "avx512", "weights": "bfloat16", "available": True, "why_not": ""},
    {"name": "avx512_bf16", "weights": "bfloat16", "available": True, "why_not": ""},
    {"name": "avx512", "weights": "float32", "available": True, "why_not": ""},
]
SETS = {"avx512_bf16": True, "slow_dpbf16": True}


NO_AMX = "; not amx_bf16: no AMX here"
BEST = "the best that this CPU has for these weights"


@pytest.mark.parametrize(
    ("weights", "kernel", "sets", "variables", "reason"),
    [
        (
            "bfloat16",
            "avx512",
            SETS,
            {},
            "fp32 FMA has twice the peak of VDPBF16PS on this CPU (Intel)" + NO_AMX,
        ),
        (
            "bfloat16",
            "avx512_bf16",
            {**SETS, "slow_dpbf16": False},
            {},
            "VDPBF16PS has twice the peak of fp32 FMA on this CPU" + NO_AMX,
        ),
        ("bfloat16", "avx512", {"avx512_bf16": False}, {}, BEST + NO_AMX),
        ("float32", "avx512", SETS, {}, BEST),
        ("bfloat16", "portable", SETS, {"AMX_SFT_MOE_KERNEL": "portable"}, "AMX_SFT_MOE_KERNEL=portable"),
        ("float32", "avx512", SETS, {"AMX_SFT_MOE_KERNEL": ""}, BEST),
        ("float32", "none: why", SETS, {"AMX_SFT_MOE_KERNEL": "abacus"}, ""),
    ],
)
def test_why_chosen(
    weights: str, kernel: str, sets: dict[str, Any], variables: dict[str, str], reason: str
) -> None:
    assert why_chosen(LISTED, sets, weights, kernel, variables) == reason


def test_reason_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AMX_SFT_MOE_KERNEL", raising=False)
    found = amx_sft_moe.info()
    for weights, reason in found["auto_reason"].items():
        better = []
        for kernel in (k for k in found["kernels"] if k["weights"] == weights):
            if kernel["name"] == found["auto_kernel"][weights]:
                break
            better.append(kernel)
        assert all(not kernel["available"] for kernel in better)
        assert all(f"not {kernel['name']}: {kernel['why_not']}" in reason for kernel in better)
    monkeypatch.setenv("AMX_SFT_MOE_KERNEL", "portable")
    assert amx_sft_moe.info()["auto_reason"]["bfloat16"] == "AMX_SFT_MOE_KERNEL=portable"


def test_permission() -> None:
    found = amx_sft_moe.info()
    sets, permission = found["instruction_sets"], found["amx_permission"]
    if sets["amx_emulated"] or not sets["amx_tile"]:
        assert permission.startswith("not asked: ")
    elif sets["amx"] == "amx":
        assert permission == "granted"
    else:
        assert permission.startswith("denied: ")


SMALL_SIGNAL_STACK = """
import ctypes
class Stack(ctypes.Structure):
    _fields_ = [("sp", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]
memory = ctypes.create_string_buffer(8192)
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(Stack(ctypes.addressof(memory), 0, 8192)), None) == 0
import amx_sft_moe
found = amx_sft_moe.info()
print(found["amx_permission"], found["instruction_sets"]["amx"], sep="|")
"""


# A process of its own: once granted, the permission stays.
def test_permission_refused_for_a_small_signal_stack_says_so() -> None:
    sets = amx_sft_moe.info()["instruction_sets"]
    done = subprocess.run(
        [sys.executable, "-c", SMALL_SIGNAL_STACK], capture_output=True, text=True, check=True
    )
    permission, amx = done.stdout.strip().split("|")
    if sets["amx_emulated"] or not sets["amx_tile"]:
        assert permission.startswith("not asked: ")
        return
    for said in (permission, amx):
        assert "sigaltstack" in said
        assert "No space left on device" in said


# Findings and text.


def test_findings() -> None:
    found = amx_sft_moe.info()
    quiet = {
        **found,
        "openmp_libraries": ["/usr/lib/libgomp.so.1"],
        "threads": {"openmp": 2, "affinity": 2, "affinity_list": "0-1", "cgroup_quota": None},
        "amx_permission": "granted",
        "auto_kernel": {"bfloat16": "avx2", "float32": "avx2"},
        "instruction_sets": {**found["instruction_sets"], "avx512": True},
        "packages": {**found["packages"], "torch": "2.13.0"},
        "huge_pages": {"transparent": "madvise", "reserved": 0},
        "environment": {"THP_MEM_ALLOC_ENABLE": "1"},
    }
    assert findings(quiet) == []
    assert findings({**quiet, "environment": {"GLIBC_TUNABLES": "glibc.a=2:glibc.malloc.hugetlb=1"}}) == []
    for setting in ("always", "never", "not supported"):  # no variable changes it there
        pages = {"transparent": setting, "reserved": 0}
        assert findings({**quiet, "environment": {}, "huge_pages": pages}) == []
    for change, word in (
        ({"openmp_libraries": ["/a/libgomp.so.1", "/b/libiomp5.so"]}, "2 OpenMP libraries are loaded"),
        ({"threads": {**quiet["threads"], "openmp": 8}}, "8 OpenMP threads on the 2 CPUs"),
        ({"threads": {**quiet["threads"], "cgroup_quota": 1.5}}, "2 OpenMP threads on a quota of 1.5 CPUs"),
        ({"amx_permission": "denied: Invalid argument"}, "the operating system refused it"),
        ({"instruction_sets": {**found["instruction_sets"], "avx512": False}}, 'dense_dtype="auto"'),
        ({"environment": {}}, "lie in pages of 4 KiB: with THP_MEM_ALLOC_ENABLE=1"),
        (
            {"auto_kernel": {"bfloat16": "none: AMX_SFT_MOE_KERNEL: ..."}},
            "AMX_SFT_MOE_KERNEL names no kernel for bfloat16",
        ),
    ):
        (one,) = findings({**quiet, **change})
        assert word in one


def test_text() -> None:
    found = amx_sft_moe.info()
    text = as_text({**found, "findings": ["something " * 30]})
    for value in (found["cpu"], found["compiler"], found["amx_permission"], found["system"]["python"]):
        assert " ".join(value.split()) in " ".join(text.split())
    for kernel in found["kernels"]:
        assert f"  {kernel['name']:<14}{kernel['weights']:<10}" in text
    assert not [line for line in text.splitlines() if line != line.rstrip()]
    # Longer only where a single word, behind the label's column, is: the path of a library.
    assert [line for line in text.splitlines() if len(line) > 100 and len(line[18:].split()) > 1] == []
    assert max(text.count("\n\n\n"), text.count("\n\n\n\n")) == 0


def test_no_names_of_people_or_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither text nor JSON has the home directory or the host's name."""
    host = os.uname().nodename
    text = json.dumps(amx_sft_moe.info())
    home = os.path.expanduser("~")
    assert home == "/" or f'"{home}/' not in text
    assert len(host) < 5 or host not in text
