SHELL := bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := protocol gateway worker cachectl deploy tests
# Without an NVIDIA driver: the release whose CPU kernels our numbers were measured with.
TORCH ?= $(if $(wildcard /proc/driver/nvidia/version),torch>=2.11,torch==2.13.0)

.PHONY: help setup setup-test run test lint demo bench dashboards clean
help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(VENV)/.installed ## make .venv and install prefixd into it
setup-test: $(VENV)/.installed-test

run: setup ## fetch the default model and serve it on 127.0.0.1:8080
	$(BIN)/prefixd serve $(ARGS)

test: setup-test ## run the test suite
	$(BIN)/prefixd fetch
	$(BIN)/python -m pytest $(ARGS)

lint: setup-test ## linters and type checker
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy

demo: setup ## play an agent's conversation against BASE_URL, or a daemon of its own
	$(BIN)/python tests/bench/demo.py $(ARGS)

bench: setup ## measure daemons of its own; compare with ARGS="--peer NAME=URL"
	$(BIN)/python tests/bench/serving.py --own "packed=--dtype int4" $(ARGS)

dashboards: ## make the Grafana dashboards of their source
	$(PYTHON) deploy/grafana/generate.py

clean: ## remove what the other targets made
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find $(SOURCES) -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --disable-pip-version-check '$(TORCH)'
	$(BIN)/python -m pip install --disable-pip-version-check -e .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/python -m pip install --disable-pip-version-check -e '.[test]'
	touch $@
