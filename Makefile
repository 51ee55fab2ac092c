PYTHON_BIN := .venv/bin/python

.PHONY: help setup demo test test-engine check compat matrix mutants bench mutations
.DEFAULT_GOAL := help

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## create .venv with torch, vLLM for the CPU and this project
	@./setup.sh

demo: setup ## sync a live engine on this machine and prove it; no GPU needed
	.venv/bin/weightsync demo

test-engine: setup ## tests that start real inference engines
	$(PYTHON_BIN) -m pytest -m engine

test: setup ## all tests, the fast ones first
	$(PYTHON_BIN) -m pytest -m "not engine and not compat and not matrix"
	$(PYTHON_BIN) -m pytest -m engine

check: setup ## format, lint, types, fast tests
	$(PYTHON_BIN) -m ruff format --check .
	$(PYTHON_BIN) -m ruff check .
	$(PYTHON_BIN) -m mypy
	$(PYTHON_BIN) -m pytest -m "not engine and not compat and not matrix"

compat: setup ## one live update on each supported vLLM release; makes their environments once (6 GB)
	$(PYTHON_BIN) tests/compat/run.py

matrix: setup ## every model family, in process, at TP=2 and over HTTP, by both ways in (25 minutes)
	$(PYTHON_BIN) -m pytest -v -m matrix tests/matrix

mutants: setup ## mutation testing of the pure modules, in a copy (10 minutes)
	$(PYTHON_BIN) tests/mutants/run.py

mutations: setup ## inject every fault of the catalogue into a sync; what sees it, as a table
	$(PYTHON_BIN) tests/mutations/run.py

bench: setup ## every bench/bench_*.py, figures in build/bench
	@mkdir -p build/bench
	@set -e; for script in bench/bench_*.py; do \
	    name=$$(basename $$script .py); echo "== $$name"; \
	    $(PYTHON_BIN) $$script --json build/bench/$$name.json; \
	done
