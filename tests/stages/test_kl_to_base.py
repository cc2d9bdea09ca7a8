"""KL to the base model of an adapter: the written-out formula, all launchers, and an exact resume."""

import itertools
import json

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from hf_pretrain.loading.adapters import KeepingArguments
from hf_pretrain.stages.kl_to_base import BaseTerm
from hf_pretrain.tokenizer.training import train_tokenizer
from hf_pretrain.training.training_arguments import LMTrainingArguments
from tests.invariants.launching import ROOT, launcher_command, start
from tests.toys import EXPERTS, toy_model, write_jsonl
from tests.trainers import make_documents, make_model, make_trainer, pack, train
from tests.trainers import written_out_loss as cross_entropy_and_router_loss


SHARE = 0.4
SIZES = [4, 1, 5, 3]
ZERO3 = ["--deepspeed", str(ROOT / "ds_configs/zero3.json")]


def make_adapted(num_experts: int = 0):
    """Return a toy model with an adapter that changes its logits."""
    torch.manual_seed(3)
    options = {"target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.0, "init_lora_weights": False}
    return get_peft_model(make_model(num_experts), LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **options))


def log_probs(model, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids).logits[0, :-1].log_softmax(-1)


def written_out_divergences(model, documents: list[dict]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the term of a step and of an evaluation, with two forward passes per document."""
    kept, moved, weight_sum = torch.zeros(3)
    for document in documents:
        ids, weights = torch.tensor([document["input_ids"]]), torch.tensor(document["loss_mask"])[1:]
        if not weights.any():
            continue
        with model.disable_adapter(), torch.no_grad():
            base = log_probs(model, ids)
        divergence = F.kl_div(log_probs(model, ids), base, log_target=True, reduction="none").sum(-1)
        kept = kept + ((1 - weights).clamp(min=0) * divergence).sum()
        moved = moved + (weights * divergence).sum()
        weight_sum = weight_sum + weights.sum()
    return kept / weight_sum, moved / weight_sum


@pytest.mark.parametrize("num_experts", [0, 4])
@pytest.mark.parametrize(("batch", "accumulation"), [(2, 2), (4, 1)])
def test_a_step_is_the_formula(tmp_path, batch, accumulation, num_experts):
    documents = make_documents(weighted=True)
    model = make_adapted(num_experts)
    ce, aux = cross_entropy_and_router_loss(model.get_base_model(), documents)
    divergence, moved = written_out_divergences(model, documents)
    loss = (1 - SHARE) * ce + SHARE * divergence + 0.5 * aux
    loss.backward()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    expected = {name: p.detach() - 0.5 * p.grad for name, p in trained.items()}

    model = make_adapted(num_experts)
    args = LMTrainingArguments(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none")
    term = BaseTerm(model, KeepingArguments(kl_to_base=SHARE), args)
    options = {"batch": batch, "accumulation": accumulation, "arguments": {"max_steps": 1}}
    trainer = make_trainer(tmp_path, pack(documents, SIZES), model=model, term=term, eval_batch=3, **options)
    before = trainer.evaluate()
    (step,) = train(trainer)
    figures = {"loss": loss, "ce_loss": ce, "kl_loss": divergence, "eval_loss": ce, "eval_kl": moved}
    for name, figure in figures.items():
        assert (step | before)[name] == pytest.approx(figure.item(), rel=1e-5), name
    assert divergence > 1e-3
    for name, weight in model.named_parameters():
        if name in expected:
            torch.testing.assert_close(weight.data, expected[name], rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    """Return a function that fine-tunes a toy with experts and returns its log and its adapter."""
    path = tmp_path_factory.mktemp("kept")
    texts = [f"river {n} walks under {n * 7} quiet stones" for n in range(24)]
    tokenizer = train_tokenizer(texts, vocab_size=320)
    fields = {"vocab_size": len(tokenizer), "num_key_value_heads": 2, "initializer_range": 0.3, **EXPERTS}
    toy_model(**fields).save_pretrained(path / "toy")
    tokenizer.save_pretrained(path / "toy")
    answers = [{"role": "assistant", "content": text, "weight": n % 3 / 2 or 0.01} for n, text in enumerate(texts)]
    users = [{"role": "user", "content": text[:12]} for text in texts]
    write_jsonl(path / "chats.jsonl", [{"messages": list(pair)} for pair in zip(users, answers, strict=True)])
    flags = (
        "--use_cpu --bf16 false --max_length 64 --validation_fraction 0.2 --max_steps 5 --logging_steps 1 --optim sgd "
        "--learning_rate 0.02 --lr_scheduler_type constant --warmup_steps 0 --max_grad_norm 0 --weight_decay 0 "
        "--save_steps 3 --model_name_or_path toy --dataset_name chats.jsonl --use_peft --lora_r 4 --kl_to_base 0.5 "
        "--lora_target_modules q_proj k_proj v_proj o_proj"
    )

    def run(name: str, launcher: str = "python", *others: str) -> tuple[list[dict], dict[str, torch.Tensor]]:
        batch = ["4", "1"] if launcher == "python" else ["1", "2"]
        sizes = ["--per_device_train_batch_size", batch[0], "--gradient_accumulation_steps", batch[1]]
        command = [*launcher_command(launcher), str(ROOT / "recipes/sft.py"), *flags.split(), *sizes]
        result = start([*command, "--output_dir", name, *others], cwd=path)
        assert result.returncode == 0, result.stdout[-4000:]
        log = json.loads((path / name / "trainer_state.json").read_text())["log_history"]
        return log, load_file(path / name / "adapter_model.safetensors")

    first = run("python")
    numbers = itertools.count()
    return lambda *words: (*first, *run(f"run-{next(numbers)}", *words))


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("launcher", "others"),
    [
        ("torchrun", []),
        ("deepspeed", ZERO3),
        ("python", ["--resume_from_checkpoint", "python/checkpoint-3"]),
        ("python", ["--activation_checkpointing"]),
    ],
)
def test_losses_and_adapters_agree(launch, launcher, others):
    expected, weights, steps, found = launch(launcher, *others)
    for key in ("loss", "ce_loss", "kl_loss", "aux_loss", "eval_loss", "eval_kl"):
        values, wanted = ([entry[key] for entry in log if key in entry] for log in (steps, expected))
        assert values == pytest.approx(wanted, abs=1e-5) and len(set(values)) > 1, key
    for name, weight in weights.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=5e-6, msg=name)
