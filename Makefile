# Run `make help` for the targets.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help setup protos docs docs-serve screenshots demo up test test-slow test-all test-costs lint lint-types lint-rest bench wheel images test-images push-images clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | awk -F '\t' '{ printf "  make %-14s %s\n", $$1, $$2 }'
	@echo "  ARGS='...' reaches the command: make test ARGS='tests/shared -k settings'"

setup: $(READY) ## install Quire and what its development needs into .venv

# pip's error would be misleading on older Pythons.
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11) and "make: Quire needs Python 3.11 or newer, and \
	$(PYTHON) is " + sys.version.split()[0] + "; PYTHON=COMMAND names another")

# The package's build (setup.py) generates the protocol modules and compiles the kernels.
$(READY): pyproject.toml setup.py $(shell find protos kernels/cpu -name '*.proto' -o -name '*.cpp' -o -name '*.h')
	@$(BIN)/python -m pip --version > /dev/null 2>&1 || { $(PYTHON) -c '$(NEW_ENOUGH)' && $(PYTHON) -m venv $(VENV); }
	@echo "Installing Quire and what it needs into $(VENV): some minutes the first time, most of them for torch."
	$(BIN)/python -m pip install --disable-pip-version-check --editable '.[dev]'
	touch $@

protos: setup ## generate the modules of the protocols again
	$(BIN)/python -m quire.protos.generate

demo: setup ## start a cluster, chat with it, stop it
	$(BIN)/quire demo

up: setup ## start a cluster and stay in the foreground
	$(BIN)/quire up $(ARGS)

# Tests start hundreds of processes, which should not recompile every module if the environment disables caching.
export PYTHONDONTWRITEBYTECODE :=

# Two processes per core, because many tests wait. A file's tests stay together, so that their fixtures are created once.
# A crashed process ends the run: xdist would wait for the rest of its file for ever.
PROCESSES := $(shell $(PYTHON) -c 'import os; print(min(8, 2 * os.cpu_count()))')
PYTEST := $(BIN)/python -m pytest --numprocesses $(PROCESSES) --dist loadscope --no-loadscope-reorder --max-worker-restart 0

test: setup ## all tests that need no GPU
	$(PYTEST) $(ARGS)

# Also required for every change: more faults, more environments, more random operations.
test-slow: setup ## more faults, more environments, more random operations
	$(PYTEST) -m 'slow and not gpu and not sweep' $(ARGS)

# Both, and every case of the sweeps (tests/sweeps.py).
test-all: setup ## both, and every case of the sweeps
	$(PYTEST) -m 'not gpu' $(ARGS)

test-costs: setup ## all tests that need no GPU, and the processor time of folders and of the most expensive tests
	$(PYTEST) -p tests.processor_time $(ARGS)

# Type checking takes as long as everything else.
lint: setup ## types, style, layers, protocols, deployment files
	@$(MAKE) --no-print-directory --jobs 2 lint-types lint-rest

lint-types: setup
	$(BIN)/mypy

lint-rest: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/buf lint protos
	$(BIN)/python -m tests.breaking
	$(BIN)/hadolint Dockerfile
	$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec docker-compose.yml
	$(BIN)/python -m pytest --quiet tests/deploy tests/metrics

# Broken links, pages that the navigation lacks and images without a description fail, as warnings of MkDocs do in
# strict mode. It does not count those that --quiet hides.
docs: setup ## build the documentation into build/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --config-file tools/docs/mkdocs.yml

docs-serve: setup ## serve the documentation, and build it again after each change
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve --config-file tools/docs/mkdocs.yml

screenshots: setup ## take the pictures of the documentation again (needs Chromium)
	CONSOLE_PICTURES=docs/pictures $(BIN)/python -m pytest --quiet tests/services/frontend/console

bench: setup ## measure (ARGS='serve tiny')
	$(BIN)/quire bench $(ARGS)

# For this machine's CPU; KERNELS_ARCH=x86-64-v3 for others.
wheel: setup ## build a wheel for this machine's CPU into dist
	$(BIN)/python -m pip wheel --no-deps --no-build-isolation --wheel-dir dist .

# The images from the Dockerfile without a Docker engine, and a test cluster that runs them. Needs root for
# the chroots, and `apt-get install buildah mmdebstrap`. IMAGES='frontend scheduler worker', which is the default, or
# worker-cuda, which takes 25 GB of disk. ARGS='--build-arg NAME=VALUE' reaches the Dockerfile.
OF_IMAGES := $(if $(IMAGES),--images $(IMAGES))
images: setup ## build the container images without a Docker engine
	$(BIN)/python -m tests.deploy.images build $(OF_IMAGES) $(ARGS)

test-images: images ## start a cluster from the images and query it
	$(BIN)/python -m tests.deploy.images test $(OF_IMAGES)

# Pushes images that are already built. TO=docker://REGISTRY/PATH (buildah login REGISTRY comes first) or TO=oci-archive:/FOLDER
push-images: setup ## push the images (TO=docker://REGISTRY/PATH)
	$(BIN)/python -m tests.deploy.images push $(OF_IMAGES) --to $(TO)

clean: ## remove the virtual environment and everything built
	rm -rf $(VENV) build dist kernels/cpu/build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	find shared/pb -mindepth 1 -maxdepth 1 -type d -exec rm -rf {} +
