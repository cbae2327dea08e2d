# Targets run make setup first if they need it. make help lists all targets.
#
#   VENV     the environment that make setup creates; empty: use the environment of PYTHON unchanged
#   PYTHON   the interpreter for .venv, or the interpreter to use if VENV is empty
#   TORCH    the torch to install if PYTHON has no torch >= 2.11
#   ARGS     more arguments for demo, check, test, examples, nightly, soak, flaky, stress and bench
#   PROGRAMS number of random programs in make nightly
#   SHARE    fraction of the full size of make soak
#   HOURS    duration of make stress; fractions are allowed
#   JOBS     number of parallel processes of make stress, for HOURS= hours each
#   N        number of runs of make flaky
#   SEED     make flaky: seed of the first run; make stress: the program to run, as a fault prints it
#   STAGES   stages of make gpu to run; empty: write the report of existing records
#   GPU_JOBS number of parallel stages of make gpu
#   GPU_MINUTES time limit of all stages of make gpu
#   RECORDS  folder of the stages' records and logs
#   PLATFORM platform tag of the wheel of make wheel, which auditwheel checks

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
ARGS ?=
PROGRAMS ?= 100000
SHARE ?= 1
HOURS ?= 0.1
JOBS ?= 1
N ?= 10
SEED ?=
STAGES ?= all
GPU_JOBS ?= 1
GPU_MINUTES ?= inf
RECORDS ?= build/gpu
# The lowest valid tag for a library built on Debian 12; see docs/releasing.md.
PLATFORM ?= manylinux_2_34_$(shell uname -m)
SPEEDTORCH_CUDA ?= auto
export SPEEDTORCH_CUDA
# Waiting threads must not spin, because they would slow down other processes.
export OMP_WAIT_POLICY ?= passive
# Without bytecode each process of a test run would compile all test files again.
unexport PYTHONDONTWRITEBYTECODE
# torch looks for ninja in PATH.
export PATH := $(if $(VENV),$(abspath $(VENV))/bin:)$(PATH)

