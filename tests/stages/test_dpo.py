"""DPO compared with its written-out formula, its router loss, and the files of a run."""

import copy
import math
import re

import pytest
import torch
from datasets import Dataset

from hf_pretrain.data.conversations import read_preference
from hf_pretrain.rows.preference_pairs import prepare_pairs
from hf_pretrain.run_directory.history import read_run
from hf_pretrain.stages.dpo import DPOTrainingArguments, MiniMindDPOTrainer
from hf_pretrain.tokenizer.pretrained import load_tokenizer
from hf_pretrain.tokenizer.rendering import set_template
from tests.invariants.launching import ROOT
from tests.toys import EXPERTS, LikeMPS, check_start_of_workers
from tests.trainers import ARGUMENTS, frozen, written_out_loss


NAMES = ("prompt", "chosen", "rejected")
TEXTS = [
    ("two", "four", "five five"),
    ("three and three", "six", "no"),
    ("one", "is one", "two two two"),
    tuple("abc"),
]
RECORDS = [dict(zip(NAMES, texts, strict=True)) for texts in TEXTS]


def documents() -> Dataset:
    return Dataset.from_dict({"text": [read_preference(record) for record in RECORDS]})


@pytest.fixture
def build_trainer(build_model, tokenizer, tmp_path):
    def build(*, num_pairs: int = 4, experts: dict | None = None, **arguments):
        overrides = {"vocab_size": len(tokenizer), **(experts or {})}
        policy, reference = build_model(**overrides), build_model(**overrides)
        with torch.no_grad():  # Model and reference differ, or every reward would be 0.
            for parameter in policy.parameters():
                parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
        pairs, _ = prepare_pairs(documents(), tokenizer, max_length=64)
        sizes = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 2, "beta": 0.3, "max_length": 64}
        sizes |= {"eval_on_start": False, "save_strategy": "no"}
        args = DPOTrainingArguments(output_dir=str(tmp_path / "run"), **ARGUMENTS | sizes | arguments)
        data = {"train_dataset": pairs.select(range(num_pairs)), "eval_dataset": pairs.select(range(2))}
        return MiniMindDPOTrainer(policy, ref_model=reference, args=args, processing_class=tokenizer, **data)

    return build


def log_probability(model, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """Return the sum of the log-probabilities of the answer's tokens."""
    ids = torch.tensor([prompt + answer])
    log_probs = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
    return log_probs.gather(1, ids[0, 1:, None])[len(prompt) - 1 :].sum()


@pytest.mark.parametrize("experts", [{}, EXPERTS], ids=["dense", "moe"])
def test_loss_and_gradient_follow_the_formula(build_trainer, experts):
    trainer = build_trainer(experts=experts)
    policy, reference, beta = trainer.model, trainer.ref_model, 0.3
    pairs, batch = list(trainer.train_dataset), next(iter(trainer.get_train_dataloader()))
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
        rows = rows_of(trainer.train_dataset)
        aux_loss = written_out_loss(policy, [{"input_ids": ids} for ids in rows])[1]
        assert aux_loss > 1.5  # two layers; not negligible
        expected = expected + 0.5 * aux_loss
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    expected.backward()
    for name, parameter in policy.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-6, msg=name)


def rows_of(pairs: Dataset) -> list[list[int]]:
    return [pair["prompt_ids"] + pair[name] for name in ("chosen_ids", "rejected_ids") for pair in pairs]


