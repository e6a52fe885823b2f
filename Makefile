# The commands of everyday work; `make` alone lists them.
#
#   PYTHON=python3.12   the interpreter that .venv is made with (3.11 or newer; the first found otherwise)
#   T="-k lanczos -x"   more arguments for pytest
#   SUITES=folder       where source distributions of other libraries lie unpacked, for test-peers
#   WORKERS=4           how many processes share the tests; each computes with one thread
#   CUDA_PYTHON=python3 the interpreter of test-cuda, where .venv has a torch without CUDA

.DEFAULT_GOAL := help
PYTHON ?=
T ?=
WORKERS ?= 2

BIN := .venv/bin
READY := .venv/.ready
CUDA_PYTHON ?= $(BIN)/python
PEERS := .venv/.peers
DOCS := .venv/.docs
OLDEST := .venv/oldest/.ready
PIP := $(BIN)/python -m pip --quiet --quiet --disable-pip-version-check --no-input
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
PROSE := src docs benchmarks scripts notebooks README.md CONTRIBUTING.md CHANGELOG.md
FITS := import sys; assert sys.version_info >= (3, 11); import ensurepip, venv

.PHONY: help setup peers report test test-oldest test-slow test-peers test-cuda check bench docs clean clean-all

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: $(READY) ## the package with the extras hf, peft, lens, umap, monitor and dev, in .venv
	@:

peers: $(PEERS) ## other curvature libraries into .venv, to compare with
	@:

report: $(READY) ## look at the bundled model: one HTML page
	@$(BIN)/curvescope report

test: $(READY) ## all tests but the slow ones
	@$(PYTEST) $(T)

test-oldest: $(OLDEST) ## the tests with the oldest versions that are taken, in .venv/oldest
	@PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 .venv/oldest/bin/python -m pytest -n $(WORKERS) --dist worksteal $(T)

test-slow: $(PEERS) ## the slow tests, and those that compare with other libraries
	@$(PYTEST) -m "slow or cross_library" $(T) || { status=$$?; [ $$status -eq 5 ] || exit $$status; }

test-peers: $(PEERS) ## other libraries' own tests with curvescope behind their classes: counts in runs/peer-suites/
	@OMP_NUM_THREADS=1 $(BIN)/python tests/peer_suites/run.py $(if $(SUITES),--suites $(SUITES)) $(if $(T),-- $(T))

test-cuda: ## on a CUDA device: every test that can use one, the grid of attention, compute-sanitizer
	@$(CUDA_PYTHON) -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else \
	  "make test-cuda needs a CUDA device, and torch " + torch.__version__ + " finds none")'
	@PYTHONPATH=src $(CUDA_PYTHON) -m pytest -m cuda $(T)

check: $(READY) ## style, format, types, direction of imports, spelling, plain sentences
	@failed=0; \
	for tool in "ruff check ." "ruff format --check ." "pyright" "lint-imports --no-logo" "codespell $(PROSE)" "python scripts/check_prose.py"; do \
	  PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/$$tool || failed=1; \
	done; \
	exit $$failed

bench: $(READY) ## every script in benchmarks/
	@scripts=$$(find benchmarks -maxdepth 1 -name '[!_]*.py' 2>/dev/null | sort); \
	[ -n "$$scripts" ] || echo "no benchmarks yet: a script in benchmarks/ is run by this command"; \
	for script in $$scripts; do echo "== $$script"; $(BIN)/python "$$script" || exit 1; done

docs: $(DOCS) ## the documentation, in site/; a dead link or a docstring that cannot be read stops it
	@PATH="$(CURDIR)/$(BIN):$$PATH" NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "site/index.html; with its search: $(BIN)/python -m http.server -d site"

clean: ## remove caches and build outputs; .venv, runs/ and reports stay
	@rm -rf build dist site .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	@find . -name .venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

clean-all: clean ## remove .venv too
	@rm -rf .venv

$(READY): requirements.lock pyproject.toml
	@echo "setting up .venv (once): $$(grep -c '^[^#].*==' requirements.lock) packages, 2 to 3 GB on disk" \
	  "(more where torch brings CUDA along), some minutes"
	@$(BIN)/python -c '$(FITS)' 2>/dev/null || { \
	  for python in $(or $(PYTHON),python3.11 python3.12 python3.13 python3.14 python3 python); do \
	    if $$python -c '$(FITS)' 2>/dev/null; then exec $$python -m venv --clear .venv; fi; \
	  done; \
	  echo "curvescope needs Python 3.11 or newer with its venv module and found none:" \
	    "install one, or name it with PYTHON=..." >&2; \
	  exit 1; \
	}
	@echo "1 of 3: $$(grep ^torch== requirements.lock), the largest"
	@$(PIP) install -c requirements.lock "$$(grep ^torch== requirements.lock)"
	@echo "2 of 3: everything else that requirements.lock names, the tools of development among it"
	@$(PIP) install -r requirements.lock
	@echo "3 of 3: curvescope itself"
	@$(PIP) install --no-deps --no-build-isolation -e .
	@touch $@

$(OLDEST): $(READY) requirements-oldest.lock pyproject.toml
	@echo "installing the oldest versions (once)"
	@$(BIN)/python -m venv --clear .venv/oldest
	@.venv/oldest/bin/python -m pip install --quiet --disable-pip-version-check hatchling editables -r requirements-oldest.lock
	@.venv/oldest/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

$(PEERS): $(READY) requirements-peers.lock
	@echo "installing the libraries to compare with (once)"
	@$(PIP) install --no-deps -r requirements-peers.lock
	@touch $@

$(DOCS): $(READY) requirements-docs.lock
	@echo "installing what builds the documentation (once)"
	@$(PIP) install --no-deps -r requirements-docs.lock
	@touch $@
