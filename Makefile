# make pretrain                                            on the devices of this machine
# make pretrain GPUS=4                                     torchrun, four processes
# make pretrain GPUS=2 DEVICE=cpu                          two CPU processes over gloo
# make pretrain GPUS=2 LAUNCHER=deepspeed DS=zero3         the deepspeed launcher
# make pretrain GPUS=2 LAUNCHER=accelerate ACCELERATE=fsdp2
# make pretrain ARGS="--max_steps 100"                     any other flag of the recipe
# make sft, then make dpo | distill | grpo                 the other stages, launched alike
# make chat | serve | evaluate                             talk to the newest model, serve it, measure it
# make bench                                               compare the speed with other programs
# make race                                                compare the time to a validation loss with other programs
# make tokenizer | test | test-quick | faults | quality
# make docs                                                the documentation as a website, in build/docs
# make clean                                               remove .venv, caches and build files; never out/

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# The numbers of the GPUs to use: CUDA_VISIBLE_DEVICES, or all GPUs of the machine.
comma := ,
PRESENT := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | sed -n 's/^GPU \([0-9]*\):.*/\1/p')
VISIBLE := $(or $(subst $(comma), ,$(CUDA_VISIBLE_DEVICES)),$(PRESENT))
# Without an NVIDIA GPU the recipe chooses: another accelerator that torch finds, or the CPU.
DEVICE ?= $(if $(PRESENT),cuda,auto)
ifeq ($(filter $(DEVICE),cuda cpu auto),)
  $(error DEVICE=$(DEVICE) is unknown: use cuda, cpu or auto)
endif
GPUS ?= $(if $(filter cuda,$(DEVICE)),$(words $(VISIBLE)),1)
LAUNCHER ?= torchrun
DS ?= zero2
ACCELERATE ?= ddp
MASTER_PORT ?= 29500
PRESET ?= $(if $(filter cuda,$(DEVICE)),minimind2-small,tiny)
CONFIG ?= recipes/$(PRESET)/$@.yaml
ARGS ?=

.PHONY: pretrain sft dpo distill grpo chat serve evaluate tokenizer bench race test test-quick faults quality docs clean help
.DEFAULT_GOAL := help

help:
	@sed -n '/^#/!q; s/^# //p' $(firstword $(MAKEFILE_LIST))

# The environment and the launch command. On CPUs, DeepSpeed takes the number of devices from LOCAL_SIZE, and
# OMP_NUM_THREADS divides the cores among the processes.
ENV :=
ifneq ($(DEVICE),cuda)
  CPU_ARGS := $(if $(filter cpu,$(DEVICE)),--use_cpu)
  ifneq ($(GPUS),1)
    ENV := LOCAL_SIZE=$(GPUS) OMP_NUM_THREADS=$(shell n=$$(( $$(getconf _NPROCESSORS_ONLN) / $(GPUS) )); echo $$(( n > 0 ? n : 1 )))
  endif
endif
DEVICES := $(shell seq -s, 0 $$(( $(GPUS) - 1 )))
ifeq ($(DEVICE),cuda)
  ifneq ($(VISIBLE),)
    ifneq ($(words $(wordlist 1,$(GPUS),$(VISIBLE))),$(GPUS))
      $(error GPUS=$(GPUS), but this machine has $(words $(VISIBLE)) to offer: $(VISIBLE))
    endif
    # DeepSpeed ignores CUDA_VISIBLE_DEVICES if it gets --include, so the GPUs go into the include list.
    DEVICES := $(shell echo $(wordlist 1,$(GPUS),$(VISIBLE)) | tr ' ' ,)
  endif
  ifneq ($(LAUNCHER),deepspeed)
    ENV := CUDA_VISIBLE_DEVICES=$(DEVICES)
  endif
endif
ifeq ($(LAUNCHER),deepspeed)
  LAUNCH := $(BIN)/deepspeed --include localhost:$(DEVICES) --master_port $(MASTER_PORT)
  LAUNCH_ARGS := --deepspeed ds_configs/$(DS).json
