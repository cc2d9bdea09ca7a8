"""MaskedLossTrainer in one process, compared with written-out formulas and with itself at other batch sizes."""

import copy
import json
import math
import random

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
import torch.nn.functional as F
from datasets import Dataset
from torch._dynamo.testing import CompileCounter
from torch.utils.data import IterableDataset
from transformers import (
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.testing_utils import CaptureLogger
from transformers.utils import logging

from hf_pretrain import MaskedLossTrainer, MiniMindForCausalLM, MiniMindForSequenceClassification
from hf_pretrain.data.collators import DataCollatorForPackedRows
from hf_pretrain.tokenizer.training import train_tokenizer
from hf_pretrain.training.callbacks import ProfilerCallback
from hf_pretrain.training.launch import check_micro_batch
from hf_pretrain.training.measurements import Meter
from hf_pretrain.training.training_arguments import LMTrainingArguments
from tests.toys import EXPERTS, LikeMPS, toy_model


LENGTHS = [7, 19, 4, 12, 16, 5, 9, 11, 3, 14, 20, 6, 8]


def make_model(num_experts: int = 0) -> MiniMindForCausalLM:
    experts = EXPERTS | {"num_experts": num_experts} if num_experts else {}
    return toy_model(vocab_size=64, num_key_value_heads=2, intermediate_size=64, **experts)


def make_documents(*, weighted: bool = False) -> list[dict]:
    """Return thirteen documents of uneven length; with weights, some tokens and one whole document have weight 0."""
    generator = torch.Generator().manual_seed(1)
    documents = []
    for number, length in enumerate(LENGTHS):
        document = {
            "input_ids": torch.randint(3, 64, (length,), generator=generator).tolist(),
            "seq_lengths": [length],
        }
        if weighted:
            weights = 2 * torch.rand(length, generator=generator) * (torch.rand(length, generator=generator) > 0.3)
            document["loss_mask"] = (weights * (number != 4)).tolist()
        documents.append(document)
    return documents


def pack(documents: list[dict], sizes: list[int]) -> list[dict]:
    rows, start = [], 0
    for size in sizes:
        group = documents[start : start + size]
        rows.append({key: sum((document[key] for document in group), []) for key in group[0]})
        start += size
    assert start == len(documents)
    return rows


def make_trainer(tmp_path, rows, *, model=None, batch=8, accumulation=1, eval_batch=4, **kwargs) -> MaskedLossTrainer:
    arguments = {
        "max_steps": 6,
        "optim": "sgd",
        "learning_rate": 0.5,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "max_grad_norm": 0,
        "weight_decay": 0,
        "eval_strategy": "no",
        "save_strategy": "no",
        "logging_steps": 1,
        "bf16": False,
        "use_cpu": True,
        "disable_tqdm": True,
        "report_to": "none",
        **kwargs.pop("arguments", {}),
    }
    return MaskedLossTrainer(
        model=model or make_model(),
        args=LMTrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulation,
            per_device_eval_batch_size=eval_batch,
            **arguments,
        ),
        data_collator=kwargs.pop("data_collator", DataCollatorForPackedRows(pad_token_id=0)),
        train_dataset=rows,
        eval_dataset=rows,
        **kwargs,
    )


