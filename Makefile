# make demo    federated training on embedded data, FedAvg against FedAWA, with a report to look at; then a round of 20
#              ResNet-18s: fastagg against PyTorch
# make test    the tests
# make test-integrations   the tests inside Flower and NVFlare, each in an environment of its own, and against byzfl
# make test-nightly   generated cases by the ten thousand, and what takes too long for every day
# make sanitize  the native code under AddressSanitizer, UndefinedBehaviorSanitizer, ThreadSanitizer and valgrind
# make bench   every kernel and method against PyTorch and one read of memory, and the simulator against a PyTorch loop:
#              tables and plots in benchmarks/results, under 15 minutes; make bench ONLY=fedawa measures a part
# make bench-integrations   a round inside Flower and NVFlare, theirs against ours
# make bench-compare BASE=<commit>   is the working tree slower than that commit?
# make lint    ruff, clang-format, the type checker, and what may import what
# make docs    the site, from docs and the docstrings, into site/; in an environment of its own, offline once that is there
# make notebooks   runs docs/notebooks, and stores what they put out
# make stubs   writes fastagg/__init__.pyi, after a method or its options have changed
# Each sets itself up in .venv; PYTHON=python3.12 chooses the interpreter.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip -q --disable-pip-version-check
# Builds with what is in $(VENV): build-requirements.txt, and not whatever pip would fetch for the occasion
BUILD := PATH="$(abspath $(BIN)):$$PATH" $(PIP)
# CUDA for the GPU that is here (none: nvcc's oldest), where `pip install .` builds for every generation. Tests
# compile for more by themselves.
export FASTAGG_CUDA_ARCHITECTURES ?= native
SOURCES := pyproject.toml setup.py CMakeLists.txt constraints.txt $(wildcard csrc/*.* csrc/cpu/*.* csrc/cuda/*.*)
NATIVE := $(filter-out %.txt,$(wildcard csrc/*.* csrc/cpu/*.* csrc/cuda/*.* csrc/cuda/emulator/*.* tests/helpers/*.cu \
  tests/native/*.*))

SANITIZERS := sanitize-address sanitize-thread sanitize-plain

INTEGRATIONS := flower nvflare

.PHONY: demo test test-integrations $(INTEGRATIONS:%=test-%) test-byzfl test-nightly sanitize $(SANITIZERS) bench bench-integrations bench-compare lint docs notebooks stubs format clean

demo: $(VENV)/ready
	rm -rf runs/demo
	$(BIN)/fastagg sim --out runs/demo
	$(BIN)/python -m benchmarks.demo

test: $(VENV)/ready
	$(BIN)/python -m pytest --durations=15 -n auto --maxprocesses=4 --dist loadfile -p no:benchmark

test-integrations: $(INTEGRATIONS:%=test-%) test-byzfl
$(INTEGRATIONS:%=test-%): test-%: $(VENV)-%/ready
	$(VENV)-$*/bin/pytest -m integration tests/integrations/test_$*.py tests/integrations/test_$*_*.py

# Its aggregators need no more than the tests do; all that the package asks for would bring torchvision
test-byzfl: $(VENV)/ready build/byzfl
	PYTHONPATH=build/byzfl $(BIN)/python -m pytest -m integration tests/integrations/test_byzfl.py tests/integrations/test_byzfl_pre.py
build/byzfl: Makefile | $(BIN)/python
	$(PIP) install --no-deps --upgrade --target $@ byzfl==0.0.11
	touch $@

test-nightly: $(VENV)/ready
	FASTAGG_HYPOTHESIS=nightly $(BIN)/python -m pytest tests/test_properties.py tests/test_fuzz.py tests/engine/test_large.py

# tests/native says what is done with each; a plain build is for valgrind. Whatever runs beside them comes first: they
# only compute, and others have to wait for one thing after the other.
sanitize: $(SANITIZERS)
sanitize-address: WITH := address,undefined
sanitize-thread: WITH := thread
$(SANITIZERS): $(VENV)/build
	$(BIN)/cmake -S tests/native -B build/$@ -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja \
	  -DFASTAGG_SANITIZE=$(WITH)
	nice $(BIN)/cmake --build build/$@
	nice $(BIN)/ctest --test-dir build/$@ --output-on-failure

bench: $(VENV)/bench
	mkdir -p benchmarks/results
	$(BIN)/python -m pytest benchmarks -k "$(ONLY)" -o python_files='bench_*.py' -q \
	  --benchmark-quiet --benchmark-json=benchmarks/results/bench.json
	$(BIN)/python -m benchmarks.report

bench-integrations: $(VENV)/ready $(INTEGRATIONS:%=$(VENV)-%/ready)
	$(foreach i,$(INTEGRATIONS),$(VENV)-$(i)/bin/python -m benchmarks.integrations &&) true

bench-compare: $(VENV)/ready
	$(BIN)/python -m benchmarks.compare --base $(BASE)

# The type checker reads what the package imports: it needs the package's environment
lint: $(VENV)/lint $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/clang-format --dry-run -Werror $(NATIVE)

docs: $(VENV)-docs/ready
	NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/python -m mkdocs build
	@echo "open site/index.html, or for its search: python3 -m http.server --directory site"

notebooks: $(VENV)-flower/notebooks
	$(VENV)-flower/bin/python -m tools.site.notebooks docs/notebooks/*.ipynb

stubs: $(VENV)/ready
	$(BIN)/python -m tools.stubs

format: $(VENV)/lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(NATIVE)

clean:
	rm -rf $(VENV) $(VENV)-docs $(INTEGRATIONS:%=$(VENV)-%) build site fastagg/*.so *.egg-info .pytest_cache .ruff_cache .hypothesis

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# Editable, so that a change of a .py file needs no step; a change of a native file builds again.
$(VENV)/ready: $(SOURCES) $(VENV)/build
	$(BUILD) install --no-build-isolation -c constraints.txt -e ".[test,demo]"
	touch $@

# The package as its users get it, built once, with the framework as its extra
$(VENV)-flower/ready: WITH := flwr[simulation]==1.41.0
$(VENV)-nvflare/ready: WITH := nvflare==2.9.0
$(INTEGRATIONS:%=$(VENV)-%/ready): $(VENV)-%/ready: build/wheel/built
	$(PYTHON) -m venv $(VENV)-$*
	$(VENV)-$*/bin/python -m pip install -q --no-compile --disable-pip-version-check -c constraints.txt \
	  "$$(echo build/wheel/fastagg-*.whl)[$*]" "$(WITH)" pytest scikit-learn matplotlib
	touch $@

# ziamath is here for its font
$(VENV)-docs/ready: Makefile
	$(PYTHON) -m venv $(VENV)-docs
	$(VENV)-docs/bin/python -m pip install -q --disable-pip-version-check mkdocs==1.6.1 mkdocs-material==9.8.1 \
	  mkdocstrings-python==2.0.11 ruff==0.17.4 latex2mathml==3.81.1 ziamath==0.13
	touch $@

$(VENV)-flower/notebooks: $(VENV)-flower/ready
	$(VENV)-flower/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt \
	  "$$(echo build/wheel/fastagg-*.whl)[sim]" nbclient==0.11.0 ipykernel==7.4.0
	touch $@

build/wheel/built: $(SOURCES) $(wildcard fastagg/*.py fastagg/*.pyi fastagg/*/*.py fastagg/*/*/*.py) $(VENV)/build
	rm -rf build/wheel build/lib.* build/bdist.*
	FASTAGG_CUDA=0 $(BUILD) wheel --no-build-isolation --no-deps -w build/wheel .
	touch $@

$(VENV)/bench: $(VENV)/ready
	$(BUILD) install --no-build-isolation -c constraints.txt -e ".[bench]"
	touch $@

# basedpyright is pyright with all it needs in its wheel; tomli is read in the name of Python 3.10
$(VENV)/lint: Makefile constraints.txt | $(BIN)/python
	$(PIP) install ruff==0.17.4 clang-format==23.1.3 basedpyright==1.40.2 import-linter==2.16 tomli==2.5.0
	touch $@

$(VENV)/build: build-requirements.txt | $(BIN)/python
	$(PIP) install --require-hashes --only-binary :all: -r build-requirements.txt
	touch $@
