# Start with `make demo` and `make test`. Both first run `make setup`, which writes only into .venv and build/. The machine
# needs Python 3.11 or later with venv, a C++20 compiler and make; everything else comes from PyPI.
# Without a GPU, torch's CPU build is a smaller download: make setup PIP_ARGS="--extra-index-url
# https://download.pytorch.org/whl/cpu". Every `pip install` of this file gets PIP_ARGS, also from the environment.
PYTHON ?= python3
PIP_ARGS ?=
OUT ?= gpu-check
JOBS ?= 3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
NATIVE := CMakeLists.txt $(wildcard csrc/*)
PIP := $(BIN)/python -m pip
# BYTECODE compiles packages to bytecode in a process for each core; pip would use only one process. It skips the packages' own
# tests, and packages that weft's tests rarely import, or that are compiled to C. It ignores errors, because some packages contain
# files for other versions of Python.
INSTALL := $(PIP) install --disable-pip-version-check --no-compile $(PIP_ARGS)
UNUSED := /tests/|/torch/testing/_internal/|/(pip|setuptools|mypyc?|networkx)/
BYTECODE := $(BIN)/python -m compileall -qq -j 0 -x "$(UNUSED)" $(VENV)/lib || true

# NEEDS prints weft's requirements. One pip installs them while another pip compiles csrc/; a single pip would do one after the
# other.
define NEEDS
import tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
print(*project["dependencies"], *sum(map(project["optional-dependencies"].get, ("cli", "test", "dev")), []), sep="\n")
endef
export NEEDS

# Tests start hundreds of processes, each of which would compile the sources again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup build demo test test-slow test-models test-torchrec test-formats test-all lint bench-cpu gpu-check commit-note wheel docs release clean

help:  ## List these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

setup: $(STAMP)  ## Make .venv with everything that development needs (again after a change of csrc/ or pyproject.toml)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "weft needs Python 3.11 or later: make PYTHON=python3.12")'
	@echo "== 1 of 3: making $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml constraints.txt $(NATIVE) | $(BIN)/python
	@echo "== 2 of 3: installing what builds the native module, into $(VENV)"
	@$(INSTALL) "scikit-build-core>=0.10" "nanobind>=2.4" "cmake>=3.22" ninja
	@echo "== 3 of 3: installing torch and what tests need, and compiling csrc/: takes minutes the first time"
	@$(BIN)/python -c "$$NEEDS" > $(VENV)/needs.txt
	@$(INSTALL) --no-build-isolation --no-deps -e . > $(VENV)/compiled.txt 2>&1 & compiling=$$!; \
	  $(INSTALL) -c constraints.txt -r $(VENV)/needs.txt; installed=$$?; \
	  wait $$compiling || { cat $(VENV)/compiled.txt; exit 1; }; exit $$installed
	@$(BYTECODE)
	@touch $@
	@echo "== weft is in $(VENV)"

build: | $(BIN)/python  ## Recompile the native module after a change of csrc/ (needs no network)
	@echo "== compiling csrc/"
	@$(PIP) install -q --disable-pip-version-check --no-build-isolation --no-deps -e .

demo: setup  ## Run, check, time and draw embedding + all-to-all on 2 CPU processes; writes weft-demo/ (PICTURE=file: copy its picture there)
	$(BIN)/weft demo
	$(if $(PICTURE),cp weft-demo/overlap.png $(PICTURE))

# Leave out tests/gpu and tests/multigpu, which would only be imported. One thread per process, because tests run concurrently:
# torch's threads of several processes would wait for each other, and spin.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests --ignore tests/gpu --ignore tests/multigpu
test: setup  ## Run the tests that need no GPU, about 5 minutes on two cores
	$(PYTEST) -n $(JOBS) --dist worksteal -m "not slow and not gpu and not multigpu"

test-slow: setup  ## Run the slow tests: more ranks, random cases, whole commands, examples, planted faults. PART=1/2: half of them
	$(PYTEST) -n $(JOBS) --dist worksteal -m "slow and not gpu and not multigpu" $(if $(PART),--part $(PART))

test-models: setup  ## Train a Hugging Face and a torchtitan Llama with weft's styles and with torch's; installs both packages
	$(INSTALL) -q -c constraints.txt transformers torchtitan
	@$(BYTECODE)
	$(BIN)/python -m pytest tests/processes/test_parallel_styles.py -n 2 -k "hugging_face or debug_llama"

# TorchRec wants the CUDA build of FBGEMM, of half a gigabyte: these are its other needs.
TORCHREC := torchrec fbgemm-gpu-cpu tensordict torchmetrics pyre-extensions typing-inspect mypy-extensions cloudpickle pyvers tqdm
test-torchrec: setup  ## Train with weft's sharder and with TorchRec's; installs TorchRec and FBGEMM for CPUs, 10 MB
	$(INSTALL) -q --no-deps -c constraints.txt $(TORCHREC)
	$(BIN)/python -m pytest tests/processes/test_torchrec.py

test-formats: setup  ## Read traces and topologies with Chakra, HolisticTraceAnalysis and InfraGraph; installs them into build/formats
	$(INSTALL) -q --upgrade --target build/formats mlc-chakra HolisticTraceAnalysis infragraph
	PYTHONPATH=build/formats $(BIN)/python -m pytest tests/unit/test_sim_chakra.py tests/unit/test_trace.py tests/unit/test_topology_infragraph.py

test-all: test test-slow test-models test-torchrec test-formats  ## Run the five targets above

.PHONY: chaos chaos-gpu
N ?= 250
SEED ?= 0
HOSTS ?= 1
SERIES ?= 8
chaos: setup  ## Kill, stop and interrupt ranks at random, then make random calls in a row, less than 10 minutes (N=250 SERIES=8 SEED=0). Resumes if interrupted. HOSTS=2: between two hosts
	$(BIN)/python -m tests.chaos -n $(N) --seed $(SEED) --hosts $(HOSTS)
	$(BIN)/python -m tests.chaos.series -n $(SERIES) --seed $(SEED)

chaos-gpu:  ## The same on GPUs, on a machine as for gpu-check: 200 injections, results in OUT=folder
	PYTHON=$(PYTHON) bash benchmarks/gpu_chaos.sh $(OUT) --seed $(SEED)

# SANITIZE=address also finds undefined behaviour, leaks runs the unit tests only, thread finds data races. Each is built with GCC into
# build/sanitize-NAME; the installed module stays as it is. TESTS: files of tests, instead of the usual choice.
.PHONY: sanitize
SANITIZE ?= address leaks thread
sanitize: setup  ## Run CPU tests of csrc/ under sanitizers, 1 to 10 minutes each: memory errors, leaks, data races (SANITIZE=thread: only one). Fails if one reports anything
	failed=; for name in $(SANITIZE); do $(BIN)/python -m tests.sanitize $$name $(TESTS) || failed="$$failed $$name"; done; \
	  [ -z "$$failed" ] || { echo "== failed:$$failed"; exit 1; }

lint: setup  ## Check style, types and layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(BIN)/mypy & types=$$!; $(BIN)/lint-imports; layers=$$?; wait $$types && exit $$layers

bench-cpu: setup  ## Measure all presets on 2 CPU processes into benchmarks/results/, and update the documents' tables
	$(BIN)/weft bench embedding_all_to_all --device cpu --ranks 2 --json benchmarks/results/cpu-2-ranks.jsonl
	$(BIN)/python -m weft.bench.report README.md docs/*.md docs/studies/*.md benchmarks/results/*.jsonl

gpu-check:  ## On a machine with GPUs, torch and Triton (no .venv, no network): build, test, measure into OUT=folder
	PYTHON=$(PYTHON) bash benchmarks/gpu_check.sh $(OUT)

commit-note: setup  ## Write benchmarks/.commit, so that records made in a copy without .git contain the commit
	@$(BIN)/python -m weft.bench.provenance

wheel: | $(BIN)/python  ## Build dist/weft-*.whl
	$(PIP) wheel -q --disable-pip-version-check --no-deps -w dist .

docs: setup  ## Update the generated documents and pictures (CONTRIBUTING.md lists them)
	$(BIN)/python docs/generate.py
	$(BIN)/python -m weft.bench.report README.md docs/*.md docs/studies/*.md benchmarks/results/*.jsonl
	$(BIN)/python docs/speedups.py
	$(BIN)/python docs/reproduction.py
	$(BIN)/python docs/hosts_page.py
	$(BIN)/python docs/torchrec_page.py
	$(BIN)/python docs/training_page.py

release: setup  ## Build manylinux wheels and the source package into dist/: needs docker, and the repository's address in pyproject.toml
	$(INSTALL) cibuildwheel build
	rm -rf build/release && mkdir -p build/release && git archive HEAD | tar -x -C build/release
	$(BIN)/python docs/package_page.py build/release
	cd build/release && ../../$(BIN)/cibuildwheel --platform linux --output-dir ../../dist
	cd build/release && ../../$(BIN)/python -m build --sdist -o ../../dist

clean:  ## Remove .venv and everything built
	rm -rf $(VENV) build dist
