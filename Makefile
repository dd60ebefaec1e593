# The two commands of the README: `make serve` and `make test`. Both set up .venv on first use.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ARGS ?=

.PHONY: test-all serve test check lint types docs clean

serve: $(STAMP)
	$(BIN)/twinpool serve $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest -q $(ARGS)

# Every row of the matrices of families, strategies and data types; per commit a part of them runs.
test-all: $(STAMP)
	$(BIN)/python -m pytest -q --full $(ARGS)

check: lint types test

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/docs.py --check

types: $(STAMP)
	$(BIN)/mypy

docs: $(STAMP)
	$(BIN)/python tools/docs.py

clean:
	rm -rf $(VENV) build src/*.egg-info src/twinpool/_native*.so

# torch first and pinned: an open range would fetch a CUDA build of several gigabytes.
$(STAMP): pyproject.toml setup.py $(wildcard src/native/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || python3 -m venv $(VENV)
	$(BIN)/python -m pip install -q torch==2.13.0
	$(BIN)/python -m pip install -q -e '.[dev]'
	touch $(STAMP)
