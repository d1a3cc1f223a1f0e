# paceline: `make train` trains a model, `make test` runs all checks. Both create their own environment.
PYTHON ?= python3
RECIPE ?=
# Number of test workers. Many tests wait, so one more than the number of cores is fastest on a small machine.
WORKERS ?= 3
# Use another torch than the pinned one: make TORCH='2.11.*' test. Read when .venv is created.
TORCH ?= $(shell sed -n 's/^torch==//p' constraints.txt)
# How often, and beside how many busy processes, `make burn` runs TEST.
RUNS ?= 30
LOAD ?= 8
# Base commit of `make bench-compare`.
BASE ?= HEAD~1
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.installed
# pip would compile all 17,000 files of packages: a minute. Python compiles those that are imported, and keeps them.
PIP_OPTIONS := --quiet --disable-pip-version-check --no-compile -c $(VENV)/constraints.txt
unexport PYTHONDONTWRITEBYTECODE

SOAK := soak-crash-points soak-damage soak-faults soak-kills soak-histories soak-deaths soak-recovery soak-programs soak-launches \
	soak-folders soak-recipes soak-frames soak-bits soak-dropout soak-groups soak-steps soak-two-nodes soak-accumulate

.PHONY: help train test test-all burn lint suite pytest hooks system gpu docs migrations parity bench bench-gpu bench-compare soak $(SOAK) clean

help:
	@echo "make train [RECIPE=recipes/vae.yaml] [ARGS='train.epochs=2 -n 2']   train a recipe (default: a small GPT)"
	@echo "make test    lint, types, import rules and all tests"
	@echo "make test-all   everything: services, full samples, every way to start the tutorial"
	@echo "make burn TEST=tests/…/test_x.py::test_y [RUNS=30] [LOAD=8]   run it 30 times beside 8 busy processes"
	@echo "make system  install the services for PACELINE_SYSTEM_TESTS=1 make test: ssh, SLURM, Ray (as root, on Debian)"
	@echo "make lint    lint, types and import rules only"
	@echo "make suite   all tests, without lint"
	@echo "make hooks   install the git hook that lints every commit (pre-commit)"
	@echo "make gpu     the tests that need a GPU"
	@echo "make docs    build the site into site/, and run all code in the docs"
	@echo "make migrations   run the scripts of other frameworks in examples/migrate, and what they become"
	@echo "make parity  compare every model on every layout with one process (25 minutes)"
	@echo "make bench   side-by-side measurements (not part of the tests)"
	@echo "make bench-gpu   the same on a GPU"
	@echo "make bench-compare [BASE=main] [ARGS='--check']   which key figures of this checkout differ from BASE's"
	@echo "make soak    the long fault campaigns (2 hours); make soak-kills, ... for one of them"

# The stamp is written last, so that an interrupted install is repeated and a finished one is not.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "paceline needs Python 3.11 or newer; '$(PYTHON)' is older. Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $(VENV)/constraints.txt
	$(BIN)/python -m pip install $(PIP_OPTIONS) -e '.[dev]'
	@touch $(READY)

train: $(READY)
	@$(BIN)/paceline train $(RECIPE) $(ARGS)

lint: $(READY)
	@$(BIN)/ruff check src tests benchmarks examples tools
	@$(BIN)/ruff format --check src tests benchmarks examples tools
	@$(BIN)/mypy
	@$(BIN)/mypy tests/typing_of_users.py
	@$(BIN)/lint-imports --no-cache

# With PACELINE_SYSTEM_TESTS=1, as in CI, tests also start real ssh, SLURM, Ray and network namespaces.
SERVICES := $(if $(filter 1,$(PACELINE_SYSTEM_TESTS)),system)

# Tests wait now and then: lint uses the time.
test: $(READY) $(SERVICES)
	@$(MAKE) --no-print-directory -j 2 lint pytest

# Before an issue is called resolved, and every night: also the tests marked `nightly`, larger samples, and services.
test-all: export PACELINE_ALL_TESTS = 1
test-all: export PACELINE_SYSTEM_TESTS = 1
test-all: system
	@$(MAKE) --no-print-directory -j 2 lint pytest

suite: $(READY) $(SERVICES)
	@$(MAKE) --no-print-directory pytest

# Some tests run make: they are not jobs of this one.
pytest:
	@env -u MAKEFLAGS -u MFLAGS -u MAKELEVEL $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

# A new or changed test of ranks, faults or services, before it lands.
burn: $(READY)
	@$(if $(TEST),,$(error Which test? make burn TEST=tests/faults/test_frames.py))
	@$(BIN)/python tools/burn.py $(TEST) --runs $(RUNS) --load $(LOAD)

hooks: $(READY)
	@$(BIN)/pre-commit install

system: $(READY)
	@PACELINE_SYSTEM_TESTS=1 sh tests/system/install.sh
	@$(BIN)/python -m pip install $(PIP_OPTIONS) -e '.[ray]'

gpu: $(READY)
	@PACELINE_GPU_TESTS=1 $(BIN)/python -m pytest tests/gpu $(ARGS)

