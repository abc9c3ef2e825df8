# make train    set everything up and train on two CPU processes     make train ARGS="--config recipes/mnist.yaml"
# make doctor   say whether two CPU processes can train here       make doctor ARGS="--json doctor.json"
# make test     set everything up and run the tests
# make lint     ruff, check and format

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

.PHONY: train doctor test lint
train: $(VENV)/.train
	$(BIN)/accelerate launch --config_file accelerate_configs/2cpu.yaml train.py $(ARGS)

doctor: $(VENV)/.train
	$(BIN)/accelerate launch --config_file accelerate_configs/2cpu.yaml doctor.py $(ARGS)

test: $(VENV)/.test
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

$(VENV)/bin/pip:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.train: requirements.txt | $(VENV)/bin/pip
	$(BIN)/pip install -r requirements.txt
	touch $@

$(VENV)/.test: requirements-dev.txt requirements.txt | $(VENV)/bin/pip
	$(BIN)/pip install -r requirements-dev.txt
	touch $@ $(VENV)/.train
