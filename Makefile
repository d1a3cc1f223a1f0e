# paceline: `make train` trains a model, `make test` checks everything. Both make their own environment.
PYTHON ?= python3
RECIPE ?=
# Tests that run at a time. Many wait, so one more than there are cores is quickest on a small machine.
WORKERS ?= 3
# Another torch than the one that the tests are pinned to: make TORCH='2.11.*' test. Read when .venv is created.
TORCH ?= $(shell sed -n 's/^torch==//p' constraints.txt)
# The commit that `make bench-compare` measures against.
BASE ?= HEAD~1
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.installed

SOAK := soak-crash-points soak-damage soak-faults soak-kills soak-histories soak-deaths soak-recovery

.PHONY: help train test lint suite hooks system gpu docs parity bench bench-compare soak $(SOAK) clean

help:
	@echo "make train [RECIPE=recipes/vae.yaml] [ARGS='train.epochs=2 -n 2']   train a recipe (default: a small GPT)"
	@echo "make test    lint, types, import rules and every test"
	@echo "make system  install (as root, on Debian) what PACELINE_SYSTEM_TESTS=1 make test needs: ssh, SLURM, Ray"
	@echo "make lint    lint, types and import rules only"
	@echo "make suite   every test, without lint"
	@echo "make hooks   install the git hook that lints every commit (pre-commit)"
	@echo "make gpu     the tests that need a GPU"
	@echo "make docs    run every line of code in the docs"
	@echo "make parity  every model on every layout, beside one process (15 minutes)"
	@echo "make bench   side-by-side measurements (not part of the tests)"
	@echo "make bench-compare [BASE=main] [ARGS='--quick --record']   the key figures of this checkout beside those of BASE"
	@echo "make soak    the long fault campaigns (1.5 hours); make soak-kills, ... for one of them"

# The stamp is written last, so an interrupted install starts again and a finished one is not repeated.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "paceline needs Python 3.11 or newer; '$(PYTHON)' is older. Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $(VENV)/constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt -e '.[dev]'
	@touch $(READY)

train: $(READY)
	@$(BIN)/paceline train $(RECIPE) $(ARGS)

lint: $(READY)
	@$(BIN)/ruff check src tests benchmarks examples
	@$(BIN)/ruff format --check src tests benchmarks examples
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache

# Where PACELINE_SYSTEM_TESTS=1, as in CI, tests also start real ssh, SLURM, Ray and network namespaces.
test: lint suite

suite: $(READY) $(if $(filter 1,$(PACELINE_SYSTEM_TESTS)),system)
	@$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

hooks: $(READY)
	@$(BIN)/pre-commit install

system: $(READY)
	@PACELINE_SYSTEM_TESTS=1 sh tests/system/install.sh
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt -e '.[ray]'

gpu: $(READY)
	@PACELINE_GPU_TESTS=1 $(BIN)/python -m pytest tests/gpu $(ARGS)

docs: $(READY)
	@$(BIN)/python -m pytest tests/docs $(ARGS)

parity: $(READY)
	@OMP_NUM_THREADS=1 $(BIN)/python benchmarks/parity_table.py
	@OMP_NUM_THREADS=1 $(BIN)/python benchmarks/layout_table.py

bench: $(READY)
	@OMP_NUM_THREADS=1 $(BIN)/python benchmarks/overhead.py
	@OMP_NUM_THREADS=1 $(BIN)/python benchmarks/overhead.py --fused
	@OMP_NUM_THREADS=1 $(BIN)/python benchmarks/ddp_overhead.py
	@OMP_NUM_THREADS=1 $(BIN)/python benchmarks/fsdp_overhead.py
	@OMP_NUM_THREADS=1 $(BIN)/python benchmarks/fsdp_memory.py
	@OMP_NUM_THREADS=1 $(BIN)/python benchmarks/pipeline_bubble.py
	@OMP_NUM_THREADS=1 $(BIN)/python benchmarks/recompute_memory.py
	@OMP_NUM_THREADS=1 $(BIN)/python benchmarks/auto_choice.py
	@$(BIN)/python benchmarks/start_time.py
	@$(BIN)/python benchmarks/import_time.py
	@$(BIN)/python benchmarks/data_order.py

bench-compare: $(READY)
	@$(BIN)/python benchmarks/compare_commits.py $(BASE) $(ARGS)

# A campaign that breaks a promise ends with status 1; `make -k soak` runs the others all the same. CI runs a sample of each.
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

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache
