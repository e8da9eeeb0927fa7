# make test     build, install into .venv, run all tests
# make demo     see it work on a small model
# CMAKE_ARGS    reaches llama.cpp: make test CMAKE_ARGS=-DGGML_CUDA=ON

PYTHON      ?= python3
VENV        ?= .venv
ASAN_VENV   ?= .venv-asan
LINT_VENV   ?= .venv-lint
STOCK_VENV  ?= .venv-stock
PYTEST_ARGS ?=
DEMO_ARGS   ?=
BENCH_ARGS  ?=

export CMAKE_BUILD_PARALLEL_LEVEL ?= $(shell nproc 2>/dev/null || echo 2)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# LLAMA_BUILD=OFF: llama-cpp-python shall not build a llama.cpp of its own. pip would keep the wheel made that way, without
# libraries, and give it to other environments that want a complete one: hence --no-cache-dir below.
NATIVE_ARGS := $(strip $(CMAKE_ARGS) -DLLAMA_BUILD=OFF -DPYCRITICALKV_BUILD_TESTS=ON)
ASAN_ARGS   := $(NATIVE_ARGS) -DPYCRITICALKV_SANITIZE=ON

SOURCES := CMakeLists.txt pyproject.toml README.md LICENSE THIRD_PARTY_NOTICES.md \
           $(sort $(shell find native pycriticalkv -type f ! -name '*.pyc'))
CXX_FILES = $(sort $(shell find native -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh'))

# Python itself is not instrumented, so the runtimes have to be there before it loads our libraries; libstdc++ too, or
# the sanitizer cannot find the functions behind C++ exceptions.
RUNTIMES    = $(foreach lib,libasan.so libubsan.so libstdc++.so.6,$(shell $(CC) -print-file-name=$(lib)))
SAN_OPTIONS = ASAN_OPTIONS=detect_leaks=0:detect_stack_use_after_return=1:abort_on_error=1 \
              UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1

.DELETE_ON_ERROR:
.PHONY: help venv install test test-native demo bench stock test-asan cuda-report lint format clean FORCE

help:
	@echo "make test | demo | bench | stock | test-asan | cuda-report | lint | format | install | venv | clean"

# ---------------------------------------------------------------- environments

%/bin/activate:
	@$(PYTHON) -m venv $*
	@$*/bin/python -m pip install --quiet --upgrade "pip>=25.1"

venv: $(VENV)/bin/activate

# Changes when a file comes or goes or CMAKE_ARGS differs, which no file's time would tell.
define write_inputs
@printf '%s\n' $(1) $(SOURCES) > $@.new
@if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; fi
endef

$(VENV)/.inputs: FORCE | $(VENV)/bin/activate
	$(call write_inputs,$(NATIVE_ARGS))

$(ASAN_VENV)/.inputs: FORCE | $(ASAN_VENV)/bin/activate
	$(call write_inputs,$(ASAN_ARGS))

$(VENV)/.installed: $(SOURCES) $(VENV)/.inputs
	@echo "Building and installing pycriticalkv into $(VENV); the first time this takes some minutes"
	@CMAKE_ARGS="$(NATIVE_ARGS)" $(VENV)/bin/python -m pip install --quiet --no-cache-dir ".[test]"
	@touch $@

$(ASAN_VENV)/.installed: $(SOURCES) $(ASAN_VENV)/.inputs
	@echo "Building and installing pycriticalkv with sanitizers into $(ASAN_VENV)"
	@CMAKE_ARGS="$(ASAN_ARGS)" SKBUILD_BUILD_DIR=build/asan SKBUILD_INSTALL_STRIP=false \
	    $(ASAN_VENV)/bin/python -m pip install --quiet --no-cache-dir ".[test]"
	@touch $@

$(LINT_VENV)/.installed: pyproject.toml | $(LINT_VENV)/bin/activate
	@$(LINT_VENV)/bin/python -m pip install --quiet --group dev
	@touch $@

install: $(VENV)/.installed

# ---------------------------------------------------------------- tests

# $(1): shell pattern of build folders, of which the newest counts; $(2): settings for the programs
define run_native_tests
@for source in native/tests/*.cpp; do \
    [ -e "$$source" ] || continue; \
    program=$$(ls -t $(1)/native-tests/$$(basename $$source .cpp) | head -n 1); \
    echo "$$program"; \
    $(2) "$$program" || exit 1; \
done
endef

test-native: install
	$(call run_native_tests,build/cp3*,)

# "python -m pytest" would put this folder, with the uninstalled pycriticalkv, first on the import path.
# The newest build has the mock CUDA device of its C++ tests.
test: install test-native
	PYCRITICALKV_NATIVE_TESTS="$$(ls -td build/cp3*/native-tests | head -n 1)" $(VENV)/bin/pytest $(PYTEST_ARGS)

# --capture=sys: a sanitizer writes its report and ends the process, and pytest could not show what it had captured.
test-asan: $(ASAN_VENV)/.installed
	$(call run_native_tests,build/asan,$(SAN_OPTIONS))
	LD_PRELOAD="$(RUNTIMES)" $(SAN_OPTIONS) PYTHONMALLOC=malloc PYCRITICALKV_NATIVE_TESTS=build/asan/native-tests \
	    $(ASAN_VENV)/bin/pytest --capture=sys $(PYTEST_ARGS)

# Registers, spills and shared memory of our CUDA kernels, and whether ggml's CUDA backend can call them. Needs nvcc, no GPU,
# and the pinned source of llama.cpp; status 77 means there is no nvcc.
cuda-report:
	@$(PYTHON) native/cuda/report.py --ggml build/cuda-report || [ $$? -eq 77 ]

# ---------------------------------------------------------------- programs

# The demo fetches its model by itself.
demo: install
	$(VENV)/bin/python examples/demo.py $(DEMO_ARGS)

bench: install
	$(VENV)/bin/python benchmarks/bench.py $(BENCH_ARGS)

# An unpatched llama-cpp-python, for benchmarks/bench.py --stock-python $(STOCK_VENV)/bin/python.
stock: $(STOCK_VENV)/bin/activate
	CMAKE_ARGS="$(CMAKE_ARGS) -DLLAVA_BUILD=OFF" $(STOCK_VENV)/bin/python -m pip install --no-cache-dir --force-reinstall \
	    "llama-cpp-python==$$(sed -n 's/^version *= *//p' native/llama.cpp.lock)"

# ---------------------------------------------------------------- style

lint: $(LINT_VENV)/.installed
	$(LINT_VENV)/bin/ruff check .
	$(LINT_VENV)/bin/ruff format --check .
	$(LINT_VENV)/bin/mypy
	$(LINT_VENV)/bin/clang-format --dry-run -Werror $(CXX_FILES)

format: $(LINT_VENV)/.installed
	$(LINT_VENV)/bin/ruff check --fix --exit-zero .
	$(LINT_VENV)/bin/ruff format .
	$(LINT_VENV)/bin/clang-format -i $(CXX_FILES)

clean:
	rm -rf build dist $(VENV) $(ASAN_VENV) $(LINT_VENV) $(STOCK_VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
