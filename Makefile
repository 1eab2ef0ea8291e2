# Each target makes .venv from the lock file when it is missing or stale; after that nothing here needs the network.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# pip picks the build: the CPU one where the machine offers it. The package itself accepts newer ones.
TORCH ?= torch==2.13.0
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input --quiet

.PHONY: help serve test check format docs bench lock clean

help:  ## Show this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 16

serve: $(STAMP)  ## Answer on http://127.0.0.1:8700/v1 (ARGS="--port 9000")
	@$(BIN)/atoll serve $(ARGS)

test: $(STAMP)  ## Run the tests (ARGS="-k ledger")
	@$(BIN)/python -m pytest $(ARGS)

check: $(STAMP)  ## Lint, types, import contract, docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/docs.py --check

format: $(STAMP)  ## Format the code
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

docs: $(STAMP)  ## Write the generated parts of the docs anew
	$(BIN)/python scripts/docs.py

bench: $(STAMP)  ## Run every benchmark side by side with its alternative
	@for program in benchmarks/*.py; do echo "== $$program"; $(BIN)/python $$program || exit 1; done

lock: $(STAMP)  ## Resolve pyproject.toml into locks/dev.txt anew
	@test -x .cache/uv/bin/uv || ($(PYTHON) -m venv .cache/uv && .cache/uv/bin/python -m pip install --quiet uv)
	.cache/uv/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --upgrade \
	  --no-emit-package torch --extra dev pyproject.toml locks/pins.txt --output-file locks/dev.txt

clean:  ## Remove what was built, the environment too
	rm -rf $(VENV) .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist src/*.egg-info

$(STAMP): pyproject.toml locks/dev.txt locks/pins.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Atoll needs Python 3.11 or newer; name one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "Setting up $(VENV) from locks/dev.txt (once; a few minutes)"
	@$(PYTHON) -m venv --clear $(VENV)
	@$(PIP) install --no-deps --require-hashes -r locks/dev.txt
	@$(PIP) install $(TORCH)
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@
