# The targets below set up what they need. They need make, and Python 3.11 or newer with pip and venv. Targets:
#   make demo                               three consumers, a kill -9, a fourth consumer; about half a minute
#   make demo ARGS="--html timeline.html"   and write who owned what as a page; ARGS=--help lists the options
#   make pipeline                           orders through Kafka and Spark, about a minute; ARGS=--kill kills it midway
#   make check                              lint, types and quick tests, of what needs neither Kafka nor Spark
#   make test                               lint, types and every test but those of `make proof`
#   make proof                              tests that take long and prove more of the same; before a release
#   make test ARGS="tests/client -k lease"  some of the tests; ARGS are pytest's
#   make lint                               format, lint and types alone
#   make soak                               long random searches, until Ctrl-C
#   make package                            the wheel and the sdist in dist/, each installed and tried
#   make lowest                             the tests of `make check` over the lowest version of each dependency
#   make torture SECONDS=300 SEED=1         faults on three brokers, their links, consumers as processes; judged
#   make torture-matrix SECONDS=2400        every row of it, and on from where the last one stopped
#   make endurance SECONDS=3600             an hour without a fault: memory, threads, descriptors, the log, two halves compared
#   make versions                           the transport over every supported version of confluent-kafka
#   make bench                              the benchmarks, on an otherwise idle machine
#   make pictures                           the pictures of the demo and of top in docs/pictures, with Debian's chromium
#   make docs                               the site with the API reference, in build/site; a warning is an error
#   make requirements                       which test shows which sentence of a design, in build/requirements.md
#   make clean                              removes the environment and all caches
#   make PYTHON=python3.12 test             another interpreter (after `make clean`)

PYTHON ?= python3
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
# A stamp is written when its installation is complete, and is out of date when pyproject.toml is newer. There are two,
# so that the demo need not wait for Spark.
VENV_STAMP := $(VENV)/.stamp-venv
CORE_STAMP := $(VENV)/.stamp-core
TEST_STAMP := $(VENV)/.stamp-test
# All extras but schema-registry, of which the group `test` has the parts (pyproject.toml).
TEST_EXTRAS := cli,delta,iceberg,keys,metrics,otel,spark,testing
DOCS_STAMP := $(VENV)/.stamp-docs
PIP_INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check

.PHONY: help demo pipeline check test proof lint package lowest versions bench docs pictures requirements soak torture torture-matrix endurance clean

help:
	@sed -n 's/^#   //p' Makefile

demo: $(CORE_STAMP)
	$(BIN)/marshal demo $(ARGS)

# It starts the same broker as the tests, so it needs what they need.
pipeline: $(TEST_STAMP)
	$(BIN)/python -m examples.pipeline $(ARGS)

LINT := $(BIN)/ruff format --check --quiet . && $(BIN)/ruff check . && $(BIN)/mypy

lint: $(TEST_STAMP)
	$(LINT)

# Five processes also on two cores, because tests wait for more than half of their time. `--quick` leaves out what needs
# Kafka or Spark, and files of more than 2 CPU seconds (tests/support/file_scheduler.py). Tests start some hundred Python
# processes, and each would compile the package again if PYTHONDONTWRITEBYTECODE were set.
check: lint
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n 5 --dist loadfile --no-loadscope-reorder --quick $(ARGS)

# One process begins with the files for Spark, one with those for Kafka, two with the rest
# (tests/support/file_scheduler.py). In a new clone each would compile all test files: so one process lists the tests, and
# compiles them, on the core that mypy leaves free.
test: $(TEST_STAMP)
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -qq --collect-only $(ARGS) >/dev/null 2>&1 & \
		$(LINT); status=$$?; wait; exit $$status
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder $(ARGS)

# What is marked with `proof`: models beyond the smallest, more seeds, all planted bugs, more kills on Kafka, benchmarks on
# it beyond one, guides a second time on it, kills of Spark beyond those of the pipeline, Spark Connect, the oldest
# confluent-kafka, the site, the types as an editor sees them, the page of a timeline in Chromium (Debian's package
# chromium), a minute of torture, two of endurance. Then more examples of the properties.
proof: $(TEST_STAMP) $(DOCS_STAMP)
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder -m proof $(ARGS)
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 4 --hypothesis-profile=proof tests/properties tests/protocol

