"""Mistakes in the flags, the launch and the rows of a run, and checkpoints that it cannot resume."""

import copy
import sys
from functools import partial
from types import SimpleNamespace

import torch
from accelerate import ParallelismConfig
from datasets import IterableDataset
from transformers import DataCollatorWithFlattening, DefaultDataCollator, LlamaConfig, LlamaForCausalLM

from hf_pretrain import MaskedLossTrainer
from hf_pretrain.checkpoints.writer import CheckpointWriter
from hf_pretrain.data.sources import name_eval_sets
from hf_pretrain.loading.adapters import AdapterArguments
from hf_pretrain.loading.model import load_model
from hf_pretrain.loading.model_arguments import ModelArguments
from hf_pretrain.training import budgets, deepspeed_support, float8, launch, optimizers, resume_check, run, spikes
from hf_pretrain.training.parsing import parse_args
from hf_pretrain.training.step_loss import EvaluationSums
from hf_pretrain.training.training_arguments import LMTrainingArguments
from recipes import pipeline
from tests.mistakes import Mistake
from tests.models import saved_model
from tests.toys import toy_model
from tests.trainers import ARGUMENTS, make_documents, make_run_trainer, make_trainer, parse, resume, small_tokenizer


def typed(flags="", config=None, **launcher):
    """Parse a command line, under `accelerate launch` if there are variables of it."""

    def make(tmp_path, monkeypatch):
        for name, value in launcher.items():
            monkeypatch.setenv(f"ACCELERATE_{name}", value)
        parse(tmp_path, "--use_cpu", *flags.split(), config=config)

    return make


def pipelined(flags="--gradient_accumulation_steps 4"):
    """Parse a command line of pipelines."""
    return lambda tmp_path: parse_args(*pipeline.ARGUMENTS, argv=["--output_dir", str(tmp_path), *flags.split()])


def overridden(overrides):
    return lambda: load_model(ModelArguments(model_preset="tiny", config_overrides=overrides), small_tokenizer())


def trained(rows=None, *, batch=8, data_collator=None, **arguments):
    given = {"batch": batch, "arguments": arguments} | ({"data_collator": data_collator} if data_collator else {})
    return lambda tmp_path: make_trainer(tmp_path, rows or make_documents(), **given).train()


def spoiled(column, value):
    """Train on rows with a bad value."""
    documents = make_documents(weighted=True)
    documents[7][column][5] = value
    return trained(documents)


def checked(check, **fields):
    return partial(check, SimpleNamespace(**fields))


def prepared(config, **arguments):
    """Prepare a DeepSpeed config."""
    return lambda tmp_path: deepspeed_support.prepare_deepspeed_config(
        copy.deepcopy(config), LMTrainingArguments(str(tmp_path), **ARGUMENTS | arguments)
    )


def resumed(then=None, now=None, settings=None, **more):
    """Resume from a checkpoint whose run had other contents (`then`), settings, or parts of its description."""

    def make(tmp_path):
        trainer = make_trainer(tmp_path, make_documents())
        described = resume_check.describe_run(trainer)
        described["contents"] |= now or {}
        other = copy.deepcopy(described) | more
        other["contents"] |= then or {}
        other["settings"] |= settings or {}
        resume(tmp_path, other, described, trainer.args)

    return make


def evaluated(ce_loss, label):
    """Evaluate a row with one loss and one label."""

    def make():
        sums = EvaluationSums()
        sums.add(SimpleNamespace(ce_loss=torch.tensor(ce_loss)), {"labels": torch.full((2, 5), label)})
        sums.figures(lambda tensor: tensor, prefix="eval", description="a set")

    return make


def converted(torchao):
    """Convert layers of width 60 to float8, with or without torchao. The conversion itself is not reached."""

    def make(monkeypatch):
        monkeypatch.setitem(sys.modules, "torchao.float8", torchao)
        float8.convert_to_float8(toy_model(intermediate_size=60).model.layers, emulates=True)

    return make


def writer(directory, num_bytes):
    return CheckpointWriter(LMTrainingArguments(str(directory), **ARGUMENTS), lambda: num_bytes)