else ifeq ($(LAUNCHER),accelerate)
  LAUNCH := $(BIN)/accelerate launch --config_file recipes/accelerate_configs/$(ACCELERATE).yaml \
    --num_processes $(GPUS) --main_process_port $(MASTER_PORT)
else ifeq ($(LAUNCHER),torchrun)
  ifeq ($(GPUS),1)
    LAUNCH := $(BIN)/python
  else
    LAUNCH := $(BIN)/torchrun --standalone --nproc_per_node $(GPUS)
  endif
else
  $(error LAUNCHER=$(LAUNCHER) is unknown: use torchrun, accelerate or deepspeed)
endif

# torchrun --standalone finds a free port by itself. The other launchers use MASTER_PORT.
FREE_PORT := import socket; s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1); s.bind(("", $(MASTER_PORT)))
ifneq ($(LAUNCHER),torchrun)
  CHECK_PORT := @$(BIN)/python -c '$(FREE_PORT)' 2>/dev/null || \
    { echo "Port $(MASTER_PORT) is in use; choose another: make ... MASTER_PORT=$$(( $(MASTER_PORT) + 1 ))" >&2; exit 1; }
endif

# Extras of pyproject.toml that single stages need.
dpo grpo: $(VENV)/.installed-trl
serve: $(VENV)/.installed-serve
evaluate: $(VENV)/.installed-eval

pretrain sft dpo distill grpo: $(VENV)/.installed
	$(CHECK_PORT)
	$(ENV) PATH="$(abspath $(BIN)):$$PATH" $(LAUNCH) recipes/$@.py --config $(CONFIG) $(CPU_ARGS) $(LAUNCH_ARGS) $(ARGS)

chat serve evaluate: $(VENV)/.installed
	$(BIN)/python recipes/$@.py $(ARGS)

tokenizer: $(VENV)/.installed
	$(BIN)/python recipes/tokenizer.py $(ARGS)

# Two workers on every machine: most of the time, tests wait for processes that start, die or hang.
test: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

# The tests that start no process, of the packages that everything else stands on.
QUICK := tests/model tests/tokenizer tests/data tests/checkpoints tests/runtime \
  $(addprefix tests/training/test_,trainer.py run_parts.py arguments.py optimizers.py) \
  tests/test_library_contract.py tests/test_project_files.py
test-quick: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow and not faults and not distributed" $(QUICK) $(ARGS)

# Run all fault tests and write faults.json. N=300 kills 300 runs at random moments.
faults: $(VENV)/.installed-test
	FAULTS_JSON=faults.json $(BIN)/python -m pytest tests/faults -m "faults or not faults" -n 2 --dist worksteal $(ARGS)

# Compare useful tokens/s with a bare loop, stock Trainer, TRL and a loop like MiniMind's. SIZES=all adds models and
# sequence lengths.
SIZES ?= 26M
bench: $(VENV)/.installed-trl
	$(BIN)/python -m benchmarks.bench --sizes $(SIZES) $(ARGS)

# Train side by side with stock Trainer, TRL and a loop like MiniMind's, and compare when they reach the same validation
# loss. ARGS="--upstream ../minimind" takes a checkout of MiniMind instead of the loop.
race: $(VENV)/.installed-trl
	$(BIN)/python -m benchmarks.race $(ARGS)

quality: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy hf_pretrain recipes benchmarks examples
	$(BIN)/lint-imports

# Warnings are errors: a broken link or a missing flag fails the build.
docs: $(VENV)/.installed-docs
	$(BIN)/python -m sphinx -W --keep-going -b html docs build/docs

# The bounds of torch in pyproject.toml accept a CPU wheel that the machine provides, so tests need no other index.
$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --disable-pip-version-check -q -e ".[corpora,plots]"
	touch $@

$(VENV)/.installed-%: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --disable-pip-version-check -q -e ".[corpora,plots,$*]"
	touch $@ $(VENV)/.installed

# This removes .venv and not $(VENV), which may be the user's own environment.
clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find hf_pretrain recipes benchmarks tests -name __pycache__ -prune -exec rm -rf {} +
