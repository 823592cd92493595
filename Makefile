# The two commands of the README, and what they are made of. On a fresh Debian 12 machine `make finetune` and
# `make test` install what they need: a compiler and headers by apt, the rest into .venv by pip.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BUILD := build
JOBS ?= $(shell nproc)
SUDO := $(shell [ "$$(id -u)" = 0 ] || echo sudo)
# torch is pinned: an unpinned one brings gigabytes of CUDA libraries.
TORCH ?= torch==2.13.0
NVTX_INCLUDE = $(shell $(BIN)/python -c "import nvidia, pathlib; \
  print(next((p.parent.parent for d in nvidia.__path__ for p in pathlib.Path(d).rglob('nvtx3/nvtx3.hpp')), ''))")
SOURCES := $(shell find cmake include python pyproject.toml CMakeLists.txt -type f -not -name '*.pyc')

.PHONY: finetune test test-cpp test-python test-full matrix qemu lint bench clean help

help:
	@echo "make finetune    LoRA fine-tuning of a small MoE language model on real text, offline"
	@echo "make test        all C++ and Python tests"
	@echo "make test-full   also sanitizers, other compilers, other CPUs"
	@echo "make matrix      a program by each compiler found, C++20 and C++23, strict warnings"
	@echo "make qemu        one binary on emulated CPUs from SSE2 to AVX2"
	@echo "make bench       GEMM forms and one operator step beside this machine's limits"
	@echo "make lint        clang-format, ruff"

finetune: $(VENV)/installed
	$(BIN)/python -m amx_sft_moe finetune $(ARGS)

test: test-cpp test-python

test-cpp: $(VENV)/tools
	$(BIN)/cmake -S . -B $(BUILD) -G Ninja -DAMX_SFT_MOE_NVTX_INCLUDE=$(NVTX_INCLUDE)
	$(BIN)/cmake --build $(BUILD) -j $(JOBS)
	OMP_WAIT_POLICY=passive $(BIN)/ctest --test-dir $(BUILD) --output-on-failure -j $(JOBS)

test-python: $(VENV)/installed test-cpp
	AMX_EMULATOR_LIBRARY=$$(find $(abspath $(BUILD)) -name libamx_emulator.so | head -1) \
	  $(BIN)/python -m pytest -q tests/python

test-full: test lint matrix qemu
	$(BIN)/cmake -S . -B $(BUILD)-asan -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo \
	  -DAMX_SFT_MOE_SANITIZE=address,undefined -DAMX_SFT_MOE_BENCHMARKS=OFF
	$(BIN)/cmake --build $(BUILD)-asan -j $(JOBS)
	OMP_WAIT_POLICY=passive $(BIN)/ctest --test-dir $(BUILD)-asan --output-on-failure -j $(JOBS)

matrix qemu: $(VENV)/tools
	@if [ $@ = qemu ] && ! command -v qemu-x86_64 >/dev/null; then \
	  echo "installing qemu-user by apt"; \
	  $(SUDO) apt-get update -q && $(SUDO) env DEBIAN_FRONTEND=noninteractive \
	    apt-get install -y -q --no-install-recommends qemu-user || true; \
	fi
	$(BIN)/cmake -S . -B $(BUILD) -G Ninja -DAMX_SFT_MOE_NVTX_INCLUDE=$(NVTX_INCLUDE)
	$(BIN)/ctest --test-dir $(BUILD) -C full -L $@ --verbose

bench: $(VENV)/tools
	$(BIN)/cmake -S . -B $(BUILD) -G Ninja -DAMX_SFT_MOE_NVTX_INCLUDE=$(NVTX_INCLUDE)
	$(BIN)/cmake --build $(BUILD) -j $(JOBS) --target bench_gemm bench_step
	$(BUILD)/benchmarks/bench_gemm
	$(BUILD)/benchmarks/bench_step

lint: $(VENV)/tools
	$(BIN)/ruff check python tests benchmarks
	$(BIN)/ruff format --check python tests benchmarks
	git ls-files '*.hpp' '*.cpp' | xargs $(BIN)/clang-format --dry-run --Werror

# Compiler, Python headers, GoogleTest, oneDNN: only where they are missing.
$(VENV)/system:
	@if ! command -v g++ >/dev/null || [ ! -d /usr/src/googletest ] || [ ! -f /usr/include/dnnl.hpp ] || ! $(PYTHON) -c \
	    'import ensurepip, os, sysconfig; assert os.path.exists(sysconfig.get_path("include") + "/Python.h")' \
	    2>/dev/null; then \
	  echo "installing g++, python3-dev, python3-venv, googletest and libdnnl-dev by apt"; \
	  $(SUDO) apt-get update -q && $(SUDO) env DEBIAN_FRONTEND=noninteractive \
	    apt-get install -y -q g++ git python3-dev python3-venv googletest libdnnl-dev; \
	fi
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/tools: $(VENV)/system
	$(BIN)/pip install -q cmake ninja nvidia-nvtx ruff clang-format==16.0.6 pybind11 scikit-build-core
	@touch $@

$(VENV)/packages: $(VENV)/tools
	$(BIN)/pip install -q $(TORCH)
	$(BIN)/pip install -q $$($(BIN)/python -c "import tomllib; \
	  e = tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']; \
	  print(' '.join('\"%s\"' % r for r in e['train'] + e['test'] if not r.startswith('amx-sft-moe')))" | tr -d '"')
	@touch $@

# The package itself, built once for all instruction sets; built again when a source changes.
$(VENV)/installed: $(VENV)/packages $(SOURCES)
	$(BIN)/pip install -q --no-build-isolation --no-deps .
	@touch $@

clean:
	rm -rf $(BUILD) $(BUILD)-asan $(VENV)
