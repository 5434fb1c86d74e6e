# Everything needs Python 3.11+ and make, nothing else: the first target that runs makes .venv and installs into it.
PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: help demo test lint types format coverage pretrain clean

help: ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(INSTALLED) ## the main job: train the small model by MAR-GRPO with an embedded reward server
	$(BIN)/python trainer/run.py --config configs/train/small.yaml

test: lint types ## lint, type-check and run the whole test suite with coverage
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --cov --cov-report=term

lint: $(INSTALLED) ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED) ## mypy, strict on trainer and reward_server
	$(BIN)/mypy

format: $(INSTALLED) ## let ruff rewrite the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

pretrain: $(INSTALLED) ## make the small policy's base checkpoint again
	$(BIN)/python trainer/pretrain.py

clean: ## remove what builds and runs left, but not the runs
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .coverage

$(INSTALLED): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11 ..."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[dev]'
	touch $@
