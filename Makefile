# make demo: install into .venv and convert the embedded demo checkpoint. make test: install and test.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := build/demo

.PHONY: demo test lint bench fuzz audit clean

demo: $(VENV)/.installed
	rm -rf $(DEMO)
	$(BIN)/motif-convert --source demo --bits 4.5 --keep-mtp-fp16 --out $(DEMO)

# one more than processors: some tests wait more than they work
WORKERS ?= $$(($$(getconf _NPROCESSORS_ONLN) + 1))
test: $(VENV)/.installed-test
	OPENBLAS_NUM_THREADS=1 $(BIN)/pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

bench: $(VENV)/.installed-test
	$(BIN)/python tests/bench.py

FUZZ_SECONDS ?= 600
fuzz: $(VENV)/.installed-test
	$(BIN)/python tests/fuzz.py --seconds $(FUZZ_SECONDS)

audit: $(VENV)/.installed-test
	$(BIN)/python .ci/audit

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/.installed-test: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	touch $@ $(VENV)/.installed

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache
