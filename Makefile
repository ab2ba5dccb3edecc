# Each command works in a fresh clone. It needs only Python 3.11 or later with venv and pip.
#
#   make run            the demo: a pair with real data, a kill, a promotion, the proof that nothing is lost, Spark
#   make run SPARK=0    the same without Spark
#   make run MODE=dledger   three nodes that elect their leader, which is killed twice
#   make run CLIENTS=rocketmq   RocketMQ's own Java clients through kill -9 of the master, also with MODE=dledger; about half
#                       a minute, needs Java 17 and Maven
#   make run ZK=1       the demo with the roles in ZooKeeper, which is killed in the middle of the flip
#   make test           what is proved in one process, and one real thing of each kind, in six workers, 5 to 7 minutes
#                       (make test PYTEST_ARGS="tests/store -x"; WORKERS=0: in one process, for --pdb)
#   make test-all       the same, then the rest: Spark, RocketMQ's Java, real ZooKeepers, kills; up to 25 minutes
#   make test-long      long cases of which the other two have a shorter one: with RocketMQ's JVMs, each alert seen firing by a real
#                       Prometheus, each planted mistake of whole nodes, a soak of seconds with planted leaks; 5 to 15 minutes
#   make coverage       make test, and how much of each package it executes
#   make check          style, types, imports
#   make bench          the benchmarks against RocketMQ and Kafka, 10 to 20 minutes; these two peers need Java 17 and Maven
#                       (make bench BENCH_ARGS="--only puts --scale 0.1"; PYTHON=/usr/bin/python3 chooses the interpreter)
#   make bench-growth   the same load on a log of 1 GiB and of 16 GiB, 2 to 10 minutes and 34 GiB of disk
#   make bench-spark    the Spark side against Spark's Kafka connector, Parquet and RocketMQ, 10 to 20 minutes, 10 GiB of disk
#                       (BENCH_ARGS="--only reads --scale 0.1"; Java 17 and Maven as for make bench)
#   make fuzz-api       hostile bytes to the client API, 10 minutes, then to links that forward requests, twice a tenth
#                       of that (SECONDS=n; SEED=n repeats a run)
#   make fuzz           fuzzing by coverage of what hastore reads from others and from its own files, a minute a target
#                       (TARGET=name; SECONDS=n or RUNS=n executions of each target; SEED=n). New inputs and finds: build/fuzz
#   make attack         floods, leaks, slow and full disks, links, forgeries on real nodes, 10 minutes: a line for each with
#                       its quiet figure, the one under attack and the target (SECONDS=n; SEED=n; ONLY=tls-600,hellos;
#                       MARKDOWN=1: the table for docs/security.md); exit code 1 if a target is missed or a put is lost
#   make histories      the history checker on 1,000 healthy histories and on corrupted ones, a minute (SEEDS=n; SEED=n repeats a run)
#   make world          100 walks of whole nodes of each mode on virtual time, network and disk, each about 2 s of CPU; a walk
#                       that fails is reduced and told (SEED=n: the first; SEEDS=n; MODE=dledger or classic: only that mode)
#   make crash-points   200,000 states that a power loss may leave of stores of both modes, each recovered from and checked, in a
#                       file system in memory; 20 minutes on two cores (STATES=n, SEED=n, ONLY=classic,dledger), then planted mistakes
#   make power-cuts     300 power cuts of real nodes, on a file system that loses what was not synced; half an hour (CUTS=n, SEED=n; as
#                       root, since it mounts)
#   make explore        all states of small groups of both modes, with the project's own code, each interleaving within a scope's
#                       bounds: states, depth, and whether a scope was searched to its end (MODE=classic: that mode; STATES=n of
#                       each scope; SCOPE=name: one scope; PLANTED=1: the mistakes that it must find, with the shortest way to each)
#   make soak           30 minutes with 2,000 connections that come and go, 1,000 groups, nodes that leave and join, retention:
#                       memory, descriptors, threads and files must stay bounded, nothing may be lost (SECONDS=28800: 8 hours;
#                       SEED=n; MODE=dledger; CONNECTIONS=n; GROUPS=n; SOAK_ARGS="--csv FILE --plot FILE"); exit code 1 if not
#   make upgrade FROM=COMMIT   three nodes of an earlier commit are upgraded to this one node by node, their master is killed, and
#                       they go back, under producers of both; half a minute for each mode (MODE=classic or dledger: only that mode)
#   make torture        500 cycles of kill -9, promotion and rejoin, about 20 minutes, then 500 of network faults, about 30
#                       (CYCLES=n: 2 to 4 s each; SEED=n repeats a run; PYTEST_ARGS="-k network" or "-k 'not network'": one half)
#   make torture MODE=dledger   500 cycles of kills, pauses, lost disks, cut links, jumping clocks, slow and full disks and
#                       commands of administrators, about 20 minutes (CYCLES=n: 2 to 3 s each; SEED=n)
#   make planted        each planted mistake of both modes, and after how many walks it is caught (SEEDS=n: at most so many)
#   make dledger-faults what the real DLedger does wrong, each fault provoked in its servers, 1 to 5 minutes (Java 17, Maven)
#   make torture-rocketmq   200 cycles of flips, kills, hangs and partitions under RocketMQ's own clients, half of them in each
#                       mode; about 15 minutes (CYCLES=n, SEED=n; MODE=dledger: that mode alone)
#   make torture-spark  100 kills of each kind of Spark job, with their workers and nodes (CYCLES=n; SEED=n repeats a run)

