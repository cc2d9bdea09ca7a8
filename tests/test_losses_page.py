"""The numbers of docs/losses.md, its formulas, and the functions that it names agree, in both languages."""

import re
from collections import defaultdict
from dataclasses import fields
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from torch import tensor
from trl import DPOTrainer, GRPOTrainer, RewardTrainer, RLOOTrainer

from hf_pretrain.loading.adapters import KeepingArguments
from hf_pretrain.model.loss import masked_cross_entropy, whole_loss
from hf_pretrain.model.router_loss import find_documents
from hf_pretrain.stages.distillation import DistillationArguments
from hf_pretrain.stages.dpo import _LOSSES
from hf_pretrain.stages.reinforcement import GRPOTrainingArguments
from hf_pretrain.tokenizer.training import train_tokenizer
from tests.invariants.launching import ROOT
from tests.rollouts import toy_tasks, toy_trainer
from tests.trainers import ARGUMENTS


pytestmark = pytest.mark.documents

NUMBERS = r"-?\d+\.\d{4}(?:, -?\d+\.\d{4})*"


def run_blocks(section: str, scope: dict) -> dict[str, tuple[torch.Tensor, list[float]]]:
    """Run the Python blocks of a section in `scope`. Return the values that they print, computed and printed."""
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE))
    exec(code, scope)
    printed = re.findall(rf"^(\w+) = .*  # ({NUMBERS})$", code, re.MULTILINE)
    assert len(printed) == len(re.findall("  # [-0-9]", code)), "a value has another form"
    return {name: (scope[name], list(map(float, numbers.split(", ")))) for name, numbers in printed}


def run_table(section: str, scope: dict) -> dict[str, tuple[torch.Tensor, list[float]]]:
    """Return the mean value of the formulas of each row of a table, and the value that the row prints."""
    rows = {}
    for name, formulas, number in re.findall(rf"^\| `(\w+)` \| (.*) \| ({NUMBERS}) \|$", section, re.MULTILINE):
        # The formula needs the name that the other one defines.
        *names, formula = sorted(re.findall(r"`([^`]+)`", formulas), key=lambda each: not re.match(r"\w = ", each))
        exec("\n".join(names), row := dict(scope))
        rows[name] = eval(formula, row).mean(), [float(number)]
    return rows


# What the named functions give for the numbers of the page, by the names of their results


def one_hot_logits(probabilities: torch.Tensor) -> torch.Tensor:
    """Return logits `(1, num_tokens + 1, 2)` that give each token after the first, with id 1, its probability."""
    logits = torch.stack([1 - probabilities, probabilities], dim=-1).log()
    return torch.cat([logits, logits[:1]])[None]


def cross_entropy(function, scope) -> dict:
    labels = torch.ones(1, len(scope["w"]) + 1, dtype=torch.long)
    logits, weights = one_hot_logits(scope["p"]), torch.cat([tensor([9.0]), scope["w"]])[None]
    alone = [function(logits[:, i : i + 2], labels[:, :2]) for i in range(len(scope["w"]))]
    return {"CE": torch.stack(alone), "loss": function(logits, labels, loss_mask=weights)}


def step(function, scope) -> dict:
    # Two micro-batches: the numbers of the section before, and a token of weight 1.
    labels = [torch.ones(1, 5, dtype=torch.long), torch.ones(1, 2, dtype=torch.long)]
    weights = [tensor([[9.0, 1.0, 1.0, 0.5, 0.0]]), tensor([[9.0, 1.0]])]
    logits = [one_hot_logits(tensor([0.5, 0.25, 0.1, 0.9])), one_hot_logits(tensor([0.4]))]
    batches = [{"labels": ids, "loss_mask": mask} for ids, mask in zip(labels, weights, strict=True)]
    total = function(batches, device=torch.device("cpu")).weights
    assert torch.equal(scope["weights"], torch.stack([mask[:, 1:].sum() for mask in weights]))
    parts, means = (
        [
            masked_cross_entropy(logits[i], labels[i], loss_mask=weights[i], num_items_in_batch=divisor)
            for i in range(2)
        ]
        for divisor in (total, None)
    )
    return {"loss_of_step": sum(parts), "mean_of_means": sum(means) / 2}


def router(function, scope) -> dict:
    logits = torch.cat([scope["first"], scope["second"]]).log()
    positions = tensor([[0, 1, 0]])
    both = find_documents((1, 3), position_ids=positions)
    parts = {"of_documents": [(logits[:2], tensor([[0, 1]])), (logits[2:], tensor([[0]]))]}
    alone = [function((each,), 1, find_documents(at.shape, position_ids=at)) for each, at in parts["of_documents"]]
    return {
        "of_documents": torch.stack(alone),
        "per_document": function((logits,), 1, both),
        "per_batch": function((logits,), 1, both, level="batch"),
    }


class Teacher(torch.nn.Module):
    """A teacher of another shape than MiniMind's, with fixed logits."""

    config, device = SimpleNamespace(), torch.device("cpu")

    def __init__(self, logits: torch.Tensor):
        super().__init__()
        self.logits = logits

    def forward(self, **inputs):
        return SimpleNamespace(logits=self.logits)


