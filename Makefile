# `make gate` checks everything, `make test` tests the checker.  Both set themselves up in .venv.
#   ENGINE=none       leaves the live engines (vLLM and SGLang on torch, some 3.3 GB) out; vllm and sglang set up one
#   GPU_ARGS='--vllm DIR' goes to tools/gpu_check.py
#   TESTS=DIR         a vLLM source distribution: its own tests, for `make detection`
#   ENGINES='DIR...'  folders of other versions of vLLM, for the same
#   DETECTION_ARGS='...' goes to tools/detection.py (--limit N, --seconds S, --jobs N)
#   GATE_ARGS='...'   goes to `kvclaims gate`      PYTEST_ARGS='...'  goes to pytest (default: all but slow tests)

ENGINE ?= all
GATE_ARGS ?=
GPU_ARGS ?=
TESTS ?=
ENGINES ?=
DETECTION_ARGS ?=
PYTEST_ARGS ?= -n auto -m 'not slow'
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help setup gate gpu-check detection test docs benchmarks lint format clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' Makefile

setup: ## install everything into .venv (starts at once when nothing changed)
	@sh tools/setup.sh --engine '$(ENGINE)'

gate: setup ## prove, explore, run litmus and fuzzing; report in gate/report.html
	@$(BIN)/kvclaims gate $(GATE_ARGS)

gpu-check: ## what only a GPU can show, in 8 minutes at most (without one: a line); installs nothing
	@$(firstword $(wildcard $(BIN)/python) python3) tools/gpu_check.py $(GPU_ARGS)

detection: setup ## what finds faults in vLLM, in docs/detection.md; goes on where it was left
	@$(BIN)/python tools/detection.py faults $(DETECTION_ARGS)
	@$(BIN)/python tools/detection.py reach
	@$(BIN)/python tools/detection.py ours $(DETECTION_ARGS)
ifneq ($(TESTS),)
	@$(BIN)/python tools/detection.py theirs --tests '$(TESTS)' $(DETECTION_ARGS)
endif
	@$(BIN)/python tools/detection.py clean
	@for engine in $(ENGINES); do $(BIN)/python tools/detection.py clean --engine-path "$$engine"; done
	@$(BIN)/python tools/detection.py page

test: setup ## run the test suite
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

docs: setup ## build the documentation into site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict

benchmarks: setup ## what it costs, held against benchmarks/baselines (minutes, on a quiet machine)
	@$(BIN)/python benchmarks/arbiter.py --compare
	@$(BIN)/python benchmarks/exploration.py --sizes S,M --compare
	@$(BIN)/python benchmarks/monitor.py --compare
	@$(BIN)/python benchmarks/serving.py overhead --compare
	@$(BIN)/python benchmarks/elastic.py --compare

lint: setup ## ruff and mypy --strict
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/mypy tools

format: setup ## format the code
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format .

clean: ## remove the environment and everything that was built
	rm -rf .venv build dist site gate counterexamples kvclaims.egg-info examples/*/build examples/*/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
