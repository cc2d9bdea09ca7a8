"""DPO compared with its written-out formula, its router loss, and the files of a run."""

import json
import math
import re

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file

from hf_pretrain.data.conversations import read_preference
from hf_pretrain.data.preferences import prepare_pairs
from hf_pretrain.reports.runs import read_run
from hf_pretrain.stages.preferences import ALGORITHMS, preference_arguments
from hf_pretrain.tokenizer.chat_template import mark_template
from hf_pretrain.tokenizer.loading import load_tokenizer
from hf_pretrain.tokenizer.training import train_tokenizer
from tests.invariants.launching import ROOT, launcher_command, start
from tests.toys import WithoutFloat64, write_jsonl


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "num_shared_experts": 1, "router_aux_loss_coef": 0.5}
TEXTS = [
    ("two", "four", "five five"),
    ("three and three", "six", "no"),
    ("one", "is one", "two two two"),
    ("a", "b", "c"),
]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["one two three four five six and no is"] * 4, vocab_size=320)


def documents() -> Dataset:
    records = [{"prompt": prompt, "chosen": chosen, "rejected": rejected} for prompt, chosen, rejected in TEXTS]
    return Dataset.from_dict({"text": [read_preference(record) for record in records]})


@pytest.fixture
def build_trainer(build_model, tokenizer, tmp_path):
    def build(*, algorithm: str = "dpo", num_pairs: int = 4, experts: dict | None = None, **arguments):
        arguments_class, trainer_class = ALGORITHMS[algorithm]
        overrides = {"vocab_size": len(tokenizer), **(experts or {})}
        policy, reference = build_model(**overrides), build_model(**overrides)
        with torch.no_grad():  # Model and reference differ, or every reward would be 0.
            for parameter in policy.parameters():
                parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
        pairs, _ = prepare_pairs(documents(), tokenizer, max_length=64)
        args = arguments_class(
            **{
                **{"output_dir": str(tmp_path / "run"), "use_cpu": True, "bf16": False, "report_to": "none"},
                **{"per_device_train_batch_size": 4, "per_device_eval_batch_size": 2, "beta": 0.3},
                **{
                    "algorithm": algorithm,
                    "eval_on_start": False,
                    "eval_strategy": "no",
                    "save_strategy": "no",
                    "max_length": 64,
                },
                **arguments,
            }
        )
        return trainer_class(
            model=policy,
            ref_model=reference,
            args=args,
            train_dataset=pairs.select(range(num_pairs)),
            eval_dataset=pairs.select(range(2)),
            processing_class=tokenizer,
        )

    return build


def log_probability(model, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """Return the sum of the log-probabilities of the answer's tokens."""
    ids = torch.tensor([prompt + answer])
    log_probs = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
    return log_probs.gather(1, ids[0, 1:, None])[len(prompt) - 1 :].sum()


def switch_loss(model, rows: list[list[int]]) -> torch.Tensor:
    """Return the mean over rows of equations 4 to 6 of Switch Transformers, summed over layers."""
    total = 0.0
    for ids in rows:
        output = model(input_ids=torch.tensor([ids]), output_router_logits=True)
        for logits in output.router_logits:
            probabilities = logits.reshape(len(ids), -1).softmax(-1)
            top = probabilities.topk(2, dim=-1).indices
            load = torch.nn.functional.one_hot(top, 4).sum((0, 1)) / (2 * len(ids))
            total = total + 4 * (load * probabilities.mean(0)).sum()
    return total / len(rows)


@pytest.mark.parametrize("experts", [{}, EXPERTS], ids=["dense", "moe"])
def test_loss_and_gradient_follow_the_formula(build_trainer, experts):
    trainer = build_trainer(experts=experts)
    policy, reference, beta = trainer.model, trainer.ref_model, 0.3
    pairs = list(trainer.train_dataset)
    batch = next(iter(trainer.get_train_dataloader()))
    policy.train()
    loss = trainer.compute_loss(policy, dict(batch))
    loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in policy.named_parameters()}
    policy.zero_grad()

    expected = 0.0
    for pair in pairs:
        prompt, margin = pair["prompt_ids"], 0.0
        for sign, name in ((1, "chosen_ids"), (-1, "rejected_ids")):
            with torch.no_grad():
                baseline = log_probability(reference, prompt, pair[name])
            margin = margin + sign * (log_probability(policy, prompt, pair[name]) - baseline)
        expected = expected - torch.nn.functional.logsigmoid(beta * margin) / len(pairs)
    if experts:
        rows = [pair["prompt_ids"] + pair[name] for pair in pairs for name in ("chosen_ids", "rejected_ids")]
        aux_loss = switch_loss(policy, rows)
        assert aux_loss > 1.5  # two layers; not negligible
        expected = expected + 0.5 * aux_loss
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    expected.backward()
    for name, parameter in policy.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-6, msg=name)


