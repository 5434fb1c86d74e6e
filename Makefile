# Everything needs Python 3.11+ and make, nothing else: the first target that runs makes .venv and installs into it.
PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS)
# two stamps: what the demo needs, and that with what the tests need
INSTALLED := $(VENV)/.installed
DEVELOP := $(VENV)/.develop

.PHONY: help demo test test-weights test-netns test-docker lint lint-docker types format pretrain locks clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

demo: $(INSTALLED) ## the main job: train the small model by MAR-GRPO with an embedded reward server
	$(BIN)/python trainer/run.py --config configs/train/small.yaml

test: lint types ## lint, type-check and run the whole test suite with coverage
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --cov --cov-report=term

test-weights: $(DEVELOP) ## published scores, by those rewards whose real weights are on this machine
	$(BIN)/python -m pytest -m weights tests/weights

test-netns: $(DEVELOP) ## many hosts: network namespaces, whose cables are cut and healed; as root, on Linux
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m netns tests/integration

test-docker: $(DEVELOP) ## the images and compose.yaml in a container engine, started as root if none runs (about 10 minutes)
	$(BIN)/python -m pytest -m docker tests/docker -s

lint: $(DEVELOP) ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

lint-docker: $(DEVELOP) ## hadolint, the compose files and what they promise; part of the test suite, too
	$(BIN)/python -m pytest tests/test_deployment_files.py

types: $(DEVELOP) ## mypy, strict on trainer and reward_server
	$(BIN)/mypy

format: $(DEVELOP) ## let ruff rewrite the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

pretrain: $(INSTALLED) ## make the small policy's base checkpoint again
	$(BIN)/python trainer/pretrain.py

locks: $(DEVELOP) ## write the lock files of docker/requirements again, with the newest versions that fit
	$(BIN)/python docker/requirements/lock.py docker/requirements/*.in docker/requirements/programs/*.in

clean: ## remove what builds and runs left, but not the runs
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .coverage

$(INSTALLED): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11 ..."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) -e .
	touch $@

$(DEVELOP): $(INSTALLED)
	$(INSTALL) -e '.[dev]'
	touch $@
