"""The router loss of TRL's losses by its formula, the figures and rows of a run, and the weights for its engine."""

import re
import time

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from trl.distributed import DistributedBackend
from trl.generation.vllm_generation import VLLMGeneration

from hf_pretrain.loading.adapters import AdapterArguments, add_adapter
from hf_pretrain.stages.reinforcement import ALGORITHMS
from hf_pretrain.training.run import train_and_evaluate
from tests.rollouts import make_model, toy_tasks, toy_trainer
from tests.toys import EXPERTS
from tests.trainers import written_out_loss


COEFFICIENT = 0.5


def toy_batch(trainer) -> dict[str, torch.Tensor]:
    """Return inputs of `compute_loss` as TRL makes them: one prompt padded left, one completion padded right."""
    torch.manual_seed(1)
    ones = torch.ones(2, 4, dtype=torch.long)
    prompt_mask, completion_mask = ones.clone(), ones.clone()
    prompt_mask[0, :2] = 0
    completion_mask[1, 3:] = 0
    return {
        "prompt_ids": torch.randint(40, 300, (2, 4)),
        "prompt_mask": prompt_mask,
        "completion_ids": torch.randint(40, 300, (2, 4)),
        "completion_mask": completion_mask,
        "advantages": torch.tensor([1.0, -1.0]),
        "num_items_in_batch": completion_mask.sum(),
    }


@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
@pytest.mark.parametrize("num_micro_batches", [1, 4])
def test_the_router_loss_is_ours_by_its_formula(tokenizer, tmp_path, algorithm, num_micro_batches):
    losses = []
    for coefficient in (COEFFICIENT, 0.0):
        model = make_model(num_experts=4, router_aux_loss_coef=coefficient)
        trainer = toy_trainer(tokenizer, tmp_path, model=model, algorithm=algorithm)
        trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation = num_micro_batches
        model.train()
        batch = toy_batch(trainer)
        if algorithm == "rloo":
            batch["old_logps"] = torch.zeros(2)
        losses.append(trainer.compute_loss(model, batch))
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    documents = [{"input_ids": row[each.bool()].tolist()} for row, each in zip(ids, mask, strict=True)]
    with torch.no_grad():
        expected = COEFFICIENT * written_out_loss(model, documents)[1].item()
    # TRL's GRPO itself divides by the number of micro-batches. For RLOO, Trainer does.
    expected /= num_micro_batches if algorithm == "grpo" else 1
    assert (losses[0] - losses[1]).item() == pytest.approx(expected, rel=1e-5)
    losses[0].backward()


def test_the_router_loss_reaches_the_routers_and_only_while_training(tokenizer, tmp_path):
    model = make_model(num_experts=4, router_aux_loss_coef=COEFFICIENT)
    trainer = toy_trainer(tokenizer, tmp_path, model=model)
    trainer.current_gradient_accumulation_steps = 1
    batch = toy_batch(trainer) | {"advantages": torch.zeros(2)}
    model.train()
    trainer.compute_loss(model, batch).backward()
    assert all(layer.mlp.gate.weight.grad.abs().max() > 0 for layer in model.model.layers)
    assert len(trainer._metrics["train"]["aux_loss"]) == 1
    model.eval()
    with torch.no_grad():
        assert trainer.compute_loss(model, batch).item() == 0.0
    assert not trainer._metrics["eval"]["aux_loss"]


def test_the_speed_counts_the_time_of_steps_without_a_generation(tokenizer, tmp_path):
    """Two steps use the completions of one generation, and each step logs."""
    model = make_model(num_experts=4)
    flags = {"max_steps": 4, "num_iterations": 2, "eval_strategy": "steps", "eval_steps": 4}
    data = {"eval_dataset": toy_tasks(4)}
    trainer = toy_trainer(tokenizer, tmp_path, model=model, trainer=data, **flags)
    begin = time.perf_counter()
    trainer.train()
    took = time.perf_counter() - begin
    log = trainer.state.log_history
    steps = [entry for entry in log if "loss" in entry]
    assert ["tokens_per_second" in entry for entry in steps] == [True, False, True, False]
    logged = [entry["training_seconds"] for entry in steps]
    assert all(entry["training_seconds"] > entry["step_time"] > 0 for entry in steps), "TRL's own clock of a step"
    (evaluation,) = [entry["eval_runtime"] for entry in log if "eval_runtime" in entry]
    assert sum(logged) < took - evaluation


def rewards_of_steps(*values: float | None):
    """Return a reward function that gives each completion of step `n` the value `values[n]`."""
    return lambda completions, trainer_state, **columns: [values[trainer_state.global_step]] * len(completions)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_steps_without_a_reward_log_no_reward(tokenizer, tmp_path, capsys, algorithm):
    options = {"reward_funcs": rewards_of_steps(1.0, None, 3.0, None), "eval_dataset": toy_tasks(4)}
    trainer = toy_trainer(tokenizer, tmp_path, algorithm=algorithm, trainer=options, max_steps=3)
    (tmp_path / "run").mkdir(exist_ok=True)
    metrics, _ = train_and_evaluate(trainer, checkpoint=None)
    lines = [line for line in capsys.readouterr().out.splitlines() if re.match(r"step \d/3: loss", line)]
    assert [re.findall("reward ([^,]+)", line) for line in lines] == [["1.0000"], [], ["3.0000"]]
    # After the last step, no completion gets a reward.
    assert "eval_runtime" in metrics and "eval_reward" not in metrics
    assert not [entry for entry in trainer.state.log_history if None in entry.values()]


@pytest.mark.parametrize("trains_adapter", [False, True])
@pytest.mark.parametrize("fields", [{}, {"qk_norm": True, "tie_word_embeddings": False}, EXPERTS], ids=str)
def test_weights_for_vllm_have_the_names_of_the_checkpoint(tmp_path, fields, trains_adapter):
    """vLLM's Transformers backend loads our checkpoint by its own names, and TRL's weights by the same loader."""
    model = make_model(**fields)
    model.save_pretrained(tmp_path)
    if trains_adapter:
        # A run from a checkpoint has this name.
        model.name_or_path = str(tmp_path)
        model = add_adapter(model, AdapterArguments(use_peft=True))
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.1)
    sender = object.__new__(VLLMGeneration)
    sender.model, sender._dist = model, DistributedBackend(Accelerator(cpu=True))
    sent = {name: weight.clone() for name, weight in sender._iter_named_params()}
    saved = load_file(tmp_path / "model.safetensors")
    assert {name: weight.shape for name, weight in sent.items()} == {name: each.shape for name, each in saved.items()}
    changed = {name for name, weight in sent.items() if not torch.equal(weight, saved[name])}
    assert bool(changed) == trains_adapter
    if trains_adapter:
        merged = model.merge_and_unload().state_dict()
        for name in sent:
            torch.testing.assert_close(sent[name], merged[name])
