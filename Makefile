# make bench   the main job: set up if needed, measure, print a table, write a picture
# make test    set up if needed, run every test that needs no GPU
# make venv, lint, format, test-full, sanitize: see below
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := $(shell find csrc -name '*.cpp' -o -name '*.h')

.PHONY: bench test test-full sanitize lint format venv clean

bench: venv
	$(BIN)/python -m bench

test: venv
	$(BIN)/python -m pytest -q -m "not full"

test-full: venv
	$(BIN)/python -m pytest -q

lint: $(VENV)/.requirements
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(SOURCES)

format: $(VENV)/.requirements
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(SOURCES)

venv: $(VENV)/.built

$(VENV)/.requirements: requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -r requirements.txt
	@touch $@

# An editable install: Python sources are used in place, the extension lands in python/boltzattn.
$(VENV)/.built: $(VENV)/.requirements setup.py pyproject.toml $(SOURCES)
	$(BIN)/pip install --quiet --no-build-isolation --no-deps --editable .
	$(BIN)/python -c "import boltzattn._C"
	@touch $@

clean:
	rm -rf $(VENV) build dist python/*.egg-info python/boltzattn/*.so
