# Targets set up what they need, in .venv and in your model store. Start with: make chat

SHELL := /bin/sh
# Python compiles each module once, at its first import. Most installed modules are never imported.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
BIN := $(VENV)/bin
STARTER := starter

.DEFAULT_GOAL := help
.PHONY: help setup chat test test-e2e test-all test-slow reliability lint format bench check-mac numbers pictures wheel lock clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(VENV)/.installed ## install akunu into a virtual environment, .venv
	@echo "Now: make chat"

chat: $(VENV)/.installed ## chat with the starter model
	@$(BIN)/akunu models pull $(STARTER) --if-missing
	@$(BIN)/akunu chat

# Twice the cores of a small machine: many tests wait for a process or a terminal.
WORKERS := 4
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# The first collection compiles the tests; else each worker would. Meanwhile, the starter comes.
PREPARE = { [ -d tests/__pycache__ ] || $(BIN)/python -m pytest --collect-only >/dev/null 2>&1; } & \
	$(BIN)/akunu models pull $(STARTER) --if-missing && wait

test: $(VENV)/.installed-dev ## run the fast tests
	@$(PREPARE)
	@$(PYTEST) -m "not (slow or e2e or long)"

test-e2e: $(VENV)/.installed-dev ## run the end-to-end tests: the starter, faults, terminals
	@$(PREPARE)
	@$(PYTEST) -m "(e2e or long) and not slow"

test-all: $(VENV)/.installed-dev ## run the fast and the end-to-end tests, like CI
	@$(PREPARE)
	@$(PYTEST) -m "not slow"

test-slow: $(VENV)/.installed-dev ## run the tests that take minutes
	@$(BIN)/akunu models pull $(STARTER) --if-missing
	@$(BIN)/python -m pytest -m slow

# Faults for MINUTES, then fuzzing, endurance and privacy at full length, then drafting compared with
# plain decoding.
MINUTES := 25
reliability: $(VENV)/.installed-dev ## inject faults and fuzz, for hours (docs/reliability.md)
	@$(BIN)/akunu models pull $(STARTER) --if-missing
	$(BIN)/python -m tests.reliability --minutes $(MINUTES)
	$(BIN)/python -m pytest -m "slow or not slow" tests/reliability
	$(BIN)/python -m tests.measure.fidelity --max-tokens 24

lint: $(VENV)/.installed-dev ## check format, style, types and import directions
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy akunu_py tests docs/pictures.py docs/race.py packaging/homebrew/make_formula.py
	$(BIN)/lint-imports --no-cache

format: $(VENV)/.installed-dev ## format the sources
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.installed ## measure this machine, in about two minutes
	@$(BIN)/akunu models pull $(STARTER) --if-missing
	@$(BIN)/akunu bench

check-mac: $(VENV)/.installed ## check in two minutes what only a Mac can show (FULL=1: all, in ten)
	@$(BIN)/akunu models pull $(STARTER) --if-missing
	@$(if $(FULL),$(BIN)/python -m tests.measure.chat $(if $(MODEL),--model $(MODEL)))
	@$(BIN)/python -m tests.measure.check $(if $(MODEL),--model $(MODEL)) $(if $(FULL),--full) $(if $(SOAK),--soak $(SOAK))

numbers: $(VENV)/.installed-dev ## measure the README's numbers again, in 10 to 20 minutes on a quiet machine
	@$(BIN)/akunu models pull $(STARTER) --if-missing
	$(BIN)/akunu bench --workload chat --workload edit --workload json --workload agent \
	  --draft off --draft auto --repeats 5 --max-tokens 128 -o bench/results/readme.json
	$(BIN)/python -m tests.measure.readme README.md docs/bench-reference.md

pictures: $(VENV)/.installed ## draw the README's pictures from real answers
	@$(BIN)/akunu models pull $(STARTER) --if-missing
	$(BIN)/python docs/pictures.py docs/images
	$(BIN)/python docs/race.py docs/images

wheel: $(VENV)/.installed-dev ## build the sdist and the wheel into dist/
	@rm -rf build dist
	@$(BIN)/python -m build $(if $(shell command -v uv),--installer uv) --outdir dist . >$(VENV).log 2>&1 || \
	  { cat $(VENV).log; exit 1; }
	@echo "Now: uv tool install dist/*.whl, or: pipx install dist/*.whl"

# Before a release, or after a change of the dependencies in pyproject.toml; then: make test-all
lock: ## pin the newest dependencies for clones and for the Homebrew formula (needs uv)
	uv pip compile pyproject.toml --quiet --upgrade --universal --extra dev --python-version 3.11 \
	  --no-header --no-annotate --output-file packaging/constraints.txt
	MACOSX_DEPLOYMENT_TARGET=14.0 uv pip compile pyproject.toml --quiet --format pylock.toml \
	  --python-version 3.14 --python-platform aarch64-apple-darwin --output-file pylock.toml

clean: ## remove everything built here; keep models
	rm -rf $(VENV) $(VENV).log build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache

# The first Python that is new enough installs akunu: see packaging/environment.py.
INSTALL = for python in $(PYTHON) python3 python3.13 python3.12 python3.11 python3.14; do \
    if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
      exec $$python packaging/environment.py $(if $(findstring -dev,$@),--dev) $(VENV); \
    fi; \
  done; \
  echo "akunu: Python 3.11 or later is needed, found $$(python3 --version 2>/dev/null || echo none); install one (macOS: brew install python@3.13) or name it: make chat PYTHON=/path/to/python3" >&2; exit 1

$(VENV)/.installed: pyproject.toml packaging/constraints.txt
	@$(INSTALL)
	@touch $@

$(VENV)/.installed-dev: pyproject.toml packaging/constraints.txt
	@$(INSTALL)
	@touch $@ $(VENV)/.installed
