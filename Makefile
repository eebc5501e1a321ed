# make train: set-up and the main job.  make test: set-up and the suite.  Needs Python 3.11+ and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXTRAS := mujoco,gymnasium,atari,remote,tensorboard,wandb,peers,report,sweep,export,video,dev

.PHONY: setup train test check clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.12 ..." if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[$(EXTRAS)]'
	touch $(STAMP)

# PQL on HalfCheetah: about four minutes on two CPU cores; on a GPU by itself where there is one.
train: setup
	$(BIN)/pql train task=halfcheetah algo=pql budget.seconds=240 $(ARGS)

test: setup
	$(BIN)/pytest $(ARGS)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy tools

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .hypothesis
