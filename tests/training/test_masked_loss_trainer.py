"""MaskedLossTrainer in one process, compared with written-out formulas and with itself at other batch sizes."""

import copy
import json
import math
import pickle
import random

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from datasets import Dataset
from torch._dynamo.testing import CompileCounter
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainingArguments, set_seed
from transformers.testing_utils import CaptureLogger
from transformers.utils import logging

from hf_pretrain import MaskedLossTrainer, MiniMindForSequenceClassification
from hf_pretrain.rows.collators import DataCollatorForPackedRows
from hf_pretrain.runtime.errors import UserError
from hf_pretrain.tokenizer.training import train_tokenizer
from hf_pretrain.training import launch, settling
from hf_pretrain.training.callbacks import ProfilerCallback
from tests.toys import LikeMPS, toy_model
from tests.trainers import (
    ARGUMENTS,
    LENGTHS,
    AtStep,
    make_documents,
    make_model,
    make_trainer,
    pack,
    train,
    written_out_loss,
)


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


@pytest.mark.parametrize(
    ("make_rows", "batch"), [(as_lists, 1), (as_lists, 7), (as_a_tokenizer_pads, 7), (as_a_dataset_with_labels, 7)]
)
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


@pytest.mark.parametrize(
    ("row_sizes", "batch", "accumulation"), [([1] * 13, 2, 7), ([4, 1, 5, 3], 2, 2)], ids=["separate", "packed"]
)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("num_experts", [0, 4])
def test_the_first_step_is_the_formula(tmp_path, num_experts, weighted, row_sizes, batch, accumulation):
    documents = make_documents(weighted=weighted)
    model = make_model(num_experts)
    ce_loss, aux_loss = written_out_loss(model, documents)
    loss = ce_loss + 0.5 * aux_loss
    loss.backward()
    expected = {name: p.detach() - 0.5 * p.grad for name, p in model.named_parameters()}
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])

    options = {"model": make_model(num_experts), "arguments": {"max_steps": 1}, "accumulation": accumulation}
    trainer = make_trainer(tmp_path, pack(documents, row_sizes), batch=batch, **options)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(ce_loss.item(), rel=1e-6)
    (step,) = train(trainer)
    figures = {"loss": loss, "ce_loss": ce_loss, "grad_norm": norm} | ({"aux_loss": aux_loss} if num_experts else {})
    assert {name: step[name] for name in figures} == pytest.approx({k: v.item() for k, v in figures.items()}, rel=1e-5)
    # The document without a weight is not counted.
    assert step["num_input_tokens_seen"] == sum(LENGTHS) - weighted * LENGTHS[4]
    for name, parameter in trainer.model.named_parameters():
        torch.testing.assert_close(parameter.data, expected[name], rtol=0, atol=5e-6)


