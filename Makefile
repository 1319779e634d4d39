# `make` alone lists what there is to do. Everything is installed into .venv, nothing elsewhere
# but the caches of pip and of horovod-abs.

SHELL := /bin/sh
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# The Python to use; found by itself if empty.
PYTHON ?=
# PyTorch's own index of builds for CPUs only, a tenth of the size of those for CUDA, which PyPI has. For CUDA: TORCH_INDEX=
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

PIP_INSTALL = $(BIN)/python -m pip install --disable-pip-version-check --quiet \
	$$($(BIN)/python -m horovod_abs.install.index $(TORCH_INDEX)) --constraint horovod_abs/constraints.txt

.PHONY: help setup test test-schedules test-tensorflow test-hosts test-docker demo lab notebooks api clean

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile

setup: $(READY) ## Create .venv with everything in it, Horovod included (quick the second time)

test: setup ## Run the linter, the type checker and all tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest

test-schedules: setup ## Run more than 10,000 new random schedules in virtual time against the rules (2 minutes)
	$(BIN)/pytest --hypothesis-profile=long --timeout=1200 tests/core tests/sim/test_cluster.py

test-tensorflow: setup ## Run the longer tests of TensorFlow and Keras (10 minutes)
	$(BIN)/pytest -m tensorflow

test-hosts: setup ## Run the tests over four hosts of network namespaces, as root (8 minutes)
	$(BIN)/pytest -m hosts tests/hosts

test-docker: setup ## Build the image and run the cluster of containers (half an hour; as root where no engine runs)
	$(BIN)/pytest -s -m docker tests/docker

demo: setup ## Compare plain Horovod with ABS-SGD on four workers of unequal speed
	$(BIN)/python -m horovod_abs.examples.demo

lab: setup ## Open the notebooks in JupyterLab
	$(BIN)/jupyter lab notebooks $(if $(filter 0,$(shell id -u)),--allow-root)

notebooks: setup ## Execute all notebooks in place, which brings their outputs up to date (4 minutes)
	$(BIN)/python -m tests.notebooks.executing

api: setup ## Build the API reference into build/api
	$(BIN)/python -m tests.documentation.api build/api

clean: ## Remove .venv and everything that was generated; the caches stay
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): $(BIN)/python pyproject.toml horovod_abs/constraints.txt $(wildcard horovod_abs/install/*.py)
	@echo "Installing the Python packages into $(VENV): 2.5 GB, some minutes the first time"
	@$(PIP_INSTALL) --editable '.[all]'
	@$(BIN)/horovod-abs install-horovod
	@touch $@

# pyenv's shims and Debian's Python without python3-venv look like a Python but cannot be used,
# so each candidate is tried.
$(BIN)/python:
	@for python in $(or $(PYTHON),python3.11 python3.13 python3.12 python3.10 python3); do \
		if $$python -c 'import ensurepip, sys, venv; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' \
				2>/dev/null; then \
			echo "Creating $(VENV) with $$($$python --version)"; \
			exec $$python -m venv $(VENV); \
		fi; \
	done; \
	echo "There is no usable $(or $(PYTHON),Python 3.10 to 3.13). To get one:" >&2; \
	echo "  Debian, Ubuntu: apt-get install python3 python3-venv python3-dev" >&2; \
	echo "  Fedora: dnf install python3.13 python3.13-devel" >&2; \
	echo "  or name one: make $(or $(MAKECMDGOALS),setup) PYTHON=/path/to/python3" >&2; \
	exit 1