def distillation(term, scope) -> dict:
    # The last position predicts nothing.
    logits = {name: torch.cat([scope[name], torch.zeros(1, 3)])[None] for name in ("teacher", "student")}
    inputs = {"input_ids": tensor([[1, 0, 2]]), "labels": tensor([[1, 0, 2]])}
    inputs["loss_mask"] = torch.cat([tensor([9.0]), scope["w"]])[None]
    args, results = SimpleNamespace(device="cpu", bf16=False, fp16=False), {}
    for kl in ("forward", "reverse"):
        arguments = DistillationArguments("teacher", kl=kl, temperature=scope["T"], ce_weight=scope["ce_weight"])
        loss = term(Teacher(logits["teacher"]), arguments, args)(inputs)
        weighting = {"loss_mask": inputs["loss_mask"]}
        parts = whole_loss(logits["student"], inputs["labels"], token_loss=loss, **weighting)
        results |= {f"loss_{kl}": parts.loss, "cross_entropy": parts.ce_loss}
    return results


class Table(Teacher):
    """A model whose logits depend on the last token alone."""

    def __init__(self, rows: torch.Tensor):
        torch.nn.Module.__init__(self)
        self.table = torch.nn.Embedding.from_pretrained(rows)

    def forward(self, input_ids, **inputs):
        return SimpleNamespace(logits=self.table(input_ids))


def kl_to_base(term, scope) -> dict:
    # The answer follows the id 1, and the prompt the id 0.
    model = get_peft_model(Table(scope["base"][[1, 0, 0]]), LoraConfig(target_modules=["table"]))
    inputs = {"input_ids": tensor([[1, 0, 2]]), "labels": tensor([[1, 0, -100]])}
    inputs["loss_mask"] = torch.cat([tensor([9.0]), scope["w"]])[None]
    args = SimpleNamespace(bf16=False, fp16=False)
    loss = term(model.train(), KeepingArguments(kl_to_base=scope["share"]), args)(inputs)
    # The last position predicts nothing.
    logits = torch.cat([scope["model"], torch.zeros(1, 3)])[None]
    parts = whole_loss(logits, inputs["labels"], token_loss=loss, loss_mask=inputs["loss_mask"])
    return {"loss": parts.loss, "cross_entropy": parts.ce_loss, "term": parts.token_loss}


def bare(trainer_class: type, **attributes):
    """Return a trainer of TRL without its constructor, with what its loss reads."""
    trainer = object.__new__(trainer_class)
    shared = {"accelerator": Accelerator(cpu=True), "_metrics": defaultdict(lambda: defaultdict(list))}
    shared |= {"model": torch.nn.Identity(), "aux_loss_enabled": False, "_total_train_tokens": 0, "_tp_size": 1}
    vars(trainer).update(shared | attributes)
    return trainer


def preferences(compute_loss, scope) -> dict:
    lengths = torch.cat([scope["n_c"], scope["n_r"]])
    # (4, 5): a token of the prompt before the longest answer
    mask = (torch.arange(5) <= lengths[:, None]).long()
    mask[:, 0] = 0
    log_probs = torch.cat([scope["log_c"], scope["log_r"]]) / lengths
    outputs = {"log_probs": log_probs[:, None] * mask[:, 1:], "is_top1": mask[:, 1:].bool()}
    outputs |= dict.fromkeys(("entropy", "mean_logits"), torch.zeros(4, 4))
    inputs = {"input_ids": mask, "attention_mask": mask, "completion_mask": mask}
    inputs |= {"ref_chosen_logps": scope["reference_c"], "ref_rejected_logps": scope["reference_r"]}
    settings = {"beta": scope["beta"], "label_smoothing": scope["e"], "f_divergence_type": "reverse_kl"}
    settings |= {"ld_alpha": None, "precompute_ref_logps": True, "use_weighting": False, "loss_weights": [1.0]}
    settings |= {"args": SimpleNamespace(discopop_tau=scope["tau"], max_length=None)}
    results = {}
    for kind in _LOSSES:
        trainer = bare(DPOTrainer, loss_types=[kind], **settings)
        results[kind] = compute_loss(trainer, lambda **_: SimpleNamespace(**outputs), dict(inputs))
    return results | {"loss": results["sigmoid"]}


def reward_model(compute_loss, scope) -> dict:
    scores = torch.cat([scope["chosen"], scope["rejected"]])[:, None]
    trainer = bare(RewardTrainer, args=SimpleNamespace(center_rewards_coefficient=None))
    inputs = {"attention_mask": torch.ones(4, 1)}
    return {"loss": compute_loss(trainer, lambda **_: SimpleNamespace(logits=scores), inputs)}


def advantages(score, rewards: torch.Tensor, **flags) -> torch.Tensor:
    """Let a toy trainer generate two groups, and return the advantages for given rewards."""
    tokenizer = train_tokenizer(["What is 12 + 30? Blue sky. Green tree."] * 9, vocab_size=360)
    data = {"reward_funcs": lambda completions, **_: rewards.flatten().tolist()}
    trainer = toy_trainer(tokenizer, Path("out"), trainer=data, per_device_train_batch_size=8, **flags)
    return score(trainer, [dict(row) for row in toy_tasks(2) for _ in range(4)])["advantages"]