def test_a_run_logs_its_tokens_and_speed_and_apple_gpus_have_what_it_needs(build_trainer, tmp_path, monkeypatch):
    arguments = {"experts": EXPERTS, "max_steps": 2, "logging_steps": 1, "save_strategy": "steps", "save_steps": 1}
    with LikeMPS():
        trainer = build_trainer(**arguments)
        with frozen(monkeypatch, trainer.args):
            trainer.train()
        trainer.evaluate()
        trainer.save_model()
        again = build_trainer(**arguments)
        again.train(resume_from_checkpoint=str(tmp_path / "run/checkpoint-1"))
    assert again.state.num_input_tokens_seen == trainer.state.num_input_tokens_seen
    # Each step trains on all pairs.
    assert trainer.state.num_input_tokens_seen == 2 * sum(map(len, rows_of(trainer.train_dataset)))
    speeds = [entry["tokens_per_second"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(speeds) == 2 and min(speeds) > 0


def test_evaluation_has_no_router_loss(build_trainer):
    dense_part = build_trainer(experts={**EXPERTS, "router_aux_loss_coef": 0.0}).evaluate()["eval_loss"]
    assert build_trainer(experts=EXPERTS).evaluate()["eval_loss"] == pytest.approx(dense_part, rel=1e-6)


def test_each_of_several_validation_sets_has_its_own_figures(build_trainer):
    trainer = build_trainer()
    check_start_of_workers(trainer.get_train_dataloader())
    check_start_of_workers(trainer.get_eval_dataloader())
    sets = {"first": trainer.eval_dataset, "second": trainer.train_dataset.select([2, 3])}
    alone = {}
    for name, trainer.eval_dataset in sets.items():
        alone[name] = trainer.evaluate()
    trainer.eval_dataset = sets
    together = trainer.evaluate()
    for key in ("loss", "rewards/margins"):
        assert together[f"eval_{key}"] == pytest.approx(alone["first"][f"eval_{key}"])
        assert together[f"eval_second_{key}"] == pytest.approx(alone["second"][f"eval_{key}"])
        assert together[f"eval_{key}"] != together[f"eval_second_{key}"]


def test_accumulation_and_whole_batches(build_trainer):
    """Three pairs in batches of two: each epoch drops one pair, with and without accumulation."""
    histories, how = [], {"max_steps": 4, "logging_steps": 1, "optim": "sgd", "learning_rate": 0.1}
    for size, steps in ((2, 1), (1, 2)):
        how |= {"per_device_train_batch_size": size, "gradient_accumulation_steps": steps}
        trainer = build_trainer(num_pairs=3, experts=EXPERTS, **how)
        trainer.train()
        histories.append([(e["loss"], e["grad_norm"], e["epoch"]) for e in trainer.state.log_history if "loss" in e])
    assert len(histories[0]) == 4 and histories[0][-1][2] == 4  # one step per epoch
    for one, two in zip(*histories, strict=True):
        assert one == pytest.approx(two, rel=1e-4)


def test_the_seed_decides_the_order_of_the_pairs(build_trainer):
    def order(**seeds) -> list[list[int]]:
        loader = build_trainer(per_device_train_batch_size=1, **seeds).get_train_dataloader()
        return [batch["input_ids"].tolist() for batch in loader]

    orders = [order(seed=seed) for seed in range(4)]
    assert orders[1] == order(seed=1) == order(seed=2, data_seed=1)
    assert len(set(map(str, orders))) > 1


def test_pairs_are_truncated_and_dropped(tokenizer):
    pairs, report = prepare_pairs(documents(), tokenizer, max_length=64)
    for pair, (prompt, chosen, rejected) in zip(pairs, TEXTS, strict=True):
        assert tokenizer.decode(pair["prompt_ids"]) == f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
        assert tokenizer.decode(pair["chosen_ids"]) == f"{chosen}<|im_end|>"
        assert tokenizer.decode(pair["rejected_ids"]) == f"{rejected}<|im_end|>"
    longest = max(len(pair["prompt_ids"]) for pair in pairs)
    fewer, report = prepare_pairs(documents(), tokenizer, max_length=longest)
    assert len(fewer) == 3 and report.startswith("3 pairs, 1 dropped")
    # Answers that differ only beyond `max_length` are equal for the training.
    late = {"prompt": "one", "chosen": "two " * 9 + "four", "rejected": "two " * 9 + "six"}
    late = Dataset.from_dict({"text": [read_preference(late)]})
    assert [len(prepare_pairs(late, tokenizer, max_length=length)[0]) for length in (24, 64)] == [0, 1]
    none, report = prepare_pairs(documents(), tokenizer, max_length=4)
    assert len(none) == 0 and report.startswith("0 pairs, 4 dropped")


def test_a_template_whose_prompt_depends_on_the_answer():
    """minimind-3's template writes an empty <think> block into the prompt of an answer without reasoning."""
    v3 = load_tokenizer(ROOT / "tests/fixtures/tokenizers/v3")
    set_template(v3)
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


def test_another_bos_makes_other_pairs(tokenizer):
    other = copy.deepcopy(tokenizer)
    other.bos_token = "<|endoftext|>"
    fingerprints = {prepare_pairs(documents(), tokens, max_length=64)[0]._fingerprint for tokens in (tokenizer, other)}
    assert len(fingerprints) == 2


def test_a_template_that_marks_only_the_last_answer(tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    text = "{{ message.role + '\n' }}{{ message.content + eos_token }}"
    marked = text.replace("}}{{", "}}{% generation %}{{") + "{% endgeneration %}"
    tokenizer.chat_template = (
        f"{{% for message in messages %}}{{% if loop.last %}}{marked}{{% else %}}{text}{{% endif %}}{{% endfor %}}"
    )
    turns = [{"role": role, "content": role} for role in ("user", "assistant", "user")]
    texts = [read_preference({"prompt": turns, "chosen": "four", "rejected": "no"})]
    (pair,), _ = prepare_pairs(Dataset.from_dict({"text": texts}), tokenizer, max_length=200)
    assert tokenizer.decode(pair["prompt_ids"]).endswith("user\nuser<|im_end|>assistant\n")
    answers = [tokenizer.decode(pair[name]) for name in ("chosen_ids", "rejected_ids")]
    assert answers == ["four<|im_end|>", "no<|im_end|>"]


def test_two_ranks_train_an_adapter_and_report_it(trained):
    run = trained("dpo-torchrun")
    assert {path.name for path in run.directory.glob("*.safetensors")} == {"adapter_model.safetensors"}
    # B starts at zero, so the adapter is trained. The first loss is log 2: the reference has no adapter.
    assert all(weight.abs().max() > 0 for name, weight in run.weights.items() if "lora_B" in name)
    assert len(run.series("loss")) == 4 and run.series("loss")[0] == pytest.approx(math.log(2), abs=1e-6)
    # Each evaluation answers the same questions, and the page has the loss of the algorithm, the memory and the time.
    history = read_run(run.directory)
    questions = [[question for question, _ in answers] for answers in history.samples.values()]
    assert set(history.samples) == {0, 2, 4} and questions[0] == questions[1] == questions[2]
    assert questions[0] and all(re.fullmatch(r"\d+\?", question) for question in questions[0])
    assert history.loss_unit == "DPO" and history.last("peak_memory_gib") > 0.1
    page = run.text("report.html")
    assert "Loss over minutes" in page and f"{history.last('eval_loss'):.4f} DPO" in page


@pytest.mark.parametrize("name", ["dpo", "judge", "grpo"])
def test_the_card_of_a_checkpoint_names_the_run(trained, name):
    """TRL writes a card before each checkpoint, while Trainer sees another directory."""
    run = trained(name)
    assert f"# {name}\n" in run.text("README.md") and not list(run.directory.glob("checkpoint-*/README.md"))