def train(trainer: MaskedLossTrainer) -> list[dict]:
    trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def written_out_loss(model: MiniMindForCausalLM, documents: list[dict]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cross-entropy and router loss by their formulas, with one forward pass per document."""
    ce = weight_sum = aux = num_documents = torch.zeros(())
    for document in documents:
        ids = torch.tensor([document["input_ids"]])
        weights = torch.tensor(document.get("loss_mask", [1.0] * ids.shape[1]))[1:]
        if not weights.any():
            continue
        output = model(ids, output_router_logits=bool(model.config.num_experts))
        ce = ce + (F.cross_entropy(output.logits[0, :-1], ids[0, 1:], reduction="none") * weights).sum()
        weight_sum, num_documents = weight_sum + weights.sum(), num_documents + 1
        for logits in output.router_logits or ():
            probabilities = logits.softmax(-1)
            chosen = F.one_hot(probabilities.topk(2).indices, 4).sum(1).float()
            aux = aux + 4 * (chosen.mean(0) / 2 * probabilities.mean(0)).sum()
    return ce / weight_sum, aux / num_documents


def as_lists(documents: list[dict]) -> list[dict]:
    return [{"input_ids": document["input_ids"]} for document in documents]


def as_a_tokenizer_pads(documents: list[dict]) -> Dataset:
    """Pad to 32 tokens on the left."""
    rows = []
    for document in documents:
        ids, padding = document["input_ids"], 32 - len(document["input_ids"])
        rows.append({"input_ids": [0] * padding + ids, "attention_mask": [0] * padding + [1] * len(ids), "text": "x"})
    return Dataset.from_list(rows)


def as_a_dataset_with_labels(documents: list[dict]) -> Dataset:
    rows = [row | {"labels": row["input_ids"], "token_type_ids": row["input_ids"]} for row in as_lists(documents)]
    return Dataset.from_list(rows).with_format("torch")


@pytest.mark.parametrize("batch", [1, 7])
@pytest.mark.parametrize("make_rows", [as_lists, as_a_tokenizer_pads, as_a_dataset_with_labels])
def test_plain_use_in_a_notebook_follows_the_formula(tmp_path, make_rows, batch):
    documents = make_documents()
    model = make_model(4)
    ce_loss, aux_loss = written_out_loss(model, documents)
    arguments = TrainingArguments(
        str(tmp_path),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=-(-len(documents) // batch),
        **{"num_train_epochs": 2, "logging_steps": 1, "use_cpu": True, "report_to": "none", "disable_tqdm": True},
        **{"save_strategy": "epoch", "eval_strategy": "epoch"},
    )
    rows = make_rows(documents)
    trainer = MaskedLossTrainer(model, arguments, train_dataset=rows, eval_dataset=rows)
    steps = train(trainer)
    assert steps[0]["loss"] == pytest.approx((ce_loss + 0.5 * aux_loss).item(), rel=1e-5)
    assert steps[1]["loss"] < steps[0]["loss"]
    # Resume from the first epoch, and reach the same end.
    arguments.eval_steps = 0.1
    again = MaskedLossTrainer(make_model(4), arguments, train_dataset=rows, eval_dataset=rows)
    with CaptureLogger(logging.get_logger("transformers.trainer")) as captured:
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    # No warning about a tied head, which no file holds, or about a share of the steps that became a number.
    assert "missing keys" not in captured.out and "do not match" not in captured.out
    assert again.evaluate()["eval_loss"] == trainer.evaluate()["eval_loss"]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("num_experts", [0, 4])
def test_first_step_is_the_formula(tmp_path, num_experts, weighted):
    documents = make_documents(weighted=weighted)
    model = make_model(num_experts)
    ce_loss, aux_loss = written_out_loss(model, documents)
    loss = ce_loss + 0.5 * aux_loss
    loss.backward()
    expected = {name: p.detach() - 0.5 * p.grad for name, p in model.named_parameters()}
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])

    trainer = make_trainer(
        tmp_path, documents, model=make_model(num_experts), batch=2, accumulation=7, arguments={"max_steps": 1}
    )
    (step,) = train(trainer)
    assert step["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert step["ce_loss"] == pytest.approx(ce_loss.item(), rel=1e-5)
    assert step["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    if num_experts:
        assert step["aux_loss"] == pytest.approx(aux_loss.item(), rel=1e-5)
    for name, parameter in trainer.model.named_parameters():
        torch.testing.assert_close(parameter.data, expected[name], rtol=0, atol=5e-6)


@pytest.mark.parametrize("num_experts", [0, 4])
def test_accumulation_changes_nothing_across_epochs(tmp_path, num_experts):
    rows = make_documents(weighted=True)
    trainers = [
        make_trainer(tmp_path, rows, model=make_model(num_experts), batch=batch, accumulation=8 // batch)
        for batch in (8, 2, 1)
    ]
    reference, *others = [train(trainer) for trainer in trainers]
    assert len(reference) == 6
    for steps in others:
        for step, expected in zip(steps, reference, strict=True):
            assert step["loss"] == pytest.approx(expected["loss"], rel=1e-5)
            assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    for trainer in trainers[1:]:
        for parameter, expected in zip(trainer.model.parameters(), trainers[0].model.parameters(), strict=True):
            torch.testing.assert_close(parameter.data, expected.data, rtol=0, atol=5e-6)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("num_experts", [0, 4])
def test_packing_changes_nothing(tmp_path, num_experts, weighted):
    documents = make_documents(weighted=weighted)
    separate = make_trainer(tmp_path, documents, model=make_model(num_experts), batch=13, arguments={"max_steps": 3})
    packed = make_trainer(
        tmp_path,
        pack(documents, [4, 1, 5, 3]),
        model=make_model(num_experts),
        batch=2,
        accumulation=2,
        arguments={"max_steps": 3},
    )
    for step, expected in zip(train(packed), train(separate), strict=True):
        for key in ("loss", "ce_loss", "grad_norm", "num_input_tokens_seen"):
            assert step[key] == pytest.approx(expected[key], rel=1e-5), key
        if num_experts:
            assert step["aux_loss"] == pytest.approx(expected["aux_loss"], rel=1e-5)
    assert packed.evaluate()["eval_loss"] == pytest.approx(separate.evaluate()["eval_loss"], rel=1e-6)


class Stream(IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


@pytest.mark.parametrize("num_experts", [0, 4])
def test_a_batch_without_weights_trains_nothing(tmp_path, num_experts):
    rows = [{**document, "loss_mask": [0.0] * len(document["input_ids"])} for document in make_documents()]
    model = make_model(num_experts)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    trainer = make_trainer(tmp_path, rows, model=model, batch=2, accumulation=2, arguments={"max_steps": 2})
    for step in train(trainer):
        assert step["loss"] == step["ce_loss"] == step["grad_norm"] == 0
    for parameter, expected in zip(trainer.model.parameters(), before, strict=True):
        assert torch.equal(parameter.data, expected)


@pytest.mark.parametrize("num_experts", [0, 4])
def test_evaluation_is_one_ratio_at_any_batch_size(tmp_path, num_experts):
    documents = make_documents(weighted=True)
    model = make_model(num_experts).eval()
    with torch.no_grad():
        expected, _ = written_out_loss(model, documents)
    for eval_batch in (1, 4, 13):
        metrics = make_trainer(tmp_path, documents, model=model, eval_batch=eval_batch).evaluate()
        assert metrics["eval_loss"] == pytest.approx(expected.item(), rel=1e-6)
        assert metrics["eval_perplexity"] == pytest.approx(math.exp(expected.item()), rel=1e-5)


@pytest.mark.parametrize("drop_last", [False, True])
def test_an_evaluation_loader_gives_every_row_once(tmp_path, drop_last):
    documents = make_documents()
    for rows in (documents, Stream(documents), Dataset.from_list(documents)):
        trainer = make_trainer(tmp_path, rows, eval_batch=4, arguments={"dataloader_drop_last": drop_last})
        ids = [row[:3] for batch in trainer.get_eval_dataloader() for row in batch["input_ids"].tolist()]
        assert ids == [document["input_ids"][:3] for document in documents]


def test_compute_metrics_sees_every_row_once(tmp_path):
    seen = {}

    def compute_metrics(prediction):
        seen["shape"] = prediction.predictions.shape, prediction.label_ids.shape
        return {"rows": len(prediction.label_ids)}

    trainer = make_trainer(
        tmp_path,
        make_documents(),
        model=make_model(4),
        compute_metrics=compute_metrics,
        data_collator=DataCollatorForPackedRows(pad_token_id=0, max_length=20),
    )
    assert trainer.evaluate()["eval_rows"] == 13
    assert seen["shape"] == ((13, 20, 64), (13, 20))


def test_a_broken_model_fails_its_evaluation(tmp_path):
    model = make_model()
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="eval_loss is nan"):
        make_trainer(tmp_path, make_documents(), model=model).evaluate()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"label_smoothing_factor": 0.1}, "--label_smoothing_factor"),
        ({"train_sampling_strategy": "batch_rebalance"}, "--train_sampling_strategy"),
    ],
)
def test_arguments_that_would_change_the_loss_are_refused(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, make_documents(), arguments=arguments)


def test_tokens_are_counted_up_to_each_evaluation(tmp_path):
    arguments = {"max_steps": 7, "logging_steps": 5, "eval_strategy": "steps", "eval_steps": 2}
    trainer = make_trainer(tmp_path, make_documents(), batch=13, arguments=arguments)
    trainer.train()
    for entry in trainer.state.log_history:
        assert entry["num_input_tokens_seen"] == entry["step"] * sum(LENGTHS)


@pytest.mark.parametrize(
    ("column", "bad", "message"),
    [
        ("input_ids", 64, "A row holds the id 64; the model knows ids 0 to 63"),
        ("input_ids", -1, "A row holds the id -1; the model knows ids 0 to 63"),
        ("loss_mask", -1.0, "negative weight"),
    ],
)
def test_ids_and_weights_that_mean_nothing_are_refused(tmp_path, column, bad, message):
    documents = make_documents(weighted=True)
    documents[7][column][5] = bad
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, documents).train()


def test_weight_decay_is_for_matrices(tmp_path):
    trainer = make_trainer(tmp_path, make_documents(), model=make_model(4), arguments={"weight_decay": 0.1})
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    groups = trainer.create_optimizer().param_groups
    decayed = {names[id(p)] for group in groups for p in group["params"] if group["weight_decay"] > 0}
    assert decayed == {name for name, p in trainer.model.named_parameters() if p.dim() >= 2}


@pytest.mark.parametrize("schedule", ["cosine_with_min_lr", "warmup_stable_decay"])
def test_schedules_end_at_their_floor(tmp_path, schedule):
    arguments = {"lr_scheduler_type": schedule, "warmup_steps": 0.1, "max_steps": 100, "learning_rate": 1.0}
    trainer = make_trainer(tmp_path, make_documents(), arguments=arguments)
    trainer.create_optimizer_and_scheduler(num_training_steps=100)
    rates = [trainer.lr_scheduler.lr_lambdas[0](step) for step in range(101)]
    assert rates[5] == pytest.approx(0.5, abs=0.06)
    assert (rates[10], rates[100]) == (pytest.approx(1.0), pytest.approx(0.1))


def make_packed_rows(num_rows: int = 24) -> list[dict]:
    """Return rows of 40 tokens, each cut into documents of different lengths."""
    generator = random.Random(0)
    rows = []
    for _ in range(num_rows):
        cuts = sorted(generator.sample(range(1, 40), generator.randrange(4)))
        lengths = [stop - start for start, stop in zip([0, *cuts], [*cuts, 40], strict=True)]
        rows.append({"input_ids": generator.choices(range(3, 64), k=40), "seq_lengths": lengths})
    return rows


class GraphCounter(TrainerCallback):
    def __init__(self):
        self.num_graphs = []

    def on_step_end(self, *args, **kwargs):
        self.num_graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.mark.slow
def test_compiled_layers_train_the_same_and_are_compiled_once(tmp_path):
    """Whatever the rows contain, no graph is added after the first steps."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, counter = make_model(), GraphCounter()
    model.set_attn_implementation("packed")
    plain = train(make_trainer(tmp_path, make_packed_rows(), model=copy.deepcopy(model), batch=4))
    arguments = {"torch_compile": True}
    trainer = make_trainer(
        tmp_path, make_packed_rows(), model=model, batch=4, arguments=arguments, callbacks=[counter]
    )
    compiled = train(trainer)
    assert counter.num_graphs[1] > 0 and counter.num_graphs[-1] == counter.num_graphs[1]
    assert [step["loss"] for step in compiled] == pytest.approx([step["loss"] for step in plain], rel=1e-5)


def test_a_compiled_layer_is_one_graph_under_ddp(tmp_path):
    """DDP's optimization would cut it where a bucket of gradients is full, and bypass the cache of compiled graphs."""
    counter, input_ids = CompileCounter(), torch.randint(3, 64, (2, 8))
    with torch._dynamo.config.patch(optimize_ddp=True):
        model = make_trainer(tmp_path, make_documents(), arguments={"torch_compile_backend": "eager"}).model
        model.set_attn_implementation("sdpa")
        model.model.layers[0].compile(backend=counter)
        dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
        try:
            # A bucket holds 0.01 MiB, less than a layer.
            ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.01)
            ddp(input_ids, labels=input_ids).loss.backward()
        finally:
            dist.destroy_process_group()
    assert counter.frame_count == 1


