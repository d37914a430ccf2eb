# Everything a person types. The work of the set-up is in ops/setup.sh; the versions are in ops/requirements/.
PYTHON := .venv/bin/python
UV ?= uv
ENGINE ?= podman
COMPOSE ?= $(ENGINE) compose
SERVERS ?= 2
EMBEDDED_MODEL ?= 1
PLATFORM ?= macos-arm64
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
LOCK := env -u PIP_FIND_LINKS $(UV) pip compile --quiet --universal --generate-hashes --python-version 3.11 \
	--no-config --custom-compile-command "make lock"

.DEFAULT_GOAL := help
.PHONY: help serve test test-deploy test-clients fuzz routers bench loadtest loadtest-smoke figures determinism \
	engine-parity format docs families wheelhouse sums image compose-up compose-down mac-contract screenshots lock clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

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

loadtest-smoke: ## under three minutes: back-pressure, gain of batching, fairness, leaving users, drain
	@ops/setup.sh dev
	$(PYTHON) -m loadtest run smoke

loadtest: ## every scenario against a server of the embedded model, 75 minutes; run nothing else meanwhile
	@ops/setup.sh dev
	$(PYTHON) -m loadtest run all

figures: ## measure single mechanisms, one table each; run nothing else meanwhile
	@ops/setup.sh dev
	$(PYTHON) -m loadtest.figures

determinism: ## play 1,000 random schedules in deterministic mode; every request must have one output
	@ops/setup.sh dev
	$(PYTHON) -m loadtest.determinism --schedules 1000

engine-parity: ## mlxcel run and the server must give the same greedy answers to 20 prompts: MODEL=path/to/folder
	@ops/setup.sh dev
	$(PYTHON) -m loadtest.engine_parity $(if $(MODEL),--model $(MODEL))

test-deploy: ## only the tests of the fleet: hosts of their own over ssh, gateways, alerts, image (root, Linux)
	@ops/setup.sh dev
	$(PYTHON) -m pytest tests/test_rollout.py tests/test_deploy_files.py tests/test_monitoring.py \
		tests/test_balancer.py tests/test_routers.py tests/test_image.py

test-clients: ## install other people's clients into .clients and tests/clients (npm), and try them on a server
	@ops/setup.sh dev
	@[ -x .clients/bin/pip ] || python3 -m venv .clients
	.clients/bin/pip install --quiet --require-hashes --no-deps --only-binary :all: -r ops/requirements/clients.txt
	@! command -v npm >/dev/null || npm ci --prefix tests/clients --no-audit --no-fund --ignore-scripts
	$(PYTHON) -m pytest tests/test_clients.py

fuzz: ## 100,000 requests of every kind, most of them broken, at a server of a tiny model: half an hour
	@ops/setup.sh dev
	$(PYTHON) -m loadtest.fuzz

routers: ## install the gateways of ops/routers into .routers (Linux), for a gateway or for their tests
	@[ -x .routers/bin/pip ] || python3 -m venv .routers
	.routers/bin/pip install --quiet --require-hashes --no-deps --only-binary :all: -r ops/requirements/routers.txt

wheelhouse: ## pack a release that installs without a network: PLATFORM=macos-arm64 PYTHONS="3.12 3.13"
	@ops/setup.sh serve
	$(PYTHON) -m ops.wheelhouse $(PLATFORM) $(PYTHONS)

sums: ## write the checksums of a model to deploy: MODEL=path/to/folder
	python3 ansible/roles/mlxcel/files/sums.py write $(MODEL)

image: ## build the container image localhost/mlxcel (EMBEDDED_MODEL=0 leaves the model out)
	$(ENGINE) build --format docker -f ops/Containerfile -t localhost/mlxcel \
		--build-arg VERSION=$(VERSION) --build-arg REVISION=$(shell git rev-parse --short HEAD 2>/dev/null) \
		--build-arg EMBEDDED_MODEL=$(EMBEDDED_MODEL) $(IMAGE_FLAGS) .

compose-up: ## start SERVERS servers from that image behind HAProxy on port 8080, with Prometheus on 9090
	$(COMPOSE) -f ops/compose.yaml up -d --scale server=$(SERVERS)

compose-down: ## stop them
	$(COMPOSE) -f ops/compose.yaml down --remove-orphans

mac-contract: ## on a Mac: whether launchd does what the deployment relies on (changes nothing that stays; asks for sudo)
	sudo /bin/sh launchd/contract.sh

screenshots: ## look at the page in Chromium and write docs/images (five minutes)
	@ops/setup.sh dev
	SCREENSHOTS=docs/images $(PYTHON) -m pytest tests/test_page_in_browser.py -k screenshots

format: ## let ruff put imports and layout in order
	@ops/setup.sh dev
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

docs: ## write docs/configuration.md and the Ansible role's variables from app/settings.py, docs/models.md, the fields in docs/api.md
	@ops/setup.sh serve
	$(PYTHON) -m ops.configuration_page > docs/configuration.md
	$(PYTHON) -m ops.api_page
	$(PYTHON) -m ops.models_page
	$(PYTHON) -m ops.argument_specs > ansible/roles/mlxcel/meta/argument_specs.yml

families: ## try every model family mlx-lm has and write docs/models.md, some minutes
	@ops/setup.sh serve
	$(PYTHON) -m ops.families.coverage
	$(PYTHON) -m ops.models_page

lock: ## resolve pyproject.toml again and write ops/requirements/*.txt (needs uv)
	$(LOCK) --upgrade pyproject.toml -o ops/requirements/serve.txt
	$(LOCK) --upgrade --extra dev --extra load --extra fleet --extra otel -c ops/requirements/serve.txt pyproject.toml -o ops/requirements/dev.txt
	$(LOCK) --upgrade --no-deps ops/requirements/model.in -o ops/requirements/model.txt
	$(LOCK) --upgrade ops/requirements/routers.in -o ops/requirements/routers.txt
	$(LOCK) --upgrade ops/requirements/clients.in -o ops/requirements/clients.txt
	$(LOCK) --upgrade --no-deps ops/requirements/build.in -o ops/requirements/build.txt

clean: ## remove the virtual environment and every cache in the tree
	rm -rf .venv .routers .clients tests/clients/node_modules .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
