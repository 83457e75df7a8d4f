# `make help` lists the targets. Needs: Python ≥ 3.11 with venv, a stable Rust with cargo, a C compiler, make; the tests
# also node ≥ 20 with npm.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV ?= .venv
MODEL ?=
ARGS ?=
BIN := $(VENV)/bin
PY := $(BIN)/python
MODEL_ARGUMENT = $(if $(MODEL),"$(MODEL)")
RUST_SOURCES := Cargo.toml Cargo.lock $(shell find rust_core -name target -prune -o -type f \( -name '*.rs' -o -name '*.toml' -o -name '*.py' -o -name '*.pyi' \) -print)
PYTHON_PATHS := py_engine/src kernels/src rust_core/python bench/src tests tools

.PHONY: help
help: ## This list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-20s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# ---- set-up: each step leaves a stamp, so a second run does nothing ----

$(VENV)/.stamp-env: requirements.lock tools/pip.lock
	@tools/check_setup.sh "$(PYTHON)"
	@echo "== Python environment in $(VENV) (PyTorch is large: several GB the first time)"
	$(PY) -m pip --version >/dev/null 2>&1 || "$(PYTHON)" -m venv --clear $(VENV)
	$(PY) -m pip install --disable-pip-version-check --quiet --require-hashes --no-deps -r tools/pip.lock
	$(PY) -m pip install --disable-pip-version-check --require-hashes --no-deps -r requirements.lock
	@touch $@

$(VENV)/.stamp-core: $(VENV)/.stamp-env $(RUST_SOURCES)
	@echo "== Rust core (release build)"
	cd rust_core && VIRTUAL_ENV="$(abspath $(VENV))" "$(abspath $(BIN))/maturin" develop --release --locked
	@touch $@

$(VENV)/.stamp-packages: $(VENV)/.stamp-env $(VENV)/.stamp-core kernels/pyproject.toml py_engine/pyproject.toml bench/pyproject.toml
	$(PY) -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation -e kernels -e py_engine -e bench
	@touch $@

.PHONY: install core model
install: $(VENV)/.stamp-packages ## Environment, core and packages
core: $(VENV)/.stamp-core ## Only the Rust core
model: install ## Fetch the embedded chat model (SmolLM2-135M-Instruct)
	@$(PY) -m oneloop.loader.embedded >/dev/null

# ---- run ----

.PHONY: serve chat
serve: install $(if $(MODEL),,model) ## Serve on 127.0.0.1:8000 (MODEL=path or id, ARGS=more options)
	@exec $(BIN)/oneloop serve $(MODEL_ARGUMENT) $(ARGS)
chat: install $(if $(MODEL),,model) ## Talk to a model in the terminal
	@$(BIN)/oneloop chat $(MODEL_ARGUMENT) $(ARGS) || test $$? -eq 130  # Ctrl-C at the prompt is how one leaves

# ---- checks: what CI runs is `make test` ----

# Tests that compute and wait for nothing, most of them in Triton's interpreter: each takes one thread, so as many pieces
# run beside each other as there are CPUs. The longest first. Each has a folder of its own for temporary files: pytests
# that share one fail where one of them ends while another begins (both look after a link there).
COMPUTING := tests/kernels tests/worker tests/e2e/test_greedy_parity.py tests/e2e/test_fp8_quality.py
SHARES := 6 1 2 3 4 5
PIECES := parity worker runner quality $(addprefix kernels-,$(SHARES))
compute-parity: TESTS := tests/e2e/test_greedy_parity.py
compute-quality: TESTS := tests/e2e/test_fp8_quality.py
compute-runner: TESTS := tests/worker/test_gpu_runner.py
compute-worker: TESTS := tests/worker --ignore=tests/worker/test_gpu_runner.py
$(addprefix compute-kernels-,$(SHARES)): TESTS = tests/kernels --share $(@:compute-kernels-%=%)/$(words $(SHARES))
.PHONY: $(addprefix compute-,$(PIECES))
$(addprefix compute-,$(PIECES)):
	folder=$$(mktemp -d); trap "rm -rf $$folder" EXIT; OMP_NUM_THREADS=1 $(PY) -m pytest --basetemp=$$folder/tests $(TESTS)

.PHONY: test lint types test-rust test-python test-clients test-slow test-gpu client-environments fuzz format lock
test: ## Everything CI runs: cargo tests (beside the installation, which they do not need), lints, types, Python tests
	@tools/check_setup.sh "$(PYTHON)"
	@$(MAKE) --no-print-directory -j2 -Oline install test-rust
	@$(MAKE) --no-print-directory lint types test-python
