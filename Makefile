# Two commands for a fresh clone: `make train` and `make test`. Both make .venv first; nothing else is touched.

PYTHON ?= python3
# One rank for each GPU, else two on the CPU; `make train RANKS=2 DEVICE=cpu` for two on the CPU of a machine with one GPU.
RANKS ?= $(if $(wildcard /dev/nvidia[0-9]*),auto,2)
DEVICE ?=
ARGS ?=

.PHONY: train test test-all soak gpu check dist site clean

train: .venv/ready
	.venv/bin/echelon run --ranks $(RANKS) $(if $(DEVICE),--device $(DEVICE)) examples/gpt.py $(ARGS)

PYTEST = .venv/bin/python -m pytest -q --dist loadfile --no-loadscope-reorder --durations=50

# Three at once, so that two cores have work while a test waits for a signal, a disk or a job.
#
# Every promise, each with real processes. What only repeats one at a larger size is marked `full`: see docs/promises.md.
test: .venv/ready
	$(PYTEST) -n 3 -m "not full"

test-all: .venv/ready
	$(PYTEST) -n 3

# Not part of the tests: every crash point, 200 kills, 1,000 damages, 200 restarts; about half an hour on two cores.
soak: .venv/ready
	.venv/bin/python -m tests.chaos.soak $(ARGS)

# What only a GPU can show, in eight minutes: docs/gpu.md. PYTHON=... names an interpreter that has torch; then nothing is installed.
GPU_PYTHON = $(if $(filter file,$(origin PYTHON)),.venv/bin/python,$(PYTHON))
gpu: $(if $(filter file,$(origin PYTHON)),.venv/ready)
	@exec "$(GPU_PYTHON)" -m bench.gpu $(ARGS)

PYTHON_FILES = src tests examples bench .ci $(wildcard docs/*.py)
PAGES = $(wildcard *.md) docs examples
check: .venv/ready
	.venv/bin/ruff format --check $(PYTHON_FILES)
	.venv/bin/ruff check $(PYTHON_FILES)
	.venv/bin/mypy
	.venv/bin/lint-imports
	.venv/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	.venv/bin/zizmor --offline --quiet --no-progress .github
	.venv/bin/codespell src bench $(PAGES)
	.venv/bin/proselint check --config .proselintrc.json $(PAGES)

# The sdist and the wheel of the last commit, in dist/; twice the same bytes.
dist: .venv/ready
	.venv/bin/python .ci/dist.py

# The documentation, into build/site; a warning is an error. It needs no network, then or when it is read.
site: .venv/ready
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict --quiet
	@echo build/site/index.html

# torch first and by its exact version: a range would let pip choose the newest build, with gigabytes of CUDA.
.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	.venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv build dist src/*.egg-info
