# Each target is the only command a fresh clone needs: it makes .venv, installs, and does the job.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready

.PHONY: demo test check format docs bench torture clean

demo: $(READY)
	$(BIN)/hardmix demo

test: check
	$(BIN)/coverage erase
	$(BIN)/pytest -n 2 --cov --cov-report=term

check: $(READY)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python docs/lines.py --check

format: $(READY)
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

docs: $(READY)
	$(BIN)/python docs/lines.py

bench: $(READY)
	$(BIN)/python benchmarks/loss.py

torture: $(READY)
	$(BIN)/python benchmarks/torture.py

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'hardmix needs Python 3.11 or newer: make PYTHON=python3.12')"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf .venv .coverage .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
