"""Every stage resumes with the same command, however its paths are spelled, and refuses another objective."""

import json
import re
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from transformers import TrainingArguments

from hf_pretrain.runtime.errors import UserError
from hf_pretrain.tokenizer.control_tokens import CHAT_TEMPLATE
from hf_pretrain.tokenizer.training import train_tokenizer
from hf_pretrain.training import resume_check
from hf_pretrain.training.resume_check import check_resume, describe_config, describe_run
from hf_pretrain.training.training_arguments import LMTrainingArguments
from tests.invariants.launching import ROOT, start
from tests.toys import EXPERTS, toy_model, write_jsonl
from tests.trainers import make_documents, make_trainer, resume


# Start a recipe once per list of words, in one process. Between two launches, the project may move to a machine that
# has prepared no data yet.
LAUNCHES = """
import json, os, runpy, shutil, sys
recipe, launches = json.loads(sys.argv[1])
for words in launches:
    if words[0] == "mv":
        # Reinforcement learning prepares none.
        shutil.rmtree(os.environ["HF_DATASETS_CACHE"], ignore_errors=True)
        os.rename(words[1], words[2])
        os.chdir(words[2])
        continue
    print("launch:", flush=True)
    sys.argv = [recipe, *words]
    try:
        runpy.run_path(recipe, run_name="__main__")
    except SystemExit as ended:
        print("status", ended.code, flush=True)
"""
PAIRS = [{"prompt": f"Is {n} odd?", "chosen": f"yes, {n}", "rejected": "no"} for n in range(9)]
COMMON = [
    *("--use_cpu", "--bf16", "false", "--report_to", "none", "--validation_fraction", "0", "--output_dir", "out"),
    *("--per_device_train_batch_size", "2", "--max_steps", "2", "--save_steps", "1", "--max_grad_norm", "1"),
    *("--lr_scheduler_type", "constant_with_warmup", "--warmup_steps", "1"),
]
ADAPTER = ["--use_peft", "--lora_r", "4", "--lora_alpha", "8"]
# For each stage: its recipe and flags, and the refused changes with their messages.
STAGES = {
    "pretrain": (
        *("pretrain", ["--dataset_name", "text.jsonl", "--learning_rate", "1e-2", "--max_length", "16"]),
        {
            ("--learning_rate", "2e-2"): "--learning_rate was 0.01 and is now 0.02",
            ("--lr_scheduler_type", "cosine"): "--lr_scheduler_type was constant_with_warmup and is now cosine",
            ("--seed", "1"): "--seed was 42 and is now 1",
            ("--max_length", "24"): "its data differed .*; --max_length was 16 and is now 24",
            ("--config_overrides", "dropout=0.5"): r"its config differed \(dropout was 0.0 and is now 0.5, --config",
            # It changes one document of 3,000.
            ("--dataset_name", "changed.jsonl"): "its data differed .*--dataset_name was ",
        },
    ),
    "sft with an adapter": (
        *("sft", ["--dataset_name", "chats.jsonl", "--max_length", "64", *ADAPTER]),
        {
            ("--use_peft", "false"): r"cannot resume .*its adapter differed \(--use_peft was True and is now False\)",
            ("--lora_r", "2"): r"cannot resume .*its adapter differed \(.*--lora_r was 4 and is now 2",
            ("--lora_alpha", "512"): r"cannot resume .*its adapter differed \(.*--lora_alpha was 8 and is now 512",
            ("--model_name_or_path", "other"): r"its base model differed \(--model_name_or_path was toy and is",
        },
    ),
    "dpo": (
        *("dpo", ["--dataset_name", "pairs.jsonl"]),
        {
            ("--beta", "0.5"): "--beta was 0.1 and is now 0.5",
            # The collator cuts the pairs, so their rows stay the same.
            ("--max_length", "64"): "--max_length was 512 and is now 64",
            ("--loss_type", "ipo"): r"--loss_type was \['sigmoid'\] and is now \['ipo'\]",
            ("--model_name_or_path", "other"): r"its reference model differed \(--model_name_or_path was toy",
        },
    ),
    "distill": (
        *("distill", ["--dataset_name", "chats.jsonl", "--max_length", "64", "--teacher_name_or_path", "teacher"]),
        {
            ("--temperature", "3"): "--temperature was 1.5 and is now 3.0",
            ("--kl", "reverse"): "--kl was forward and is now reverse",
            ("--teacher_name_or_path", "other"): r"its teacher differed \(--teacher_name_or_path was teacher",
        },
    ),
    "grpo": (
        *("grpo", ["--dataset_name", "tasks.jsonl", "--rewards", "arithmetic", "--num_generations", "2"]),
        {
            ("--beta", "0.2"): "--beta was 0.1 and is now 0.2",
            ("--rewards", "length"): r"--rewards was \['arithmetic'\] and is now \['length'\]",
            ("--model_name_or_path", "other"): "its reference model differed",
        },
    ),
}
STAGES["grpo"][1].extend(["--max_completion_length", "4", "--beta", "0.1"])


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    tokenizer = train_tokenizer([row[name] for row in PAIRS for name in row] * 9, vocab_size=300)
    path = tmp_path_factory.mktemp("project")
    for name, scale in {"toy": 1.0, "teacher": 1.5, "other": 2.0}.items():
        model = toy_model(vocab_size=len(tokenizer))
        for parameter in model.parameters():
            parameter.data.mul_(scale)
        model.save_pretrained(path / name)
        # The time of a rendering stands for a template that writes the day.
        tokenizer.chat_template = '{{ strftime_now("%M:%S.%f") }}' + CHAT_TEMPLATE
        tokenizer.save_pretrained(path / name)
    texts = [f"document {number} of the river" for number in range(3000)]
    write_jsonl(path / "text.jsonl", texts)
    write_jsonl(path / "changed.jsonl", [*texts[:1501], "another document", *texts[1502:]])
    write_jsonl(path / "pairs.jsonl", PAIRS)
    write_jsonl(path / "chats.jsonl", [{"prompt": row["prompt"], "completion": row["chosen"]} for row in PAIRS])
    write_jsonl(path / "tasks.jsonl", [{"prompt": f"What is {n} + 3?", "solution": [str(n + 3)]} for n in range(9)])
    return path


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_resumes_exactly_or_names_the_changed_flag(stage, project, tmp_path):
    recipe, flags, changes = STAGES[stage]
    first, second = tmp_path / "first", tmp_path / "second"
    shutil.copytree(project, first)
    words = ["--model_name_or_path", "toy", *COMMON, *flags]
    again = [*words, "--resume_from_checkpoint", "out/checkpoint-1"]
    # The project moves, and the paths are spelled otherwise. Evaluations, logs and processes change no update.
    data = flags[flags.index("--dataset_name") + 1]
    spelled = ["--model_name_or_path", "./toy/", "--dataset_name", str(second / data), "--output_dir", "./out"]
    spelled += ["--logging_steps", "1", "--save_total_limit", "5", "--max_steps", "3", "--num_train_epochs", "7"]
    launches = [words, *([*again, *change] for change in changes), ["mv", str(first), str(second)], [*again, *spelled]]
    command = [sys.executable, "-c", LAUNCHES, json.dumps([str(ROOT / f"recipes/{recipe}.py"), launches])]
    result = start(command, cwd=first, HF_DATASETS_CACHE=str(tmp_path / "cache"))
    errors = [line for line in result.stdout.splitlines() if line.startswith("error: ")]
    assert len(errors) == len(changes), result.stdout[-5000:]
    for message, line in zip(changes.values(), errors, strict=True):
        assert re.search(message, line), line
    history = json.loads((second / "out/trainer_state.json").read_text())
    dates = [launch["date"] for launch in json.loads((second / "out/run.json").read_text())]
    assert len(set(dates)) == 1
    assert history["global_step"] == 3 and "although" not in result.stdout, result.stdout[-3000:]


