"""The digest of rows, and the manifest that keeps it beside their Arrow files."""

import json
import os
from pathlib import Path

import datasets
import pytest

from hf_pretrain.rows import manifest
from hf_pretrain.rows.data_arguments import DataArguments
from hf_pretrain.rows.manifest import describe_data, write_rows_manifest
from hf_pretrain.rows.packing import prepare_rows
from hf_pretrain.rows.preparation import load_rows
from hf_pretrain.tokenizer.training import train_tokenizer
from hf_pretrain.training.training_arguments import LMTrainingArguments
from tests.toys import write_jsonl


def test_one_changed_row_of_many_changes_the_digest():
    """The digest depends on the rows alone, not on the tables and the format that hold them."""
    rows = {"input_ids": [[number, number + 1] for number in range(4000)], "text": list("abcd") * 1000}
    whole = describe_data(datasets.Dataset.from_dict(rows))
    halves = [datasets.Dataset.from_dict(rows).select(part) for part in (range(2001), range(2001, 4000))]
    assert describe_data(datasets.concatenate_datasets(halves)) == whole
    assert describe_data(datasets.Dataset.from_dict(rows).select(range(4000)[::-1]).select(range(4000)[::-1])) == whole
    assert describe_data(datasets.Dataset.from_dict(rows).with_format("torch")) == whole
    # The weights of the reference model are compared, and not what it computes.
    assert describe_data(datasets.Dataset.from_dict(rows | {"ref_chosen_logps": [0.5] * 4000})) == whole
    for column, value in (("input_ids", [1, 2]), ("text", "z")):
        changed = {name: list(values) for name, values in rows.items()}
        # A sample of every third row would miss it.
        changed[column][2002] = value
        assert describe_data(datasets.Dataset.from_dict(changed)) != whole


@pytest.fixture
def hashed(monkeypatch) -> list[int]:
    """The numbers of rows of the datasets that were hashed."""
    hashed, digest_rows = [], manifest._digest_rows
    monkeypatch.setattr(manifest, "_digest_rows", lambda rows: hashed.append(len(rows)) or digest_rows(rows))
    return hashed


def load(tmp_path: Path, texts: list[str]) -> datasets.Dataset:
    """Prepare the rows as each start of a run does."""
    names = [
        write_jsonl(tmp_path / "train.jsonl", [*texts, {"text": 1}]),
        write_jsonl(tmp_path / "val.jsonl", ["two"]),
    ]
    flags = {"packing": "none", "max_length": 16, "max_rejected_ratio": 0.5}
    data_args = DataArguments(dataset_name=names[:1], eval_dataset_name=names[1:], **flags)
    args = LMTrainingArguments(str(tmp_path / "out"), use_cpu=True, bf16=False)
    return load_rows(data_args, args, train_tokenizer(["one two"], vocab_size=300)).train


def test_rows_are_hashed_once(tmp_path, hashed):
    first = describe_data(load(tmp_path, ["one", "two", "one two"]))
    assert hashed == [3, 1]
    again = load(tmp_path, ["one", "two", "one two"])
    assert describe_data(again) == first and hashed == [3, 1]
    path = manifest._manifest_path(again)
    content = json.loads(path.read_text())
    assert content["kind"] == "text" and content["report"].endswith("1 bad lines skipped")
    assert first == {"rows": 3, "digest": content["digest"]} == {"rows": 3, "digest": manifest._digest_rows(again)}
    # The same rows in another order, or other rows, have another digest.
    assert describe_data(again.select([2, 0, 1]))["digest"] != first["digest"]
    assert describe_data(load(tmp_path, ["one", "two", "two two"]))["digest"] != first["digest"]


def touch_rows(path: Path) -> None:
    """Give the Arrow files another time, as if they had been written again."""
    for file in json.loads(path.read_text())["files"]:
        os.utime(path.with_name(file), ns=(1, 1))


DAMAGES = {
    "missing": Path.unlink,
    "empty": lambda path: path.write_text(""),
    "cut": lambda path: path.write_text(path.read_text()[:-9]),
    "a list": lambda path: path.write_text("[]"),
    "of other rows": touch_rows,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_manifest_is_written_again(tmp_path, hashed, damage):
    rows = load(tmp_path, ["one", "two", "one two three"])
    first, path = describe_data(rows), manifest._manifest_path(rows)
    damage(path)
    hashed.clear()
    assert describe_data(rows) == first and hashed == [3]
    assert describe_data(load(tmp_path, ["one", "two", "one two three"])) == first and hashed == [3, 3]
    assert describe_data(rows) == first and hashed == [3, 3]


def test_rows_whose_manifest_cannot_be_written_are_hashed(tmp_path, monkeypatch, hashed):
    def fail(*args, **kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "write_text", fail)
    tokenizer = train_tokenizer(["one two"], vocab_size=300)
    texts = [f"one {number}" for number in range(50)]
    documents = datasets.Dataset.from_generator(lambda: ({"text": text} for text in texts))
    rows, _ = prepare_rows(documents, tokenizer, max_length=16, packing_strategy="none")
    write_rows_manifest(rows)
    assert describe_data(rows)["rows"] == 50 and hashed == [50, 50]
    assert not [*manifest._manifest_path(rows).parent.glob("*manifest*"), *tmp_path.glob(".saving*")]
