# Everything a developer runs. Needs make and a Python of 3.11 or later; the rest goes into .venv.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: help demo test check bench gpu docs clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-6s %s\n", $$1, $$2}' Makefile

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

# Installs nothing, so that a machine without a network will do; says what it skips, and why.
GPU_PYTHON ?= $(shell $(BIN)/python -c 'import cupy' 2>/dev/null && echo $(BIN)/python || echo python3)
GPU_OPTIONS ?=

gpu:  ## check and measure on a GPU; GPU_OPTIONS=--quick takes a minute
	$(GPU_PYTHON) -m bench.gpu $(GPU_OPTIONS)

docs: $(STAMP)  ## build the documentation; warnings are errors
	$(BIN)/sphinx-build -q -W --keep-going -b html docs docs/_build/html

clean:  ## remove what was built, .venv included
	rm -rf .venv build dist docs/_build .benchmarks .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The pip that comes with Python 3.11 knows no dependency groups.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[torch,demo]" --group dev
	touch $@