lint: install ## ruff, clippy, rustfmt, import contracts
	$(BIN)/ruff check $(PYTHON_PATHS)
	$(BIN)/ruff format --check $(PYTHON_PATHS)
	$(BIN)/lint-imports
	cargo fmt --all --check
	PYO3_PYTHON="$(abspath $(PY))" cargo clippy --workspace --all-targets --locked -- -D warnings
types: install ## mypy --strict, and the stub against the built core
	$(BIN)/mypy
	$(PY) -m mypy.stubtest oneloop_core
test-rust: ## Unit and property tests of the core (fast profile)
	cargo test --locked
test-python: install model client-environments ## Python tests on the CPU
	$(PY) -m pytest $(addprefix --ignore=,$(COMPUTING))
	@$(MAKE) --no-print-directory -k -j$$(nproc) -Otarget $(addprefix compute-,$(PIECES))
test-clients: install model client-environments ## Only the tests of clients: openai, anthropic, LangChain, LiteLLM, AI SDK
	$(PY) -m pytest tests/clients
client-environments: install ## Environments of the clients that the tests run (needs node and npm; 410 MB, once)
	@$(PY) tools/client_environments.py
test-slow: install model ## Long tests and figures with limits
	$(PY) -m pytest -m slow
test-gpu: install model ## GPU tests (on a machine with a CUDA device; ARGS=more options)
	$(PY) tools/gpu_tests.py $(ARGS)
fuzz: ## Long profile of the property tests (10^6 operations x 20 seeds; about two minutes)
	ONELOOP_FUZZ=long cargo test --locked -- --nocapture
format: install ## Format Python and Rust
	$(BIN)/ruff check --fix $(PYTHON_PATHS)
	$(BIN)/ruff format $(PYTHON_PATHS)
	cargo fmt --all
lock: $(VENV)/.stamp-env ## Make requirements.lock anew from requirements.in (needs uv)
	uv pip compile --universal --python-version 3.11 --generate-hashes --no-header --no-annotate requirements.in -o requirements.lock
	cd tests/clients/python && uv pip compile --universal --python-version 3.11 --generate-hashes --no-header --no-annotate requirements.in -o requirements.lock

# ---- figures: the last line of each is one JSON object ----

.PHONY: bench-core bench-scheduler bench-host bench-cpu bench-memory bench-start
bench-core: install model ## Scheduler and detokenizer: µs per step
	@$(PY) -m oneloop_bench.micro.core
bench-scheduler: install model ## The core beside vLLM's scheduler on the same requests (installs vLLM apart: 5 GB, once)
	@$(PY) -m oneloop_bench.scheduler
bench-host: install model ## The host per token, with steps that take no time: offline and streaming
	@$(PY) -m oneloop_bench.host
bench-serve-null: install ## Token events per second over HTTP with steps that take no time, and their pace at 5 ms a step
	@$(PY) -m oneloop_bench.serve_null $(ARGS)
bench-idle: install ## Memory of idle connections, and what 10,000 of them do to 100 active ones
	@$(PY) -m oneloop_bench.idle_connections $(ARGS)
bench-lag: install model ## How late the event loop is while long prompts and bursts of requests come
	@$(PY) -m oneloop_bench.loop_lag $(ARGS)
bench-cpu: install model ## SmolLM2 on the CPU beside transformers (and llama.cpp where installed)
	@$(PY) -m oneloop_bench.cpu
bench-memory: install model ## Memory of a server with a 512 MB KV cache, all of it touched
	@$(PY) -m oneloop_bench.memory
bench-start: install model ## Seconds from the command to a ready server and the first answer, by part
	@$(BIN)/oneloop bench startup
.PHONY: bench-structured
bench-structured: install model ## Grammars: ms to compile, µs per mask; 64 requests with JSON schemas beside free text
	@$(PY) -m oneloop_bench.structured $(ARGS)
.PHONY: bench-live-view
bench-live-view: install ## What an open /debug/scheduler does to the gaps between tokens of 256 streams
	@$(PY) -m oneloop_bench.live_view $(ARGS)

.PHONY: clean
clean: ## Remove build outputs and the environment
	rm -rf target $(VENV) .mypy_cache .ruff_cache .pytest_cache
