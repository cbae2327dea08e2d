# make demo and make test do everything they need first; make help lists the rest.
#
#   VENV     the environment that make setup makes; empty: use PYTHON's own as it is
#   PYTHON   the interpreter that .venv is made from, or that is used where VENV is empty
#   TORCH    what to install where PYTHON has no torch >= 2.11
#   ARGS     more arguments for demo, test, soak and bench

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
ARGS ?=
SPEEDTORCH_CUDA ?= auto
export SPEEDTORCH_CUDA
# Threads that wait for work must not spin: they slow down whoever else has a core.
export OMP_WAIT_POLICY ?= passive
# torch looks for ninja in PATH.
export PATH := $(if $(VENV),$(abspath $(VENV))/bin:)$(PATH)

PY := $(if $(VENV),$(VENV)/bin/python,$(PYTHON))
LIBRARY := speedtorch/_C.abi3.so
INSTALLED := $(if $(VENV),$(VENV)/.speedtorch-installed)
BUILT := build/.built-$(SPEEDTORCH_CUDA)
SOURCES := $(wildcard csrc/*)

HAS_TORCH := -c "import re; from importlib.metadata import version; \
raise SystemExit(tuple(map(int, re.findall(r'\d+', version('torch'))[:2])) < (2, 11))"

.PHONY: help setup demo test soak lint bench clean force

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "make %-6s %s\n", $$1, $$2}' Makefile

setup: $(BUILT) ## .venv with torch and every tool, and the library built; nothing the second time

demo: setup ## word2vec on real text with its table in host memory
	$(PY) -m speedtorch demo word2vec $(ARGS)

test: setup ## the tests, on all cores; with a GPU one after another, and those that need one too
	$(PY) -m pytest -n auto --dist loadfile --no-loadscope-reorder $(ARGS)

soak: setup ## 100,000 random programs against torch.nn.Embedding: hours
	SPEEDTORCH_PROGRAMS=100000 $(PY) -m pytest -m '' tests/test_embedding_machine.py $(ARGS)

lint: setup ## format, lint and types
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy --strict speedtorch
	$(PY) -c 'from clang_format import clang_format; clang_format()' --dry-run -Werror $(SOURCES)

bench: setup ## on a GPU: benchmarks/results/ and the tables of README.md
	$(PY) -m benchmarks $(ARGS)

clean: ## what was built and cached; .venv stays
	rm -rf build dist speedtorch.egg-info $(LIBRARY) .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path './.*' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

# pip's own way to build would fetch a second torch: --no-build-isolation everywhere.
$(VENV)/.speedtorch-installed: pyproject.toml
	if $(PYTHON) $(HAS_TORCH) 2>/dev/null; then own=--system-site-packages; fi; \
	    $(PYTHON) -m venv $$own $(VENV)
	$(PY) -m pip install 'setuptools>=77' wheel ninja numpy
	@$(PY) $(HAS_TORCH) 2>/dev/null || $(PY) -m pip install '$(TORCH)'
	$(PY) -m pip install --no-build-isolation -e '.[demo,test,lint]'
	touch $@

$(BUILT): setup.py pyproject.toml csrc $(SOURCES) $(INSTALLED) $(if $(wildcard $(LIBRARY)),,force)
	$(PY) setup.py build_ext --inplace
	@rm -f build/.built-*
	@touch $@
