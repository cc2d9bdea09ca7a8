import pytest

from hf_pretrain.rows import preparation
from hf_pretrain.rows.chat_arguments import ChatArguments
from hf_pretrain.rows.data_arguments import DataArguments, PreferenceArguments
from hf_pretrain.rows.preference_pairs import prepare_pairs
from hf_pretrain.rows.preparation import load_rows
from hf_pretrain.stages.dpo import DPOTrainingArguments
from hf_pretrain.tokenizer.training import train_tokenizer
from hf_pretrain.training.training_arguments import LMTrainingArguments
from tests.toys import write_jsonl


@pytest.mark.parametrize(("flags", "num_rows"), [({}, 300), ({"whole_files": True, "encoding": "gb18030"}, 2)])
def test_data_without_a_document_for_validation_say_so(tmp_path, monkeypatch, flags, num_rows):
    warnings: list[str] = []
    monkeypatch.setattr(preparation.logger, "warning", warnings.append)
    names = [tmp_path / "one.txt", tmp_path / "two.txt"]
    for name in names:
        text = "\n\n".join(f"{name.stem} 第{number}段" for number in range(150))
        name.write_text(text, encoding=flags.get("encoding", "utf-8"))
    data_args = DataArguments(dataset_name=[*map(str, names)], packing="none", max_length=64, **flags)
    args = LMTrainingArguments(str(tmp_path / "out"), use_cpu=True, bf16=False)
    tokenizer = train_tokenizer(["第一段 one two"], vocab_size=400)
    data = load_rows(data_args, args, tokenizer)
    # Of many documents, the hash chooses some for validation. Of two books, it chooses none.
    assert len(data.train) + len(data.first_eval or []) == num_rows
    assert (data.eval is None) == (num_rows == 2) == any("No document is for validation" in text for text in warnings)


@pytest.mark.parametrize("kind", ["conversations", "preferences"])
def test_validation_data_may_leave_no_rows(tmp_path, kind):
    answers = {"completion": "four"} if kind == "conversations" else {"chosen": "four", "rejected": "two"}
    short, long = (
        [write_jsonl(tmp_path / f"{length}.jsonl", [{"prompt": "two " * length, **answers}])] for length in (1, 40)
    )
    args = DPOTrainingArguments(str(tmp_path), use_cpu=True, bf16=False, max_length=32)
    tokenizer = train_tokenizer(["two four user assistant"], vocab_size=420)
    if kind == "preferences":
        data = load_rows(PreferenceArguments(short, long), args, tokenizer, prepare=prepare_pairs)
    else:
        data = load_rows(ChatArguments(short, long, max_length=32), args, tokenizer)
    assert len(data.train) == 1 and data.eval is None and data.conversations is None


def test_the_report_has_the_worst_faults_of_conversations(tmp_path):
    long = {"prompt": "two?", "completion": "four " * 40}
    path = write_jsonl(
        tmp_path / "chats.jsonl", [{"prompt": f"two {n}?", "completion": "four"} for n in range(3)] + [long]
    )
    args = LMTrainingArguments(str(tmp_path / "out"), use_cpu=True, bf16=False)
    tokenizer = train_tokenizer(["two four user assistant"], vocab_size=420)
    data = load_rows(ChatArguments(dataset_name=[path], max_length=32, validation_fraction=0.0), args, tokenizer)
    assert data.report[2:] == [
        "25.0% of 4 conversations have an answer that --max_length cuts (first: conversation:4)"
    ]
