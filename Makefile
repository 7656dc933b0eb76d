# Set-up, serving, tests. `make serve` and `make test` need nothing but Python >= 3.11 and, the first time, a network.

VENV := .venv
BIN := $(VENV)/bin
# interpreters to try for the virtual environment, best first
PYTHON := python3.13 python3.12 python3.11 python3
# modules are compiled behind pip, which would do it on one core; what no Python compiles (packages hold templates of
# modules) is passed over, as pip does
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --prefer-binary --no-compile -c constraints.txt
COMPILE := $(BIN)/python -W ignore -m compileall -qq -j 0 $(VENV)/lib >/dev/null || true

.DEFAULT_GOAL := help
.PHONY: help serve test lint format bench clean

help: ## show this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 16

serve: $(VENV)/.installed ## install and serve the demo model on http://127.0.0.1:8000
	$(BIN)/hybridserve serve configs/demo.yaml

# set to anything, it would have each of the hundred processes that tests start compile this project's modules again
test: export PYTHONDONTWRITEBYTECODE :=
test: lint ## install, lint and run all tests
	$(BIN)/python -m pytest -n 2 --no-loadscope-reorder

lint: $(VENV)/.installed-dev ## check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.installed-dev ## mend style and formatting where that can be done mechanically
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.installed-dev ## measure the CPU path against transformers (wants an idle machine)
	$(BIN)/python tests/benchmarks/bench_cpu.py

clean: ## remove the virtual environment, caches and build products
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# the stamps make an installation happen once, and again when what it depends on changes
$(VENV)/.installed: pyproject.toml constraints.txt scripts/make_venv.sh
	sh scripts/make_venv.sh $(VENV) $(PYTHON)
	$(PIP_INSTALL) -e .
	$(COMPILE)
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt scripts/make_venv.sh
	sh scripts/make_venv.sh $(VENV) $(PYTHON)
	$(PIP_INSTALL) -e '.[dev]'
	$(COMPILE)
	@touch $(VENV)/.installed $@