def test_new_arguments_are_compared_by_default(tmp_path):
    """A list of names decides what is not compared, so a field of a library cannot be forgotten."""

    def settings(**given):
        return resume_check.describe_settings(LMTrainingArguments(str(tmp_path), use_cpu=True, **given))

    for name in ("neftune_noise_alpha", "label_smoothing_factor", "optim_args", "weight_decay", "tf32"):
        assert name in vars(TrainingArguments) and name in settings()
    assert "num_train_epochs" in settings() and "output_dir" not in settings()
    assert "num_train_epochs" not in settings(lr_scheduler_type="constant", num_train_epochs=5)
    # A warmup that is a share of the steps depends on their number.
    for warmup, depends in ((0.1, True), (5, False), (0, False)):
        found = settings(lr_scheduler_type="constant_with_warmup", warmup_steps=warmup)
        assert ("max_steps" in found, "num_train_epochs" in found) == (depends, depends)
    assert settings(lr_scheduler_type="reduce_lr_on_plateau", eval_steps=7)["eval_steps"] == 7


def test_a_checkpoint_of_a_gpu_resumes_on_a_cpu(tmp_path):
    """The device decides how batches are copied, and users choose how they are read ahead."""
    gpu = {"accelerator_config": {"non_blocking": True}, "dataloader_num_workers": 2}
    gpu |= {"dataloader_persistent_workers": True, "dataloader_prefetch_factor": 4, "torch_empty_cache_steps": 5}
    on_gpu, on_cpu = (
        resume_check.describe_settings(LMTrainingArguments(str(tmp_path), use_cpu=True, **given))
        for given in (gpu, {"dataloader_num_workers": 0})
    )
    assert on_gpu == on_cpu and on_cpu["accelerator_config"]["even_batches"]


