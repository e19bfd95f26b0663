# Everything runs in .venv, which `make setup` builds and every other target builds when it is missing or out of date.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.kvlab-installed
# Extra options for pip, such as an index with CPU builds of torch:
#   make setup PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu"
PIP_FLAGS ?=
# Options for pytest, such as PYTEST_FLAGS="-k padding"
PYTEST_FLAGS ?=
CORES := $(shell nproc 2>/dev/null || sysctl -n hw.ncpu 2>/dev/null || echo 2)

export HF_HUB_DISABLE_TELEMETRY := 1

.DEFAULT_GOAL := help
.PHONY: help setup demo bench test test-slow lint format docs clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "kvlab needs Python 3.11 or newer: make setup PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$$($(PYTHON) --version) is too old, kvlab needs 3.11: make setup PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) -c constraints.txt -e '.[wandb,dashboard,dev]'
	@touch $@

setup: $(STAMP) ## install everything into .venv and fetch the embedded model (once)
	@$(BIN)/python -m kvlab.embedded

demo: setup ## the main job: five policies at two budgets on real text and on retrieval; prints the tables, writes the dashboard
	@HF_HUB_OFFLINE=1 $(BIN)/kvlab run -m experiment=demo
	@$(BIN)/kvlab dashboard outputs/demo --output outputs/demo/dashboard.html

test: setup ## all fast tests
	@HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -m "not slow" -n $(CORES) --dist worksteal --durations=20 -q $(PYTEST_FLAGS)

test-slow: setup ## the rest: every policy on every model family, bigger grids
	@HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -m slow -n $(CORES) --dist worksteal --durations=20 -q $(PYTEST_FLAGS)

bench: setup ## speed and memory against transformers' own cache and the targets: some ten minutes, nothing else should run
	@HF_HUB_OFFLINE=1 $(BIN)/kvlab bench

lint: $(STAMP) ## style, formatting, types, direction of imports
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: $(STAMP) ## let ruff mend what it can
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

docs: $(STAMP) ## the API reference from docstrings, in build/docs
	@$(BIN)/python -m pip install --quiet $(PIP_FLAGS) -c constraints.txt -e '.[docs]'
	@HF_HUB_OFFLINE=1 $(BIN)/python docs/api.py

clean: ## remove what was built; keeps outputs/ and fetched models
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
