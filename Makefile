# Set-up, serving, tests. `make serve` and `make test` need nothing but Python >= 3.11 and, the first time, a network.

VENV := .venv
BIN := $(VENV)/bin
# interpreters to try for the virtual environment, best first
PYTHON := python3.13 python3.12 python3.11 python3
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --prefer-binary -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help serve test lint format bench clean

help: ## show this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 16

serve: $(VENV)/.installed ## install and serve the demo model on http://127.0.0.1:8000
	$(BIN)/hybridserve serve configs/demo.yaml

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
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt scripts/make_venv.sh
	sh scripts/make_venv.sh $(VENV) $(PYTHON)
	$(PIP_INSTALL) -e '.[dev]'
	@touch $(VENV)/.installed $@
