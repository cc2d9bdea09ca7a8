# make pretrain                                            on what this machine has
# make pretrain GPUS=4                                     torchrun, four processes
# make pretrain GPUS=2 DEVICE=cpu                          the same on CPU processes over gloo
# make pretrain GPUS=2 LAUNCHER=deepspeed DS=zero3         the deepspeed launcher
# make pretrain GPUS=2 LAUNCHER=accelerate ACCELERATE=fsdp2
# make pretrain ARGS="--max_steps 100"                     anything else for the recipe
# make tokenizer | test | quality

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
GPUS ?= 1
DEVICE ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU && echo cuda || echo cpu)
LAUNCHER ?= torchrun
DS ?= zero2
ACCELERATE ?= ddp
MASTER_PORT ?= 29500
CONFIG ?= recipes/$(if $(filter cpu,$(DEVICE)),tiny,minimind2-small)/pretrain.yaml
ARGS ?=

.PHONY: pretrain tokenizer test quality clean
.DEFAULT_GOAL := pretrain

# One launcher line each. On CPU, DeepSpeed counts devices by LOCAL_SIZE, and each process gets its share of the cores.
ifeq ($(DEVICE),cpu)
  CPU_ARGS := --use_cpu
  ifneq ($(GPUS),1)
    ENV := LOCAL_SIZE=$(GPUS) OMP_NUM_THREADS=$(shell n=$$(( $$(nproc) / $(GPUS) )); echo $$(( n > 0 ? n : 1 )))
  endif
endif
comma := ,
space := $(subst ,, )
DEVICES := $(subst $(space),$(comma),$(shell seq 0 $$(( $(GPUS) - 1 ))))
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
    LAUNCH := $(BIN)/torchrun --nproc_per_node $(GPUS) --master_port $(MASTER_PORT)
  endif
else
  $(error LAUNCHER=$(LAUNCHER) is unknown: use torchrun, accelerate or deepspeed)
endif

pretrain: $(VENV)/.installed
	$(ENV) PATH="$(abspath $(BIN)):$$PATH" $(LAUNCH) recipes/pretrain.py --config $(CONFIG) $(CPU_ARGS) $(LAUNCH_ARGS) $(ARGS)

tokenizer: $(VENV)/.installed
	$(BIN)/python recipes/tokenizer.py $(ARGS)

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest $(ARGS)

quality: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy hf_pretrain recipes

# torch first: with it installed, nothing that follows can bring another build. Where there is no GPU, a CPU wheel that
# the machine provides is as good as any; pip takes the newest that the range allows.
$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --disable-pip-version-check -q -e ".[corpora,plots]"
	touch $@

$(VENV)/.installed-test: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --disable-pip-version-check -q -e ".[test]"
	touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) out
