"""Draws per record: which conversations get a system message, and which an empty thought."""

from pathlib import Path

import pytest
from datasets import Dataset

from hf_pretrain.data.conversations import read_conversation
from hf_pretrain.data.reward_tasks import load_tasks
from hf_pretrain.rows.chat_arguments import ChatArguments
from hf_pretrain.rows.draws import SYSTEM_MESSAGES
from hf_pretrain.rows.encoding import EMPTY_THOUGHT
from hf_pretrain.rows.reading import Reading
from hf_pretrain.tokenizer.pretrained import load_tokenizer
from hf_pretrain.tokenizer.rendering import set_template
from hf_pretrain.tokenizer.training import train_tokenizer
from tests.toys import write_jsonl


NUM = 100


def documents() -> Dataset:
    """Return conversations of two turns; every third one has a thought, every fifth one tools."""
    texts = []
    for number in range(NUM):
        answers = [{"role": "assistant", "content": f"{EMPTY_THOUGHT}{number}"}, {"role": "assistant", "content": "B"}]
        if number % 3 == 0:
            answers[1]["reasoning_content"] = "Hm."
        question = {"role": "user", "content": EMPTY_THOUGHT}
        record = {"messages": [question, answers[0], question, answers[1]]}
        if number % 5 == 0:
            record["tools"] = [{"type": "function", "function": {"name": "f"}}]
        texts.append(read_conversation(record))
    return Dataset.from_dict({"text": texts})


@pytest.fixture(scope="module", params=["ours", "minimind-3"])
def tokenizer(request):
    if request.param == "ours":
        found = train_tokenizer(["What is this? A text."] * 3, vocab_size=300)
    else:
        found = load_tokenizer(Path(__file__).parents[1] / "fixtures/tokenizers/v3")
    set_template(found)
    return found


def rendered(tokenizer, *, seed: int | None = 42, **flags) -> list[str]:
    """Return the rows as text, with the trained tokens of each row after a bar."""
    arguments = ChatArguments(packing="none", max_length=400, **flags)
    rows, _ = arguments.pack(documents(), tokenizer, seed=seed)
    decode = tokenizer.decode
    return [
        decode(row["input_ids"])
        + "|"
        + decode([token for token, weight in zip(row["input_ids"], row["loss_mask"], strict=True) if weight])
        for row in rows
    ]


def without_thoughts(text: str) -> str:
    """Remove the empty thoughts that a template writes, but not those that a message spells."""
    return text.replace(f"assistant\n{EMPTY_THOUGHT}", "assistant\n")


def test_a_share_of_the_conversations_begins_with_a_system_message(tokenizer):
    plain = rendered(tokenizer)
    drawn = rendered(tokenizer, add_system_ratio=0.2)
    assert plain == rendered(tokenizer, seed=None, add_system_ratio=0.2), "the validation set"
    heads = [new.removesuffix(old) for new, old in zip(drawn, plain, strict=True)]
    expected = {f"<|im_start|>system\n{text}<|im_end|>\n" for text in SYSTEM_MESSAGES}
    assert set(heads) == {*expected, ""} and not any(heads[::5]), "never beside tools"
    assert 0.11 * NUM < sum(map(bool, heads)) < 0.21 * NUM
    assert drawn != rendered(tokenizer, add_system_ratio=0.2, seed=43)
    assert [new != old for new, old in zip(rendered(tokenizer, add_system_ratio=1.0), plain, strict=True)] == [
        bool(number % 5) for number in range(NUM)
    ]


def test_a_share_of_the_conversations_has_empty_thoughts(tokenizer):
    whole, none, drawn = (rendered(tokenizer, empty_think_ratio=ratio) for ratio in (1.0, 0.0, 0.2))
    # MiniMind's function removes the empty thoughts from the rendered text, or leaves all of them.
    assert none == [without_thoughts(text) for text in whole] and "Hm." in none[0] and "Hm." in whole[0]
    # The second answer of record 0 has a thought, the first has none.
    assert [text.count(f"assistant\n{EMPTY_THOUGHT}") for text in whole[:2]] == [1, 2]
    assert all(text.rpartition("|")[2] == other.rpartition("|")[2] for text, other in zip(whole, none, strict=True))
    kept = [text != other for text, other in zip(drawn, none, strict=True)]
    assert all(text in pair for text, *pair in zip(drawn, whole, none, strict=True))
    assert 0.08 * NUM < sum(kept) < 0.28 * NUM


def test_tasks_get_system_messages_but_keep_their_split(tmp_path):
    records = [{"prompt": f"What is {number}?", "task": None} for number in range(NUM)]
    names = [write_jsonl(tmp_path / "tasks.jsonl", records), "embedded:arithmetic"]
    plain, drawn = (
        load_tasks(names, Reading(kind="task", validation_fraction=0.1), add_system_ratio=ratio)
        for ratio in (0.0, 0.2)
    )
    for before, after in zip(plain, drawn, strict=True):
        assert [row["prompt"][-1] for row in before] == [row["prompt"][-1] for row in after]
    is_new = [prompt[0]["role"] == "system" for prompt in drawn[0]["prompt"]]
    assert 0.17 < sum(is_new) / len(is_new) < 0.23
    assert not any(prompt[0]["role"] == "system" for prompt in plain[0]["prompt"])
