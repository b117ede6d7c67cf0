# Each target makes what it needs: a virtual environment, the install with its compiled kernels, then the job.
PYTHON ?= python3
# What an install brings beside text on a CPU: make serve EXTRA=gpu, or EXTRA=gpu,speech
EXTRA ?=
# Of EXTRA=gpu and of the tests. Any from 2.11 to 2.13 works: make serve EXTRA=gpu TORCH="torch==2.11.0"
TORCH ?= torch==2.13.0
VENV ?= .venv
# What `make wheel` builds for, on any machine: x86_64 or aarch64.
ARCH ?= $(shell uname -m)
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed-$(EXTRA)
ARGS ?=

KERNELS := $(wildcard deltic/csrc/*) CMakeLists.txt
TARGETS := tests/gpu/test_gpu_targets.py

.PHONY: always install serve test test-routers test-cpu test-gpu test-others test-targets test-long targets test-package bench soak soak-speech oracle lint wheel clean

$(VENV)/.python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Deltic needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	touch $@

# The names of the modules: an editable install knows those that there were, so it is made again when one moves.
$(VENV)/.modules: $(VENV)/.python always
	@find deltic -name '*.py' | sort > $@.now; cmp -s $@ $@.now || cp $@.now $@

$(INSTALLED): $(VENV)/.python $(VENV)/.modules pyproject.toml $(KERNELS)
	$(if $(findstring gpu,$(EXTRA)),$(BIN)/python -m pip install --quiet '$(TORCH)')
	$(BIN)/python -m pip install --quiet --editable '.$(EXTRA:%=[%])'
	touch $@

$(VENV)/.test-installed: $(INSTALLED)
	$(BIN)/python -m pip install --quiet '$(TORCH)'
	$(BIN)/python -m pip install --quiet --editable '.[test,bench]'
	touch $@

install: $(INSTALLED)

serve: $(INSTALLED)
	$(BIN)/deltic serve $(ARGS)

# Everything but the long tests, with one run more than CPUs, since some wait half of their time. What all but the first print comes when they are
# done. With ARGS, e.g. make test ARGS="tests/null -k name", what they say, in one run.
test: $(VENV)/.test-installed
ifeq ($(strip $(ARGS)),)
	$(MAKE) --no-print-directory --keep-going --jobs=$$(( $$(getconf _NPROCESSORS_ONLN) + 1 )) test-cpu test-gpu test-others test-targets
else
	$(BIN)/python -m pytest $(ARGS)
endif

# What takes long beside a shorter test of the same, such as bits in company in the interpreter of GPU kernels.
test-long: $(VENV)/.test-installed
	$(BIN)/python -m pytest -m long $(ARGS)

# What drives Deltic from outside, as Ray does: large packages, in the same environment.
test-routers: $(VENV)/.routers-installed
	$(BIN)/python -m pytest tests/routers $(ARGS)

$(VENV)/.routers-installed: $(VENV)/.test-installed
	$(BIN)/python -m pip install --quiet --editable '.[routers]'
	touch $@

test-cpu:
	$(BIN)/python -m pytest tests/cpu

test-gpu: FILES := tests/gpu --ignore=$(TARGETS)
test-others: FILES := --ignore=tests/cpu --ignore=tests/gpu --ignore=tests/routers
test-targets: FILES := $(TARGETS)
test-gpu test-others test-targets:
	@mkdir -p build
	$(BIN)/python -m pytest $(FILES) > build/$@.log 2>&1; status=$$?; cat build/$@.log; exit $$status

# Every kernel of tiny and published models, compiled for every chip of tests/gpu/chips.py: no GPU, half an hour of two CPUs.
targets: $(VENV)/.test-installed
	TEST_TARGETS=1 $(BIN)/python -m pytest -s $(TARGETS)

# ARGS are `deltic bench serve`'s, e.g. make bench ARGS="--dummy qwen3.5-0.8b --n 1,2,4"
bench: $(VENV)/.test-installed
	$(BIN)/deltic bench serve $(ARGS)

soak: $(VENV)/.test-installed
	$(BIN)/python -m bench.soak --minutes 30 $(ARGS)

# Of a tiny random model that speaks.
soak-speech: $(VENV)/.test-installed
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

lint: $(VENV)/.test-installed
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

# A package for any Linux with glibc 2.28, in dist: every instruction set, by the pinned compiler. tests/wheel.py looks inside.
wheel: $(VENV)/.wheel-tools
	rm -rf build/dist dist/deltic-*_$(ARCH).whl
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir build/dist --config-settings=build-dir=build/$(ARCH) \
	  --config-settings=cmake.define.CMAKE_SYSTEM_NAME=Linux --config-settings=cmake.define.CMAKE_SYSTEM_PROCESSOR=$(ARCH) .
	$(BIN)/python -m wheel tags --remove --platform-tag manylinux_2_28_$(ARCH) build/dist/*.whl
	mkdir -p dist && mv build/dist/*.whl dist
	$(BIN)/python -m tests.wheel dist/deltic-*_$(ARCH).whl

$(VENV)/.wheel-tools: $(VENV)/.python
	$(BIN)/python -m pip install --quiet wheel auditwheel
	touch $@

# The package as its users have it, in an environment without torch and with no compiler on the PATH (tests/installed.py).
test-package: $(VENV)/.test-installed wheel
	$(BIN)/python -m tests.installed dist/deltic-*_$(ARCH).whl

clean:
	rm -rf $(VENV) build deltic/ops/lib dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