# mkdocs checks links between pages and their anchors; nothing is fetched.
docs: $(READY)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet && echo "the site: site/index.html"
	@$(BIN)/python -m pytest tests/docs $(ARGS)

# The scripts of other frameworks in examples/migrate need them; they are installed beside .venv, not into it.
migrations: $(READY)
	@$(BIN)/python -m pip install $(PIP_OPTIONS) --no-deps --upgrade --target .peers accelerate lightning pytorch-lightning
	@OMP_NUM_THREADS=1 $(BIN)/python benchmarks/migrations.py --peers .peers $(ARGS)

parity: $(READY)
	@OMP_NUM_THREADS=1 $(BIN)/python benchmarks/parity_table.py
	@OMP_NUM_THREADS=1 $(BIN)/python benchmarks/layout_table.py
	@OMP_NUM_THREADS=1 $(BIN)/python benchmarks/dropout_parity.py

# The cost of every path with its bound, and then in more detail.
bench: $(READY)
	@OMP_NUM_THREADS=1 $(BIN)/python benchmarks/cost_table.py
	@OMP_NUM_THREADS=1 $(BIN)/python benchmarks/overhead.py
	@OMP_NUM_THREADS=1 $(BIN)/python benchmarks/overhead.py --fused
	@OMP_NUM_THREADS=1 $(BIN)/python benchmarks/ddp_overhead.py
	@OMP_NUM_THREADS=1 $(BIN)/python benchmarks/fsdp_overhead.py
	@OMP_NUM_THREADS=1 $(BIN)/python benchmarks/fsdp_memory.py
	@OMP_NUM_THREADS=1 $(BIN)/python benchmarks/pipeline_bubble.py
	@OMP_NUM_THREADS=1 $(BIN)/python benchmarks/recompute_memory.py
	@OMP_NUM_THREADS=1 $(BIN)/python benchmarks/auto_choice.py
	@OMP_NUM_THREADS=1 $(BIN)/python benchmarks/save_stalls.py
	@$(BIN)/python benchmarks/start_time.py
	@$(BIN)/python benchmarks/import_time.py
	@$(BIN)/python benchmarks/data_order.py

# On a machine with a GPU.
bench-gpu: $(READY)
	@$(BIN)/python benchmarks/cost_table.py
	@$(BIN)/python benchmarks/gpu_step.py
	@$(BIN)/python benchmarks/graph_cost.py
	@$(BIN)/python benchmarks/gpu_throughput.py
	@$(BIN)/python benchmarks/resnet_throughput.py
	@$(BIN)/python benchmarks/compile_start.py --device cuda
	@$(BIN)/python benchmarks/save_stalls.py --gpu --saves 100

bench-compare: $(READY)
	@$(BIN)/python benchmarks/compare_commits.py $(BASE) $(ARGS)

# A campaign that finds a violation exits with status 1; `make -k soak` continues with the others. CI runs a sample of each.
soak: $(SOAK)

soak-%: export OMP_NUM_THREADS = 1

soak-crash-points: $(READY)
	$(BIN)/python benchmarks/crash_points.py 5000 300

soak-damage: $(READY)
	$(BIN)/python benchmarks/checkpoint_damage.py 50000 0 10000

soak-faults: $(READY)
	$(BIN)/python benchmarks/save_faults.py

soak-kills: $(READY)
	$(BIN)/python benchmarks/save_kills.py
	$(BIN)/python benchmarks/save_kills.py --bits 3000

soak-histories: $(READY)
	$(BIN)/python benchmarks/resume_histories.py --positions 50000
	$(BIN)/python benchmarks/resume_histories.py --trainings 300

soak-deaths: $(READY)
	$(BIN)/python benchmarks/deaths.py

soak-recovery: $(READY)
	$(BIN)/python benchmarks/recovery.py --rounds 20 --without-peers

soak-programs: $(READY)
	$(BIN)/python benchmarks/random_programs.py

soak-launches: $(READY)
	$(BIN)/python benchmarks/launches.py

soak-folders: $(READY)
	$(BIN)/python benchmarks/hostile_folders.py

soak-recipes: $(READY)
	$(BIN)/python benchmarks/hostile_recipes.py 10000

soak-frames: $(READY)
	$(BIN)/python benchmarks/hostile_frames.py

soak-dropout: $(READY)
	$(BIN)/python benchmarks/dropout_statistics.py

soak-groups: $(READY)
	$(BIN)/python benchmarks/destroyed_groups.py
	$(BIN)/python benchmarks/destroyed_groups.py --load 2

soak-accumulate: $(READY)
	$(BIN)/python benchmarks/accumulation.py

# Needs SLURM (`make system`).
soak-steps: $(READY)
	PYTHONPATH=tests $(BIN)/python benchmarks/slurm_steps.py 500

# Needs root: it makes network namespaces.
soak-two-nodes: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/two_nodes.py

soak-bits: $(READY)
	$(BIN)/python benchmarks/bits_on_ranks.py

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache site
