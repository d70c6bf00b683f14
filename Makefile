# One target per thing a person wants to do here; each sets up what it needs. Needs make, and Python 3.11+ with pip and venv.
#   make demo                               three consumers, a kill -9, a fourth one; about half a minute
#   make demo ARGS="--delivery at_most_once"
#   make pipeline                           orders through Kafka and Spark, about a minute; ARGS=--kill hurts it midway
#   make test                               lint, then every test
#   make PYTHON=python3.12 test             another interpreter (after `make clean`)

PYTHON ?= python3
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
# A stamp is written when its install is complete, and is out of date when pyproject.toml is newer.
# Two of them, because the demo must not wait for Spark.
VENV_STAMP := $(VENV)/.stamp-venv
CORE_STAMP := $(VENV)/.stamp-core
TEST_STAMP := $(VENV)/.stamp-test
PIP_INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check

.PHONY: help demo pipeline test lint versions bench soak clean

help:
	@sed -n 's/^#   //p' Makefile

demo: $(CORE_STAMP)
	$(BIN)/marshal demo $(ARGS)

# Its broker is the tests' own, so it needs what they need.
pipeline: $(TEST_STAMP)
	$(BIN)/python -m examples.pipeline $(ARGS)

lint: $(TEST_STAMP)
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check .
	$(BIN)/mypy

# Three processes, for machines with two cores: tests with brokers and with Spark wait for half of their time. One begins
# with Spark, one with Kafka, one with the rest (tests/support/shares.py). Tests start some hundred processes of Python,
# and each would compile the package anew where its byte code may not be kept.
test: lint
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder $(ARGS)

# `make test` runs the transport and a consumer's life over the oldest confluent-kafka that pyproject.toml allows, too; this
# runs them over every minor version since. Each is fetched once, into ~/.cache/marshal_py (tests/support/client_versions.py).
versions: $(TEST_STAMP)
	CONFLUENT_KAFKA=all $(BIN)/python -m pytest tests/transport/test_client_versions.py $(ARGS)

bench: $(TEST_STAMP)
	$(BIN)/python -m bench $(ARGS)

# Long runs that go on where they stopped: seeds, hostile records, properties with many examples; totals in proof.json.
# Without a limit it runs until Ctrl-C: make soak ARGS="--seconds 3600"; ARGS=--help lists the rest.
soak: $(TEST_STAMP)
	$(BIN)/python -m tests.support.soak $(ARGS)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV_STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "marshal_py needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Name another: make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(CORE_STAMP): pyproject.toml $(VENV_STAMP)
	@echo "Installing marshal_py into $(VENV) (about half a minute)"
	$(PIP_INSTALL) -e .
	@touch $@

# After the core install, so that `make -j` never runs two pips in one environment.
$(TEST_STAMP): pyproject.toml $(CORE_STAMP)
	@echo "Installing what the tests need, Spark among it (a minute or two, 600 MB of downloads)"
	$(PIP_INSTALL) -e '.[test]'
	@touch $@
