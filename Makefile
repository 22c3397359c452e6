# make test        the environment and the test suite
# make lint        ruff
# make quickstart  the environment, then train, harden and substitute on scikit-learn's digits
# make clean       remove the environment

VENV ?= .venv
PYTHON ?= python3
RUN := $(VENV)/bin/python

.PHONY: test test-slow lint quickstart clean

test: $(VENV)/ready
	$(RUN) -m pytest

test-slow: $(VENV)/ready
	$(RUN) -m pytest -m slow

lint: $(VENV)/ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

quickstart: $(VENV)/ready
	$(RUN) scripts/study.py --study quickstart --output_dir runs/quickstart
	$(RUN) scripts/report.py --runs runs/quickstart

# A half-made environment has no "ready" and is made anew.
$(VENV)/ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV)
