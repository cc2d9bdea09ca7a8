"""The toy model of a chat, two tasks of lm-eval for it, and its log-probabilities."""

from pathlib import Path

import pytest
import torch

from tests.inference.conftest import model, tokenizer  # noqa: F401
from tests.toys import write_jsonl


EXAMPLES = [
    {"question": "weather in", "choices": ["Oslo", "four", "capitals"], "label": 0, "text": "It rains in Oslo."},
    {"question": "two and", "choices": ["Oslo", "two", "it is them"], "label": 1, "text": "two and two is four"},
    {"question": "Answer in", "choices": ["rain", "it", "capitals"], "label": 2, "text": "HELLO AGAIN"},
]
TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {data}
test_split: train
output_type: {kind}
doc_to_text: "{text}"
doc_to_target: "{target}"
"""
CHOICE = 'doc_to_choice: "{{choices}}"\nmetric_list: [{metric: acc}, {metric: acc_norm}]\n'
ROLLING = "metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]\n"
MEAN = "group: toy_mean\ntask: [toy_inner]\naggregate_metric_list: [{metric: acc}]\nmetadata: {version: 1}\n"


@pytest.fixture(scope="session")
def tasks(tmp_path_factory) -> Path:
    """Return a directory of tasks, multiple choice and perplexity, and two groups, one with a mean of its own."""
    path = tmp_path_factory.mktemp("tasks")
    data = write_jsonl(path / "data.jsonl", EXAMPLES)
    for name in ("toy_choice", "toy_inner"):
        fields = {"data": data, "kind": "multiple_choice", "text": "{{question}}", "target": "{{label}}"}
        (path / f"{name}.yaml").write_text(TASK.format(name=name, **fields) + CHOICE)
    fields = {"data": data, "kind": "loglikelihood_rolling", "text": "", "target": "{{text}}"}
    (path / "toy_text.yaml").write_text(TASK.format(name="toy_text", **fields) + ROLLING)
    (path / "mixed.yaml").write_text("group: toy_mixed\ntask: [toy_choice, toy_text]\n")
    (path / "mean.yaml").write_text(MEAN)
    return path


def log_probabilities(model, ids: list[int]) -> torch.Tensor:  # noqa: F811
    """Return the log-probability of each id except the first, given the ids before it."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0, :-1].double()
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