def answers(trainer) -> list[tuple[list[int], list[int], list[int]]]:
    pairs, _ = prepare_pairs(documents(), trainer.processing_class, max_length=64)
    return [(pair["prompt_ids"], pair["chosen_ids"], pair["rejected_ids"]) for pair in pairs]


def simpo(trainer) -> torch.Tensor:
    """Equation 6 of the paper, with gamma 0.5."""
    losses = []
    for prompt, chosen, rejected in answers(trainer):
        means = [log_probability(trainer.model, prompt, ids) / len(ids) for ids in (chosen, rejected)]
        losses.append(-torch.nn.functional.logsigmoid(0.3 * (means[0] - means[1]) - 0.5))
    return torch.stack(losses).mean()


def orpo(trainer) -> torch.Tensor:
    """Equations 4 to 7 of the paper. The likelihood covers prompt and answer, as in TRL."""
    losses, nll, num_tokens = [], 0.0, 0
    for prompt, chosen, rejected in answers(trainer):
        p = [(log_probability(trainer.model, prompt, ids) / len(ids)).exp() for ids in (chosen, rejected)]
        odds = [value / (1 - value) for value in p]
        losses.append(-torch.nn.functional.logsigmoid((odds[0] / odds[1]).log()))
        nll = nll - log_probability(trainer.model, prompt[:1], prompt[1:] + chosen)
        num_tokens += len(prompt) - 1 + len(chosen)
    return nll / num_tokens + 0.3 * torch.stack(losses).mean()


