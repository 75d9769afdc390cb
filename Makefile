SHELL := bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check
CLIENTS := $(VENV)/clients
SOURCES := protocol gateway worker cachectl deploy tests
# Where install-app puts the program, and install-system the rest. A package is made with DESTDIR and PREFIX=/usr.
APP ?= /opt/prefixd
PREFIX ?= /usr/local
DESTDIR ?=
SHARE := $(DESTDIR)$(PREFIX)/share
# Without an NVIDIA driver: the release whose CPU kernels our numbers were measured with.
TORCH ?= $(if $(wildcard /proc/driver/nvidia/version),torch>=2.11,torch==2.13.0)

# Tests wait for daemons much of their time: one process more than processors, at most four.
PROCESSES ?= $(shell echo $$(($(shell nproc) < 3 ? $(shell nproc) + 1 : 4)))

.PHONY: help setup setup-test setup-debian run test test-clients lint demo bench dashboards install-app install-system clean
help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(VENV)/.installed ## make .venv and install prefixd into it
setup-test: $(VENV)/.installed-test

run: setup ## fetch the default model and serve it on 127.0.0.1:8080
	$(BIN)/prefixd serve $(ARGS)

setup-debian: ## install what tests of deploy/ and the status page run, and skip without; needs root
	apt-get install --no-install-recommends -y chromium groff-base nginx-light openssl prometheus systemd

test: setup-test ## run the test suite
	$(BIN)/prefixd fetch
	$(BIN)/python -m pytest -n $(PROCESSES) --dist loadscope $(ARGS)

test-clients: setup-test $(CLIENTS)/.installed ## drive real agents against the daemon; needs npm and 2 GB
	$(BIN)/python -m pytest -m clients tests/clients $(ARGS)

lint: setup-test ## linters and type checker
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy

demo: setup ## play an agent's conversation against BASE_URL, or a daemon of its own
	$(BIN)/python tests/bench/demo.py $(ARGS)

bench: setup ## measure daemons of its own; compare with ARGS="--peer NAME=URL"
	$(BIN)/python tests/bench/serving.py --own "float32=--dtype float32" $(ARGS)

dashboards: ## make the Grafana dashboards of their source
	$(PYTHON) deploy/grafana/generate.py

install-app: ## install the program itself into APP
	$(PYTHON) -m venv $(APP)/.venv
	@case $$(readlink -m $(APP)/.venv/bin/python) in /home/*|/root/*) \
	    echo '$(PYTHON) lies in a home, which the units do not see: name another one, as PYTHON=/usr/bin/python3' >&2; \
	    exit 1; esac
	$(APP)/.venv/bin/python -m pip install --disable-pip-version-check '$(TORCH)'
	$(APP)/.venv/bin/python -m pip install --disable-pip-version-check .

install-system: ## install units, settings, manual, completion and examples; needs root, or DESTDIR
	install -d $(DESTDIR)/etc/prefixd $(DESTDIR)$(PREFIX)/bin $(DESTDIR)$(PREFIX)/lib/systemd/system
	test -e $(DESTDIR)/etc/prefixd/prefixd.toml || \
	    install -m 644 deploy/systemd/prefixd.toml $(DESTDIR)/etc/prefixd/prefixd.toml
	for unit in prefixd-worker prefixd-gateway prefixd-gateway@; do \
	    sed 's|/opt/prefixd/|$(APP)/|' deploy/systemd/$${unit%@}.service \
	        >$(DESTDIR)$(PREFIX)/lib/systemd/system/$$unit.service || exit; \
	done
	install -D -m 644 deploy/systemd/sysusers.conf $(DESTDIR)$(PREFIX)/lib/sysusers.d/prefixd.conf
	install -D -m 644 deploy/systemd/tmpfiles.conf $(DESTDIR)$(PREFIX)/lib/tmpfiles.d/prefixd.conf
	ln -sfn $(APP)/.venv/bin/prefixd $(DESTDIR)$(PREFIX)/bin/prefixd
	ln -sfn $(APP)/.venv/bin/cachectl $(DESTDIR)$(PREFIX)/bin/cachectl
	install -D -m 644 deploy/cachectl/cachectl.1 $(SHARE)/man/man1/cachectl.1
	install -D -m 644 deploy/cachectl/completion.bash $(SHARE)/bash-completion/completions/cachectl
	install -D -m 644 deploy/cachectl/completion.zsh $(SHARE)/zsh/site-functions/_cachectl
	install -D -m 644 deploy/nginx/prefixd.conf $(SHARE)/prefixd/nginx/prefixd.conf
	install -D -m 644 -t $(SHARE)/prefixd/prometheus deploy/prometheus/*.yml
	install -D -m 644 -t $(SHARE)/prefixd/grafana/dashboards deploy/grafana/dashboards/*.json
	for kind in dashboards datasources; do \
	    install -d $(SHARE)/prefixd/grafana/provisioning/$$kind && \
	    sed 's|/usr/local/|$(PREFIX)/|' deploy/grafana/provisioning/$$kind/prefixd.yml \
	        >$(SHARE)/prefixd/grafana/provisioning/$$kind/prefixd.yml || exit; \
	done
	@if test -z "$(DESTDIR)" && test -d /run/systemd/system; then \
	    systemd-sysusers && systemd-tmpfiles --create prefixd.conf && systemctl daemon-reload; \
	fi

clean: ## remove what the other targets made
	rm -rf $(VENV) build *.egg-info __pycache__ .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find $(SOURCES) -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# Not compiled ahead: of so many files few are ever imported, and those are compiled then.
$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	$(PIP) --no-compile '$(TORCH)' -e .
	touch $@

$(VENV)/.installed-test: pyproject.toml | $(VENV)/bin/python
	$(PIP) --no-compile '$(TORCH)' -e '.[test]'
	touch $(VENV)/.installed $@

# Each package of Python in an environment of its own: they want other releases of what the project uses.
$(CLIENTS)/.installed: $(wildcard tests/clients/package.json tests/clients/requirements*.txt) | $(VENV)/.installed-test
	mkdir -p $(CLIENTS)
	cp tests/clients/package.json $(CLIENTS)
	npm install --prefix $(CLIENTS) --no-audit --no-fund --no-package-lock
	for name in python hermes; do test -x $(CLIENTS)/$$name/bin/python || $(PYTHON) -m venv $(CLIENTS)/$$name; done
	$(CLIENTS)/python/bin/pip install --disable-pip-version-check -r tests/clients/requirements.txt
	$(CLIENTS)/hermes/bin/pip install --disable-pip-version-check -r tests/clients/requirements-hermes.txt
	touch $@