# As Python does unless it is told otherwise: else each of the hundreds of processes that the tests start compiles all that it
# imports, and each worker rewrites the asserts of all tests anew.
export PYTHONDONTWRITEBYTECODE :=

PYTHON ?= python3
VENV ?= .venv
SPARK ?= 1
MODE ?= classic
ZK ?= 0
CLIENTS ?=
SCALE ?= 1
PYTEST_ARGS ?=
# Of pytest. Half of the time of `make test` is spent waiting for other processes; the rest has JVMs.
WORKERS ?= 6
WORKERS_OF_REST ?= 4
BENCH_ARGS ?=
CYCLES ?= 500
SECONDS ?= 600
SEED ?= 0
ONLY ?=
SEEDS ?=
TARGET ?= all
RUNS ?= 0
MARKDOWN ?=
STATES ?=
SCOPE ?=
PLANTED ?=
CUTS ?= 300
FROM ?=
CONNECTIONS ?= 2000
GROUPS ?= 1000
SOAK_ARGS ?=
TORTURE_classic := tests/torture/test_kill.py tests/torture/test_partitions.py
TORTURE_dledger := tests/torture/test_dledger.py
# `make check test` runs the style test once.
NOT_AGAIN := $(if $(filter check,$(MAKECMDGOALS)),--ignore=tests/test_style.py)
REWRITTEN := $(if $(PYTEST_ARGS),,| tests/store/__pycache__)
BIN := $(VENV)/bin
comma := ,
# RocketMQ's clients are Java's own; that demo needs no Spark.
ifneq ($(CLIENTS),)
override SPARK := 0
endif
# A machine with a Java for Spark 4 (17 or later) uses it; other machines get one from PyPI.
JAVA_OK := $(shell $${JAVA_HOME:+$$JAVA_HOME/bin/}java --version 2>/dev/null | awk 'NR == 1 { split($$2, v, "."); print (v[1] >= 17) }')
JAVA_EXTRA := $(if $(filter 1,$(JAVA_OK)),,$(comma)java)
RUN_EXTRAS := $(if $(filter 0,$(SPARK)),demo,demo$(comma)spark$(JAVA_EXTRA))
# ZooKeeper's jars: Debian's package, or those in pyspark.
ZK_JARS := $(if $(wildcard /usr/share/java/zookeeper.jar),,$(comma)spark)
ZK_EXTRAS := $(if $(filter 0,$(ZK)),,$(comma)zk$(ZK_JARS)$(JAVA_EXTRA))
RUN_FLAGS := $(if $(CLIENTS),--clients $(CLIENTS)) $(if $(filter 0,$(SPARK)),--no-spark) $(if $(filter 0,$(ZK)),,--zookeeper)
# A virtual environment keeps the interpreter that created it. If PYTHON is given, check that it is the same one, because
# figures of another interpreter would mislead.
WHICH := import sys; print(sys.version, sys.base_prefix)
SAME_PYTHON = $(if $(filter file default,$(origin PYTHON)),true,\
	test "$$($(PYTHON) -c '$(WHICH)')" = "$$($(BIN)/python -c '$(WHICH)')" || \
	{ echo "$(VENV) was made by another Python than $(PYTHON): make clean, or give another VENV=" >&2; exit 1; })

.PHONY: run test test-rest test-all test-long coverage check check-ruff check-mypy check-style bench bench-growth bench-spark fuzz-api attack torture torture-rocketmq torture-spark planted dledger-faults explore histories world crash-points power-cuts fuzz soak upgrade clean

