# make train: set-up and the main job.  make test: set-up and the suite.  Needs Python 3.11+ and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Python compiles what is imported when it first is: half of the set-up's time would go to files that nobody opens.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := pip install --quiet --no-compile
EXTRAS := mujoco,gymnasium,atari,remote,tensorboard,wandb,peers,report,sweep,export,video,hub,demos,docs,dev

.NOTPARALLEL:
.PHONY: setup robots warp peers train test test-all faults test-warp test-adapters check docs clean

setup: $(STAMP)

# LOCKED=1: every file is compared with the hash in requirements/locked.txt, but torch's, whose build depends on the machine
# (for another one than the index's, create .venv and install it first).
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.12 ..." if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/$(INSTALL) --constraint constraints.txt $(if $(LOCKED),--no-deps) torch
	$(if $(LOCKED),$(BIN)/$(INSTALL) --no-deps --require-hashes --requirement requirements/locked.txt)
	$(BIN)/$(INSTALL) $(if $(LOCKED),--no-deps --no-build-isolation,--constraint constraints.txt) --editable '.[$(EXTRAS)]'
	touch $(STAMP)

# Models of the robots of the PQL paper's tasks (files; nothing of these packages is ever imported).
robots: $(VENV)/.robots

$(VENV)/.robots: $(STAMP) requirements/robots.txt
	$(BIN)/$(INSTALL) --no-deps --constraint constraints.txt --requirement requirements/robots.txt
	touch $@

# MuJoCo Warp, whose CPU mode the suite compares with C: 150 MB that only tests and GPUs want. Before the robots, whose
# packages ask for other versions than these: pip would name the conflicts.
warp: $(VENV)/.warp

$(VENV)/.warp: $(STAMP)
	$(BIN)/$(INSTALL) --constraint constraints.txt --editable '.[warp]'
	touch $@

# Libraries that tools/peers/compare.py compares with, in an environment of their own (1.5 GB): --python .peers/bin/python
peers: .peers/.installed

.peers/.installed: pyproject.toml constraints.txt requirements/peers.txt
	test -x .peers/bin/python || $(PYTHON) -m venv .peers
	.peers/bin/$(INSTALL) --constraint constraints.txt torch
	grep -v '^psutil==' constraints.txt > .peers/constraints.txt
	.peers/bin/$(INSTALL) --constraint .peers/constraints.txt --requirement requirements/peers.txt --editable '.[mujoco,peers]'
	touch $@

# The default algorithm on HalfCheetah: about four minutes on two CPU cores; on a GPU by itself where there is one.
train: setup
	$(BIN)/pql train task=halfcheetah budget.seconds=240 $(ARGS)

# Two processes: most tests need one core. Without the robots' models their tasks' tests are skipped.
test: setup warp robots
	$(BIN)/pytest -n 2 --nbmake --nbmake-timeout 300 examples/notebooks
	$(BIN)/pytest -n 2 --dist loadfile $(ARGS)

# Every case of every test (an hour on two slow cores); make test runs a sample of the cases that differ least.
test-all: setup warp robots
	$(BIN)/pytest -n 2 --dist loadfile -m "slow or not slow" --timeout 1800 $(ARGS)

# The fault matrix at its full counts (up to 90 minutes, resumable): make faults ROWS=12,20-24 for some rows, FRESH=1 to
# forget earlier outcomes. Writes docs/results/quality.md.
faults: setup
	$(BIN)/python tools/faults.py --rows '$(ROWS)' $(if $(FRESH),--fresh) --page docs/results/quality.md $(ARGS)

# MuJoCo Warp's engine against C on every robot, on the CPU: ten minutes, most of them compiling kernels.
test-warp: setup warp robots
	$(BIN)/pytest -m "slow or not slow" tests/envs/test_mujoco_warp.py --timeout 1800 $(ARGS)

# Simulators that want other versions than ours, for real, each in an environment of its own below .adapters (2.3 GB each;
# minutes to install, and to compile: half an hour on two slow cores): make test-adapters ADAPTERS=playground
# ManiSkill draws even where nobody looks: without a GPU it takes mesa-vulkan-drivers of Mesa 24.3 or newer.
ADAPTERS ?= playground mjlab envpool maniskill
playground_WANTS := playground==0.2.0
mjlab_WANTS := mjlab==1.6.0 safetensors "hydra-core<1.4" "omegaconf<2.4" onnxruntime
envpool_WANTS := envpool==1.2.5
maniskill_WANTS := mani-skill==3.0.1

test-adapters: setup $(ADAPTERS:%=.adapters/%/.installed)
	$(BIN)/pytest -m slow tests/envs/test_adapters.py --timeout 1800 $(ARGS)

.adapters/%/.installed:
	$(PYTHON) -m venv .adapters/$*
	.adapters/$*/bin/$(INSTALL) 'torch==2.13.0+cpu' numpy $($*_WANTS) || \
		.adapters/$*/bin/$(INSTALL) --extra-index-url https://download.pytorch.org/whl/cpu 'torch==2.13.0+cpu' numpy $($*_WANTS)
	touch $@

# The documentation site: build/site/index.html, which works without a server and without a network. Broken links, and
# scripts and pictures of other hosts, are errors.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	! grep -rnE '\bsrc="(https?:)?//' build/site --include=*.html

check: setup docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy tools

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .hypothesis
