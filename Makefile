# Everything runs in a virtual environment of its own, .venv, made on first use.
# `make PYTHON=python3.13 ...` chooses the interpreter: 3.11 or later, as constraints.txt needs.
PYTHON ?= $(firstword $(foreach name,python3.11 python3,$(shell $(name) -c 'print("$(name)")' 2>/dev/null)))
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt --editable

.PHONY: demo test test-all lint clean

demo: .venv/installed
	$(BIN)/autotune search studies/gpt/model.py --ranks 2 --time-budget 3m
	@echo "The report: $(CURDIR)/studies/gpt/report.html"

test: .venv/installed-dev
	$(BIN)/python -m pytest

test-all: .venv/installed-dev
	$(BIN)/python -m pytest -m ""

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

.venv/bin/python:
	$(if $(PYTHON),,$(error no python3 found: install Python 3.11 or later, or set PYTHON))
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed")'
	$(PYTHON) -m venv .venv

.venv/installed: pyproject.toml constraints.txt | .venv/bin/python
	$(INSTALL) .
	touch $@

.venv/installed-dev: pyproject.toml constraints.txt | .venv/bin/python
	$(INSTALL) '.[gp,test,dev]'
	touch $@ .venv/installed
