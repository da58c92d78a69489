# Each target is the only command a fresh clone needs: it makes .venv, installs, and does the job.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready

.PHONY: demo test coverage quick check format docs tables bench gpu results torture clean

demo: $(READY)
	$(BIN)/hardmix demo

test: check
	$(BIN)/pytest -n 2

# The same with coverage: slower.
coverage: check
	$(BIN)/coverage erase
	$(BIN)/pytest -n 2 --cov --cov-report=term

# Lint, types and the tests that matter, in under two minutes.
quick: check
	$(BIN)/pytest -n 2 -q -m "not slow"

check: $(READY)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/links.py
	$(BIN)/python tools/words.py
	$(BIN)/python -m benchmarks.page --check
	$(BIN)/python experiments/results.py --check
	$(BIN)/python tools/mixing_findings.py --check

format: $(READY)
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

# The documentation, in site/: open site/index.html.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

# The tables of the docs and of the README, from the measurements and records they are made of.
tables: $(READY)
	$(BIN)/python -m benchmarks.page
	$(BIN)/python experiments/results.py
	$(BIN)/python tools/mixing_findings.py

# CIFAR and JPEG are folders of real images; without them, generated ones. About 45 minutes.
bench: $(READY)
	$(BIN)/python -m benchmarks --out bench.json \
	  $(if $(CIFAR),--cifar "$(CIFAR)") $(if $(JPEG),--jpeg "$(JPEG)")

# On a machine with CUDA: all that is only counted elsewhere, in about 15 minutes. Writes gpu.json and gpu.md.
gpu: $(READY)
	$(BIN)/python -m benchmarks gpu --out gpu.json \
	  $(if $(CIFAR),--cifar "$(CIFAR)") $(if $(JPEG),--jpeg "$(JPEG)") $(if $(VOC),--voc "$(VOC)")

# The older table of docs/results-older.md: two processes of one thread each, as it was made. CIFAR is the folder of
# CIFAR-10; without it, the embedded images alone. Results lie in runs/results-*. On 2 cores about
# 25 minutes for the embedded images and 2 h 25 min for CIFAR-10, by the times of the runs.
SHAPES := sweep table1 --scale shapes --out runs/results-shapes --first-seed 1
CIFAR10 := sweep table1-supp --scale cifar10 --epochs 12 --out runs/results-cifar10 --first-seed 1 --data.root "$(CIFAR)"
ROWS := MoCo-v2 "MoCHi (1024, 1024, 128)"
ORACLES := "MoCo-v2, oracle" "MoCHi (1024, 1024, 128), oracle"
QUARTER := "MoCo-v2, K = 4096" "MoCHi (1024, 1024, 128), K = 4096"
TWICE = echo 1 2 | xargs -n 1 -P 2 sh -c 'OMP_NUM_THREADS=1 $(BIN)/hardmix $(1)' && $(BIN)/hardmix $(1)

results: $(READY)
	$(call TWICE,$(SHAPES) --seeds 3 --only $(ROWS) oracle)
ifdef CIFAR
	$(call TWICE,$(CIFAR10) --seeds 1 --only supervised)
	$(call TWICE,$(CIFAR10) --seeds 2 --only $(ORACLES) $(QUARTER))
	$(call TWICE,$(CIFAR10) --seeds 3 --only "MoCHi (1024, 256, 512)")
	$(call TWICE,$(CIFAR10) --seeds 4 --only $(ROWS))
endif

torture: $(READY)
	$(BIN)/python -m benchmarks.torture

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'hardmix needs Python 3.11 or newer: make PYTHON=python3.12')"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf .venv site .coverage .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