@pytest.mark.parametrize("num_experts", [0, 4])
def test_accumulation_changes_nothing_across_epochs(tmp_path, num_experts):
    rows = make_documents(weighted=True)
    runs = []
    for batch in (8, 2, 1):
        trainer = make_trainer(tmp_path, rows, model=make_model(num_experts), batch=batch, accumulation=8 // batch)
        figures = [step[key] for step in train(trainer) for key in ("loss", "grad_norm")]
        runs.append((figures, list(trainer.model.parameters())))
        assert figures == pytest.approx(runs[0][0], rel=1e-5) and len(figures) == 2 * 6
        torch.testing.assert_close(runs[-1][1], runs[0][1], rtol=0, atol=5e-6)


class Stream(IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


@pytest.mark.parametrize("num_experts", [0, 4])
def test_evaluation_is_one_ratio_over_every_row_at_any_batch_size(tmp_path, num_experts):
    documents = make_documents(weighted=True)
    model = make_model(num_experts).eval()
    with torch.no_grad():
        expected, _ = written_out_loss(model, documents)
    options = {"model": model, "arguments": {"dataloader_drop_last": True}}
    for eval_batch, rows in (
        (1, documents),
        (4, Stream(documents)),
        (4, Dataset.from_list(documents)),
        (13, documents),
    ):
        metrics = make_trainer(tmp_path, rows, eval_batch=eval_batch, **options).evaluate()
        assert metrics["eval_loss"] == pytest.approx(expected.item(), rel=1e-6)
        assert metrics["eval_perplexity"] == pytest.approx(math.exp(expected.item()), rel=1e-5)


def test_compute_metrics_sees_every_row_once(tmp_path):
    seen = {}

    def compute_metrics(prediction):
        seen["shape"] = prediction.predictions.shape, prediction.label_ids.shape
        return {"rows": len(prediction.label_ids)}

    options = {"compute_metrics": compute_metrics, "data_collator": DataCollatorForPackedRows(0, max_length=20)}
    trainer = make_trainer(tmp_path, make_documents(), model=make_model(4), **options)
    assert trainer.evaluate()["eval_rows"] == 13
    assert seen["shape"] == ((13, 20, 64), (13, 20))


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


@pytest.mark.slow
def test_compiled_layers_train_the_same_and_are_compiled_once(tmp_path):
    """Whatever the rows contain, no graph is added after the first steps."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, num_graphs = make_model(), []
    model.set_attn_implementation("packed")
    plain = train(make_trainer(tmp_path, make_packed_rows(), model=copy.deepcopy(model), batch=4))
    statistics = torch._dynamo.utils.counters["stats"]
    callbacks = [AtStep(step, lambda: num_graphs.append(statistics["unique_graphs"])) for step in (2, 6)]
    options = {"arguments": {"torch_compile": True}, "callbacks": callbacks}
    trainer = make_trainer(tmp_path, make_packed_rows(), model=model, batch=4, **options)
    # The loss is compiled, too. A model can be pickled all the same.
    assert trainer.model.lm_head._cross_entropy is not None
    assert pickle.loads(pickle.dumps(trainer.model)).lm_head._cross_entropy is None
    compiled = train(trainer)
    assert 0 < num_graphs[0] == num_graphs[1]
    assert [step["loss"] for step in compiled] == pytest.approx([step["loss"] for step in plain], rel=1e-5)


def test_a_run_without_a_compiler_records_that_it_does_not_compile(tmp_path, monkeypatch):
    monkeypatch.setattr(settling, "can_compile", lambda *_, **__: False)
    trainer = make_trainer(tmp_path, make_documents(), arguments={"torch_compile": True})
    assert trainer.args.to_dict()["torch_compile"] is False


@pytest.mark.compiles
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
    arguments = {"max_steps": 7, "logging_steps": 5, "eval_strategy": "steps", "eval_steps": 2}
    trainer = make_trainer(tmp_path, make_documents(), batch=13, arguments=arguments)
    (step,) = train(trainer)
    number = trainer.model.num_parameters()
    assert step["model_flops_per_second"] == pytest.approx(6 * number * step["tokens_per_second"])
    assert 0.1 < step["peak_memory_gib"] < 100 and step["learning_rate"] == 0.5
    # Evaluations have the number of tokens, too.
    for entry in trainer.state.log_history:
        assert entry["num_input_tokens_seen"] == entry["step"] * sum(LENGTHS)


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


def test_micro_batches_that_apple_gpus_get_wrong_are_refused(monkeypatch):
    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            assert launch.has_right_gradient(65 * 512, "cpu") and launch.has_right_gradient(32_767, "cpu")
    exact = launch.F.linear
    # A GPU that leaves terms out: the last one, or an even number of them.
    for left_out in (1, 2, 4096):
        monkeypatch.setattr(launch.F, "linear", lambda rows, matrix, n=left_out: exact(rows[:-n], matrix))
        assert not launch.has_right_gradient(32_768, "cpu")
    # M1 and M2 with torch 2.13 leave out the last term of a sum over 32,767 or more.
    monkeypatch.setattr(launch, "has_right_gradient", lambda num_tokens, device_type: num_tokens < 32_767)
    for num_tokens, device_type in ((32_766, "mps"), (64 * 512, "cpu")):
        launch.check_micro_batch(num_tokens, device_type)
    for num_tokens in (32_767, 64 * 512):
        with pytest.raises(UserError):
            launch.check_micro_batch(num_tokens, "mps")


def test_tokens_are_summed_beyond_float32_precision(tmp_path):
    """From 2**24 on, float32 represents only even integers; these documents have 7, 19 and 5 tokens."""
    trainer = make_trainer(tmp_path, make_documents())
    trainer.meter.add_step(torch.tensor(2**24))
    trainer._begin_step([trainer.data_collator([make_documents()[n] for n in (0, 1, 5)])])
    assert trainer.meter.read_tokens() == 2**24 + 31


def test_rows_of_a_batch_are_read_in_one_call(tmp_path):
    rows = Dataset.from_list(make_documents())
    read = []

    class Counted(Dataset):
        def __getitems__(self, keys):
            read.append(list(keys))
            return super().__getitems__(keys)

    counted = Counted(rows.data, rows.info)
    assert len(list(make_trainer(tmp_path, counted, batch=8).get_train_dataloader())) == 2
    # Thirteen rows in the sampler's order, then three padding rows.
    assert sorted([*read[0], *read[1][:5]]) == list(range(13)) and read[1][5:] == [0] * 3 and len(read) == 2


def test_accumulation_leaves_the_loss_of_a_classifier_as_it_is(tmp_path):
    """transformers' Trainer, which trains the classifier."""
    ids = [[5, 9, 7, 3], [4, 6, 8, 2], [9, 9, 4, 5], [3, 8, 6, 7]]
    rows = [{"input_ids": row, "labels": row[0] % 2} for row in ids]
    logs = []
    for accumulation in (1, 4):
        set_seed(0)
        model = MiniMindForSequenceClassification(toy_model(vocab_size=64, num_labels=2).config)
        sizes = {"per_device_train_batch_size": 4 // accumulation, "gradient_accumulation_steps": accumulation}
        arguments = TrainingArguments(str(tmp_path), max_steps=1, logging_steps=1, **ARGUMENTS, **sizes)
        trainer = Trainer(model, arguments, train_dataset=Dataset.from_list(rows))
        trainer.train()
        logs.append(trainer.state.log_history[0])
    assert logs[0]["loss"] == pytest.approx(logs[1]["loss"], abs=1e-4)
    assert logs[0]["grad_norm"] == pytest.approx(logs[1]["grad_norm"], rel=1e-4)
