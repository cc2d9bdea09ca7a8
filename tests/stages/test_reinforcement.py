"""GRPO and RLOO on toy models: what moves, the reference model, tools, MiniMind's losses, and the recipe."""

import math
import re
import shlex
from itertools import groupby
from types import SimpleNamespace

import pytest
import torch
from accelerate.data_loader import prepare_data_loader, skip_first_batches
from safetensors.torch import load_file

from hf_pretrain.loading.adapters import AdapterArguments
from hf_pretrain.loading.model_arguments import ModelArguments
from hf_pretrain.run_directory.history import read_run
from hf_pretrain.stages import reward_history
from hf_pretrain.stages.reinforcement import ALGORITHMS, GRPOTrainingArguments, MiniMindGRPOTrainer, TaskArguments
from hf_pretrain.training.parsing import parse_args
from hf_pretrain.training.training_arguments import LMTrainingArguments
from tests.hub_server import HubServer
from tests.invariants.launching import ROOT
from tests.matrix import COMMON, TASKS, call
from tests.rollouts import make_model, toy_tasks, toy_trainer
from tests.toys import EXPERTS, LikeMPS, check_start_of_workers
from tests.trainers import frozen


@pytest.mark.parametrize(
    "flags",
    [
        {"loss_type": "cispo", "epsilon_high": 5.0},
        {"loss_type": "dapo"},
        {"loss_type": "grpo", "beta": 0.1},
        {"algorithm": "rloo", "beta": 0.05},
    ],
    ids=lambda flags: "-".join(map(str, flags.values())),
)
def test_every_parameter_moves_under_every_loss(tokenizer, tmp_path, flags):
    model = make_model()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    trainer = toy_trainer(tokenizer, tmp_path, model=model, **flags)
    trainer.train()
    assert all((parameter != before[name]).any() for name, parameter in model.named_parameters())
    history = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert len(history) == 2 and all(math.isfinite(entry["grad_norm"]) for entry in history)
    assert trainer.state.num_input_tokens_seen > 0


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_evaluations_do_not_change_what_is_learnt(tokenizer, tmp_path, algorithm):
    learnt = []
    for name, flags in {"never": {}, "often": {"eval_strategy": "steps", "eval_steps": 1}}.items():
        data = {"train_dataset": toy_tasks(), "eval_dataset": toy_tasks(4)}
        trainer = toy_trainer(tokenizer, tmp_path / name, algorithm=algorithm, trainer=data, max_steps=3, **flags)
        trainer.train()
        learnt.append(dict(trainer.model.named_parameters()))
    assert all(torch.equal(weight, learnt[1][name]) for name, weight in learnt[0].items())


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_apple_gpus_have_what_a_run_needs(tokenizer, tmp_path, algorithm):
    arguments = {"algorithm": algorithm, "beta": 0.1, "save_strategy": "steps", "save_steps": 1}
    with LikeMPS():
        trainer = toy_trainer(tokenizer, tmp_path, model=make_model(**EXPERTS), **arguments)
        trainer.train()
        trainer.save_model()
        again = toy_trainer(tokenizer, tmp_path, model=make_model(**EXPERTS), **arguments)
        again.train(resume_from_checkpoint=str(tmp_path / "run/checkpoint-1"))
    assert again.state.global_step == 2


def test_the_reference_is_the_policy_at_the_start_and_nothing_assigns_to_an_argument(tokenizer, tmp_path, monkeypatch):
    model = make_model()
    start_weights = {name: value.clone() for name, value in model.state_dict().items()}
    # Both models divide their logits by the temperature: a reference without it gives a KL divergence at the start.
    arguments = {"beta": 0.1, "max_steps": 3, "warmup_steps": 0, "temperature": 0.5}
    trainer = toy_trainer(tokenizer, tmp_path, model=model, **arguments)
    with frozen(monkeypatch, trainer.args):
        trainer.train()
    # The reference has no dropout.
    assert not any(module.training for module in trainer.ref_model.modules())
    reference = trainer.ref_model.state_dict()
    assert all(torch.equal(reference[name], value) for name, value in start_weights.items())
    kl = [entry["kl"] for entry in trainer.state.log_history if "kl" in entry]
    assert kl[0] == pytest.approx(0.0, abs=1e-5) and kl[1] > 1e-4
    assert trainer.args.beta == 0.1


def prompts_of(loader) -> list[str]:
    return [row["prompt"][0]["content"] for batch in loader for row in batch]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_each_of_two_ranks_resumes_in_the_order_of_its_epoch(tokenizer, tmp_path, algorithm):
    loader = toy_trainer(tokenizer, tmp_path, algorithm=algorithm).get_train_dataloader()
    check_start_of_workers(loader)
    first = prompts_of(loader)
    loader.set_epoch(1)
    whole = prompts_of(loader)
    assert whole != first and sorted(whole) == sorted(first)
    for rank in range(2):
        fresh = toy_trainer(tokenizer, tmp_path, algorithm=algorithm).get_train_dataloader().base_dataloader
        sharded = prepare_data_loader(fresh, num_processes=2, process_index=rank)
        resumed = skip_first_batches(sharded, 3)
        resumed.set_epoch(1)
        batches = [whole[start : start + 4] for start in range(4 * rank, len(whole), 8)]
        assert prompts_of(resumed) == sum(batches[3:], [])


