# Each target sets up what it needs: a virtual environment in .venv, from a clean clone with Python 3.11.
# For another interpreter: make test PYTHON=python3.12

PYTHON ?= $(firstword $(foreach p,python3.11 python3,$(shell command -v $(p) 2>/dev/null)))
VENV   := .venv
STAMP  := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow check bench docs clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(STAMP)  ## train a small federation on handwritten digits and show what personalisation brings
	$(VENV)/bin/fedloom demo

test: check  ## formatting, lint, types and every test that is not slow
	scripts/test

test-slow: $(STAMP)  ## the slow tests only, and the tests of the kernels if triton is installed
	scripts/test -m slow
	scripts/test_kernels

check: $(STAMP)  ## formatting, lint and types, without running anything
	scripts/check

bench: $(STAMP)  ## run every script in benchmarks/; with PEERS=1 other libraries beside fedloom too
	PEERS=$(PEERS) scripts/bench

docs: $(STAMP)  ## build the documentation's site into site/, with every link checked
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

clean:  ## remove the virtual environment and all caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist site
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is written only after a complete installation, and lives and dies with the environment.
$(STAMP): pyproject.toml constraints.txt
	@echo "setting up $(VENV) (once; torch is a large download)"
	@test -n "$(PYTHON)" || { echo "no python3.11 found; install it or give one: make PYTHON=..." >&2; exit 1; }
	@test -x $(VENV)/bin/python || "$(PYTHON)" -m venv $(VENV)
	@$(VENV)/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fedloom needs Python 3.11 or newer, $(VENV) has " + sys.version.split()[0])'
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@
