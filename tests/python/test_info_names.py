"""What `info` prints names neither the user nor the host."""

from __future__ import annotations

import os
import sys

import pytest

import amx_sft_moe
from amx_sft_moe import kernels
from amx_sft_moe.system.files import without_names


def named(host: str) -> os.uname_result:
    return os.uname_result(("Linux", host, "6.1.0", "#1 SMP", "x86_64"))


@pytest.fixture(autouse=True)
def ada_on_node17(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/srv/people/ada")
    monkeypatch.setenv("USER", "ada")
    monkeypatch.setattr(os, "uname", lambda: named("node17.cluster.example"))
    monkeypatch.setattr(sys, "prefix", "/scratch/ada/env")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/srv/people/ada", "~"),
        ("/srv/people/ada/lib/x.so", "~/lib/x.so"),
        ("/home/bob/lib/x.so", "~/lib/x.so"),
        ("/srv/people/adam/x", ".../x"),
        ("/usr/lib/libgomp.so.1", "/usr/lib/libgomp.so.1"),
        ("/opt/ada/libomp.so.5", "/opt/.../libomp.so.5"),
        ("/scratch/ada/env/lib/libgomp.so.1", "<environment>/lib/libgomp.so.1"),
        ("/scratch/ada/envy/libgomp.so.1", ".../libgomp.so.1"),
        ("/data/Bob Babbage/my libs/", ".../my libs"),
        ("/data/bob/a.so:/usr/lib/b.so /data/bob/c.so", ".../a.so:/usr/lib/b.so .../c.so"),
        ("/data/runs/node17/", ".../..."),
        ("runs/ada/trace_node17.json", "runs/.../trace_....json"),
        ("dumps-node17.cluster.example.json", "dumps-....json"),
        ("canada/adage.json", "canada/adage.json"),
        ("granularity=fine,compact,1,0", "granularity=fine,compact,1,0"),
        (
            "TRACE: expected a file, got /data/bob/none/x: no folder",
            "TRACE: expected a file, got .../x: no folder",
        ),
        ("cannot import x from y (/data/ada/pkg/__init__.py)", "cannot import x from y (.../__init__.py)"),
        ("[/home/bob/x] `/data/bob/y` </data/bob/z>", "[~/x] `.../y` <.../z>"),
        ("-L/home/bob/lib -I/data/bob/include", "-L~/lib -I.../include"),
        ("pkg@/data/bob/wheels >/data/bob/log", "pkg@.../wheels >.../log"),
        ("/data/Bob (old)/libs/x", ".../Bob (old).../x"),
        ("r-bob/x ./bob/x ~/bob/x ${HOME}/bob/x c++/v1/x", "r-bob/x ./bob/x ~/bob/x ${HOME}/bob/x c++/v1/x"),
        ("/x", "/x"),
        ("", ""),
    ],
)
def test_texts_without_names(text: str, expected: str) -> None:
    assert without_names(text) == expected


def test_names_that_tell_nothing_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER", "root")
    monkeypatch.setattr(os, "uname", lambda: named("localhost"))
    assert without_names("runs/root/localhost.json") == "runs/root/localhost.json"


def test_a_user_without_an_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)
    assert without_names("runs/ada/x") == "runs/.../x"


def test_info_has_them_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMX_SFT_MOE_TRACE", "/data/projects-of-ada/node17/trace.json")
    monkeypatch.setenv("OMP_TOOL_LIBRARIES", "/scratch/ada/tools/node17.so")
    monkeypatch.setenv("AMX_SFT_MOE_TIMER", "json")
    monkeypatch.setenv("AMX_SFT_MOE_TIMER_FILE", "/data/projects-of-ada/node17/steps.jsonl")
    reason = "its module cannot be loaded: /data/ada/_onednn.so: undefined symbol"
    monkeypatch.setattr(sys.modules["amx_sft_moe.info"], "load_onednn", lambda: (None, reason))
    found = amx_sft_moe.info()
    assert kernels.ONEDNN in {kernel["name"] for kernel in found["kernels"]}
    text = repr(found)
    assert "_onednn.so: undefined symbol" in text
    assert "trace.json" in text
    for name in ("ada", "node17", "projects-of"):
        assert name not in text