def read_back_something_else(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_pretrain.checkpoints.writer.find_damage", lambda path: ["a file has another sha256"])
    with writer(tmp_path, 1000).writing_checkpoint(tmp_path / "checkpoint-3", {}):
        pass


def train_adapters_in_float8(tmp_path):
    args = parse(tmp_path, "--use_cpu", *EMULATED.split(), "--optim_preset", "adamw")[2]
    run.begin_run("sft", args, ModelArguments(), AdapterArguments(use_peft=True))


def train_adapters_with_muon(tmp_path):
    import peft

    model = peft.get_peft_model(saved_model(tmp_path), peft.LoraConfig(target_modules=["q_proj"]))
    optimizers.build_muon(model, None, uses_deepspeed=False)


def use_a_large_micro_batch(monkeypatch):
    monkeypatch.setattr(launch, "has_right_gradient", lambda num_tokens, device_type: False)
    launch.check_micro_batch(32_768, "mps")


def validate_nothing(tmp_path):
    trainer = make_run_trainer(tmp_path, early_stopping_patience=3, eval_strategy="steps")
    trainer.eval_dataset = None
    run.train_and_evaluate(trainer, checkpoint=None)


CPU = torch.device("cpu")
EMULATED = "--fp8 --fp8_emulate --bf16"
ZERO2 = {"zero_optimization": {"stage": 2}, "gradient_clipping": "auto"}
OFFLOADED = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}
LLAMA = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
# A run that trains in float8, a run that skips spikes, and a run on two GPUs with tensor parallelism.
FLOAT8 = {"fp8": True, "fp8_emulate": True, "bf16": True, "has_masked_loss": True, "device": CPU}
SKIPPING = {"skip_spikes": True, "has_masked_loss": True, "fp16": False, "deepspeed_plugin": None}
TWO_GPUS = {"gradient_accumulation_steps": 2, "fp16": False, "tp_size": 1, "n_gpu": 2, "device": CPU}
SPLIT = SimpleNamespace(tp_size=2, config=SimpleNamespace(qk_norm=True))
TORCHAO = SimpleNamespace(Float8LinearConfig=None, convert_to_float8_training=None)

