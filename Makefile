# `make demo` and `make test` are all the set-up there is. Everything lands in .venv, demo/ and build/.
#   make test PYTHON=python3.12 VENV=.venv-3.12    another interpreter, with an environment of its own
#   make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu    a small torch without CUDA, from that index
PYTHON ?=
VENV ?= .venv
TORCH_INDEX ?=
PYTEST_ARGS ?=
# Processes that share the tests, a file at a time each; those of one file, a test.
TEST_JOBS ?= 2
DEMO_ARGS ?=
# Oldest transformers that the integration supports; its tests run on it too.
OLDEST_TRANSFORMERS ?= 5.17.0
# vLLM's build for CPUs, which the plugin is tested with.
VLLM ?= 0.32.0

bin := $(VENV)/bin
# Of what differs between releases of transformers.
by_release := $(patsubst %,tests/test_%.py,transformers cache_argument cuda_graphs gated_delta prompts residuals)
in_parallel := -n $(TEST_JOBS) --dist loadfile
sources := src tests tools examples
cxx_sources := $(wildcard src/kbit/backends/cpu/csrc/*.h src/kbit/backends/cpu/csrc/*.cpp)
# Compiled where they run, so that an installation does not depend on them.
test_headers := $(wildcard tests/*.h tests/*/*.h)
cuda_sources := $(wildcard src/kbit/backends/cuda/csrc/*.cu src/kbit/backends/cuda/csrc/*.cuh)
build_inputs := pyproject.toml constraints.txt tools/setup.sh $(wildcard CMakeLists.txt) $(cxx_sources)
export PYTHON VENV TORCH_INDEX
# Images set it; each process that tests start would compile kbit's modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-oldest test-vllm lint format readme docs report report-check reinstall clean
.DELETE_ON_ERROR:

help:
	@echo "make demo      install, then quantize a real model to 4, 3 and 2 bits and talk to it"
	@echo "make test      install, then run every test that needs no GPU"
	@echo "make test-oldest   what differs between releases of transformers, on the oldest supported"
	@echo "make test-vllm the tests of the plugin for vLLM, in an environment of their own"
	@echo "make lint      formatting, style and types;  make format  repairs the first two"
	@echo "make readme    put the figures of benchmarks/results/ and the command line's options into README.md and docs/"
	@echo "make docs      build docs/ into build/site; warnings are errors"
	@echo "make report    draw benchmarks/results/ into build/report.html;  make report-check  opens it in Chromium"
	@echo "make reinstall build the CPU kernels after installing a compiler"
	@echo "make clean     remove .venv, build/ and demo/"

# The package is installed in place: Python edits need no reinstall, C++ edits make this stamp old.
$(VENV)/.installed: $(build_inputs)
	@tools/setup.sh install

$(VENV)/.lint-installed: constraints.txt tools/setup.sh | $(VENV)/.installed
	@tools/setup.sh lint

demo: $(VENV)/.installed
	@$(bin)/kbit demo $(DEMO_ARGS)

test: $(VENV)/.installed
	@$(bin)/python -m pytest -m "not gpu" $(in_parallel) $(PYTEST_ARGS)

test-oldest: $(VENV)/.installed
	@tools/setup.sh oldest $(OLDEST_TRANSFORMERS)
	@PYTHONPATH=$(VENV)/oldest $(bin)/python -m pytest -m "not gpu" $(by_release) -n $(TEST_JOBS) $(PYTEST_ARGS)

test-vllm: $(VENV)/.installed
	@tools/setup.sh vllm $(VLLM)
	@$(VENV)/vllm/bin/python -m pytest tests/test_vllm.py -n $(TEST_JOBS) $(PYTEST_ARGS)

lint: $(VENV)/.lint-installed
	@$(bin)/ruff check $(sources)
	@$(bin)/ruff format --check $(sources)
	@$(bin)/mypy
	@$(bin)/clang-format --dry-run -Werror $(cxx_sources) $(cuda_sources) $(test_headers)

format: $(VENV)/.lint-installed
	@$(bin)/ruff check --fix-only --quiet $(sources)
	@$(bin)/ruff format $(sources)
	@$(bin)/clang-format -i $(cxx_sources) $(cuda_sources) $(test_headers)

readme: $(VENV)/.installed
	@$(bin)/python tools/render_readme.py
	@$(bin)/python tools/render_docs.py

docs: $(VENV)/.installed
	@NO_MKDOCS_2_WARNING=1 $(bin)/python -m mkdocs build --strict --quiet --site-dir build/site

report: $(VENV)/.installed
	@mkdir -p build
	@$(bin)/kbit bench report benchmarks/results --out build/report.html

# What only a browser knows (nothing loaded, nothing too wide), and screenshots in build/. Needs Chromium.
report-check: report
	@$(bin)/python tools/check_report.py build/report.html build

# After installing a compiler or headers that were missing.
reinstall:
	@tools/setup.sh install

clean:
	rm -rf $(VENV) build demo
