"""In the embedded corpora, no stage trains on data that another stage validates on."""

import json
import re

import datasets
import pytest

from hf_pretrain.data.documents import load_documents
from hf_pretrain.data.reward_tasks import ANSWER_FORMATS, load_tasks


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["chitchat", "chatterbot", "idiom"])
def stages(request, tmp_path_factory):
    """Return the name of a part, then training and validation texts of pretraining, SFT (and distillation) and DPO."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache")))
        schemas = ("text", "conversation", "preference")
        sides = [load_documents([f"embedded:{request.param}"], schema=schema) for schema in schemas]
        return request.param, *([list(side["text"]) for side in sides_of_schema] for sides_of_schema in sides)


def spoken(text: str) -> list[str]:
    """Return the lines of a conversation, of a preference (with its real reply) or of a dialogue's text."""
    if not text.startswith("{"):
        return [line[3:] if line[:3] in ("A: ", "B: ") else line for line in text.split("\n")]
    parts = json.loads(text)
    return [message["content"] for message in parts.get("messages") or parts["prompt"] + parts["chosen"]]


def joined(texts: list[str]) -> str:
    """Join the lines of all texts, so that a search finds only whole lines."""
    return "\0" + "\0".join("\n" + "\n".join(spoken(text)) + "\n" for text in texts) + "\0"


def leaks(part: str, validation: list[str], trained_on: str) -> int:
    """Count the validation documents, conversations or prompts that occur unchanged in `trained_on`."""
    if part == "idiom":
        # The idiom in a question, or at the head of a dictionary entry.
        pattern = r"(?m)^(?:“(.+)”是什么意思？|(.+?) \(.+\))$"
        words = [{"".join(found) for found in re.findall(pattern, text)} for text in (joined(validation), trained_on)]
        assert len(words[0]) >= len(validation) - 2
        return len(words[0] & words[1])
    # A single line, such as a greeting, may also occur in other dialogues.
    wanted = (joined([text]) if len(spoken(text)) == 1 else joined([text])[1:-1] for text in validation)
    return sum(text in trained_on for text in wanted)


def test_no_stage_trains_on_validation_data(stages):
    part, *sides = stages
    found = {}
    for holder, (_, validation) in zip(("text", "conversation", "preference"), sides, strict=True):
        assert len(validation) > 20
        for trainer, (train, _) in zip(("text", "conversation", "preference"), sides, strict=True):
            found[holder, trainer] = leaks(part, validation, joined(train)), len(validation)
    assert not any(number for number, _ in found.values()), found


# The tasks are made of these parts.
@pytest.mark.parametrize("stages", ["chitchat", "chatterbot"], indirect=True)
def test_tasks_ask_nothing_that_other_stages_train_on(stages):
    _, (train, _), *_ = stages
    suffix = f" {ANSWER_FORMATS['sentence'].instruction}"
    tasks, validation = load_tasks(["embedded:answer-format"], validation_fraction=0.01)
    assert len(validation) >= 5 and len(tasks) + len(validation) == 2000
    trained_on = "\n" + "\n".join(train)
    asked = [prompt[0]["content"].removesuffix(suffix) for prompt in validation["prompt"]]
    assert not [question for question in asked if question in trained_on]
