"""What one stage holds out of the embedded corpora, no stage trains on."""

import json
import re

import datasets
import pytest

from hf_pretrain.data.loading import load_documents
from hf_pretrain.data.tasks import ANSWER_FORMATS, load_tasks


@pytest.fixture(scope="module", params=["chitchat", "chatterbot", pytest.param("idiom", marks=pytest.mark.slow)])
def stages(request, tmp_path_factory):
    """Name of the part; what pretraining, SFT (and so distillation) and DPO train on and hold out of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache")))
        schemas = ("text", "conversation", "preference")
        sides = [load_documents([f"embedded:{request.param}"], schema=schema) for schema in schemas]
        return request.param, *([list(side["text"]) for side in sides_of_schema] for sides_of_schema in sides)


def spoken(text: str) -> list[str]:
    """What is said in a conversation, a preference (its true reply), or a dialogue's text."""
    if not text.startswith("{"):
        return [line[3:] if line[:3] in ("A: ", "B: ") else line for line in text.split("\n")]
    parts = json.loads(text)
    return [message["content"] for message in parts.get("messages") or parts["prompt"] + parts["chosen"]]


def joined(texts: list[str]) -> str:
    return "\0" + "\0".join("\n" + "\n".join(spoken(text)) + "\n" for text in texts) + "\0"


def leaks(part: str, held_out: list[str], trained_on: str) -> int:
    """How many of the held-out documents, conversations or prompts stand in a text as they are."""
    if part == "idiom":
        # The idiom that is asked about, or that the dictionary entry is of.
        pattern = r"(?m)^(?:“(.+)”是什么意思？|(.+?) \(.+\))$"
        words = [{"".join(found) for found in re.findall(pattern, text)} for text in (joined(held_out), trained_on)]
        assert len(words[0]) >= len(held_out) - 2
        return len(words[0] & words[1])
    # One line alone, such as a greeting, may be said in other dialogues too.
    wanted = (joined([text]) if len(spoken(text)) == 1 else joined([text])[1:-1] for text in held_out)
    return sum(text in trained_on for text in wanted)


def test_nothing_held_out_is_trained_on(stages):
    part, *sides = stages
    found = {}
    for holder, (_, held_out) in zip(("text", "conversation", "preference"), sides, strict=True):
        assert len(held_out) > 20
        for trainer, (train, _) in zip(("text", "conversation", "preference"), sides, strict=True):
            found[holder, trainer] = leaks(part, held_out, joined(train)), len(held_out)
    assert not any(number for number, _ in found.values()), found


def test_tasks_ask_nothing_that_other_stages_train_on(stages):
    part, (train, _), *_ = stages
    name, suffix = {
        "idiom": ("idiom-task", "__"),
        "chitchat": ("answer-format", f" {ANSWER_FORMATS['sentence'].instruction}"),
        "chatterbot": ("answer-format", f" {ANSWER_FORMATS['sentence'].instruction}"),
    }[part]
    tasks, held_out = load_tasks([f"embedded:{name}"], validation_fraction=0.01)
    assert len(held_out) >= 5 and len(tasks) + len(held_out) == 2000
    trained_on = "\n" + "\n".join(train)
    asked = [prompt[0]["content"].removesuffix(suffix).removeprefix("补全成语：") for prompt in held_out["prompt"]]
    if part == "idiom":
        words = [beginning + solution[0] for beginning, solution in zip(asked, held_out["solution"], strict=True)]
        asked = [f"\n{word} (" for word in words]
    assert not [question for question in asked if question in trained_on]
