"""Builds what is published, and tries it as its users will: `make wheel`.

    python tests/wheel/build.py [--twice] [--consumer] OUTPUT PYTHON...

1. the sdist, and from it alone, in an empty environment, a wheel for each PYTHON;
2. `auditwheel repair`, which gives it its platform tag and must not bring a library along: libgomp is torch's
   or the system's (two copies in a process wait for each other), oneDNN the system's (40 MB; kernel `onednn`
   says what is missing where there is none);
3. the wheel in a fresh environment whose PATH holds no compiler: tests/wheel/smoke.py.

With LDFLAGS=-static-libstdc++ in the environment the wheel has a libstdc++ of its own beside that of numpy, as
toolchains make it that link it in.

--twice builds each wheel once more, from another directory, and compares the bytes. --consumer builds
tests/consumers/find_package with the installed wheel's headers and CMake files.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
EXCLUDED = ("libgomp.so.1", "libdnnl.so.*")
# One mnemonic of each kernel: all must be in each wheel, whatever the CPU that it was built on.
INSTRUCTIONS = {
    "amx_bf16": r"tdpbf16ps",
    "avx512_bf16": r"vdpbf16ps .*zmm",
    "avx512": r"vfmadd.*ps .*zmm",
    "avx2": r"vfmadd.*ps .*ymm",
    "portable": r"\smulps .*xmm",
}
# auditwheel looks for patchelf on the PATH, and takes the time of all files (2020-01-01) from the environment.
ENVIRONMENT = {
    "SOURCE_DATE_EPOCH": "1577836800",
    **os.environ,
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
}
COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++", "cmake", "ninja")


def run(*command: object, **options: object) -> str:
    """Standard output of a command; a failure shows everything it wrote."""
    words = [str(word) for word in command]
    sys.stdout.write(f"+ {' '.join(words)}\n")
    sys.stdout.flush()
    done = subprocess.run(words, capture_output=True, text=True, **{"env": ENVIRONMENT, **options})
    if done.returncode != 0:
        sys.exit(f"{done.stdout}\n{done.stderr}\nexit status {done.returncode}: {' '.join(words)}")
    return done.stdout


def only(files: list[Path]) -> Path:
    """The one file of a list."""
    if len(files) != 1:
        sys.exit(f"expected one file, got {files}")
    return files[0]


def build_wheel(environment: Path, sdist: Path, output: Path) -> Path:
    """A repaired wheel from the sdist, by an empty environment's pip. The sources lie elsewhere each time."""
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch) / "made"
        run(environment / "bin/pip", "wheel", "-q", "--no-deps", "--no-cache-dir", "-w", made, sdist)
        words = [word for name in EXCLUDED for word in ("--exclude", name)]
        run(sys.executable, "-m", "auditwheel", "repair", *words, "-w", output, only(list(made.glob("*.whl"))))
    return only(list(output.glob(f"*-{tag_of(environment)}-*.whl")))


def tag_of(environment: Path) -> str:
    """Tag of an environment's Python: cp311."""
    return run(environment / "bin/python", "-c", "import sys; print('cp%d%d' % sys.version_info[:2])").strip()


def check_wheel(wheel: Path) -> None:
    """Platform tag, no library beside the modules, and every kernel's instructions."""
    if not re.search(r"-manylinux_2_\d+_x86_64(\.manylinux\w+)*\.whl$", wheel.name):
        sys.exit(f"{wheel.name}: expected a manylinux tag")
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as scratch:
        libraries = [name for name in archive.namelist() if ".so" in Path(name).name]
        core = only([Path(name) for name in libraries if "/_core." in name])
        ours = re.compile(r"amx_sft_moe/_(core|onednn)\.[\w-]+\.so")
        others = [name for name in libraries if not ours.fullmatch(name)]
        if others:
            sys.exit(f"{wheel.name}: expected the modules alone, got also {others}")
        if shutil.which("objdump") is None:
            sys.stdout.write("no objdump: instructions not looked at\n")
            return
        assembly = run("objdump", "-d", "--no-show-raw-insn", archive.extract(str(core), scratch))
    for kernel, pattern in INSTRUCTIONS.items():
        count = len(re.findall(pattern, assembly))
        sys.stdout.write(f"  {kernel:<12} {count} instructions\n")
        if count == 0:
            sys.exit(f"{wheel.name}: no instruction {pattern} for kernel {kernel}")


def try_wheel(wheel: Path, python: str, scratch: Path, consumer: bool) -> None:
    """Installs the wheel where there is no compiler, runs the smoke test, and the consumer where one is asked
    for."""
    fresh = Path(tempfile.mkdtemp(dir=scratch))
    run(python, "-m", "venv", fresh)
    bare = {**ENVIRONMENT, "PATH": str(fresh / "bin"), "CC": "no-compiler", "CXX": "no-compiler"}
    bare.pop("PYTHONPATH", None)
    found = [name for name in COMPILERS if shutil.which(name, path=bare["PATH"])]
    if found:
        sys.exit(f"{bare['PATH']}: expected no compiler, got {found}")
    run(fresh / "bin/pip", "install", "-q", "--only-binary", ":all:", wheel, env=bare)
    sys.stdout.write(run(fresh / "bin/python", HERE / "smoke.py", env=bare, cwd=scratch))
    if consumer:
        ask = "import amx_sft_moe; print(amx_sft_moe.get_cmake_dir())"
        where = run(fresh / "bin/python", "-c", ask).strip()
        build = scratch / "consumer"
        run("cmake", "-S", ROOT / "tests/consumers/find_package", "-B", build, f"-Damx_sft_moe_DIR={where}")
        run("cmake", "--build", build)
        sys.stdout.write(run(build / "consumer"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("pythons", nargs="+", metavar="PYTHON")
    parser.add_argument("--twice", action="store_true")
    parser.add_argument("--consumer", action="store_true")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    for old in (*options.output.glob("amx_sft_moe-*.whl"), *options.output.glob("amx_sft_moe-*.tar.gz")):
        old.unlink()
    run(sys.executable, "-m", "build", "--sdist", "--outdir", options.output, ROOT)
    sdist = only(list(options.output.glob("amx_sft_moe-*.tar.gz")))
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        for number, python in enumerate(options.pythons):
            builder = scratch / f"builder-{number}"
            run(python, "-m", "venv", builder)
            wheel = build_wheel(builder, sdist, options.output)
            check_wheel(wheel)
            if options.twice:
                again = build_wheel(builder, sdist, scratch / f"again-{number}")
                same = again.read_bytes() == wheel.read_bytes()
                sys.stdout.write(f"{wheel.name}: built twice, {'the same bytes' if same else 'other bytes'}\n")
                if not same:
                    sys.exit(1)
            try_wheel(wheel, python, scratch, options.consumer and number == 0)
    sys.stdout.write("".join(f"{path}\n" for path in sorted(options.output.iterdir())))


if __name__ == "__main__":
    main()
