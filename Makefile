# make bench   the main job: set up if needed, measure, print a table, write a picture
# make test    set up if needed, run every test that needs no GPU
# make bench-full   the whole grid of benchmarks with every peer, resumable; make micro: the kernels
# make venv, lint, format, test-full: see below
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One worker and one thread per core: tests that need more threads ask for them.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto
SOURCES := $(shell find csrc tests/cuda_host -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
# Where nvcc is found, CUDA kernels are built for one architecture here; newer ones take its PTX.
export TORCH_CUDA_ARCH_LIST ?= 8.0+PTX

.PHONY: bench bench-full micro test test-full lint format venv clean

bench: venv
	$(BIN)/python -m bench

bench-full: venv $(VENV)/.peers
	$(BIN)/python -m bench --full

# Saved under .benchmarks: `.venv/bin/pytest-benchmark compare` shows runs side by side.
micro: venv
	$(BIN)/python -m pytest -q bench/micro --benchmark-autosave --benchmark-columns=median,iqr,rounds

# A peer that does not install is listed as missing in the results.
$(VENV)/.peers: bench/requirements.txt $(VENV)/.requirements
	-$(BIN)/pip install --quiet -r bench/requirements.txt -c requirements.txt
	@touch $@

test: venv
	$(PYTEST) -m "not full"

test-full: venv
	$(PYTEST)

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
