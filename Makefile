# `make demo`, `make test`, `make lint`, `make types`: each sets up .venv first where it has to.
# Written for GNU make 3.81 (macOS) and later.

VENV ?= .venv
JOBS ?= 2
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
	if $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
	echo $$p; break; fi; done)
BIN := $(VENV)/bin

.PHONY: demo test lint types format gpu clean
.DEFAULT_GOAL := demo

demo: $(VENV)/.demo
	$(BIN)/python -m autockpt demo

test: $(VENV)/.test
	$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal

lint: $(VENV)/.test
	$(BIN)/ruff check .

types: $(VENV)/.test
	$(BIN)/mypy

format: $(VENV)/.test
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

gpu: $(VENV)/.demo
	$(BIN)/python benchmarks/gpu_check.py

$(BIN)/python:
	@if [ -z "$(PYTHON)" ]; then \
		echo "autockpt needs Python 3.11 or later: make PYTHON=/path/to/python3.12"; exit 1; fi
	$(PYTHON) -m venv $(VENV)

# What is installed is recorded by empty files, so that a second run starts at once.
$(VENV)/.demo: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[demo]"
	@touch $@

$(VENV)/.test: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[test]"
	@touch $@ $(VENV)/.demo

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