def group_advantages(score, scope) -> dict:
    names = {"A": "group", "A_batch": "batch", "centred": "none"}
    return {name: advantages(score, scope["rewards"], scale_rewards=scale) for name, scale in names.items()}


def rloo_advantages(score, scope) -> dict:
    return {"A_rloo": advantages(score, scope["rewards"], algorithm="rloo")}


def grpo_arguments(scope, **flags) -> GRPOTrainingArguments:
    flags |= {"max_completion_length": 4, "num_generations": 2, "per_device_train_batch_size": 2}
    values = {"beta": scope["beta"], "epsilon": scope["low"], "epsilon_high": scope["high"]}
    return GRPOTrainingArguments(output_dir="out", **ARGUMENTS | values | flags)


def answers(scope, args) -> tuple[dict, dict]:
    """Return the inputs of a loss of TRL for the answers of the page, and the attributes of its trainer."""
    mask, empty = scope["mask"], torch.zeros(2, 1, dtype=torch.long)
    inputs = {"prompt_ids": empty, "prompt_mask": empty, "completion_ids": mask, "completion_mask": mask}
    inputs |= {"advantages": scope["A"].flatten(), "num_items_in_batch": mask.sum()}
    inputs |= {"old_per_token_logps": scope["old"], "ref_per_token_logps": scope["reference"]}
    inputs |= {"old_logps": (scope["old"] * mask).sum(1)}
    attributes = {"args": args, "beta": args.beta, "epsilon_low": args.epsilon, "epsilon_high": args.epsilon_high}
    attributes |= {"current_gradient_accumulation_steps": 1, "_entropy_bonus_enabled": False, "use_vllm": False}
    for name in "loss_type importance_sampling_level top_entropy_quantile max_completion_length".split():
        attributes[name] = vars(args)[name]
    attributes |= {"off_policy_mask_threshold": None}
    log_probs = scope["new"], torch.zeros(2, 3), None
    return inputs, attributes | {"_get_per_token_logps_and_entropies": lambda *_, **__: log_probs}


def grpo(compute_loss, scope) -> dict:
    results = {}
    for kind in "grpo bnpo dapo dr_grpo cispo sapo luspo vespo".split():
        flags = {"importance_sampling_level": "sequence"} if kind == "luspo" else {}
        flags |= {"epsilon_high": scope["limit"]} if kind == "cispo" else {}
        inputs, attributes = answers(scope, grpo_arguments(scope, loss_type=kind, **flags))
        results[kind] = compute_loss(bare(GRPOTrainer, **attributes), None, inputs)
    return results


def rloo(compute_loss, scope) -> dict:
    inputs, attributes = answers(scope, grpo_arguments(scope))
    return {"loss": compute_loss(bare(RLOOTrainer, **attributes), None, inputs)}


FUNCTIONS = {
    "hf_pretrain.model.loss.masked_cross_entropy": cross_entropy,
    "hf_pretrain.training.step_loss.count_step": step,
    "hf_pretrain.model.router_loss.router_loss": router,
    "hf_pretrain.stages.distillation.TeacherTerm": distillation,
    "hf_pretrain.stages.kl_to_base.BaseTerm": kl_to_base,
    "trl.DPOTrainer.compute_loss": preferences,
    "trl.RewardTrainer.compute_loss": reward_model,
    "trl.GRPOTrainer._generate_and_score_completions": group_advantages,
    "trl.RLOOTrainer._generate_and_score_completions": rloo_advantages,
    "trl.GRPOTrainer.compute_loss": grpo,
    "trl.RLOOTrainer.compute_loss": rloo,
}


def sections(page: str) -> list[str]:
    return re.split(r"^(?=##)", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE)


@pytest.mark.parametrize("page", ["docs/losses.md", "docs/zh/losses.md"])
def test_the_numbers_the_formulas_and_the_functions_agree(page):
    start, *others = sections(page)
    compared = set()
    for section in others:
        run_blocks(start, scope := {})
        results = run_blocks(section, scope) | run_table(section, scope)
        for name, (value, printed) in results.items():
            assert value.flatten().tolist() == pytest.approx(printed, abs=5.1e-5), name
        for function in re.findall(r"`((?:hf_pretrain|trl)\.[\w.]+)`", section):
            compared.add(function)
            for name, value in FUNCTIONS[function](resolve_name(function), scope).items():
                assert value.flatten().tolist() == pytest.approx(results[name][0].flatten().tolist(), rel=1e-5), name
    assert compared == FUNCTIONS.keys()


def test_the_tables_have_every_loss():
    pages = ["".join(sections(page)) for page in ("docs/losses.md", "docs/zh/losses.md")]
    (losses,) = [field.metadata["choices"] for field in fields(GRPOTrainingArguments) if field.name == "loss_type"]
    for page in pages:
        assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == {*_LOSSES, *losses}
