# Two commands: `make demo` (the main job, with a picture) and `make test`. Both make .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
NATIVE := CMakeLists.txt $(wildcard csrc/*)

.PHONY: setup build demo test lint gpu-check wheel clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt $(NATIVE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check "scikit-build-core>=0.10" "nanobind>=2.4" ninja
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt --no-build-isolation -e ".[test,dev]"
	touch $@

build:
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-build-isolation --no-deps -e .

demo: setup
	$(BIN)/weft demo

test: setup
	$(BIN)/python -m pytest tests

lint: setup
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/lint-imports

wheel:
	$(PYTHON) -m pip wheel --no-deps -w dist .

clean:
	rm -rf $(VENV) build dist