def kto(trainer) -> torch.Tensor:
    """Equation 8 of the paper. The KL term pairs each prompt with the answer before it in the batch."""
    rows = [(row["prompt_ids"], row["completion_ids"], row["label"]) for row in trainer.train_dataset]
    wanted = [
        (prompt, ids, liked)
        for prompt, *both in answers(trainer)
        for ids, liked in zip(both, (True, False), strict=True)
    ]
    assert sorted(rows) == sorted(wanted)
    assert all(rows[i][0] != rows[i - 1][0] for i in range(len(rows)))
    assert all(rows[i][2] != rows[i - 1][2] for i in range(len(rows)))

    def margin(prompt: list[int], ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            baseline = log_probability(trainer.ref_model, prompt, ids)
        return log_probability(trainer.model, prompt, ids) - baseline

    kl = torch.stack([margin(rows[i][0], rows[i - 1][1]) for i in range(len(rows))]).mean().detach().clamp(min=0)
    losses = []
    for prompt, ids, is_liked in rows:
        sign = 1 if is_liked else -1
        losses.append(1 - torch.sigmoid(0.3 * sign * (margin(prompt, ids) - kl)))
    return torch.stack(losses).mean()


@pytest.mark.parametrize("experts", [{}, EXPERTS], ids=["dense", "moe"])
@pytest.mark.parametrize("formula", [kto, orpo, simpo])
def test_the_other_algorithms_follow_their_papers(build_trainer, formula, experts):
    trainer = build_trainer(
        algorithm=formula.__name__, experts=experts, per_device_train_batch_size=8 if formula is kto else 4
    )
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.model.train()
    loss = trainer.compute_loss(trainer.model, dict(batch))
    expected = formula(trainer)
    if experts:
        triples = answers(trainer)
        rows = [prompt + ids for prompt, *both in triples for ids in both]
        expected = expected + 0.5 * switch_loss(trainer.model, rows)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_the_algorithm_chooses_the_arguments():
    assert preference_arguments([]).__name__ == "DPOTrainingArguments"
    assert preference_arguments(["--x", "1", "--algorithm", "orpo"]).__name__ == "ORPOTrainingArguments"
    with pytest.raises(
        ValueError, match="--algorithm ppo is unknown; the nearest one is dpo. All: dpo, kto, orpo, simpo"
    ):
        preference_arguments(["--algorithm=ppo"])


@pytest.mark.parametrize("coef", [0.0, 2.0])
def test_the_router_coefficient_can_be_given(build_trainer, coef):
    losses, aux_losses = {}, []
    for value in (None, coef):
        trainer = build_trainer(experts=EXPERTS, router_aux_loss_coef=value)
        batch = next(iter(trainer.get_train_dataloader()))
        losses[value] = trainer.compute_loss(trainer.model, dict(batch)).item()
        aux_losses += trainer._metrics["train"]["aux_loss"]
    assert losses[coef] - losses[None] == pytest.approx((coef - 0.5) * aux_losses[0], rel=1e-4)


def test_layers_are_compiled_with_the_flag(build_trainer):
    for compiles in (False, True):
        trainer = build_trainer(torch_compile=compiles)
        assert all((layer._compiled_call_impl is not None) == compiles for layer in trainer.model.model.layers)


def rows_of(pairs: Dataset) -> list[list[int]]:
    return [pair["prompt_ids"] + pair[name] for name in ("chosen_ids", "rejected_ids") for pair in pairs]


def expert_load(model, rows: list[list[int]]) -> list[list[float]]:
    """Return the share of each expert in the choices of each layer."""
    loads = torch.zeros(2, 4)
    for ids in rows:
        logits = model(input_ids=torch.tensor([ids]), output_router_logits=True).router_logits
        for layer, row in enumerate(logits):
            loads[layer] += torch.nn.functional.one_hot(row.topk(2, dim=-1).indices, 4).sum((0, 1))
    return (loads / loads.sum(1, keepdim=True)).tolist()


@pytest.mark.parametrize("coef", [0.5, 0.0])
def test_an_evaluation_records_the_expert_load_of_the_steps_before_it(build_trainer, coef, tmp_path):
    # At a learning rate of 0, the model stays as it is.
    experts = EXPERTS | {"router_aux_loss_coef": coef}
    trainer = build_trainer(experts=experts, max_steps=2, learning_rate=0.0)
    expected = expert_load(trainer.model, rows_of(trainer.train_dataset))
    trainer.train()
    trainer.evaluate()
    trainer.evaluate()  # no step since the first one
    (tmp_path / "run/run.json").write_text("[]")
    (entry,) = read_run(tmp_path / "run").of_kind("router_load")
    assert entry["step"] == 2
    assert entry["load"] == [pytest.approx(row, abs=1e-6) for row in expected]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_tokens_and_their_speed_are_logged(build_trainer, algorithm):
    trainer = build_trainer(algorithm=algorithm, max_steps=2, logging_steps=1)
    trainer.train()
    num_tokens = sum(map(len, rows_of(build_trainer().train_dataset)))
    # KTO's rows are single answers: two steps are one epoch. The other algorithms train on all pairs in each step.
    assert trainer.state.num_input_tokens_seen == num_tokens * (1 if algorithm == "kto" else 2)
    speeds = [entry["tokens_per_second"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(speeds) == 2 and min(speeds) > 0


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_no_float64_is_needed(build_trainer, algorithm):
    trainer = build_trainer(algorithm=algorithm, experts=EXPERTS, max_steps=2)
    with WithoutFloat64():
        trainer.train()
        trainer.evaluate()
        trainer.save_model()


def test_evaluation_has_no_router_loss(build_trainer):
    dense_part = build_trainer(experts={**EXPERTS, "router_aux_loss_coef": 0.0}).evaluate()["eval_loss"]
    assert build_trainer(experts=EXPERTS).evaluate()["eval_loss"] == pytest.approx(dense_part, rel=1e-6)


def test_accumulation_and_whole_batches(build_trainer):
    """Three pairs in batches of two: each epoch drops one pair, with and without accumulation."""
    histories = []
    for batch in (
        {"per_device_train_batch_size": 2},
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2},
    ):
        trainer = build_trainer(
            num_pairs=3, experts=EXPERTS, max_steps=4, logging_steps=1, optim="sgd", learning_rate=0.1, **batch
        )
        trainer.train()
        histories.append([(e["loss"], e["grad_norm"], e["epoch"]) for e in trainer.state.log_history if "loss" in e])
    assert len(histories[0]) == 4 and histories[0][-1][2] == 4  # one step per epoch
    for one, two in zip(*histories, strict=True):
        assert one == pytest.approx(two, rel=1e-4)
    trainer = build_trainer(num_pairs=1, per_device_train_batch_size=2)
    with pytest.raises(ValueError, match="1 rows do not fill one batch of 2"):
        trainer.train()


def test_pairs_are_truncated_and_dropped(tokenizer):
    pairs, report = prepare_pairs(documents(), tokenizer, max_length=64)
    for pair, (prompt, chosen, rejected) in zip(pairs, TEXTS, strict=True):
        assert tokenizer.decode(pair["prompt_ids"]) == f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
        assert tokenizer.decode(pair["chosen_ids"]) == f"{chosen}<|im_end|>"
        assert tokenizer.decode(pair["rejected_ids"]) == f"{rejected}<|im_end|>"
    longest = max(len(pair["prompt_ids"]) for pair in pairs)
    fewer, report = prepare_pairs(documents(), tokenizer, max_length=longest)
    assert len(fewer) == 3 and report.startswith("3 pairs, 1 dropped")
    with pytest.raises(ValueError, match="No prompt of 4 pairs leaves room"):
        prepare_pairs(documents(), tokenizer, max_length=4)


def test_a_template_whose_prompt_depends_on_the_answer():
    """minimind-3's template writes an empty <think> block into the prompt of an answer without reasoning."""
    v3 = load_tokenizer(ROOT / "tests/fixtures/tokenizers/v3")
    mark_template(v3)
    thought = {"role": "assistant", "content": "hello", "reasoning_content": "greet"}
    plain = {"role": "assistant", "content": "go away"}
    for chosen, rejected in ((thought, plain), (plain, thought)):
        record = {"prompt": "hi", "chosen": [chosen], "rejected": [rejected]}
        texts = Dataset.from_dict({"text": [read_preference(record)]})
        (pair,), _ = prepare_pairs(texts, v3, max_length=64)
        for name, answer in (("chosen_ids", chosen), ("rejected_ids", rejected)):
            messages = [{"role": "user", "content": "hi"}, answer]
            rendered = v3.apply_chat_template(messages, tokenize=False)
            assert v3.decode(pair["prompt_ids"] + pair[name]) + "\n" == rendered


def test_kto_needs_two_answers_for_its_kl(build_trainer):
    with pytest.raises(ValueError, match="--per_device_train_batch_size 1 must be at least 2"):
        build_trainer(algorithm="kto", per_device_train_batch_size=1)
    build_trainer(algorithm="kto", per_device_train_batch_size=1, loss_type="apo_zero_unpaired")


def test_a_small_validation_set_is_evaluated(build_trainer):
    trainer = build_trainer(per_device_eval_batch_size=8)
    assert trainer.evaluate()["eval_loss"] > 0  # two pairs


@pytest.fixture
def command(build_model, tokenizer, tmp_path) -> list[str]:
    """Return the recipe's command on a toy model and four pairs, without the steps and the output directory."""
    build_model(vocab_size=len(tokenizer)).save_pretrained(tmp_path / "toy")
    tokenizer.save_pretrained(tmp_path / "toy")
    records = [{"prompt": prompt, "chosen": chosen, "rejected": rejected} for prompt, chosen, rejected in TEXTS]
    write_jsonl(tmp_path / "pairs.jsonl", records)
    return [
        *(*launcher_command("python"), str(ROOT / "recipes/dpo.py"), "--use_cpu", "--bf16", "false"),
        *("--model_name_or_path", str(tmp_path / "toy"), "--dataset_name", str(tmp_path / "pairs.jsonl")),
        *("--validation_fraction", "0", "--logging_steps", "1", "--per_device_train_batch_size", "2"),
        *("--learning_rate", "1e-2"),
    ]


@pytest.mark.distributed
def test_muon_under_deepspeed_is_checked_here_too(command, tmp_path):
    words = command[len(launcher_command("python")) :]
    words += ["--deepspeed", "ds_configs/zero2.json", "--optim_preset", "muon", "--max_grad_norm", "1"]
    words += ["--output_dir", str(tmp_path / "muon")]
    result = start([*launcher_command("deepspeed"), *words])
    assert result.returncode != 0 and "Leave --max_grad_norm out" in result.stdout, result.stdout[-3000:]


@pytest.mark.distributed
def test_a_dry_run_plans_without_writing(command, tmp_path):
    result = start([*command, "--max_steps", "6", "--dry_run", "--output_dir", str(tmp_path / "planned")])
    assert result.returncode == 0, result.stdout[-3000:]
    assert re.search(r"^Steps +6 of 2 sequences each, 3.00 passes over 4 sequences$", result.stdout, re.MULTILINE)
    estimate = r"at least [\d,]+ rows of \d+ tokens fit \(--per_device_train_batch_size\), fewer if longer ones come"
    assert re.search(rf"^Memory +peak of [\d.]+ GiB per process .*\n +{estimate}$", result.stdout, re.MULTILINE)
    assert not (tmp_path / "planned").exists()


@pytest.mark.distributed
def test_the_recipe_runs_and_resumes(command, tmp_path):
    """Compare two steps and two more after a resume with four steps in one run, and check the saved files."""
    command = [*command, "--max_steps", "4", "--save_steps", "2"]
    whole = start([*command, "--output_dir", str(tmp_path / "whole")])
    assert whole.returncode == 0, whole.stdout[-3000:]
    checkpoint = ["--resume_from_checkpoint", str(tmp_path / "whole/checkpoint-2")]
    resumed = start([*command, *checkpoint, "--output_dir", str(tmp_path / "resumed")])
    assert resumed.returncode == 0, resumed.stdout[-3000:]
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "resumed")]
    assert weights[0] == weights[1]
    files = {path.name for path in (tmp_path / "whole").iterdir()}
    assert {"config.json", "modeling_minimind.py", "tokenizer.json", "trainer_state.json"} <= files
    assert "training_args.bin" not in files


