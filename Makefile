# Every verb sets up first when needed. `make demo` and `make test` are all a newcomer needs.
PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.ready

.PHONY: setup demo serve test test-slow check prove bench gpu-test clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt hatch_build.py $(wildcard csrc/*)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[plots,dev]"
	$(BIN)/forerun fetch smollm2-135m
	@touch $@

demo: setup
	$(BIN)/forerun run "Explain in three sentences why the sky is blue." --max-tokens 128 --compare

serve: setup
	$(BIN)/forerun serve

test: setup check
	$(BIN)/python -m pytest -q -m "not slow and not gpu"

test-slow: setup
	$(BIN)/python -m pytest -q -m "slow and not gpu"

gpu-test: setup
	$(BIN)/python -m pytest -q -m gpu

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

prove: setup
	$(BIN)/forerun prove

bench: setup
	$(BIN)/forerun bench --launch

clean:
	rm -rf $(VENV) build dist
