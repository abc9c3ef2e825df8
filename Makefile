# make train      set everything up and train on two CPU processes   make train ARGS="--config recipes/mnist.yaml"
# make doctor     check whether two CPU processes can train here     make doctor ARGS="--json doctor.json"
# make test       set everything up and run the quick tests          make test ARGS="tests/data"
# make test-all   the quick tests and those marked `full`, more cases of long tables
# make test-full  only the tests marked `full`
# make gpu        check everything that needs a GPU, or a part of it   make gpu ARGS="runs"    (table: build/gpu.md)
# make lint       ruff: rules and format
# make types      mypy; these two install only what they need
# make coverage   the quick tests, and which lines they ran, in child processes too
#
# All of them use the environment in .venv, with the tested versions of constraints.txt. To take the newest versions
# that requirements.txt allows instead: make train CONSTRAINTS=

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS ?= -c constraints.txt
ARGS ?=
# Many tests wait for other processes, so four workers are faster than two even on two cores.
WORKERS ?= -n 4 --dist worksteal
# Without those that need minutes each, root, a GPU or a browser.
ORDINARY := not slow and not machines and not slurm and not gpu and not browser
# pip is quiet, so a loop prints the seconds every 20 s. The trap ends both, also after Ctrl-C.
define install
@echo "Installing $(1) into $(VENV). The first time, this downloads about 3 GB with PyTorch, and takes minutes."
@s=0; while sleep 20 >/dev/null 2>&1; do s=$$((s + 20)); echo "    $$s s"; done & loop=$$!; \
$(BIN)/pip install --quiet --disable-pip-version-check -r $(1) $(CONSTRAINTS) & pip=$$!; \
trap "kill $$loop $$pip 2>/dev/null" EXIT INT TERM HUP; wait $$pip
endef

.PHONY: train doctor test test-all test-full gpu lint types coverage
train: $(VENV)/.train
	$(BIN)/accelerate launch --config_file accelerate_configs/2cpu.yaml train.py $(ARGS)

doctor: $(VENV)/.train
	$(BIN)/accelerate launch --config_file accelerate_configs/2cpu.yaml doctor.py $(ARGS)

test: $(VENV)/.test
	$(BIN)/python -m pytest $(WORKERS) $(ARGS)

test-all: $(VENV)/.test
	$(BIN)/python -m pytest $(WORKERS) -m "$(ORDINARY)" $(ARGS)

test-full: $(VENV)/.test
	$(BIN)/python -m pytest $(WORKERS) -m "full and $(ORDINARY)" $(ARGS)

gpu: $(VENV)/.test
	$(BIN)/python tests/gpu/run.py $(ARGS)

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.lint
	$(BIN)/mypy

coverage: $(VENV)/.test
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest $(ARGS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

$(VENV)/bin/pip:
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.train: requirements.txt constraints.txt | $(VENV)/bin/pip
	$(call install,requirements.txt)
	@touch $@

$(VENV)/.lint: requirements-lint.txt constraints.txt | $(VENV)/bin/pip
	$(call install,requirements-lint.txt)
	@touch $@

$(VENV)/.test: requirements-dev.txt requirements-lint.txt requirements.txt constraints.txt | $(VENV)/bin/pip
	$(call install,requirements-dev.txt)
	@touch $@ $(VENV)/.train $(VENV)/.lint