def test_flags_have_the_same_defaults_in_every_recipe(tmp_path):
    ours = GRPOTrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    base = LMTrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    own = {"learning_rate", "optim_preset", "max_grad_norm", "remove_unused_columns", "run_name", "logging_dir"}
    different = {name for name, value in vars(base).items() if getattr(ours, name) != value} - own
    assert {name for name in different if not name.startswith("_")} <= {"distributed_state", "accelerator_config"}
    assert not ours.gradient_checkpointing and ours.bf16 == base.bf16


@pytest.mark.parametrize(("algorithm", "teaches"), [("grpo", False), ("rloo", False), ("grpo", True)])
def test_rewards_that_teach_nothing_are_said(tokenizer, tmp_path, monkeypatch, algorithm, teaches):
    said: list[str] = []
    monkeypatch.setattr(reward_history.logger, "warning_once", said.append)
    monkeypatch.setattr(reward_history, "STEPS_WITHOUT_SIGNAL", 2)
    rewards = iter(range(1000))
    functions = [lambda completions, **columns: [float(next(rewards)) if teaches else 0.5 for _ in completions]]
    trainer = toy_trainer(tokenizer, tmp_path, algorithm=algorithm, trainer={"reward_funcs": functions})
    trainer.train()
    assert any("got the same reward" in text for text in said) is not teaches


def test_ten_steps_without_a_difference_are_counted_from_the_last_one_with_some():
    figures, said = reward_history.KnownFigures(), []

    def log(step, share):
        state = SimpleNamespace(global_step=step, log_history=[{}])
        # The difference of an engine that computes in bfloat16 is no reason to stop.
        logs = {"sampling/sampling_logp_difference/mean": 0.06}
        figures.on_log(None, state, None, logs=logs | ({} if share is None else {"frac_reward_zero_std": share}))
        return bool(said)

    figures.on_train_begin(None, SimpleNamespace(global_step=20), None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reward_history.logger, "warning_once", said.append)
        # An evaluation has no groups.
        assert not any(log(*each) for each in ((21, 1.0), (29, 0.75), (30, None), (38, 1.0)))
        assert log(39, 1.0) and said[0].startswith("In 10 steps, all completions of each prompt got the same reward")