# `make proof` runs the tests of the transport and of a consumer's life also with the oldest confluent-kafka that
# pyproject.toml allows; this runs them with every minor version since. Each version is fetched once, into
# ~/.cache/marshal_py (tests/support/client_versions.py).
versions: $(TEST_STAMP)
	CONFLUENT_KAFKA=all $(BIN)/python -m pytest -m proof tests/transport/test_client_versions.py $(ARGS)

# Of the last commit. Wheel and sdist are built twice and compared, and each is installed alone (tests/support/package.py).
# Besides, the manifests fit the schemas of Kubernetes; that of KEDA is not among them.
package: $(TEST_STAMP)
	$(PIP_INSTALL) --group package
	$(BIN)/python -m tests.support.package dist
	$(BIN)/kubernetes-validate --strict deploy/kubernetes/consumer.yaml deploy/kubernetes/exporter.yaml

# In build/lowest, without what needs Kafka or Spark: make lowest ARGS=tests/spark/test_query.py runs that. It leaves out
# what is marked with `new_client`: the embedded broker of the oldest confluent-kafka can neither cut a log nor refuse a
# request.
LOWEST := build/lowest
lowest: $(TEST_STAMP)
	mkdir -p build
	$(BIN)/python -m tests.support.lowest > build/lowest.txt
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/pip install --quiet --disable-pip-version-check 'pip>=25.1'
	$(LOWEST)/bin/pip install --quiet -c build/lowest.txt -e '.[$(TEST_EXTRAS),schema-registry]' --group test
	PYTHONDONTWRITEBYTECODE= $(LOWEST)/bin/python -m pytest -q -n 4 --dist loadfile --no-loadscope-reorder \
		-m "not proof and not new_client" $(or $(ARGS),--quick)

bench: $(TEST_STAMP)
	$(BIN)/python -m bench $(ARGS)

pictures: $(CORE_STAMP)
	$(BIN)/python docs/pictures.py

docs: $(DOCS_STAMP)
	$(BIN)/python docs/site_build.py

requirements: $(TEST_STAMP)
	$(BIN)/python -m tests.support.seeds

# Long runs that continue where the last one stopped: seeds, hostile records, properties with many examples. The totals are
# in proof.json. Without a limit it runs until Ctrl-C: make soak ARGS="--seconds 3600"; ARGS=--help lists the options.
soak: $(TEST_STAMP)
	$(BIN)/python -m tests.support.soak $(ARGS)

# torture.jsonl keeps what ran, for the table of totals at the end. FAULTS=kill,link,... are some of the faults or none,
# PLANT=late-heartbeat-wins is a bug that the judge must find (exit code 1).
torture: $(TEST_STAMP)
	$(BIN)/python -m tests.rigs.torture $(if $(SECONDS),--seconds $(SECONDS)) $(if $(SEED),--seed $(SEED)) $(if $(FAULTS),--faults $(FAULTS)) $(if $(PLANT),--plant $(PLANT)) $(ARGS)

# endurance.jsonl keeps what ran, a line per run, so that a day may be several of them.
endurance: $(TEST_STAMP)
	$(BIN)/python -m tests.rigs.endurance $(if $(SECONDS),--seconds $(SECONDS)) $(if $(SEED),--seed $(SEED)) $(ARGS)

torture-matrix: $(TEST_STAMP)
	$(BIN)/python -m tests.rigs.torture --rows 99 --resume --seconds $(or $(SECONDS),2400) --seed $(or $(SEED),1) $(ARGS)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV_STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "marshal_py needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Name another: make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(CORE_STAMP): pyproject.toml $(VENV_STAMP)
	@echo "Installing marshal_py into $(VENV) (about half a minute)"
	$(PIP_INSTALL) -e '.[cli]'
	@touch $@

# After the core install, so that `make -j` never runs two pips in one environment. pip 25.1 is the first that knows
# groups of dependencies; that of a new environment is often older.
$(TEST_STAMP): pyproject.toml $(CORE_STAMP)
	@echo "Installing what the tests need, including Spark (a minute or two, 600 MB of downloads)"
	$(PIP_INSTALL) 'pip>=25.1'
	$(PIP_INSTALL) -e '.[$(TEST_EXTRAS)]' --group test
	@touch $@

$(DOCS_STAMP): pyproject.toml $(CORE_STAMP)
	$(PIP_INSTALL) 'pip>=25.1'
	$(PIP_INSTALL) --group docs
	@touch $@
