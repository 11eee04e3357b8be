# Every target makes .venv by itself, and is quick when it is there already.

SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON ?= python3
STRATEGY ?= fsdp
ARGS ?=

# How many processes run tests, a file at a time. Most of the time a test waits for a process or for a deadline: two of
# them leave two cores idle for six tenths of it.
WORKERS ?= 3

BIN := .venv/bin
COMPILE_COLLECTIVE := from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder as b; b().load(verbose=False)
PIP := $(BIN)/python -m pip install --quiet --no-compile -c constraints.txt
STAMP := .venv/.installed
COMPILED := .venv/.compiled
DOCS_STAMP := .venv-docs/.installed

# The tests start hundreds of interpreters. Without bytecode each of them compiles every module that it imports.
unexport PYTHONDONTWRITEBYTECODE

# The tests start many small processes; more threads than cores only make them wait for each other.
export OMP_NUM_THREADS ?= 1

# Where torch and DeepSpeed keep the extensions that they compile: beside the packages that they were compiled for.
export TORCH_EXTENSIONS_DIR ?= $(CURDIR)/.venv/torch_extensions

.PHONY: help pretrain test check bench chaos docs readme clean

help: ## Show this list
	@sed -nE 's/^([a-z]+):.*## (.*)/make \1	\2/p' $(MAKEFILE_LIST) | expand -t 16

pretrain: $(COMPILED) ## Pretrain a small Llama on two ranks, kill one, compare the weights (STRATEGY=ddp|fsdp|model_parallel|deepspeed)
	$(BIN)/python examples/tinyllama/pretrain.py --strategy $(STRATEGY) $(ARGS)

test: $(COMPILED) ## Run the test suite (ARGS="tests/unit -k name" for a part of it)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

check: $(STAMP) ## Lint, format check, types, import layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(COMPILED) ## Measure what the package costs
	$(BIN)/python -m benchmarks $(ARGS)

chaos: $(COMPILED) ## Run the long repetitions of the fault tests
	$(BIN)/python -m pytest -m soak $(ARGS)

docs: $(DOCS_STAMP) ## Build the documentation into site/
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --quiet

readme: $(STAMP) ## Draw the README's picture of a verdict again, from a run that hangs
	$(BIN)/python docs/picture.py

clean: ## Remove everything that can be made again, .venv included
	rm -rf .venv .venv-docs build dist site runs lightning_logs .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# DeepSpeed comes as source and imports torch while it is built: hence first torch, then the build tools and what
# DeepSpeed's set-up imports, then everything else without build isolation. litdata comes without torchvision, whose wheel
# ends every `import lightning` where it was built for another kind of torch (CUDA, and a CPU wheel of torch). Python
# compiles modules when they are first imported: of some of these packages few ever are.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) torch numpy
	$(PIP) setuptools wheel hatchling editables packaging ninja py-cpuinfo
	$(PIP) --no-build-isolation -e ".[dev,examples]"
	$(PIP) --no-deps litdata
	touch $@

# At its first start on a CPU DeepSpeed compiles a collective, for a minute: better here than inside the deadline of the
# first test.
$(COMPILED): $(STAMP)
	DS_ACCELERATOR=cpu $(BIN)/python -c "$(COMPILE_COLLECTIVE)" >/dev/null
	touch $@

# The documentation is built without torch: the API reference is read from the sources, not imported.
$(DOCS_STAMP): docs/requirements.txt
	test -x .venv-docs/bin/python || $(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet -r docs/requirements.txt
	touch $@