def minimind_loss(model, reference, batch: dict[str, torch.Tensor], rewards: torch.Tensor, loss_type: str):
    """Return the loss of MiniMind's `train_grpo.py`, written out: beta 0.1, six generations, on-policy."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    length = batch["completion_ids"].shape[1]

    def log_probabilities(policy):
        logits = torch.nn.functional.linear(
            policy.model(input_ids=ids, attention_mask=mask).last_hidden_state, policy.lm_head.weight
        )
        return logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0][:, -length:]

    policy, expected = log_probabilities(model), log_probabilities(reference).detach()
    groups = rewards.view(-1, 6)
    deviation = ((groups - groups.mean(1, keepdim=True)) ** 2).mean(1, keepdim=True).sqrt()
    advantages = ((groups - groups.mean(1, keepdim=True)) / (deviation + 1e-4)).view(-1, 1)
    ratio = torch.exp(policy - policy.detach())
    if loss_type == "cispo":
        gain = ratio.clamp(max=5.0).detach() * advantages * policy
    else:
        gain = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    kl = torch.exp(expected - policy) - (expected - policy) - 1
    tokens = batch["completion_mask"]
    return (((0.1 * kl - gain) * tokens).sum(1) / tokens.sum(1)).mean()


def test_trl_writes_to_trackers_only_while_they_track(tokenizer, tmp_path):
    """trackio raises an error before and after its run."""
    seen = []

    def reward(completions, **columns):
        seen.append((trainer.is_in_train, trainer.args.report_to))
        return [1.0] * len(completions)

    data = {"reward_funcs": reward, "eval_dataset": toy_tasks(4)}
    trainer = toy_trainer(tokenizer, tmp_path, trainer=data, report_to="none", per_device_eval_batch_size=4)
    trainer.args.report_to = ["trackio", "wandb"]
    trainer.evaluate()
    trainer.train()
    trainer.evaluate()
    assert [is_in_train for is_in_train, _ in groupby(seen, lambda each: each[0])] == [False, True, False]
    assert all(("trackio" in trackers) == is_in_train and "wandb" in trackers for is_in_train, trackers in seen)


@pytest.mark.parametrize("loss_type", ["grpo", "cispo"])
def test_the_documented_command_has_the_gradients_of_minimind(tokenizer, tmp_path, loss_type):
    page = (ROOT / "docs/from-minimind.md").read_text(encoding="utf-8")
    words = shlex.split(re.search(r"```bash\nhf-pretrain grpo (.*?)```", page, re.DOTALL)[1].replace("\\\n", " "))
    # Only sizes and the precision differ from the page.
    own = ["--output_dir", str(tmp_path), "--bf16", "false", "--use_cpu", "--eval_strategy", "no"]
    own += ["--max_completion_length", "8", "--report_to", "none"]
    *_, args = parse_args(
        ModelArguments, AdapterArguments, TaskArguments, GRPOTrainingArguments, stage="grpo", argv=[*words, *own]
    )
    given = torch.rand(12, generator=torch.Generator().manual_seed(2))
    model = make_model()
    data = {"reward_funcs": lambda completions, **columns: given.tolist(), "train_dataset": toy_tasks()}
    trainer = MiniMindGRPOTrainer(model, args=args, processing_class=tokenizer, **data)
    assert trainer.generation_config.temperature == 0.8
    # Away from the reference, so that the KL term has a gradient.
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    model.train()
    prompts = toy_tasks(2)["prompt"]
    batch = trainer._prepare_inputs([{"prompt": prompts[number // 6]} for number in range(12)])
    trainer.current_gradient_accumulation_steps = 1
    # TRL shuffles the completions of a step. Their advantages name their rewards.
    groups = given.view(2, 6)
    unshuffled = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()
    rows = torch.cdist(unshuffled[:, None], batch["advantages"][:, None]).argmin(1)
    assert sorted(rows.tolist()) == list(range(12))
    ordered = {name: batch[name][rows] for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")}

    def gradient(loss: torch.Tensor) -> torch.Tensor:
        return torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(model.parameters()))])

    ours = gradient(trainer.compute_loss(model, batch))
    theirs = gradient(minimind_loss(model, trainer.ref_model, ordered, given, loss_type))
    # The factor of the sample deviation, also in --beta and --max_grad_norm.
    factor = math.sqrt(5 / 6)
    assert args.beta == pytest.approx(0.1 * factor, rel=1e-3) and args.max_grad_norm == pytest.approx(factor, rel=1e-3)
    assert torch.dist(ours, factor * theirs) < 2e-3 * theirs.norm()
    assert torch.dist(ours, theirs) > 0.05 * theirs.norm()


def test_a_run_saves_and_reports(trained):
    run = trained("grpo")
    expected = {"model.safetensors", "config.json", "tokenizer.json", "modeling_minimind.py"}
    assert expected <= {path.name for path in run.directory.iterdir()}
    held_out = run.series("eval_reward")[-1]
    assert f"Mean reward        {held_out:.4f}" in run.output and "Validation loss" not in run.output
    # A generation batch of four completions has two prompts.
    assert run.output.count("Sample ") == 2
    recorded = read_run(run.directory)
    samples = list(recorded.samples.values())[-1]
    assert len(samples) == 2 and all(re.fullmatch(r"\d+\?", question) for question, _ in samples)
    page = run.text("report.html")
    for title in ("Reward over tokens", "Reward over minutes", "Loss over tokens", "Completion length", "Memory"):
        assert f'<figcaption><span lang="en">{title}</span>' in page
    assert recorded.loss_unit == "GRPO" and samples[0][0] in page
    card = run.text("README.md")
    assert "made with hf_pretrain. Reinforcement (grpo, dapo loss)" in card
    assert f"| mean reward | {held_out:.4f} |" in card and "- Rewards: length" in card
    assert "validation loss" not in card and "trl" not in card.lower()


def test_grpo_takes_a_trained_reward_model_and_pushes_what_belongs_to_its_own(toys, trained, tmp_path):
    # The report of the reward model prints its directory so.
    rewards = re.search("hf-pretrain grpo (--rewards judge) ", trained("judge").output)[1]
    flags = (
        f"{COMMON} {TASKS} {rewards} --model_name_or_path dense --max_steps 2 --push_to_hub --hub_model_id user/toy"
    )
    with HubServer() as server:
        call(toys, "python", "grpo", f"{flags} --output_dir {tmp_path}/run", **server.client_environment())
        pushed = server.repos["user/toy"].files
    assert len(read_run(tmp_path / "run").series("rewards/judge/mean")[1]) == 2
    assert {"model.safetensors", "config.json", "tokenizer.json", "modeling_minimind.py", "README.md"} <= pushed.keys()
    assert not [name for name in pushed if "/" in name or name.endswith((".bin", ".pt", ".parquet"))]


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["rloo-torchrun", "grpo-zero3"])
def test_two_processes_share_the_groups_under_every_launcher(trained, toys, name):
    run = trained(name)
    history = [entry for entry in run.log if "reward" in entry]
    assert len(history) == 4 and all({"aux_loss", "kl"} <= entry.keys() for entry in history)
    assert "2 process(es) on CPU" in run.output and run.output.count("Mean reward") == 1
    before, weights = load_file(toys / "moe/model.safetensors"), run.weights
    assert any((weights[name] != value).any() for name, value in before.items())
