"""
Two models on the same examples: intervals beside a bootstrap, equal and earlier models, seeds, tasks and questions.
"""

import json
import math
import random
import shutil
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from markupsafe import escape

from hf_pretrain import MiniMindForCausalLM, export
from hf_pretrain.evaluation.paired import Difference, judge, paired_difference, seed_noise, student_t
from hf_pretrain.model.configuration_minimind import MiniMindConfig
from hf_pretrain.model.presets import PRESETS
from hf_pretrain.runtime.errors import UserError
from hf_pretrain.tokenizer.control_tokens import encode_documents
from hf_pretrain.tokenizer.pretrained import load_tokenizer
from hf_pretrain.tokenizer.training import train_tokenizer
from hf_pretrain.training.parsing import parse_args
from recipes.evaluate import ARGUMENTS, main
from tests.evaluation.conftest import EXAMPLES, log_probabilities
from tests.invariants.launching import ROOT, launcher_command, start
from tests.matrix import call, make_workspace
from tests.toys import toy_model, write_jsonl


# Statistics


def draw_documents(kind: str, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return totals and weights of a large set, each of shape `(2, 20_000)`."""
    number = 20_000
    if kind == "accuracy":
        # Models agree on most examples.
        right = generator.random((3, number)) < np.array([[0.4], [0.45], [0.25]])
        return np.where(right[2], right[:2], right[0]).astype(float), np.ones((2, number))
    tokens = np.ceil(generator.gamma(2.0, 60.0, number)) + 4
    hard = generator.normal(4.0, 0.6, number)
    losses = hard + generator.normal(0, 0.1, (2, number)) + np.array([[0.0], [0.03]]) * hard
    weights = np.stack([tokens, tokens])
    if kind == "other bytes":
        weights[1] += np.floor(generator.random(number) * 5)
    return losses * weights, weights


@pytest.mark.parametrize("kind", ["documents", "other bytes", "accuracy"])
def test_intervals_hold_the_true_difference_as_often_as_a_bootstrap_says(kind):
    generator = np.random.default_rng(0)
    totals, weights = draw_documents(kind, generator)
    true = np.subtract(*(totals.sum(1) / weights.sum(1)))
    samples = generator.integers(0, totals.shape[1], (1_000, 150))
    found = [paired_difference(totals[:, sample], weights[:, sample]) for sample in samples]
    share = np.mean([each.low <= true <= each.high for each in found])
    assert 0.93 <= share <= 0.97, share
    widths = []
    for sample, each in zip(samples[:40], found, strict=False):
        again = sample[generator.integers(0, len(sample), (1_000, len(sample)))]
        differences = np.subtract(*(totals[:, again].sum(2) / weights[:, again].sum(2)))
        low, high = np.quantile(differences, [0.025, 0.975])
        widths.append((high - low) / (each.high - each.low))
    assert np.mean(widths) == pytest.approx(1, abs=0.03)


def test_the_interval_of_five_examples_by_hand():
    first, second, tokens = [9.0, 4.0, 8.0, 3.0, 6.0], [8.0, 4.5, 6.0, 2.0, 6.0], [3.0, 2.0, 4.0, 1.0, 2.0]
    found = paired_difference(np.array([first, second]), np.array([tokens, tokens]))
    # The differences are 1, -0.5, 2, 1 and 0, their sum 3.5, and the tokens 12.
    difference = 3.5 / 12
    squares = sum((d - difference * n) ** 2 for d, n in zip([1, -0.5, 2, 1, 0], tokens, strict=True))
    # The quantile of Student's distribution with four degrees of freedom, from a table.
    half = 2.776 * math.sqrt(squares / 12**2 * 5 / 4)
    assert found.first - found.second == pytest.approx(difference)
    assert (found.low, found.high) == pytest.approx((difference - half, difference + half), rel=0.01)
    assert (found.first, found.num_examples, found.num_different) == (pytest.approx(30 / 12), 5, 4)
    # More quantiles, from the same table.
    for degrees, expected in ((4, 2.7764), (9, 2.2622), (29, 2.0452), (120, 1.9799)):
        assert student_t(degrees) == pytest.approx(expected, rel=3e-3)


def make_difference(value: float, half: float = 0.001, num_different: int = 200) -> Difference:
    return Difference(4.0 + value, 4.0, value - half, value + half, 200, num_different)


def test_the_two_noises_are_told_apart():
    # Five examples that all favour one model have no spread, and may still be chance.
    five, six = (paired_difference(np.array([[1.0] * n, [0.0] * n]), np.ones((2, n))) for n in (5, 6))
    assert five.low == five.high == 1
    better = "is better, by more than the chance of the examples"
    for difference, seeds, lower_is_better, begin in (
        (make_difference(0.0, num_different=0), 0.05, True, "Equal"),
        (make_difference(0.0005), 0.05, True, "No more than chance"),
        (make_difference(-0.02), 0.05, True, f"A {better}, but not of the"),
        (make_difference(0.02), 0.05, True, f"B {better}, but not of the"),
        (make_difference(0.07), 0.05, True, f"B {better}, and of the seed"),
        (make_difference(0.07), None, True, f"B {better}. Nobody"),
        (make_difference(0.07), None, False, f"A {better}"),
        (five, None, False, "Too few to tell: A and B differ on 5 examples, and fewer than 6"),
        (six, None, False, f"A {better}"),
    ):
        known = None if seeds is None else (seeds, "five runs")
        assert judge(difference, lower_is_better=lower_is_better, seeds=known).startswith(begin)


SMOLLM2 = {"hidden_size": 576, "num_hidden_layers": 30, "intermediate_size": 1536, "vocab_size": 49152}


@pytest.mark.parametrize("name, shape", [("tiny", PRESETS["tiny"]), ("smollm2", SMOLLM2)])
def test_five_seeds_of_a_preset_are_not_ranked(name, shape):
    record = json.loads((ROOT / "hf_pretrain/evaluation/seed_noise.json").read_text())[name]
    losses, kind = list(record["losses"].values()), record["kind"]
    assert len(losses) == 5 and len(set(losses)) == 5
    models = [MiniMindConfig(**{"vocab_size": 6400} | shape) for _ in range(2)]
    bound, about = seed_noise(models, kind)
    # Two runs whose losses have the standard deviation s differ by s * sqrt(2) on average over the square.
    assert bound == pytest.approx(2.776 * math.sqrt(2) * np.std(losses, ddof=1), rel=0.01) and name in about
    for first, second in combinations(losses, 2):
        text = judge(make_difference(first - second, half=0.0), lower_is_better=True, seeds=(bound, about))
        assert f"but not of the seed: two seeds of one recipe differ by up to {bound:.4f}" in text
    # Other data and other shapes have not been measured.
    assert seed_noise(models, "preference") is None
    assert seed_noise([models[0], MiniMindConfig(**PRESETS["minimind2"])], kind) is None


# Models


@pytest.fixture(scope="module")
def workspace(tmp_path_factory) -> Path:
    """Return a directory with a run of 20 steps, its checkpoint at 14, an export, and texts that nobody trained on."""
    path = tmp_path_factory.mktemp("against")
    make_workspace(path)
    generator = random.Random(1)
    words = ["river", "stone", "green", "light", "walks", "under", "seven", "quiet"]
    texts = [" ".join(generator.choices(words, k=generator.randint(3, 30))) for _ in range(150)]
    write_jsonl(path / "held_out.jsonl", [*texts, "<script>alert('river')</script> & green"])
    flags = "--dataset_name train.jsonl --max_length 32 --model_name_or_path dense --max_steps 20 --save_steps 14"
    flags += " --optim_preset adamw --learning_rate 1e-2 --use_cpu --bf16 false --report_to none"
    call(path, "python", "pretrain", f"{flags} --validation_fraction 0 --output_dir run")
    model, tokenizer = MiniMindForCausalLM.from_pretrained(path / "run"), load_tokenizer(path / "run")
    export(model, path / "llama_export", "llama", tokenizer=tokenizer)
    return path


def evaluate(workspace: Path, *words: str, data: str = "held_out.jsonl") -> dict:
    """Compare models in this process, and return what `against.json` holds."""
    shutil.rmtree(workspace / "results", ignore_errors=True)
    words = [*words, "--results_dir", str(workspace / "results"), "--use_cpu", "--bf16", "false"]
    words += ["--eval_dataset_name", str(workspace / data), "--max_length", "32", "--disable_tqdm", "true"]
    main(*parse_args(*ARGUMENTS, stage="evaluate", argv=words))
    return json.loads((workspace / "results/against.json").read_text(encoding="utf-8"))


def results_of(workspace: Path) -> dict:
    return json.loads((workspace / "results/evaluation.json").read_text())


def texts_of(workspace: Path) -> list[str]:
    return [json.loads(line)["text"] for line in (workspace / "held_out.jsonl").read_text().splitlines()]


def text_flags(first: Path, second: Path) -> list[str]:
    return [str(first), "--against", str(second), "--dataset_kind", "text"]


def test_a_model_and_its_export_are_equal(workspace, capsys):
    content = evaluate(workspace, *text_flags(workspace / "run", workspace / "llama_export"))
    [record] = content["figures"]
    assert record["verdict"].startswith("Equal") and record["num_examples"] == 151
    assert record["figure"] == "validation: loss in nats per token" and record["examples"] == []
    # The figure of model A is the validation loss of the same evaluation, whose rows hold several documents.
    assert record["first"] == pytest.approx(results_of(workspace)["held_out"]["eval_loss"], rel=1e-6)
    assert content["models"] == {"A": "run", "B": "llama_export"}
    assert record["verdict"] in capsys.readouterr().out


def test_a_model_and_an_earlier_one_are_told_apart_and_stand_side_by_side(workspace):
    [record] = evaluate(workspace, *text_flags(workspace / "run", workspace / "run/checkpoint-14"))["figures"]
    assert record["verdict"].startswith("A is better, by more than the chance of the examples. Nobody has measured")
    assert record["high"] < 0 and record["first"] < record["second"]
    texts = texts_of(workspace)
    apart = [abs(first - second) for first, second in (each["figures"] for each in record["examples"])]
    assert apart == sorted(apart, reverse=True) and len(apart) == 20
    # The first example is the one that differs most, by the log-probabilities of both models.
    tokenizer = load_tokenizer(workspace / "run")
    losses = []
    for name in ("run", "run/checkpoint-14"):
        model = MiniMindForCausalLM.from_pretrained(workspace / name).eval()
        documents = encode_documents(texts, tokenizer)
        losses.append([-log_probabilities(model, ids).mean().item() for ids in documents if len(ids) <= 32])
    short = [text for text, ids in zip(texts, documents, strict=True) if len(ids) <= 32]
    most = max(range(len(short)), key=lambda n: abs(losses[0][n] - losses[1][n]))
    first = next(each for each in record["examples"] if each["text"] in short)
    assert first["text"] == short[most]
    assert first["figures"] == pytest.approx([losses[0][most], losses[1][most]], rel=1e-4)
    page = (workspace / "results/against.html").read_text(encoding="utf-8")
    assert str(escape(first["text"])) in page and record["verdict"] in page


def test_the_page_shows_texts_of_the_data_as_text(workspace):
    write_jsonl(workspace / "script.jsonl", ["<script>alert('river')</script> & green", "river under stone", "seven"])
    evaluate(workspace, *text_flags(workspace / "run", workspace / "dense"), data="script.jsonl")
    page = (workspace / "results/against.html").read_text(encoding="utf-8")
    assert "&lt;script&gt;alert(" in page and "<script" not in page and "://" not in page


def test_models_with_other_tokenizers_are_compared_by_bytes(workspace):
    tokenizer = train_tokenizer(texts_of(workspace)[:20], vocab_size=300)
    model = toy_model(vocab_size=300)
    model.save_pretrained(workspace / "other")
    tokenizer.save_pretrained(workspace / "other")
    [record] = evaluate(workspace, *text_flags(workspace / "other", workspace / "run"))["figures"]
    assert (record["figure"], record["num_examples"]) == ("validation: bits per byte", 151)
    assert record["first"] == pytest.approx(results_of(workspace)["held_out"]["eval_bits_per_byte"], rel=1e-5)
    evaluate(workspace, *text_flags(workspace / "run", workspace / "other"))
    assert record["second"] == pytest.approx(results_of(workspace)["held_out"]["eval_bits_per_byte"], rel=1e-5)


@pytest.mark.distributed
def test_two_processes_measure_what_one_measures(workspace):
    words = text_flags(workspace / "run", workspace / "run/checkpoint-14")
    expected = evaluate(workspace, *words)
    command = [*launcher_command("torchrun"), str(ROOT / "recipes/evaluate.py"), *words, "--max_length", "32"]
    command += ["--eval_dataset_name", str(workspace / "held_out.jsonl"), "--results_dir", str(workspace / "two")]
    result = start([*command, "--use_cpu", "--bf16", "false"])
    assert result.returncode == 0, result.stdout[-3000:]
    [found], [one] = json.loads((workspace / "two/against.json").read_text())["figures"], expected["figures"]
    assert [each["text"] for each in found["examples"]] == [each["text"] for each in one["examples"]]
    for name in ("first", "second", "low", "high"):
        assert found[name] == pytest.approx(one[name], rel=1e-5)


def test_a_second_model_that_is_not_there_is_noticed_before_the_first_one_is_evaluated(workspace):
    with pytest.raises(UserError):
        evaluate(workspace, *text_flags(workspace / "run", workspace / "nowhere"))
    assert not (workspace / "results/evaluation.json").exists()


# Tasks and answers


def test_choices_have_bits_of_the_right_answer_and_a_level_of_guessing(model, tokenizer, talker, workspace, tasks):
    flags = ["--tasks", "toy_choice,toy_text", "--include_path", str(tasks), "--apply_chat_template", "false"]
    content = evaluate(workspace, *text_flags(talker, talker), *flags)
    records = {record["figure"]: record for record in content["figures"]}
    bits = "toy_choice: bits per byte of the right answer"
    assert [*records] == ["validation: loss in nats per token", "toy_choice: acc", "toy_choice: acc_norm", bits]
    nats, num_bytes = 0.0, 0
    for example in EXAMPLES:
        (question,) = encode_documents([example["question"]], tokenizer)
        choice = example["choices"][example["label"]]
        (ids,) = encode_documents([f"{example['question']} {choice}"], tokenizer)
        nats -= log_probabilities(model, ids[:-1])[len(question) - 2 :].sum().item()
        num_bytes += len(choice.encode())
    assert records[bits]["first"] == pytest.approx(nats / math.log(2) / num_bytes, rel=1e-4)
    results = results_of(workspace)["tasks"]
    assert "examples" not in results["toy_choice"]
    accuracy = records["toy_choice: acc"]
    assert accuracy["first"] == pytest.approx(results["toy_choice"]["metrics"]["acc"]["value"])
    assert accuracy["chance"] == pytest.approx(1 / 3)
    assert all(record["verdict"].startswith("Equal") for record in content["figures"])


def test_answers_to_questions_are_compared_with_their_loops(talker, tokenizer, workspace):
    model = MiniMindForCausalLM.from_pretrained(talker)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.02)
    model.save_pretrained(workspace / "rambler")
    tokenizer.save_pretrained(workspace / "rambler")
    records = [{"prompt": "two and two?", "states": ["four"]}, {"prompt": "hello", "states": ["never"]}]
    questions = write_jsonl(workspace / "questions.jsonl", records)
    chats = [{"prompt": "two and two?", "completion": "It is four."}, {"prompt": "hello", "completion": "HELLO YOU"}]
    write_jsonl(workspace / "chats.jsonl", chats)
    words = [str(talker), "--against", str(workspace / "rambler"), "--enable_thinking", "false"]
    # Questions of both kinds are compared apart.
    words += ["--general_questions", write_jsonl(workspace / "general.jsonl", records[1:] * 2)]
    content = evaluate(workspace, *words, "--eval_questions", questions, data="chats.jsonl")
    figures = {record["figure"]: record for record in content["figures"]}
    right, looping = figures["questions: answers right"], figures["questions: answers that loop"]
    assert (right["first"], right["second"], right["num_different"]) == (0.5, 0, 1)
    assert right["examples"][0]["text"] == "two and two?" and right["examples"][0]["answers"][0] == "It is four."
    assert results_of(workspace)["held_out"]["eval_recall"] == 0.5
    assert looping["first"] == 0 and right["verdict"].startswith("Too few to tell")
    general = figures["general questions: answers right"]
    assert (general["first"], general["second"]) == (0, 0) and general["verdict"].startswith("Equal")