def test_the_same_run_resumes_and_so_does_a_checkpoint_without_a_manifest(tmp_path):
    trainer = make_trainer(tmp_path / "run", make_documents())
    now = describe_run(trainer)
    (tmp_path / "checkpoint-3").mkdir()
    check_resume(str(tmp_path / "checkpoint-3"), now, trainer.args)
    resume(tmp_path, now, now, trainer.args)


@pytest.mark.parametrize(("schedule", "fits"), [("constant", True), ("greedy", False)])
def test_a_whole_state_resumes_under_another_launcher_unless_the_schedule_adapts(tmp_path, schedule, fits):
    arguments = {"lr_scheduler_type": schedule, "eval_strategy": "steps", "eval_steps": 1}
    trainer = make_trainer(tmp_path / "run", make_documents(), arguments=arguments)
    now = describe_run(trainer)
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "checkpoint-3/optimizer.pt").touch()
    with nullcontext() if fits else pytest.raises(UserError):
        resume(tmp_path, now | {"layout": "ZeRO-2", "world_size": 4}, now, trainer.args)


def test_fields_that_do_not_change_a_resumed_run(tmp_path):
    """A trained model does not depend on how its weights began, and Trainer copies the ids from the tokenizer."""
    model = toy_model()
    model.save_pretrained(tmp_path / "a")
    same = {"zero_init_residual": True, "use_cache": False, "bos_token_id": 7, "eos_token_id": 8, "pad_token_id": 9}
    for fields, is_same in ((same, True), ({"dropout": 0.1}, False)):
        loaded = type(model).from_pretrained(tmp_path / "a", **fields)
        assert loaded.config._name_or_path != model.config._name_or_path
        assert (describe_config(model.config) == describe_config(loaded.config)) == is_same


def test_a_flag_newer_than_the_checkpoint_had_its_default(tmp_path):
    trainer = make_trainer(tmp_path, make_documents())
    now = describe_run(trainer)
    older = {name: value for name, value in now["settings"].items() if name != "skip_spikes"}
    # This flag is gone, and did nothing by default.
    older = now | {"settings": older | {"rewind_spikes": False}}
    resume(tmp_path, older, now, trainer.args)
    with pytest.raises(UserError):
        resume(tmp_path, older, now | {"settings": now["settings"] | {"skip_spikes": True}}, trainer.args)


