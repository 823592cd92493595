"""The tests marked `emulated` once more, on kernel amx_bf16: in a process with the AMX emulator preloaded,
its AMX instructions are trapped and executed one by one.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

LIBRARY = os.environ.get("AMX_EMULATOR_LIBRARY", "")


@pytest.mark.skipif(
    not LIBRARY, reason="AMX_EMULATOR_LIBRARY does not name the emulator's library (make test does)"
)
@pytest.mark.skipif("AMX_EMULATOR" in os.environ, reason="this is the emulated run")
def test_on_emulated_amx() -> None:
    assert Path(LIBRARY).is_file(), f"AMX_EMULATOR_LIBRARY: expected a file, got {LIBRARY}"
    environment = os.environ | {
        "LD_PRELOAD": LIBRARY,
        "AMX_EMULATOR": "1",
        "AMX_SFT_MOE_TEST_KERNELS": "amx_bf16",
        "OMP_NUM_THREADS": "2",
    }
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-m",
            "emulated",
            # faulthandler would take SIGILL, with which the emulator gets its instructions.
            "-p",
            "no:faulthandler",
            "-p",
            "no:cacheprovider",
            str(Path(__file__).parent),
        ],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed, done.stdout[-2000:]
    assert int(passed.group(1)) > 15
    assert "failed" not in done.stdout
