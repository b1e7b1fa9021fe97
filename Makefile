# Every target sets up what it needs first: a virtual environment in .venv with the versions of constraints.txt.

PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= fast,report,docs,dev
# More arguments for the command that a target runs, as in `make train ARGS='--seed 3 --output-folder runs/three'`.
ARGS ?=

RUN := $(VENV)/bin/python
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help install train test lint types docs format clean

help: ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 18

install: $(READY) ## set up .venv

# The sentinel is written last, so a set-up that was broken off is begun again. torch comes by itself and first: left to
# the resolver, another package's open range could fetch a newer torch of several gigabytes.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo 'maml_rl needs Python 3.11 or newer; name one: make PYTHON=python3.12 ...' >&2; exit 2; }
	@echo 'setting up $(VENV), which takes a few minutes once'
	$(PYTHON) -m venv --clear $(VENV)
	$(RUN) -m pip install --quiet --constraint constraints.txt torch
	$(RUN) -m pip install --quiet --constraint constraints.txt --editable '.[$(EXTRAS)]'
	@touch $@

train: $(READY) ## meta-train the default experiment (2D navigation) and print where the results lie
	$(RUN) train.py $(ARGS)

test: $(READY) ## run the whole test suite
	$(RUN) -m pytest --numprocesses 2 --dist worksteal $(ARGS)

lint: $(READY) ## check the style
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

types: $(READY) ## check the types
	$(RUN) -m mypy

docs: $(READY) ## build the documentation into site/, and fail on a broken link or a broken docstring
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --quiet $(ARGS)
	@echo 'the documentation is site/index.html; open it in any browser'

format: $(READY) ## put the code into the house style
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

clean: ## remove .venv and the caches; runs stay
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build site *.egg-info