run: $(VENV)/.run-$(SPARK)-$(ZK)
	$(BIN)/python bin/hastore demo --mode $(MODE) --scale $(SCALE) $(RUN_FLAGS)

test: $(VENV)/.dev $(REWRITTEN)
	$(BIN)/python -m pytest -n $(WORKERS) -m "not full" $(NOT_AGAIN) $(PYTEST_ARGS)

# pytest rewrites the asserts of a module that it meets for the first time. In a fresh clone each of six workers would do so for
# all modules: 100 s of CPU, beside 30 for two passes over a half of them. A module that fails here fails again in the run.
tests/store/__pycache__: | $(VENV)/.dev
	@echo "pytest reads all tests for the first time: half a minute"
	@printf '%s\n' tests/*/ | xargs -P 2 -n 8 $(BIN)/python -m pytest --collect-only -qq >/dev/null 2>&1 || true

test-rest: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(WORKERS_OF_REST) -m "full and not long" $(PYTEST_ARGS)

test-long: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 -m long $(PYTEST_ARGS)

# A failure in the first half does not hide one in the second. Tests that PYTEST_ARGS names may all be in one half, and pytest
# fails if it finds none, so they run in one call.
test-all: $(VENV)/.dev
ifeq ($(PYTEST_ARGS),)
	@$(MAKE) -k test test-rest NOT_AGAIN=$(NOT_AGAIN)
else
	$(BIN)/python -m pytest -n $(WORKERS) $(NOT_AGAIN) $(PYTEST_ARGS)
endif

coverage: $(VENV)/.dev $(REWRITTEN)
	$(BIN)/python -m pytest -n $(WORKERS) -m "not full" --cov --cov-report= $(PYTEST_ARGS)
	$(BIN)/python tests/coverage_by_package.py

check: check-ruff check-mypy check-style

check-ruff: $(VENV)/.dev
	$(BIN)/ruff check .

check-mypy: $(VENV)/.dev
	$(BIN)/mypy

check-style: $(VENV)/.dev
	$(BIN)/python -m pytest -q tests/test_style.py

bench: $(VENV)/.bench
	@$(SAME_PYTHON)
	$(BIN)/python -m benchmarks.run_all $(BENCH_ARGS)

bench-growth: $(VENV)/.bench
	@$(SAME_PYTHON)
	$(BIN)/python -m benchmarks.run_all --only growth_log

bench-spark: $(VENV)/.bench-spark
	@$(SAME_PYTHON)
	$(BIN)/python -m benchmarks.spark $(BENCH_ARGS)

world: $(VENV)/.dev
	$(BIN)/python -m tests.world --mode $(if $(filter file,$(origin MODE)),both,$(MODE)) --seed $(SEED) --seeds $(or $(SEEDS),100)

torture: $(VENV)/.dev
	HASTORE_TORTURE_CYCLES=$(CYCLES) HASTORE_TORTURE_SEED=$(SEED) $(BIN)/python -m pytest -q -s -m full $(TORTURE_$(MODE)) \
		$(PYTEST_ARGS)

torture-rocketmq: $(VENV)/.dev
	HASTORE_CLIENTS_CYCLES=$(if $(filter file,$(origin CYCLES)),200,$(CYCLES)) HASTORE_TORTURE_SEED=$(SEED) \
		$(BIN)/python -m pytest -q -s -m full tests/torture/test_rocketmq_clients.py \
		$(if $(filter file,$(origin MODE)),,-k $(MODE)) $(PYTEST_ARGS)

torture-spark: $(VENV)/.dev
	HASTORE_SPARK_CYCLES=$(if $(filter file,$(origin CYCLES)),100,$(CYCLES)) HASTORE_SPARK_SEED=$(SEED) \
		$(BIN)/python -m pytest -q -s tests/spark/torture $(PYTEST_ARGS)

planted: $(VENV)/.dev
	$(BIN)/python -m tests.planted_table --seeds $(or $(SEEDS),20000)

dledger-faults: $(VENV)/.dev
	HASTORE_DLEDGER_FAULTS=1 $(BIN)/python -m pytest -q -rA tests/interop/test_dledger_faults.py $(PYTEST_ARGS)

fuzz: $(VENV)/.fuzz
	$(BIN)/python -m tests.fuzz --run $(TARGET) --seconds $(if $(filter file,$(origin SECONDS)),60,$(SECONDS)) --runs $(RUNS) \
		--seed $(SEED)

fuzz-api: $(VENV)/.dev
	HASTORE_FUZZ_API_SECONDS=$(SECONDS) HASTORE_FUZZ_API_SEED=$(SEED) $(BIN)/python -m pytest -q -s \
		tests/process/test_api_attacks.py -k under_attack
	HASTORE_FUZZ_API_SECONDS=$$(($(SECONDS) / 10)) HASTORE_FUZZ_API_SEED=$(SEED) $(BIN)/python -m pytest -q -s \
		tests/server/remoting/test_forwarding.py -k fuzz

histories: $(VENV)/.dev
	HASTORE_SEEDS=$(or $(SEEDS),1000) HASTORE_SEED=$(SEED) $(BIN)/python -m pytest -q -s -n 0 tests/history/test_checker.py

attack: $(VENV)/.dev
	$(BIN)/python -m tests.attack --seconds $(SECONDS) --seed $(SEED) --only "$(ONLY)" $(if $(MARKDOWN),--markdown)

explore: $(VENV)/.dev
	$(BIN)/python -m tests.explore --mode $(if $(filter file,$(origin MODE)),both,$(MODE)) --states $(or $(STATES),2000000) \
		--scope "$(SCOPE)" $(if $(PLANTED),--planted)

crash-points: $(VENV)/.dev
	$(BIN)/python -m tests.crash --states $(or $(STATES),200000) --seed $(SEED) --only "$(ONLY)"
	$(BIN)/python -m tests.crash --planted --states $(or $(STATES),200000)

power-cuts: $(VENV)/.dev
	HASTORE_POWER_CUTS=$(CUTS) HASTORE_POWER_CUTS_SEED=$(SEED) $(BIN)/python -m pytest -q -s -m full \
		tests/crash/test_power_cuts.py $(PYTEST_ARGS)

soak: $(VENV)/.dev
	$(BIN)/python -m tests.soak --seconds $(if $(filter file,$(origin SECONDS)),1800,$(SECONDS)) --seed $(SEED) --mode $(MODE) \
		--connections $(CONNECTIONS) --groups $(GROUPS) $(SOAK_ARGS)

upgrade: $(VENV)/.dev
	@test -n "$(FROM)" || { echo "name the commit to upgrade from: make upgrade FROM=COMMIT" >&2; exit 2; }
	$(BIN)/python -m tests.upgrade $(FROM) --mode $(if $(filter file,$(origin MODE)),both,$(MODE))

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "hastore needs Python 3.11 or later: make PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# What pip installs for each kind of target, and about how much room it takes; pip itself says nothing for minutes.
RUN := $(VENV)/.run-$(SPARK)-$(ZK)
$(RUN): EXTRAS := $(RUN_EXTRAS)$(ZK_EXTRAS)
$(RUN): WHAT := $(if $(findstring spark,$(RUN_EXTRAS)$(ZK_EXTRAS)),1.0 GB$(comma) half of it Spark; make run SPARK=0 needs 0.3 GB,0.3 GB)
$(VENV)/.bench: EXTRAS := bench
$(VENV)/.bench: WHAT := 0.2 GB
$(VENV)/.bench-spark: EXTRAS := bench,spark$(JAVA_EXTRA)
$(VENV)/.bench-spark: WHAT := 0.9 GB, half of it Spark
# atheris is in no other environment: it has wheels for Python 3.11 to 3.13 only, of 60 MB. The targets need a part of `dev`.
$(VENV)/.fuzz: EXTRAS := fuzz
$(VENV)/.fuzz: WHAT := 0.3 GB
$(VENV)/.dev: EXTRAS := demo,spark,delta,iceberg,dev$(JAVA_EXTRA)
$(VENV)/.dev: WHAT := 1.3 GB, Spark and all that the tests need
# An environment that somebody else has made, or that venv left half made, is refused here: pip would resolve for minutes.
USABLE := import importlib.util, sys; v = sys.version_info[:2]; sys.exit( \
	"error: $(VENV) has Python %d.%d, and hastore needs 3.11 or later: make clean, or give another VENV=" % v if v < (3, 11) else \
	importlib.util.find_spec("pip") is None and "error: $(VENV) has no pip: make clean, or give another VENV=; if a new one \
	has none, install venv for $(PYTHON) (on Debian: apt-get install python3-venv)")

$(RUN) $(VENV)/.bench $(VENV)/.bench-spark $(VENV)/.fuzz $(VENV)/.dev: Makefile setup.cfg setup.py pyproject.toml | $(BIN)/python
	@$(BIN)/python -c '$(USABLE)'
	@$(SAME_PYTHON)
	@echo "pip installs into $(VENV) what hastore needs, once: $(WHAT). This may take some minutes." >&2
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[$(EXTRAS)]"
	@touch $@