@pytest.mark.slow
def test_a_profile_covers_one_step_per_interval(tmp_path, capfd):
    # An interval of 3 traces two of the six steps.
    train(make_trainer(tmp_path, make_documents(), callbacks=[ProfilerCallback(3)]))
    traces = sorted(path.name for path in (tmp_path / "profile").iterdir())
    assert traces == ["step-3-rank-0.json", "step-6-rank-0.json"]
    events = json.loads((tmp_path / "profile" / traces[0]).read_text())["traceEvents"]
    assert any(event.get("name") == "aten::mm" for event in events)
    assert any(event.get("name") == "[memory]" for event in events)
    assert "aten::mm" in capfd.readouterr().out


def test_logs_have_tokens_flops_and_memory(tmp_path):
    trainer = make_trainer(tmp_path, make_documents(), batch=13)
    (step, *_) = train(trainer)
    number = sum(parameter.numel() for parameter in trainer.model.parameters())
    assert step["model_flops_per_second"] == pytest.approx(6 * number * step["tokens_per_second"])
    assert 0.1 < step["peak_memory_gib"] < 100
    assert (step["num_input_tokens_seen"], step["learning_rate"]) == (sum(LENGTHS), 0.5)


@pytest.mark.parametrize(("num_experts", "optimizer"), [(0, {"optim": "adamw_torch"}), (4, {"optim": None})])
def test_apple_gpus_have_what_a_run_with_adamw_or_muon_needs(tmp_path, num_experts, optimizer):
    arguments = optimizer | {"max_grad_norm": 1, "save_strategy": "steps", "save_steps": 3}
    rows, tokenizer = make_documents(weighted=True), train_tokenizer(["a b c"] * 9, vocab_size=300)
    options = {"accumulation": 2, "arguments": arguments, "processing_class": tokenizer}
    trainer = make_trainer(tmp_path, rows, model=make_model(num_experts), **options)
    with LikeMPS():
        trainer.train()
        assert trainer.evaluate()["eval_bits_per_byte"] > 0
        trainer.save_model()
        again = make_trainer(tmp_path, rows, model=make_model(num_experts), **options)
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert again.state.num_input_tokens_seen == trainer.state.num_input_tokens_seen


