# `make help` lists the targets. Everything runs inside .venv, which `make setup` makes.
PYTHON ?= python3
BIN := .venv/bin
export OMP_NUM_THREADS ?= 1

.PHONY: help
help: ## Show this list
	@grep -hE '^[a-z-]+:.*?## ' $(MAKEFILE_LIST) | awk -F ':.*?## ' '{printf "  make %-12s %s\n", $$1, $$2}'

.venv/ready: pyproject.toml CMakeLists.txt $(shell find csrc -type f 2>/dev/null)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install -q --upgrade pip
	$(BIN)/pip install -q torch==2.13.0
	$(BIN)/pip install -q "scikit-build-core>=0.10" "nanobind>=2.4" cmake ninja
	$(BIN)/pip install -q --no-build-isolation -e '.[local,plot,dev]'
	touch .venv/ready

.PHONY: setup
setup: .venv/ready ## Make .venv with everything a contributor on a CPU machine needs

.PHONY: check
check: setup ## Format, lint, types, import layers
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports

.PHONY: format
format: setup ## Rewrite files as the checks want them
	$(BIN)/ruff format src tests benchmarks
	$(BIN)/ruff check --fix src tests benchmarks

.PHONY: test
test: check ## All checks and all tests that a CPU machine can run
	$(BIN)/pytest -n 2 --dist loadfile
