# make help lists the targets.

PYTHON ?= python3
PYTEST_ARGS ?=
# Tests often wait, so that there are two processes of tests more than cores; each takes about 3 GB.
WORKERS ?= $(shell awk -v n=$$(($$(nproc) + 2)) '/^MemAvailable/ { gb = int($$2 / 3e6); n = n > 8 ? 8 : n; print n < gb ? n : gb }' /proc/meminfo)
DEMO_ARGS ?=
GPU_ARGS ?=
# What a process compiles is kept for the others: without it, each process of tests compiles for 6 s.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
BIN := $(VENV)/bin
RUNTIME := $(VENV)/.runtime
INSTALLED := $(VENV)/.installed
OLDEST := .venv-oldest
NEWEST := .venv-newest
NEWEST_PIP_ARGS ?=
NEWEST_TESTS := tests/strategies/test_contract.py::test_two_steps tests/test_torch_compat.py tests/test_lightning_internals.py \
	tests/test_packaging.py::test_the_wheel_has_the_package_alone_and_trains_from_any_directory
OLDEST_RESULTS := benchmarks/results/oldest.txt
PIP_INSTALL = $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help install gpu demo check docs test suite oldest newest release clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "PYTHON=python3.12 make install    another interpreter, 3.11 or newer"
	@echo "make demo DEMO_ARGS='...'         options of examples/digits.py"
	@echo "make gpu GPU_ARGS='...'           options of python -m benchmarks.gpu, such as '--device cpu'"
	@echo "make test PYTEST_ARGS='...'       options of pytest, such as '-k ring'"
	@echo "make newest NEWEST_PIP_ARGS='...'  options of pip, such as '--extra-index-url' of torch's builds for CPUs"
	@echo "make test WORKERS=0               tests one after the other, in one process"

install: $(INSTALLED) ## .venv with the package in editable mode and all that its tests need

# torch comes first: packages that are built from source look for it.
$(RUNTIME): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("$(PYTHON) is Python %d.%d; 3.11 or newer is needed, as in: make install PYTHON=python3.11" % v[:2])'
	@echo "Installing torch, Lightning and scikit-learn into $(VENV): 1 GB and a minute or two (6 GB with CUDA)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP_INSTALL) --quiet torch
	@$(PIP_INSTALL) --quiet --editable . scikit-learn
	@touch $@

$(INSTALLED): $(RUNTIME)
	$(PIP_INSTALL) --editable '.[dev,gpu]'
	@touch $@

gpu: install ## every strategy on the GPUs of this machine; one is enough
	$(BIN)/python -m benchmarks.gpu $(GPU_ARGS)

demo: $(RUNTIME) ## train and test on real handwritten digits with ring_ddp, two processes
	$(BIN)/python examples/digits.py --strategy ring_ddp --devices 2 $(DEMO_ARGS)

check: install docs ## style, formatting, types and documentation
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: install ## the documentation pages in site/; a broken link or reference is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --config-file docs/config/mkdocs.yml

test: install ## check, and the whole test suite beside it
	$(MAKE) --jobs=2 check suite

suite: install
	$(BIN)/python -m pytest --numprocesses=$(WORKERS) --no-loadscope-reorder $(PYTEST_ARGS)

# uv, since pip cannot be asked for the oldest versions; a new environment, since uv would keep newer ones.
oldest: ## the contract of every strategy on the oldest versions that pyproject.toml admits, in .venv-oldest
	$(PYTHON) -m venv --clear $(OLDEST)
	$(OLDEST)/bin/python -m pip install --disable-pip-version-check --quiet uv
	$(OLDEST)/bin/uv pip install --quiet --python $(OLDEST)/bin/python --resolution lowest-direct --editable '.[test]'
	rm -f $(OLDEST_RESULTS)
	$(OLDEST)/bin/python -m benchmarks.versions --output $(OLDEST_RESULTS) tests/strategies/test_contract.py -q --numprocesses=2 $(PYTEST_ARGS)

# Without constraints.txt, which has what was the newest once.
newest: ## the contract in two steps on the newest versions that pip takes within pyproject.toml's ranges, in .venv-newest
	$(PYTHON) -m venv --clear $(NEWEST)
	$(NEWEST)/bin/python -m pip install --disable-pip-version-check --quiet $(NEWEST_PIP_ARGS) torch
	$(NEWEST)/bin/python -m pip install --disable-pip-version-check --quiet $(NEWEST_PIP_ARGS) --editable '.[test]'
	$(NEWEST)/bin/python -m pytest -q $(NEWEST_TESTS)

# Environments of their own: what is not in the wheel is missed there.
release: ## the distributions in dist/, checked, and tried in a fresh environment
	rm -rf dist build/release
	$(PYTHON) -m venv build/release/tools
	build/release/tools/bin/python -m pip install --disable-pip-version-check --quiet build twine
	build/release/tools/bin/python -m build --outdir dist
	build/release/tools/bin/python -m twine check --strict dist/*
	$(PYTHON) -m venv build/release/user
	build/release/user/bin/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt torch dist/*.whl
	build/release/user/bin/lightning-multigpu new build/release/project
	cd build/release/project && ../user/bin/lightning-multigpu fit --config config.yaml --trainer.max_steps=20
	@echo "To upload: build/release/tools/bin/python -m twine upload" dist/*

clean: ## removes .venv, .venv-oldest, .venv-newest, builds and caches; results in runs/ stay
	rm -rf $(VENV) $(OLDEST) $(NEWEST) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
