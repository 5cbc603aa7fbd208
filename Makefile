# Everything a developer runs. Needs make and a Python of 3.11 or later; the rest goes into .venv.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: help demo test check bench bench-compare peers gpu gpu-kit emulator nvrtc fuzz soak docs clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-13s %s\n", $$1, $$2}' Makefile

demo: $(STAMP)  ## seal two data sets, open them, train on one, watch a forgery be refused
	$(BIN)/fastrack demo

test: $(STAMP)  ## run the tests
	$(BIN)/python -m pytest

check: $(STAMP)  ## lint, formatting, types, documentation
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(MAKE) --no-print-directory docs

bench: $(STAMP)  ## measure; the machine should be idle
	$(BIN)/python -m pytest bench --benchmark-only --benchmark-sort=name
	$(BIN)/fastrack bench

PEERS := .venv-peers
PEERS_OPTIONS ?=

peers: $(PEERS)/.installed  ## measure beside what people use now; the machine should be idle
	$(PEERS)/bin/python -m bench.peers $(PEERS_OPTIONS)

bench-compare: $(STAMP)  ## is the working tree slower than BASE=<revision>? some minutes; the machine should be idle
	$(BIN)/python -m bench.compare $(BASE)

# Installs nothing, so that a machine without a network will do; says what it skips, and why.
GPU_PYTHON ?= $(shell $(BIN)/python -c 'import cupy' 2>/dev/null && echo $(BIN)/python || echo python3)
GPU_OPTIONS ?=
STAGES ?=
OUT ?= bench/results
SECONDS ?= 540

gpu:  ## check and measure on a GPU: STAGES="first tests memcheck variants figures loop profile" OUT=folder SECONDS=540
	$(GPU_PYTHON) -m bench.gpu $(if $(STAGES),--stages $(STAGES)) --out $(OUT) --seconds $(SECONDS) $(GPU_OPTIONS)

KIT ?= .gpu-kit
KIT_PYTHON ?= 3.12

gpu-kit: $(STAMP)  ## gather in KIT=.gpu-kit what `make gpu` needs on a machine without a network; KIT_PYTHON=3.12
	$(BIN)/python -m bench.gpu.kit $(KIT) --python $(KIT_PYTHON)

# One environment holds one version of NVRTC; the tests find others in the folders that FASTRACK_NVRTC names.
NVRTC ?= 13.0.88

nvrtc: $(STAMP)  ## compile the kernels with another NVRTC as well, and look for spills; NVRTC=13.0.88
	test -d .nvrtc/$(NVRTC) || $(BIN)/python -m pip install --quiet --no-deps --target .nvrtc/$(NVRTC) nvidia-cuda-nvrtc==$(NVRTC)
	FASTRACK_NVRTC=.nvrtc/$(NVRTC) $(BIN)/python -m pytest tests/kernels/test_cu_build.py -s

EMULATOR := .venv-emulator

emulator: $(EMULATOR)/.installed  ## test the device's code with the real CuPy on an emulated GPU
	$(EMULATOR)/bin/python -m pytest tests/emulator

FUZZ_SECONDS ?= 600
FUZZ_SCHEDULES ?= 10000
SOAK_SECONDS ?= 600
FUZZ_STAMP := .venv/.fuzz

fuzz: $(FUZZ_STAMP)  ## feed altered files, keys and messages to what reads them; FUZZ_SECONDS=600 FUZZ_SCHEDULES=10000
	FASTRACK_SCHEDULES=$(FUZZ_SCHEDULES) $(BIN)/python -m pytest -q tests/test_owners.py -k raised_to_its_owner
	PYTHONPATH=tests $(BIN)/python -m fuzz --seconds $(FUZZ_SECONDS) --folder .fuzz --json .fuzz/fuzz.json

soak: $(STAMP)  ## move everything on many threads while things go wrong on purpose; SOAK_SECONDS=600
	PYTHONPATH=tests $(BIN)/python -m soak --seconds $(SOAK_SECONDS) --json .fuzz/soak.json

docs: $(STAMP)  ## build the documentation; warnings are errors
	$(BIN)/sphinx-build -q -W --keep-going -b html docs docs/_build/html

clean:  ## remove what was built, .venv included
	rm -rf .venv $(PEERS) $(EMULATOR) .fuzz .gpu-kit .nvrtc build dist docs/_build .benchmarks .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The pip that comes with Python 3.11 knows no dependency groups.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[torch,demo]" --group dev
	touch $@

# Apart, because packages that nothing else needs come with them, and versions that the others would not choose.
$(PEERS)/.installed: pyproject.toml bench/peers/constraints.txt
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	$(PEERS)/bin/python -m pip install --quiet --constraint bench/peers/constraints.txt --editable ".[bench]"
	touch $@

# Apart, because without CuPy the ordinary tests show what users without it see.
$(EMULATOR)/.installed: pyproject.toml constraints.txt
	test -x $(EMULATOR)/bin/python || $(PYTHON) -m venv $(EMULATOR)
	$(EMULATOR)/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	grep -v nvidia-cuda-nvrtc constraints.txt > $(EMULATOR)/constraints.txt
	$(EMULATOR)/bin/python -m pip install --quiet --constraint $(EMULATOR)/constraints.txt --editable . --group emulator
	touch $@

# Apart, as atheris has wheels for some Pythons only. Where it has none `make fuzz` says so, and what to run instead.
$(FUZZ_STAMP): $(STAMP)
	-$(BIN)/python -m pip install --quiet --only-binary atheris --constraint constraints.txt --group fuzz && touch $@