SCHEDULE = {"lr_scheduler_type": "linear", "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
BEFORE = {"learning_rate": 2e-3, "weight_decay": 0.1, "adam_beta2": 0.95}


@pytest.mark.parametrize("optimizer", [{"optim": "adamw_torch"}, {"optim": None, "optim_preset": "muon"}])
@pytest.mark.parametrize(
    "change", [{"learning_rate": 2e-5, "weight_decay": 0.0, "adam_beta2": 0.5}, {"lr_scheduler_type": "constant"}]
)
def test_an_inexact_resume_trains_with_the_new_flags(tmp_path, optimizer, change):
    """Compare with the optimizer of a new run, and the rates with the formula of the schedule."""
    make_trainer(tmp_path, make_documents(), arguments=SCHEDULE | BEFORE | optimizer).train()
    shutil.rmtree(tmp_path / "checkpoint-4")
    resumed, new = (
        make_trainer(tmp_path / name, make_documents(), arguments=SCHEDULE | BEFORE | optimizer | change | more)
        for name, more in (("", {"allow_inexact_resume": True}), ("new", {"max_steps": 1, "save_strategy": "no"}))
    )
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    new.train()
    names = {"lr", "params"}
    groups, expected = (
        [{name: value for name, value in group.items() if name not in names} for group in each.optimizer.param_groups]
        for each in (resumed, new)
    )
    assert groups == expected
    rates = {entry["step"]: entry["learning_rate"] for entry in resumed.state.log_history if "learning_rate" in entry}
    flags = BEFORE | change
    factors = {3: 1.0, 4: 1.0} if "lr_scheduler_type" in change else {3: 0.5, 4: 0.25}
    expected = {step: flags["learning_rate"] * factor for step, factor in factors.items()}
    assert {step: rates[step] for step in factors} == pytest.approx(expected)


@pytest.mark.parametrize(
    ("then", "change"),
    [
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, {"learning_rate": 1e-3}),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, {"lr_scheduler_type": "constant"}),
        ({}, {"lr_scheduler_type": "reduce_lr_on_plateau"}),
        ({}, {"optim_args": "amsgrad=True"}),
    ],
)
def test_what_the_state_of_a_checkpoint_fixes_cannot_change(tmp_path, then, change):
    args = {"optim": "adamw_torch", "eval_strategy": "steps", **then}
    before, after = (
        describe_run(make_trainer(tmp_path, make_documents(), arguments=args | more)) for more in ({}, change)
    )
    inexact = make_trainer(tmp_path, make_documents(), arguments={"allow_inexact_resume": True}).args
    with pytest.raises(UserError):
        resume(tmp_path, before, after, inexact)


@pytest.mark.parametrize(("level", "depends"), [("batch", True), ("sequence", False)])
def test_a_router_loss_per_batch_fixes_the_micro_batch(tmp_path, level, depends):
    """As of imported minimind-3 models. Compare the weights: at the same global batch, they tell who is right."""
    now, weights = [], []
    for batch, accumulation in ((4, 1), (2, 2)):
        model = toy_model(vocab_size=64, **EXPERTS | {"router_aux_loss_level": level, "router_aux_loss_coef": 1.0})
        arguments = {"max_steps": 2, "output_dir": str(tmp_path / str(batch))}
        sizes = {"batch": batch, "accumulation": accumulation}
        trainer = make_trainer(tmp_path, make_documents(), model=model, arguments=arguments, **sizes)
        now.append(describe_run(trainer))
        trainer.train()
        weights.append(torch.cat([weight.detach().flatten() for weight in trainer.model.parameters()]))
    difference = (weights[0] - weights[1]).abs().max()
    assert difference > 1e-3 if depends else difference < 1e-5
    with pytest.raises(UserError) if depends else nullcontext():
        resume(tmp_path, *now, trainer.args)
    # Older checkpoints do not say it.
    older = {name: value for name, value in now[0]["settings"].items() if name != "per_device_train_batch_size"}
    resume(tmp_path, now[0] | {"settings": older}, now[1], trainer.args)