@pytest.mark.distributed
@pytest.mark.parametrize(
    "algorithm, adapter", [("kto", []), ("orpo", []), ("simpo", []), ("dpo", ["--use_peft", "--lora_r", "4"])]
)
def test_the_recipe_takes_the_other_algorithms_and_adapters(command, tmp_path, algorithm, adapter):
    output = [*("--output_dir", str(tmp_path / "run"), "--save_strategy", "no", "--max_steps", "2")]
    evaluation = ["--validation_fraction", "0.25", "--eval_strategy", "steps", "--eval_steps", "1"]
    result = start([*command, *output, *evaluation, "--algorithm", algorithm, "--beta", "0.2", *adapter])
    assert result.returncode == 0, result.stdout[-3000:]
    history = json.loads((tmp_path / "run/trainer_state.json").read_text())["log_history"]
    assert sum("loss" in entry for entry in history) == 2
    files = {path.name for path in (tmp_path / "run").glob("*.safetensors")}
    assert files == ({"adapter_model.safetensors"} if adapter else {"model.safetensors"})
    if adapter:
        # B starts at zero, so the adapter is trained. The first loss is log 2: the reference has no adapter.
        trained = load_file(tmp_path / "run/adapter_model.safetensors")
        assert all(weight.abs().max() > 0 for name, weight in trained.items() if "lora_B" in name)
        first = next(entry["loss"] for entry in history if "loss" in entry)
        assert first == pytest.approx(math.log(2), abs=1e-6)
    # Each evaluation answers the same questions, and the page has the loss of the algorithm, the memory and the time.
    run = read_run(tmp_path / "run")
    samples = {entry["step"]: entry["samples"] for entry in run.of_kind("samples")}
    questions = [[question for question, _ in answers] for answers in samples.values()]
    assert set(samples) == {0, 1, 2} and questions[0] == questions[1] == questions[2]
    assert set(questions[0]) <= {prompt for prompt, *_ in TEXTS}
    assert run.loss_unit == algorithm.upper() and run.last("peak_memory_gib") > 0.1
    page = (tmp_path / "run/report.html").read_text(encoding="utf-8")
    assert "Loss over minutes" in page and f"{run.last('eval_loss'):.4f} {algorithm.upper()}" in page
