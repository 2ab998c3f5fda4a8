# make demo    a round of 20 ResNet-18s: fastagg against PyTorch
# make test    the tests
# make bench   every kernel against one read of memory
# make lint    ruff and clang-format
# Each sets itself up in .venv; PYTHON=python3.12 chooses the interpreter.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := pyproject.toml setup.py CMakeLists.txt constraints.txt $(wildcard csrc/*.* csrc/cpu/*.*)
NATIVE := $(wildcard csrc/*.h csrc/*.cpp csrc/cpu/*.h csrc/cpu/*.cpp)

.PHONY: demo test bench lint format clean

demo: $(VENV)/ready
	$(BIN)/python -m benchmarks.demo

test: $(VENV)/ready
	$(BIN)/python -m pytest

bench: $(VENV)/ready
	$(BIN)/python -m benchmarks.kernels
	$(BIN)/python -m benchmarks.methods

lint: $(VENV)/lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(NATIVE)

format: $(VENV)/lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(NATIVE)

clean:
	rm -rf $(VENV) build fastagg/*.so *.egg-info .pytest_cache .ruff_cache .hypothesis

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# Editable, so that a change of a .py file needs no step; a change of a native file builds again.
$(VENV)/ready: $(SOURCES) | $(BIN)/python
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[test,demo]"
	touch $@

$(VENV)/lint: constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install -q --disable-pip-version-check ruff==0.17.4 clang-format==23.1.3
	touch $@
