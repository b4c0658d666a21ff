# Every target does all the set-up it needs, and is quick the second time.
# A bare machine needs Python 3.10 or later with venv, a C++ compiler and make; CMake 3 is fetched if it is missing.

PYTHON ?= python3
VENV := .venv
DOCS := .venv-docs
DOCS_NEEDS = $(shell sed -n '/^docs =/,/^[^ ]/s/^    //p' setup.cfg)
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
EXTRAS := torch,tensorflow-cpu,jax,cli,dev
JOBS ?= 2
ARGS ?=
KERNELS := $(wildcard grace/kernels/*.py grace/kernels/*.h grace/kernels/*.cc)
DEMO := .venv-demo
BEGAN := $(shell date +%s)

.DEFAULT_GOAL := help
.PHONY: help install demo demo-all test quick check format docs dist lab soak gpu clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(VENV)/.kernels ## make .venv with PyTorch, TensorFlow, Horovod and GRACE (minutes the first time)

# The install above compiled the kernels. This does so again where their sources changed, adds TensorFlow's operations, and
# says so where there is no compiler: GRACE works without.
$(VENV)/.kernels: $(VENV)/.installed $(KERNELS)
	$(BIN)/python -m grace.kernels.build
	@touch $@

# Horovod is not an extra here: it is compiled against the toolkits that the line above it installs.
$(VENV)/.installed: setup.py setup.cfg pyproject.toml grace_bench/pyproject.toml constraints.txt scripts/build_horovod.py
	@echo "Setting up $(VENV) (about 2 GB of packages; Horovod is compiled once and kept in a cache)"
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt setuptools wheel
	$(PIP) install -c constraints.txt --no-build-isolation -e '.[$(EXTRAS)]' -e ./grace_bench
	$(BIN)/python scripts/build_horovod.py -c constraints.txt
	@touch $@

demo: $(DEMO)/.ready ## train with and without compression, and show what it saved; needs PyTorch alone
	@$(DEMO)/bin/python examples/demo.py --began $(BEGAN) $(ARGS)

$(DEMO)/.ready: setup.py setup.cfg constraints.txt scripts/set_up_demo.py $(KERNELS)
	$(PYTHON) scripts/set_up_demo.py $(DEMO)
	@touch $@

demo-all: install ## the same in PyTorch, in Keras on TensorFlow over Horovod, in Keras on PyTorch, in JAX
	@$(BIN)/python examples/demo.py --toolkit all --began $(BEGAN) $(ARGS)

# Apart from the other packages: a process that loads TensorFlow and then PyTorch ends where Triton is among them, since
# both bring an LLVM along. Only processes that some tests start see it.
$(VENV)/.triton: $(VENV)/.installed
	[ "$$(uname)" != Linux ] || $(PIP) install -q -c constraints.txt --no-deps --upgrade --target $(VENV)/triton triton
	@touch $@

# Tests in one process first; then those that start several processes, whole files side by side, so that a fixture
# launches once. One thread per process: they share the machine's cores. M=topk: the tests of one method. EXHAUSTIVE=1:
# every combination of cases.
SELECT := $(if $(M),-k "$(M)") $(ARGS)
test: install $(VENV)/.triton ## run all tests
	@export OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1}; status=0; \
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not processes$(if $(EXHAUSTIVE),, and not exhaustive)" $(SELECT) || status=$$?; \
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m "processes$(if $(EXHAUSTIVE),, and not exhaustive)" $(SELECT) || status=$$?; \
	exit $$status

quick: install ## run one item of each test, without those marked slow
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -n $(JOBS) --quick $(SELECT)

check: install ## lint, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install ## sort imports, fix what can be fixed, format
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

docs: $(DOCS)/.installed ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

# An environment of its own: pages are made of sources that are read, not imported, so neither GRACE nor a toolkit is in it.
$(DOCS)/.installed: setup.cfg constraints.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip --disable-pip-version-check install -q -c constraints.txt $(DOCS_NEEDS)
	@touch $@

dist: $(VENV)/.release ## build sdist and wheels, check their kernels, and try them on each Python that is here
	rm -rf dist
	$(BIN)/python -m build --sdist
	$(BIN)/python scripts/build_wheels.py dist
	$(BIN)/python scripts/compare_kernels.py dist/*.whl
	$(BIN)/python -m build --wheel --outdir dist grace_bench
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python scripts/try_pythons.py dist/*_$$(uname -m).whl
	$(BIN)/python scripts/try_toolkits.py dist/*_$$(uname -m).whl

$(VENV)/.release: $(VENV)/.kernels
	$(PIP) install -c constraints.txt --no-build-isolation -e '.[release]'
	@touch $@

# The lab says what it lacks (root, openssh-server, iproute2) and how to get it; it installs nothing.
lab: install ## train across an emulated network and compare with others (about 10 minutes; needs root)
	$(BIN)/python -m benchmarks.lab run $(ARGS)

soak: install ## feed bad input, kill workers in the middle of steps, train in irregular loops (22 minutes)
	@export OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1}; status=0; \
	$(BIN)/python -m benchmarks.fuzz --seconds 240 --json out/fuzz.json || status=$$?; \
	$(BIN)/python -m benchmarks.soak --minutes 12 --json out/soak.json $(ARGS) || status=$$?; \
	$(BIN)/python -m benchmarks.loops --steps 5000 --json out/loops.json || status=$$?; \
	$(BIN)/python -m benchmarks.loops_local --steps 5000 --json out/loops_local.json || status=$$?; \
	exit $$status

gpu: install ## check and time everything on a CUDA device (under 10 minutes)
	$(BIN)/grace bench gpu $(ARGS)

clean: ## remove what was built; .venv, .venv-demo and the cache of Horovod wheels stay
	rm -rf build dist site out *.egg-info grace_bench/build grace_bench/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find grace grace_bench tests scripts examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
