# Everything a person types. The work of the set-up is in ops/setup.sh; the versions are in ops/requirements/.
PYTHON := .venv/bin/python
UV ?= uv
LOCK := env -u PIP_FIND_LINKS $(UV) pip compile --quiet --universal --generate-hashes --python-version 3.11 \
	--no-config --custom-compile-command "make lock"

.DEFAULT_GOAL := help
.PHONY: help serve test bench figures determinism format docs lock clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

serve: ## set up what is missing, then serve the embedded model on 127.0.0.1:8080
	@ops/setup.sh serve
	@exec $(PYTHON) -m app serve

test: ## set up what is missing, then lint, types and tests
	@ops/setup.sh dev
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy --strict app
	$(PYTHON) -m pytest

bench: ## time this server against mlx-lm's own, side by side; run nothing else meanwhile
	@ops/setup.sh dev
	$(PYTHON) -m loadtest.bench

figures: ## measure single mechanisms, one table each; run nothing else meanwhile
	@ops/setup.sh dev
	$(PYTHON) -m loadtest.figures

determinism: ## play 1,000 random schedules in deterministic mode; every request must have one output
	@ops/setup.sh dev
	$(PYTHON) -m loadtest.determinism --schedules 1000

format: ## let ruff put imports and layout in order
	@ops/setup.sh dev
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

docs: ## write docs/configuration.md from app/settings.py
	@ops/setup.sh serve
	$(PYTHON) -m ops.configuration_page > docs/configuration.md

lock: ## resolve pyproject.toml again and write ops/requirements/*.txt (needs uv)
	$(LOCK) --upgrade pyproject.toml -o ops/requirements/serve.txt
	$(LOCK) --upgrade --extra dev --extra load -c ops/requirements/serve.txt pyproject.toml -o ops/requirements/dev.txt
	$(LOCK) --upgrade --no-deps ops/requirements/model.in -o ops/requirements/model.txt
	$(LOCK) --upgrade --no-deps ops/requirements/build.in -o ops/requirements/build.txt

clean: ## remove the virtual environment and every cache in the tree
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
