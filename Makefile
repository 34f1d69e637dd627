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
	# Mooncake's wheel needs libibverbs; without it (and without root) only the Mooncake tests are skipped.
	ldconfig -p | grep -q libibverbs.so.1 || (apt-get update -q && apt-get install -qy --no-install-recommends libibverbs1) || true
	$(BIN)/pip install -q torch==2.13.0
	$(BIN)/pip install -q "scikit-build-core>=0.10" "nanobind>=2.4" cmake ninja
	$(BIN)/pip install -q --no-build-isolation -e '.[local,mooncake,plot,dev]'
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

.PHONY: simulate
simulate: setup ## The paper's tables beside ours, predicted in virtual time
	$(BIN)/seer paper --seeds 0,1,2

.PHONY: crash-test
crash-test: setup ## A thousand random kills of pool users; nothing acknowledged may be lost
	$(BIN)/python tests/crash/pool_torture.py --kills 1000 --seed 1