PY := $(if $(VENV),$(VENV)/bin/python,$(PYTHON))
LIBRARY := speedtorch/_C.abi3.so
INSTALLED := $(if $(VENV),$(VENV)/.speedtorch-installed)
# A crashed process is not replaced, because the new process would crash minutes later, too.
AT_ONCE := -n auto --max-worker-restart 0 --dist loadfile --no-loadscope-reorder
TEST := $(PY) -m pytest $(AT_ONCE)
# Options of runs whose tests take longer than those of make test.
PATIENT := -o faulthandler_timeout=3600
BUILT := build/.built-$(SPEEDTORCH_CUDA)
SOURCES := $(wildcard csrc/*/*)

HAS_TORCH := -c "import re; from importlib.metadata import version; \
raise SystemExit(tuple(map(int, re.findall(r'\d+', version('torch'))[:2])) < (2, 11))"

# Other libraries to test with; packages that require another torch are installed with --no-deps.
CLIENTS := .venv-clients
CLIENT_PACKAGES := einops lightning safetensors sentence-transformers accelerate transformers
CLIENT_PACKAGES += diffusers peft gensim
CLIENT_PACKAGES_ALONE := pytorch_optimizer torch_optimizer pytorch_ranger bitsandbytes torchao
CLIENT_PACKAGES_ALONE += torchrec==1.9.2 fbgemm-gpu-cpu==1.8.0 iopath portalocker tensordict pyvers
CLIENT_PACKAGES_ALONE += pyre-extensions typing-inspect mypy-extensions orjson importlib-metadata
CLIENT_PACKAGES_ALONE += cloudpickle torchmetrics lightning-utilities

# The environment of the wheel tools, which pyproject.toml pins, and of the wheel under test.
WHEEL_TOOLS := .venv-wheel
WHEEL_TRIED := build/wheel-tried
WHEEL_PATH := PATH=$(abspath $(WHEEL_TRIED))/bin

# Tools of compute-sanitizer.
GPU_TOOLS := memcheck racecheck initcheck synccheck

.PHONY: help setup demo check test examples nightly soak flaky stress clients lint sanitize $(GPU_TOOLS) gpu coverage bench notebooks docs wheel sdist clean force

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "make %-8s %s\n", $$1, $$2}' Makefile

setup: $(BUILT) ## .venv with torch and every tool, and the library; a second call does nothing

demo: setup ## word2vec on real text with its table in host memory
	$(PY) -m speedtorch demo word2vec $(ARGS)

check: lint ## lint and the fast tests, before each commit
	$(TEST) -m 'not slow and not nightly and not clients and not examples' $(ARGS)

test: setup ## the tests, on all cores; with a GPU also tests that need one
	$(TEST) $(ARGS)

examples: setup ## whole programs at a small size: examples, notebooks, benchmarks, a wheel
	$(TEST) -m 'examples and not nightly' $(ARGS)

nightly: setup ## the tests, whole grids, errors at every line, and make sanitize: hours
	SPEEDTORCH_PROGRAMS=$(PROGRAMS) $(TEST) --dist load -m 'not clients' $(PATIENT) $(ARGS)
	$(if $(ARGS),,$(MAKE) sanitize)

# One process per core; with a GPU also the parts that need one.
soak: setup ## by hand: 10^9 rows on a GPU, 10,000 kills, 5 million files, ends of processes: hours
	SPEEDTORCH_SOAK=$(SHARE) $(TEST) --dist load -m soak $(PATIENT) $(ARGS)

flaky: setup ## the tests N times in random order with random seeds; continues an interrupted run
	$(PY) tests/flaky.py $(N) $(or $(SEED),0) $(AT_ONCE) $(ARGS)

# Adds to tests/stress/progress.json; with SEED only one program runs.
stress: setup ## random programs of all features beside a mirror of all rows, for HOURS= hours
	PYTHONPATH=.:tests $(PY) -m stress --hours $(HOURS) --jobs $(JOBS) $(if $(SEED),--seed $(SEED)) $(ARGS)

clients: setup $(CLIENTS)/.installed ## tests with other libraries, in .venv-clients
	$(CLIENTS)/bin/python -m pytest -m clients tests/*/test_clients_*.py $(ARGS)

lint: setup ## format, lint and types
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	MYPYPATH=docs/examples $(PY) -m mypy --strict -p speedtorch -p demos
	$(PY) -c 'from clang_format import clang_format; clang_format()' --dry-run -Werror $(SOURCES)

# tests/sanitized.py builds a separate package with only the CPU kernels, and runs these tests with it.
TESTS_OF_BOUNDS := $(addprefix tests/memory/test_memory,.py _errors.py) \
    $(addprefix tests/ops/test_,append_ids.py chunk_digests.py argument_overlaps.py \
    argument_faults.py argument_errors.py index_errors.py pinned_gather.py \
    pinned_scatter.py pinned_copy.py optimizer_state_swap.py swap_places.py counted.py plan.py \
    sum_rows.py cpu_threads.py pool_rows.py round_rows.py shard_ids.py table_ids.py) \
    tests/step/test_many_lookups.py tests/table/test_resident_rows.py
# Tests of torch's threads within an op, of the library's threads, and of concurrent Python threads.
# One test is deselected, because the sanitizer's shadow memory counts as resident memory.
TESTS_OF_THREADS := tests/memory/test_memory.py tests/step/test_threads.py \
    --deselect tests/memory/test_memory.py::test_resident_memory_is_the_payload_and_at_most_one_large_page \
    tests/memory/test_memory_machines.py::test_threads_use_one_table_at_once \
    $(addprefix tests/ops/test_,cpu_threads.py counted.py index_errors.py optimizer_state_swap.py \
    pinned_gather.py pinned_scatter.py plan.py pool_rows.py round_rows.py shard_ids.py sum_rows.py \
    swap_places.py table_ids.py) tests/table/test_resident_rows.py

# Every kernel at small sizes.
TESTS_OF_KERNELS := tests/nn/test_bad_batches.py $(addprefix tests/ops/test_,counted.py \
    moved_rows.py plan.py::test_any_batch plan_fault.py \
    load_rows.py::test_a_batch_joins_a_step merge_rows.py pool_rows.py round_rows.py \
    shard_ids.py::test_a_small_table \
    shard_ids.py::test_requested_ids_are_the_reference \
    split_plan.py::test_a_table_has_the_plan_of_its_own_ids \
    sum_rows.py::test_ids_have_the_rows_of_their_sources swap_places.py table_ids.py)
TESTS_OF_HOST_CODE := $(addprefix tests/,ops plan memory step table)

sanitize: setup ## the ops' tests with gcc's sanitizers, and on a GPU with compute-sanitizer's
	$(PY) tests/sanitized.py address,undefined $(PATIENT) $(TESTS_OF_BOUNDS) $(ARGS)
	$(PY) tests/sanitized.py thread $(PATIENT) $(TESTS_OF_THREADS) $(ARGS)
	for tool in $(GPU_TOOLS); do $(MAKE) $$tool || exit; done

$(GPU_TOOLS): setup
	$(PY) tests/sanitized.py $@ $(PATIENT) $(TESTS_OF_KERNELS) $(ARGS)

gpu: setup ## on GPUs: tests, sanitizers, a share of make soak, small benchmarks, and a report
	$(PY) -m benchmarks.gpu_report --stages '$(STAGES)' --folder '$(RECORDS)' --jobs $(GPU_JOBS) --minutes $(GPU_MINUTES)

# Prints lists of missing lines first, and totals last.
coverage: setup ## lines and branches of the package, and lines of csrc's host code, that tests run
	@$(PY) -c "import coverage" 2>/dev/null || $(PY) -m pip install 'coverage>=7.10'
	$(PY) tests/covered.py csrc $(AT_ONCE) $(TESTS_OF_HOST_CODE) $(ARGS)
	$(PY) tests/covered.py package $(AT_ONCE) $(ARGS)

bench: setup ## on a GPU: benchmarks/results/, and the tables of README.md and docs/performance.md
	$(PY) -m benchmarks $(ARGS)

notebooks: setup ## on a GPU: runs the notebooks, and stores what they print and draw
	$(PY) notebooks/execute.py $(ARGS)

docs: setup ## build/docs: the pages of docs/ as HTML; a warning is an error
	@$(PY) -c "import furo, myst_parser, sphinx" 2>/dev/null || $(PY) -m pip install --no-build-isolation --config-settings editable_mode=compat -e '.[docs]'
	$(PY) -m sphinx -W --keep-going -q -b html docs build/docs $(ARGS)

# The wheel is tested with only its environment in PATH, without a compiler and nvcc.
wheel: setup $(WHEEL_TOOLS)/.installed ## dist: a wheel with CUDA kernels, checked and tested
	rm -rf build/wheel build/lib* build/bdist* $(WHEEL_TRIED) dist/*.whl
	SPEEDTORCH_CUDA=1 $(PY) -m pip wheel --no-build-isolation --no-deps -w build/wheel .
	PATH="$(abspath $(WHEEL_TOOLS))/bin:$$PATH" auditwheel repair --strip --exclude 'libtorch*' \
	    --exclude 'libc10*' --plat $(PLATFORM) --only-plat -w dist build/wheel/*.whl
	$(WHEEL_TOOLS)/bin/abi3audit --strict --summary dist/*.whl
	$(WHEEL_TOOLS)/bin/twine check --strict dist/*.whl
	$(PYTHON) -m venv $(WHEEL_TRIED)
	$(WHEEL_PATH) python -m pip install --only-binary=:all: '$(TORCH)'
	$(WHEEL_PATH) python -m pip install --only-binary=:all: '$(TORCH)' dist/*.whl
	cd / && $(WHEEL_PATH) speedtorch --version
	cd / && $(WHEEL_PATH) speedtorch info
	cd / && $(WHEEL_PATH) python -I $(CURDIR)/tests/installed_training.py --cuda
	@ls -l dist/*.whl

sdist: $(WHEEL_TOOLS)/.installed ## dist: the source archive, made without torch
	rm -f dist/*.tar.gz
	$(WHEEL_TOOLS)/bin/python -m build --sdist --no-isolation --skip-dependency-check
	$(WHEEL_TOOLS)/bin/twine check --strict dist/*.tar.gz

clean: ## delete build results and caches, except .venv, .venv-clients and .venv-wheel
	rm -rf build dist speedtorch.egg-info $(LIBRARY) .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path './.*' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

# --no-build-isolation everywhere, because an isolated build would download a second torch.
$(VENV)/.speedtorch-installed: pyproject.toml
	if $(PYTHON) $(HAS_TORCH) 2>/dev/null; then own=--system-site-packages; fi; \
	    $(PYTHON) -m venv $$own $(VENV)
	$(PY) -m pip install 'setuptools>=77' wheel ninja numpy
	@$(PY) $(HAS_TORCH) 2>/dev/null || $(PY) -m pip install '$(TORCH)'
	$(PY) -m pip install --no-build-isolation --config-settings editable_mode=compat -e '.[demo,test,lint]'
	touch $@

$(CLIENTS)/.installed: pyproject.toml Makefile
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install '$(TORCH)' numpy tqdm pytest hypothesis
	$(CLIENTS)/bin/python -m pip install $(CLIENT_PACKAGES) '$(TORCH)'
	$(CLIENTS)/bin/python -m pip install --no-deps $(CLIENT_PACKAGES_ALONE)
	touch $@

# Installs only the tools of the extra, because they need neither torch nor the library.
$(WHEEL_TOOLS)/.installed: pyproject.toml Makefile
	$(PYTHON) -m venv $(WHEEL_TOOLS)
	$(WHEEL_TOOLS)/bin/python -m pip install 'setuptools>=77'
	mkdir -p build && $(WHEEL_TOOLS)/bin/python setup.py -q egg_info --egg-base build
	sed '1,/^\[wheel\]$$/d; /^$$/,$$d' build/speedtorch.egg-info/requires.txt \
	    > build/wheel-tools.txt
	$(WHEEL_TOOLS)/bin/python -m pip install -r build/wheel-tools.txt
	touch $@

$(BUILT): setup.py pyproject.toml $(sort $(dir $(SOURCES))) $(SOURCES) $(INSTALLED) $(if $(wildcard $(LIBRARY)),,force)
	$(PY) setup.py build_ext --inplace
	@rm -f build/.built-*
	@touch $@
