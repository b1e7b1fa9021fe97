# Every target sets up what it needs first: a virtual environment in .venv with the versions of constraints.txt.
# `make train` installs what training and reports need; the other targets add what tests and documentation need.

PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= docs,dev,gpu
# More arguments for the command that a target runs, as in `make train ARGS='--seed 3 --output-folder runs/three'`.
ARGS ?=

RUN := $(VENV)/bin/python
INSTALL := $(RUN) -m pip install --quiet --constraint constraints.txt
TRAIN_READY := $(VENV)/.ready-to-train
READY := $(VENV)/.ready
# Meta-World needs another MuJoCo than the extra fast.
METAWORLD_VENV ?= .venv-metaworld
METAWORLD_RUN := $(METAWORLD_VENV)/bin/python
METAWORLD_READY := $(METAWORLD_VENV)/.ready
# Packages of other people need yet another MuJoCo.
OTHERS_VENV ?= .venv-others
OTHERS_RUN := $(OTHERS_VENV)/bin/python
OTHERS_READY := $(OTHERS_VENV)/.ready
OTHERS := tests/others/requirements.txt
# Families in JAX bring about a gigabyte of packages.
JAX_VENV ?= .venv-jax
JAX_RUN := $(JAX_VENV)/bin/python
JAX_READY := $(JAX_VENV)/.ready
# The lower bounds of pyproject.toml, on the oldest Python, which has builds of all of them. `fast` and `gpu` are for one
# version of MuJoCo each, which other tests have.
OLDEST_PYTHON ?= python3.11
OLDEST_VENV ?= .venv-oldest
OLDEST_RUN := $(OLDEST_VENV)/bin/python
OLDEST_READY := $(OLDEST_VENV)/.ready
OLDEST_EXTRAS := completion examples figures ray report search tensorboard test
OLDEST_TESTS := tests/envs tests/samplers/test_multi_task_sampler.py tests/samplers/test_env_recipe.py \
	tests/samplers/test_kinds_of_spaces.py tests/samplers/rollout --ignore=tests/envs/mujoco/test_rendering.py \
	-k 'not declare_a_mode and not breach_of_gymnasiums and not (takes_effect_at_the_next_step and RandParams)'
comma := ,
empty :=
RAY_READY := $(VENV)/.ready-ray
# Files with tests of a kind: to collect those of all files takes longer than some kinds do. Tests of every family have
# the kind of what a family needs.
FILES_WITH = $$(grep -rlE --include='test_*.py' 'mark\.$(1)\b$(2)' tests)
LOCK := uv pip compile --quiet --universal --python-version 3.11 --no-annotate --custom-compile-command 'make lock' $(ARGS)

# Python compiles a module when it is first imported; most modules of the installed packages never are. To compile all of
# them takes half of the time of an installation. (PIP_NO_COMPILE=1 means the opposite: pip stores the 1 as `compile`.)
export PIP_COMPILE ?= 0
# Where it is set, each of the hundreds of processes of the tests compiles what it imports.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install install-metaworld install-others install-jax install-oldest train test test-fast test-metaworld test-others test-jax test-oldest test-ray test-nightly lint types docs format lock clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 24

install: $(READY) ## set up .venv with everything