MISTAKES = [
    # Flags and files of flags.
    Mistake("`example` must hold `key: value` lines, and `mixed_in` be ", typed(config={"example": "a.jsonl"})),
    Mistake("`max_steps` depends on the precision and must have the keys", typed(config={"max_steps": {"bf16": 9}})),
    Mistake(r"--lr_scheduler_kwargs \[1\] must be a JSON object, such as", typed("--lr_scheduler_kwargs [1]")),
    Mistake("--gradient_checkpointing_kwargs a must be a JSON obj", typed("--gradient_checkpointing_kwargs a")),
    Mistake("--hub_token would be visible .* set HF_TOKEN instead", typed("--hub_token hf_x")),
    Mistake("--profile_interval 0 must be at least 2", typed("--profile_interval 0")),
    Mistake("no evaluations to choose by: pass", typed("--load_best_model_at_end --eval_strategy no")),
    Mistake("Only recipes know `dry_run`", trained(dry_run=True)),
    Mistake("Only recipes know `profile`", trained(profile=True)),
    Mistake("Only recipes know `preview`", trained(preview=1)),
    Mistake("Only recipes know `early_stopping_patience`", trained(early_stopping_patience=1)),
    # The model.
    Mistake("'width' is not a field", overridden("width=3")),
    Mistake("'num_hidden_layers' is not of the form name=value", overridden("num_hidden_layers")),
    Mistake("vocab_size", overridden("vocab_size=100")),
    Mistake("hidden_size='wide'; it must be a whole number of at least 1", overridden("hidden_size=wide")),
    Mistake("rope_theta='big'; it must be a number above 0", overridden("rope_parameters={rope_theta: big}")),
    Mistake("has to be between 0 and 1, but got 2", overridden("dropout=2")),
    Mistake("'qk_norm' expected bool.*'maybe'", overridden("qk_norm=maybe")),
    Mistake("not llama. `load_upstream` reads", lambda: MaskedLossTrainer(LlamaForCausalLM(LLAMA))),
    Mistake("not NoneType. .* no `model_init`", lambda: MaskedLossTrainer(None, model_init=toy_model)),
    # The launch and the precision. The launcher's precision is taken, and then checked like the recipe's own.
    Mistake("--fp16 on a CPU would silently train in float32", typed("--fp16")),
    Mistake("--fp16 on a CPU would .*Use --bf16", typed(MIXED_PRECISION="fp16")),
    Mistake("--mixed_precision fp8 is not the precision", typed("--bf16", MIXED_PRECISION="fp8")),
    Mistake("--mixed_precision bf16 is not the precision", typed("--bf16 false", MIXED_PRECISION="bf16")),
    Mistake("DYNAMO_BACKEND, which is not supported. .*--torch_compile_backend", typed(DYNAMO_BACKEND="INDUCTOR")),
    Mistake("USE_PARALLELISM_CONFIG, which is not supported. .*--fsdp_size", typed(USE_PARALLELISM_CONFIG="true")),
    Mistake("Context and sequence parallelism are not", trained(parallelism_config=ParallelismConfig(cp_size=2))),
    Mistake("Context and sequence parallelism are not", trained(parallelism_config=ParallelismConfig(sp_size=2))),
    Mistake("FSDP version 1 is not supported. Write `fsdp_version: 2`", partial(launch.complete_fsdp_args, {})),
    Mistake("pass --fsdp_size N", typed("--fsdp")),
    Mistake("launch with torchrun and pass --fsdp_size N", typed(USE_FSDP="true")),
    Mistake("needs 2 processes, and 1 run.*--nproc_per_node 2", typed("--fsdp_size 2")),
    # Pipelines
    Mistake("--pp_size 2 x .*needs 2 processes, and 1 run.*--nproc_per_node 2", pipelined("--pp_size 2")),
    Mistake("needs 1 processes, and 1 run.*torchrun", pipelined()),
    Mistake("--dry_run True has no effect in a pipeline. Leave", pipelined("--dry_run")),
    Mistake("--preview 1 has no effect in a pipeline. Leave", pipelined("--preview 1")),
    Mistake("Pass --save_strategy steps or no", pipelined("--save_strategy epoch")),
    Mistake("greedy evaluates, and a pipeline does not", pipelined("--lr_scheduler_type greedy")),
    Mistake("as many micro-batches or more.*steps is 1", pipelined("--pp_size 2 --gradient_accumulation_steps 1")),
    Mistake("a multiple.*is 3", pipelined("--pp_size 2 --gradient_accumulation_steps 3 --pp_schedule interleaved")),
    Mistake("--ep_size 2 must divide --fsdp_size x --tp_size", typed("--ep_size 2")),
    Mistake("torchrun --standalone --nproc_per_node 2", checked(launch.check_device, **TWO_GPUS)),
    Mistake("--tp_size 2 would train", lambda: launch.check_accumulation(SimpleNamespace(**TWO_GPUS), SPLIT)),
    Mistake("A micro-batch of 32,768 tokens is too large: with torch 2.*--gradient_acc", use_a_large_micro_batch),
    # float8.
    Mistake("capability 8.9 or newer, and this run uses cpu", typed(MIXED_PRECISION="fp8")),
    Mistake("needs a GPU of compute capability 8.9 .* uses cpu.*--fp8_emulate", typed("--fp8 --bf16")),
    Mistake("--fp8 is missing", typed("--fp8_emulate")),
    Mistake("Add --bf16", typed(f"{EMULATED} false")),
    Mistake("--fp8_backend ao", typed("--fp8_emulate", MIXED_PRECISION="fp8", FP8_BACKEND="te")),
    Mistake("pretraining, fine-tuning and dist", checked(float8.check_float8, **FLOAT8 | {"has_masked_loss": 0})),
    Mistake("train with sharded weights .*Use DDP", checked(float8.check_float8, **FLOAT8, shards_weights=True)),
    Mistake("--fp8 trains no adapters", train_adapters_in_float8),
    Mistake("0.mlp.gate_proj of the decoder layers has 60 x 32", converted(TORCHAO)),
    Mistake(r"--fp8 needs torchao: \S*pip install .*\[fp8\]", converted(None)),
    # The optimizer and the schedule.
    Mistake("--optim sgd and --optim_preset muon exclude each other", typed("--optim_preset muon --optim sgd")),
    Mistake("--optim_args a=1 has no effect with --optim_preset muon", typed("--optim_args a=1")),
    Mistake("--optim_args a does not fit: ", trained(optim_preset="adamw", optim="adamw_torch", optim_args="a")),
    Mistake("--optim_args momentum=x does not fit: .*'x'", trained(optim="rmsprop", optim_args="momentum=x")),
    Mistake(
        r"--lr_scheduler_kwargs \{'a': 1\} does not fit: .*'a'",
        trained(lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs={"a": 1}),
    ),
    Mistake("--optim stable_adamw: .*optimi", typed("--optim stable_adamw")),
    Mistake("--optim_preset muon trains no adapters", train_adapters_with_muon),
    Mistake("instead of the gradients, at 2. Leave --max_grad_norm out", prepared(ZERO2, max_grad_norm=2.0)),
    Mistake("instead of the gradients, at 0.5", prepared(ZERO2 | {"gradient_clipping": 0.5})),
    Mistake("The `optimizer` block of the DeepSpeed config would override Muon", prepared({"optimizer": {}})),
    Mistake("The `scheduler` block .* or pass --optim_preset adamw", prepared({"scheduler": {}})),
    Mistake("accelerate would replace --optim adafactor by Adam", prepared(OFFLOADED, optim="adafactor")),
    Mistake(r"stage 0, and the run trains in bf16: .* Use stage 1 \(ds_configs/zero1", prepared({}, bf16=True)),
    Mistake(
        "stage 0, and the run trains in fp16",
        partial(deepspeed_support.prepare_deepspeed_config, {}, SimpleNamespace(bf16=False, fp16=True)),
    ),
    Mistake(
        'micro_batch=2, but per_device_train_batch_size=16. Set these values to "auto"',
        checked(
            deepspeed_support.refuse_mismatches, mismatches=["- ds micro_batch=2 vs hf per_device_train_batch_size=16"]
        ),
    ),
    # Budgets and validation.
    Mistake("--max_tokens 2 B is no number of tokens. Write it as 2B", partial(budgets.parse_tokens, "2 B")),
    Mistake("--max_tokens and --tokens_per_parameter exclude", typed("--max_tokens 2B --tokens_per_parameter 20")),
    Mistake("--warmup_steps 10 must be a share below 1 with", typed("--max_minutes 5 --warmup_steps 10")),
    Mistake("--max_minutes 0.0 must be above 0", typed("--max_minutes 0")),
    Mistake("needs validation data", validate_nothing),
    Mistake("a.jsonl is named twice", lambda: name_eval_sets(["a.jsonl", "b.jsonl"], ["a.jsonl"])),
    Mistake("embedded:idiom .*also by --dataset_name", lambda: name_eval_sets(["embedded:idiom"], ["embedded"])),
    Mistake("also by --dataset_name", lambda: name_eval_sets(["embedded"], ["embedded:idiom"])),
    Mistake("two have the same name", lambda: name_eval_sets(["a/test.jsonl", "b/test.jsonl"], [])),
    # Rows and the loss.
    Mistake("A row holds the id 64; the model knows ids 0 to 63", spoiled("input_ids", 64)),
    Mistake("A row holds the id -1; the model knows ids 0 to 63", spoiled("input_ids", -1)),
    Mistake("holds a negative weight", spoiled("loss_mask", -1.0)),
    Mistake("Nothing was trained: no rows", trained(IterableDataset.from_generator(lambda: iter([])))),
    Mistake("or too few for --dataloader_drop_last. See", trained(batch=20, dataloader_drop_last=True)),
    Mistake(r"makes 1 row\(s\) of labels from 4 rows", trained(batch=4, data_collator=DataCollatorWithFlattening())),
    Mistake("makes no labels", trained([{"input_ids": [5, 6, 7]}] * 8, data_collator=DefaultDataCollator())),
    Mistake("--label_smoothing_factor", trained(label_smoothing_factor=0.1)),
    Mistake("batch_rebalance .*Use random, seq", trained(train_sampling_strategy="batch_rebalance")),
    Mistake("a set: no token of the set is to be predicted.* Check the", evaluated(0.0, -100)),
    Mistake("a set: eval_loss is nan.* lower --learning_rate", evaluated(torch.nan, 5), FloatingPointError),
    Mistake("spikes works in pretraining", checked(spikes.check_spikes, **SKIPPING | {"has_masked_loss": False})),
    Mistake(
        "DeepSpeed updates the weights in the backward pass. Use torchrun, with --fsdp_size .* leave the flag out",
        checked(spikes.check_spikes, **SKIPPING | {"deepspeed_plugin": "ZeRO"}),
    ),
    Mistake("in fp16, the loss scaler decides", checked(spikes.check_spikes, **SKIPPING | {"fp16": True})),
    # Checkpoints.
    Mistake("damaged-checkpoint-3 read back differently: a file", read_back_something_else, OSError),
    Mistake(
        "the first checkpoint could not be saved", lambda tmp_path: writer(tmp_path, 2**60).check_space(), OSError
    ),
    Mistake("cannot resume from .*its optimizer was muon and is now sgd", resumed(optimizer="muon")),
    Mistake("an older version saved its optimizer state in shards .ZeRO-2, 1 p", resumed(layout="ZeRO-2")),
    Mistake("in shards .one file, 4 process.*this launch .one file, 1. cannot read", resumed(world_size=4)),
    Mistake(
        "its schedule adapts, .*layout ZeRO-2, not one f",
        resumed(settings={"lr_scheduler_type": "greedy"}, layout="ZeRO-2"),
    ),
    Mistake("saved with --save_only_model and has no optimizer state", resumed(save_only_model=True)),
    Mistake("cannot resume.*its adapter differed", resumed({"adapter": {"r": 4}})),
    Mistake("cannot resume.*--optim_args was a=1 and is now None", resumed(settings={"optim_args": "a=1"})),
    Mistake("would not be exact: its global batch was 5 rows and is now 8. .*--allow_inex", resumed(global_batch=5)),
    Mistake("would not be exact: its data differed", resumed({"data": {"rows": 9}})),
    Mistake("--skip_spikes was True and is now False", resumed(settings={"skip_spikes": True})),
    Mistake(
        r"its optimizer differed \(lr was 1 and is now 2", resumed({"optimizer": {"lr": 1}}, {"optimizer": {"lr": 2}})
    ),
]
