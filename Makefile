# Each target makes what it needs: a virtual environment, compiled kernels, the install, then the job.
PYTHON ?= python3
# What an install brings beside text on a CPU: make serve EXTRA=gpu, or EXTRA=gpu,speech
EXTRA ?=
# Of EXTRA=gpu and of the tests. Any from 2.11 to 2.15 works: make serve EXTRA=gpu TORCH="torch==2.11.0"
TORCH ?= torch==2.13.0
VENV ?= .venv
# What `make wheel` builds for, on any machine: x86_64 or aarch64.
ARCH ?= $(shell uname -m)
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet
INSTALLED := $(VENV)/.installed-$(EXTRA)
ARGS ?=

KERNELS := build/kernels/$(ARCH)
SOURCES := $(wildcard deltic/csrc/*) CMakeLists.txt deltic/ops/cpu/instruction_sets.py
# Of this machine, the fastest first.
RUNNABLE = $(shell $(PYTHON) deltic/ops/cpu/instruction_sets.py)

# What can be done side by side is, with one job more than CPUs, since some wait half of their time: those have the CPUs first, and the
# others are nice. A test that fails stops no other.
MAKEFLAGS += --jobs=$(shell echo $$(( $$(getconf _NPROCESSORS_ONLN) + 1 ))) --keep-going --no-print-directory
SHELL := bash
.SHELLFLAGS := -o pipefail -c
# The lines of tests that run side by side say whose they are.
NAMED = 2>&1 | sed -u 's/^/$(@:test-%=%): /'

.PHONY: install serve kernels kernels-all test test-null test-cpu test-gpu test-bench test-package test-all test-routers test-clients targets bench soak soak-speech oracle lint wheel clean

$(VENV)/.python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Deltic needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	touch $@

$(VENV)/.build: $(VENV)/.python pyproject.toml
	$(PIP) --group build
	touch $@

# Kernels are compiled once, whoever asks, by ninja, which keeps its objects: those of this machine, those that it runs, all. One behind
# the other, in one folder.
$(KERNELS)/build.ninja: CMakeLists.txt pyproject.toml $(VENV)/.build
	@mkdir -p $(KERNELS)
	$(BIN)/cmake -S . -B $(KERNELS) -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja -DPython_EXECUTABLE=$(abspath $(BIN))/python $(CROSS) > $(KERNELS)/cmake.log || (cat $(KERNELS)/cmake.log; false)
	touch $@

CROSS := $(if $(filter-out $(shell uname -m),$(ARCH)),-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=$(ARCH) -DCMAKE_LIBRARY_OUTPUT_DIRECTORY=$(abspath $(KERNELS))/lib)
LIBRARIES := $(if $(CROSS),$(KERNELS)/lib,deltic/ops/lib)
COMPILE = MAKEFLAGS= NINJA_STATUS="compiling kernels, %f of %t, %w, about %W to go: " $(BIN)/ninja -C $(KERNELS)

$(KERNELS)/.native: $(KERNELS)/build.ninja $(SOURCES)
	$(COMPILE) $(firstword $(RUNNABLE))
	touch $@

$(KERNELS)/.runnable: $(KERNELS)/.native
	$(COMPILE) $(RUNNABLE)
	touch $@

$(KERNELS)/.all: $(if $(CROSS),$(KERNELS)/build.ninja $(SOURCES),$(KERNELS)/.runnable)
	$(COMPILE)
	touch $@

# All that this machine runs, e.g. behind a change to deltic/csrc; all that a package has.
kernels: $(KERNELS)/.runnable
kernels-all: $(KERNELS)/.all

# Modules are run from the tree, kernels beside them: pip compiles nothing.
EDITABLE := --no-build-isolation --config-settings=editable.mode=inplace --config-settings=wheel.cmake=false --editable

$(INSTALLED): $(VENV)/.build
	$(if $(findstring gpu,$(EXTRA)),$(PIP) '$(TORCH)')
	$(PIP) $(EDITABLE) '.$(EXTRA:%=[%])'
	touch $@

$(VENV)/.tests: $(VENV)/.build
	$(PIP) '$(TORCH)'
	$(PIP) $(EDITABLE) '.[gpu,speech,video,bench]' --group test --group lint
	$(PIP) --no-deps --group published
	touch $@

install: $(INSTALLED) $(KERNELS)/.native

serve: install
	$(BIN)/deltic serve $(ARGS)

# What a landing may break; CONTRIBUTING.md says what runs when. With ARGS, e.g. make test ARGS="tests/null -k name", what they say.
ifneq ($(strip $(ARGS)),)
test: $(VENV)/.tests $(KERNELS)/.runnable
	$(BIN)/python -m pytest $(ARGS)
else
test: test-null test-cpu test-gpu test-bench $(if $(PACKAGE),test-package)
endif

# With PACKAGE=yes, tests that need neither torch nor this tree run in the package's environment (test-package), and not here.
HERE = $(if $(PACKAGE),--not-in-package)

test-null: $(VENV)/.tests
	$(BIN)/python -m pytest tests/null $(HERE) $(NAMED)

test-cpu: $(VENV)/.tests $(KERNELS)/.runnable
	nice $(BIN)/python -m pytest --area cpu $(ALL) tests/cpu tests/arm $(HERE) $(NAMED)

test-gpu: $(VENV)/.tests $(KERNELS)/.runnable
	nice $(BIN)/python -m pytest --area gpu $(ALL) tests/gpu $(NAMED)

test-bench: $(VENV)/.tests $(KERNELS)/.runnable
	$(BIN)/python -m pytest --area bench $(ALL) tests/bench $(NAMED)

# The package as its users have it, in an environment without torch and with no compiler on the PATH (tests/installed.py).
test-package: $(VENV)/.build wheel
	$(BIN)/python -m tests.installed dist/deltic-*_$(ARCH).whl $(NAMED)

# Everything, for a night: long tests of areas that did not change, the package, programs of others.
test-all: ALL := --everything
test-all: test-null test-cpu test-gpu test-bench test-package test-routers test-clients

# What drives Deltic from outside, as Ray does: large packages, in the same environment.
test-routers: $(VENV)/.tests $(KERNELS)/.runnable
	$(PIP) $(EDITABLE) '.[ray]' --group routers
	$(BIN)/python -m pytest tests/routers $(ARGS) $(NAMED)

# Programs of others, in an environment of their own.
test-clients: $(KERNELS)/.runnable $(VENV)/.build
	$(PYTHON) -m venv build/clients
	$(BIN)/python -m pip --python build/clients/bin/python install --quiet --group build
	$(BIN)/python -m pip --python build/clients/bin/python install --quiet '$(TORCH)'
	$(BIN)/python -m pip --python build/clients/bin/python install --quiet $(EDITABLE) '.[speech,video]' --group test --group clients
	build/clients/bin/python -m pytest tests/clients $(NAMED)

# Every kernel of tiny and published models, compiled for every chip of deltic/ops/gpu/chip.py: no GPU, half an hour of two CPUs.
targets: $(VENV)/.tests
	TEST_TARGETS=1 $(BIN)/python -m pytest -s tests/gpu/test_gpu_targets.py

# ARGS are `deltic bench serve`'s, e.g. make bench ARGS="--dummy qwen3.5-0.8b --n 1,2,4"
bench: $(VENV)/.tests
	$(BIN)/deltic bench serve $(ARGS)

# Everything that a server has, at once.
soak: $(VENV)/.tests
	$(BIN)/python -m bench.soak --with all --kill-engine 5 --minutes 30 $(ARGS)

# Of a tiny random model that speaks.
soak-speech: $(VENV)/.tests
	rm -rf build/tiny-speech
	$(BIN)/python -c 'from pathlib import Path; from tests import tiny_speech; tiny_speech.write_speech(Path("build/tiny-speech"), "custom_voice")'
	$(BIN)/python -m bench.soak build/tiny-speech --speech --minutes 20 --clients 16 $(ARGS)

# Writes tests/golden/speech again, from the published package, which wants another transformers than the tests. --no-deps: it asks
# for an onnxruntime, a sox and a torchaudio that its 12.5 Hz models do not need, and for gradio.
oracle:
	$(PYTHON) -m venv build/oracle
	build/oracle/bin/python -m pip install --quiet '$(TORCH)' transformers==4.57.3 accelerate einops librosa soundfile
	build/oracle/bin/python -m pip install --quiet --no-deps qwen-tts==0.1.1
	build/oracle/bin/python tests/golden/make_speech.py

lint: $(VENV)/.tests
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

# A package for any Linux with glibc 2.28, in dist: every instruction set, by the pinned compiler. tests/wheel.py looks inside.
wheel: $(KERNELS)/.all $(VENV)/.package
	rm -rf build/dist dist/deltic-*_$(ARCH).whl
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir build/dist \
	  --config-settings=build-dir=build/wheel-$(ARCH) --config-settings=cmake.define.DELTIC_LIBRARIES=$(abspath $(LIBRARIES)) .
	$(BIN)/python -m wheel tags --remove --platform-tag manylinux_2_28_$(ARCH) build/dist/*.whl
	mkdir -p dist && mv build/dist/*.whl dist
	$(BIN)/python -m tests.wheel dist/deltic-*_$(ARCH).whl

$(VENV)/.package: $(VENV)/.build
	$(PIP) --group package
	touch $@

clean:
	rm -rf $(VENV) build deltic/ops/lib dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