# A sentinel is written last, so a set-up that was broken off is begun again. torch is installed first and by itself:
# the resolver could otherwise fetch a newer torch of several gigabytes for another package's open range.
$(TRAIN_READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null \
		|| { echo 'maml_rl needs Python 3.11 to 3.14, and $(PYTHON) is another version; name one: make PYTHON=python3.12 ...' >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
		|| { echo '$(PYTHON) cannot make virtual environments; on Debian and Ubuntu: sudo apt-get install python3-venv' >&2; exit 2; }
	@echo 'setting up $(VENV), which takes a few minutes once'
	@$(PYTHON) -m venv --clear $(VENV)
	@scripts/install-torch $(RUN)
	@$(INSTALL) --editable '.[fast,report,tensorboard]'
	@touch $@

$(READY): $(TRAIN_READY)
	@echo 'adding what tests and documentation need to $(VENV)'
	@$(INSTALL) --editable '.[fast,report,tensorboard,$(EXTRAS)]'
	@touch $@

train: $(TRAIN_READY) ## meta-train the default experiment (2D navigation) and print where the results are
	$(RUN) train.py $(ARGS)

# A third of the time of a test is waiting, for processes and for a browser.
test: $(READY) ## run the test suite
	$(RUN) -m pytest --numprocesses 3 --dist worksteal -m 'not nightly and not others and not jax and not ray' $(ARGS)

test-fast: $(READY) ## run the tests that take little time each, in some minutes
	$(RUN) -m pytest --numprocesses 2 --dist worksteal -m 'not slow and not nightly and not others and not jax and not ray' $(ARGS)

$(METAWORLD_READY): pyproject.toml constraints-metaworld.txt
	@$(PYTHON) -m venv --clear $(METAWORLD_VENV)
	@scripts/install-torch $(METAWORLD_RUN)
	@$(METAWORLD_RUN) -m pip install --quiet --constraint constraints-metaworld.txt --editable '.[metaworld,report,tensorboard,test]' stable-baselines3
	@touch $@

install-metaworld: $(METAWORLD_READY) ## set up .venv-metaworld for the tests of Meta-World

test-metaworld: $(METAWORLD_READY) ## run the tests of Meta-World, in an environment of its own
	$(METAWORLD_RUN) -c 'import metaworld'
	$(METAWORLD_RUN) -m pytest --numprocesses 2 --dist worksteal $(call FILES_WITH,metaworld,|\b(base_)?(env_id|vector_env|marks)\b) -m 'metaworld and not nightly' $(ARGS)

# opensimplex installs its own tests as a package of the name of ours, which would come first.
$(OTHERS_READY): pyproject.toml constraints-others.txt $(OTHERS)
	@$(PYTHON) -m venv --clear $(OTHERS_VENV)
	@scripts/install-torch $(OTHERS_RUN)
	@$(OTHERS_RUN) -m pip install --quiet --constraint constraints-others.txt --editable '.[report,test]' --requirement $(OTHERS)
	@rm -rf $(OTHERS_VENV)/lib/python*/site-packages/tests
	@touch $@

install-others: $(OTHERS_READY) ## set up .venv-others for the tests with packages of other people

test-others: $(OTHERS_READY) ## run the tests with packages of other people, in an environment of their own
	$(OTHERS_RUN) -c 'import minigrid'
	$(OTHERS_RUN) -m pytest --numprocesses 2 --dist worksteal $(call FILES_WITH,others) -m 'others and not nightly' $(ARGS)

$(JAX_READY): pyproject.toml constraints-jax.txt
	@$(PYTHON) -m venv --clear $(JAX_VENV)
	@scripts/install-torch $(JAX_RUN)
	@$(JAX_RUN) -m pip install --quiet --constraint constraints-jax.txt --editable '.[jax,tensorboard,test]' stable-baselines3
	@touch $@

install-jax: $(JAX_READY) ## set up .venv-jax for the tests of families in JAX

test-jax: $(JAX_READY) ## run the tests of families in JAX, in an environment of their own
	$(JAX_RUN) -c 'import jax'
	$(JAX_RUN) -m pytest --numprocesses 2 --dist worksteal $(call FILES_WITH,jax,|\b(base_)?(env_id|vector_env|marks)\b) -m 'jax and not nightly' $(ARGS)
# torch is there already, in the oldest version if the package index offers one for CPUs.
$(OLDEST_READY): pyproject.toml constraints-oldest.txt
	@$(OLDEST_PYTHON) -m venv --clear $(OLDEST_VENV)
	@scripts/install-torch $(OLDEST_RUN) constraints-oldest.txt
	@grep -vE '^(torch|triton|nvidia-[a-z0-9-]+)==' constraints-oldest.txt > $(OLDEST_VENV)/constraints.txt
	@$(OLDEST_RUN) -m pip install --quiet --constraint $(OLDEST_VENV)/constraints.txt --editable '.[$(subst $(empty) $(empty),$(comma),$(OLDEST_EXTRAS))]'
	@touch $@

install-oldest: $(OLDEST_READY) ## set up .venv-oldest with the oldest versions that pyproject.toml allows

# A test with what is not among them is skipped, and old versions warn of what they do themselves. Left out is what
# differs there without a fault of ours: Gymnasium before 1.4 writes into the metadata of other environments' classes, and
# has fewer checks; MuJoCo before 3.4 derives constants from the state, which changes the last bit.
test-oldest: $(OLDEST_READY) ## run fast tests of environments and samplers with the oldest versions that pyproject.toml allows
	$(OLDEST_RUN) -c 'import maml_rl.cli.main, maml_rl.experiment.train, maml_rl.report.writing'
	$(OLDEST_RUN) -W ignore -c 'import argcomplete, cma, matplotlib.figure, optuna, ray, stable_baselines3, tensorboard, vl_convert'
	MAML_RL_NO_SKIPS= $(OLDEST_RUN) -m pytest -W default --numprocesses 2 --dist worksteal $(OLDEST_TESTS) -m 'not slow and not nightly and not others and not metaworld and not ray' $(ARGS)
	$(OLDEST_RUN) -m pytest -W default -W ignore::pytest.PytestUnraisableExceptionWarning -k shorter_episodes tests/samplers/work/on_ray/test_ray_backend.py

$(RAY_READY): $(READY)
	@$(INSTALL) --editable '.[tune]'
	@touch $@

# One after the other: two clusters on a few cores are in each other's way.
test-ray: $(RAY_READY) ## run the tests that start a Ray cluster, and add Ray to .venv for them
	$(RUN) -c 'import ray'
	$(RUN) -m pytest $(call FILES_WITH,ray) -m 'ray and not nightly' $(ARGS)

test-nightly: $(RAY_READY) $(METAWORLD_READY) $(OTHERS_READY) $(JAX_READY) ## run the tests that repeat others at a larger scale
	$(RUN) -m pytest $(call FILES_WITH,nightly) -m 'nightly and not metaworld and not others and not jax' $(ARGS)
	$(METAWORLD_RUN) -m pytest $(call FILES_WITH,metaworld) -m 'nightly and metaworld' $(ARGS)
	$(OTHERS_RUN) -m pytest $(call FILES_WITH,others) -m 'nightly and others' $(ARGS)
	$(JAX_RUN) -m pytest $(call FILES_WITH,jax,|\bmarks\b) -m 'nightly and jax' $(ARGS)

lint: $(READY) ## check the style
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

types: $(READY) ## check the types
	$(RUN) -m mypy

docs: $(READY) ## build the documentation into site/, and fail on a broken link or a broken docstring
	@echo 'building the documentation, about 15 s on an idle machine'
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --quiet $(ARGS)
	@echo 'the documentation is site/index.html; open it in any browser'

format: $(READY) ## put the code into the house style
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

lock: ## pin the dependencies anew for every supported Python; needs uv (`make lock ARGS=--upgrade` takes the newest)
	$(LOCK) $(addprefix --extra ,fast report tensorboard data docs examples bench tune gpu dev) --output-file constraints.txt pyproject.toml
	grep -v '^mujoco==' constraints.txt > constraints-metaworld.txt # Versions to prefer.
	$(LOCK) $(addprefix --extra ,metaworld report data dev) --output-file constraints-metaworld.txt pyproject.toml
	grep -v '^mujoco==' constraints.txt > constraints-others.txt
	$(LOCK) $(addprefix --extra ,report test) --output-file constraints-others.txt pyproject.toml $(OTHERS)
	cp constraints.txt constraints-jax.txt # Versions to prefer.
	$(LOCK) $(addprefix --extra ,jax tensorboard test examples) --output-file constraints-jax.txt pyproject.toml
	$(filter-out --universal,$(LOCK)) --upgrade --python-platform linux --resolution lowest-direct $(addprefix --extra ,$(OLDEST_EXTRAS)) --output-file constraints-oldest.txt pyproject.toml

clean: ## remove the virtual environments and the caches; runs stay
	rm -rf $(VENV) $(METAWORLD_VENV) $(OTHERS_VENV) $(JAX_VENV) $(OLDEST_VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build site *.egg-info