@pytest.mark.slow
def test_workers_that_do_not_fork_give_the_same_steps(tmp_path):
    steps = []
    for name, flags in (("none", {}), ("spawn", {"dataloader_num_workers": 1})):
        arguments = flags | {"max_steps": 3, "dataloader_multiprocessing_context": name if flags else None}
        steps.append(train(make_trainer(tmp_path / name, make_documents(weighted=True), arguments=arguments)))
    for step, expected in zip(*steps, strict=True):
        assert (step["loss"], step["grad_norm"]) == (expected["loss"], expected["grad_norm"])


def test_micro_batches_that_apple_gpus_get_wrong_are_refused(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.13.0")
    check_micro_batch(64 * 512, "mps")
    check_micro_batch(65 * 512, "cpu")
    with pytest.raises(
        ValueError, match="A micro-batch of 33,280 tokens is too large. On Apple GPUs, torch 2.13.0 may"
    ):
        check_micro_batch(65 * 512, "mps")
    monkeypatch.setattr(torch, "__version__", "2.14.0")
    check_micro_batch(65 * 512, "mps")


def test_tokens_and_validation_losses_are_summed_beyond_float32_precision(tmp_path):
    """From 2**24 on, float32 represents only even integers; these documents have 7, 19 and 5 tokens."""
    trainer = make_trainer(tmp_path, make_documents())
    trainer._meter = Meter(1.0, None)
    trainer._meter.count_step(torch.tensor(2**24))
    trainer._begin_step([trainer.data_collator([make_documents()[n] for n in (0, 1, 5)])])
    assert trainer._meter.read_tokens() == 2**24 + 31
    large, small = torch.tensor([2.0**24, 1.0]), torch.tensor([1.0, 2.0**-30])
    assert trainer._add_up([large, small]) == [2.0**24 + 1, 1 + 2.0**-30]


def test_rows_of_a_batch_are_read_in_one_call(tmp_path):
    rows = Dataset.from_list(make_documents())
    read = []

    class Counted(Dataset):
        def __getitems__(self, keys):
            read.append(list(keys))
            return super().__getitems__(keys)

    counted = Counted(rows.data, rows.info)
    trainer = make_trainer(tmp_path, counted, batch=8)
    batches = list(trainer.get_train_dataloader())
    assert [len(keys) for keys in read] == [8, 8]
    # Thirteen rows in the sampler's order, then three padding rows without labels.
    assert sorted([*read[0], *read[1][:5]]) == list(range(13)) and read[1][5:] == [0] * 3
    for batch, numbers, num_rows in zip(batches, read, (8, 5), strict=True):
        assert (batch["labels"] > 0).any(-1).tolist() == [True] * num_rows + [False] * (8 - num_rows)
        for ids, number in zip(batch["input_ids"], numbers, strict=True):
            expected = rows.data["input_ids"][number].as_py()
            assert ids[: len(expected)].tolist() == expected


def test_accumulation_leaves_the_loss_of_a_classifier_as_it_is(tmp_path):
    """transformers' Trainer, which trains the classifier."""
    ids = [[5, 9, 7, 3], [4, 6, 8, 2], [9, 9, 4, 5], [3, 8, 6, 7]]
    rows = [{"input_ids": row, "labels": row[0] % 2} for row in ids]
    logs = []
    for accumulation in (1, 4):
        set_seed(0)
        model = MiniMindForSequenceClassification(toy_model(vocab_size=64, num_labels=2).config)
        arguments = TrainingArguments(
            str(tmp_path), max_steps=1, use_cpu=True, report_to="none", disable_tqdm=True, logging_steps=1, seed=0,
            per_device_train_batch_size=4 // accumulation, gradient_accumulation_steps=accumulation,
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=Dataset.from_list(rows))
        trainer.train()
        logs.append(trainer.state.log_history[0])
    assert logs[0]["loss"] == pytest.approx(logs[1]["loss"], abs=1e-4)
    assert logs[0]["grad_norm"] == pytest.approx(logs[1]["grad_norm"], rel=1e-4)
