"""A step larger than the data, streams without rows, and streams with several readers."""

import itertools
import json
from collections import Counter

import datasets
import pytest
import torch
from torch.utils.data import IterableDataset

from hf_pretrain.data.documents import load_documents
from hf_pretrain.rows.reading import Reading
from hf_pretrain.runtime.errors import UserError
from tests.invariants.launching import launcher_command, start
from tests.toys import write_jsonl
from tests.trainers import make_trainer


ROWS = [{"input_ids": [1, 5 + number, 9, 2], "seq_lengths": [4]} for number in range(22)]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(ROWS)


@pytest.mark.parametrize("rows", [ROWS, Stream()], ids=["rows", "stream"])
def test_a_step_beyond_the_data_is_one_pass(tmp_path, rows):
    """Padding rows fill the step, and change nothing."""
    losses, models = [], []
    for batch, accumulation in ((22, 1), (100, 1), (8, 6)):
        arguments = {"max_steps": 2}
        trainer = make_trainer(tmp_path, rows, batch=batch, accumulation=accumulation, arguments=arguments)
        trainer.train()
        assert trainer.state.num_input_tokens_seen == 2 * 22 * 4
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
        models.append(torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()]))
    for loss, model in zip(losses[1:], models[1:], strict=True):
        assert loss == pytest.approx(losses[0], rel=1e-5)
        torch.testing.assert_close(model, models[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("kind", ["rows", "shuffled", "stream", "shuffled stream"])
def test_drop_last_leaves_out_the_same_rows_at_any_micro_batch(tmp_path, kind, num_workers):
    """Compare four passes: of 22 rows, each leaves out the two that fill no step of four."""
    rows = datasets.Dataset.from_list(ROWS)
    if "stream" in kind:
        rows = rows.to_iterable_dataset()
        rows = rows.shuffle(seed=1, buffer_size=9) if kind != "stream" else rows
    # The order of the rows alone matters.
    arguments = {"dataloader_drop_last": True, "dataloader_num_workers": num_workers, "max_steps": 20}
    arguments |= {"learning_rate": 0.0, "train_sampling_strategy": "random" if kind == "shuffled" else "sequential"}
    found = []
    for batch, accumulation in ((4, 1), (2, 2), (1, 4)):
        trainer = make_trainer(tmp_path, rows, batch=batch, accumulation=accumulation, arguments=arguments)
        seen, begin = [], trainer.spikes.begin_step
        trainer.spikes.begin_step = lambda batches, seen=seen, begin=begin: (seen.append(batches), begin(batches))
        trainer.train()
        steps = [torch.cat([batch["input_ids"][:, 1] for batch in batches]).tolist() for batches in seen]
        assert [len(step) for step in steps] == [4] * 20
        found.append(steps)
    assert found[0] == found[1] == found[2]
    passes = [tuple(sum(found[0][start : start + 5], [])) for start in range(0, 20, 5)]
    if kind in ("rows", "stream"):
        assert passes == [tuple(range(5, 25))] * 4
    else:
        assert len(set(passes)) == 4 and all(len(set(each)) == 20 for each in passes)


EMPTY = datasets.IterableDataset.from_generator(lambda: iter([]))


@pytest.mark.parametrize(
    ("rows", "drops", "num_workers"), [(ROWS, True, 0), (Stream(), True, 0), (EMPTY, False, 0), (EMPTY, False, 2)]
)
def test_rows_that_fill_no_step_are_refused(tmp_path, rows, drops, num_workers):
    arguments = {"dataloader_drop_last": drops, "dataloader_num_workers": num_workers}
    trainer = make_trainer(tmp_path, rows, batch=12, accumulation=2, arguments=arguments)
    with pytest.raises(UserError):
        trainer.train()
    assert trainer.state.global_step == 0


# Two files of very different sizes, whose documents fill 100 batches of 16 rows.
SIZES = {"small": 100, "large": 1500}


def read_passes(directory, num_passes: int = 2, **arguments) -> list[list[int]]:
    """Return the numbers of the documents that this rank reads in some passes over a shuffled stream, by batch."""
    documents, _ = load_documents(
        [str(directory / f"{name}.jsonl") for name in SIZES], Reading(streaming=True, validation_fraction=0)
    )
    rows = documents.map(
        lambda row: {"input_ids": [1, *divmod(int(row["text"]), 60)], "seq_lengths": [3]}, remove_columns="text"
    )
    num_ranks = int(torch.distributed.is_torchelastic_launched()) + 1
    trainer = make_trainer(directory, rows.shuffle(seed=1, buffer_size=500), batch=16 // num_ranks, **arguments)
    batches = itertools.islice(trainer.get_train_dataloader(), 100 * num_passes)
    return [[60 * high + low for _, high, low in batch["input_ids"].tolist()] for batch in batches]


TWO_RANKS = """
import json, os, pathlib, sys
from tests.training.test_batches_beyond_the_data import read_passes
directory = pathlib.Path(sys.argv[1])
batches = read_passes(directory, arguments={"dataloader_num_workers": 2})
(directory / f"rank{os.environ['RANK']}").write_text(json.dumps(batches))
"""


@pytest.mark.distributed
def test_every_document_of_a_stream_is_read_once_per_pass_by_any_number_of_readers(tmp_path):
    numbers = itertools.count()
    for name, size in SIZES.items():
        write_jsonl(tmp_path / f"{name}.jsonl", [str(next(numbers)) for _ in range(size)])
    expected = read_passes(tmp_path)
    assert Counter(itertools.chain(*expected)) == dict.fromkeys(range(1600), 2)
    # Each pass has an order of its own.
    assert expected[:100] != expected[100:]
    assert read_passes(tmp_path, arguments={"dataloader_num_workers": 3}) == expected
    (tmp_path / "two_ranks.py").write_text(TWO_RANKS)
    result = start([*launcher_command("torchrun"), str(tmp_path / "two_ranks.py"), str(tmp_path)])
    assert result.returncode == 0, result.stdout
    ranks = [json.loads((tmp_path / f"rank{rank}").read_text()) for rank in range(2)]
    # The ranks share each batch of one process.
    assert [first + second for first, second in zip(*ranks, strict=True)] == expected
