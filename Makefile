# make setup | demo | test | lint | up | bench | protos | clean
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: setup protos demo up test lint bench clean

setup: $(READY)

$(READY): pyproject.toml $(shell find protos kernels/cpu -name '*.proto' -o -name '*.cpp' -o -name '*.h')
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	$(BIN)/python -m protos.generate
	$(BIN)/python -m kernels.cpu.build
	touch $@

protos: setup
	$(BIN)/python -m protos.generate

demo: setup
	$(BIN)/quire demo

up: setup
	$(BIN)/quire up $(ARGS)

test: setup
	$(BIN)/python -m pytest $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint protos
	$(BIN)/python -m tests.breaking
	$(BIN)/hadolint services/*/Dockerfile
	$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec docker-compose.yml
	$(BIN)/python -m pytest --quiet tests/deploy tests/metrics

bench: setup
	$(BIN)/quire bench $(ARGS)

clean:
	rm -rf $(VENV) build dist kernels/cpu/build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	find shared/pb -mindepth 1 -maxdepth 1 -type d -exec rm -rf {} +
