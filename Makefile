# Every target makes .venv first, if it is missing or older than the two files that describe it.
# Nothing but Python 3.11 or newer, with its venv module, has to be there.
#
#   make demo   [DEMO_ARGS='--data fashion-mnist --epochs 3']
#   make test   [PYTEST_ARGS='tests/test_server.py -x -n 0']
#   make chaos      faults at every moment of a fit; CHAOS=all for all combinations
#   make soak       a thousand short fits, after which no process may hold more   [SOAK_ARGS='--fits 300']
#   make lint | docs | format | clean
#   make bench  [BENCH_ARGS='--bench fit' DASKPS_BENCH_PROFILE=regular]
#   make figures
#   make bench-peers   [PEERS_ARGS='--batches 32 --json peers.json' WIRE_ARGS='--parts scheduler flood']

PYTHON ?= python3
DEMO_ARGS ?=
PYTEST_ARGS ?=
PEERS_ARGS ?=
WIRE_ARGS ?=
SOAK_ARGS ?=
BENCH_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help demo test chaos soak lint format docs bench figures bench-peers venv clean

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("daskps needs Python 3.11 or newer, and $(PYTHON) is %d.%d: try make PYTHON=python3.11" % sys.version_info[:2])'
	@echo "Installing daskps and its tools into $(VENV); the first time takes a few minutes ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

venv: $(STAMP)

demo: $(STAMP)
	@$(BIN)/daskps demo $(DEMO_ARGS)

# One thread per process, as Dask gives its workers: two pools that spin would fight for the cores.
test chaos soak: export OMP_NUM_THREADS := 1
test chaos soak: export OPENBLAS_NUM_THREADS := 1
test chaos soak: export MKL_NUM_THREADS := 1
# Half of the time a test waits, for a process that starts or for the other ranks: two files at once.
test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadfile --ignore=tests/test_chaos.py $(PYTEST_ARGS)

# Every two of phase, event, mode and transport together once; with CHAOS=all all combinations, which takes
# four times as long. Not a part of `make test`, but of .ci/run.
chaos: $(STAMP)
	$(BIN)/python -m pytest tests/test_chaos.py $(PYTEST_ARGS)

soak: $(STAMP)
	$(BIN)/python tests/growth.py $(SOAK_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP)
	$(BIN)/sphinx-build -q -n -W --keep-going -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

# With what is installed, for the commit that is checked out. In minutes; longer with the profile
# regular. The page can be looked at with: asv preview
bench: $(STAMP)
	cd asv_bench && ../$(BIN)/asv machine --yes >/dev/null
	cd asv_bench && ../$(BIN)/asv run -E existing:../$(BIN)/python --show-stderr \
	    --set-commit-hash $$(git rev-parse HEAD) $(BENCH_ARGS)
	cd asv_bench && ../$(BIN)/asv publish
	@echo "asv_bench/html/index.html"

# The tables and pictures of the documentation. One to two hours on two cores, with nothing else running.
figures: $(STAMP)
	$(BIN)/python docs/figures/measure.py

# Batch synchronisation beside what else two cores could do, and one round with no computing in it.
# An hour on two cores, with nothing else running.
bench-peers: $(STAMP)
	$(BIN)/python asv_bench/peers.py $(PEERS_ARGS)
	$(BIN)/python asv_bench/wire.py $(WIRE_ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info docs/_build .pytest_cache .mypy_cache .ruff_cache
	rm -rf asv_bench/env asv_bench/html asv_bench/results asv_bench/node_modules dask-worker-space
	find daskps tests docs asv_bench -name __pycache__ -type d -prune -exec rm -rf {} +
