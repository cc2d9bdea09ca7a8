"""Compare the metrics with written-out formulas, and the recipe with the run that it evaluates again."""

import json
import math
import re
from pathlib import Path

import pytest
import torch

from hf_pretrain import MiniMindConfig, MiniMindForCausalLM
from hf_pretrain.evaluation.lm_eval_tasks import evaluate_tasks
from hf_pretrain.loading.model import with_yarn
from hf_pretrain.runtime.errors import UserError
from hf_pretrain.tokenizer.control_tokens import encode_documents
from hf_pretrain.tokenizer.pretrained import load_tokenizer
from hf_pretrain.training.evaluation_arguments import check_whole_model
from hf_pretrain.training.parsing import parse_args
from hf_pretrain.training.training_arguments import LMTrainingArguments
from recipes.evaluate import ARGUMENTS, main
from tests.evaluation.conftest import EXAMPLES, log_probabilities
from tests.invariants.launching import ROOT, launcher_command, start
from tests.toys import LikeMPS, write_jsonl


pytest.importorskip("lm_eval")


@pytest.fixture(scope="module")
def task_results(model, talker, tasks):
    names = ["toy_mixed", "toy_mean"]
    return evaluate_tasks(model, load_tokenizer(talker), names, include_path=[str(tasks)], batch_size=2)


def test_multiple_choice_is_scored_after_bos(model, tokenizer, task_results):
    num_right, num_right_by_length = 0, 0
    for example in EXAMPLES:
        # eos does not belong to a question.
        (question,) = encode_documents([example["question"]], tokenizer)
        scores = []
        for choice in example["choices"]:
            (ids,) = encode_documents([f"{example['question']} {choice}"], tokenizer)
            scores.append(log_probabilities(model, ids[:-1])[len(question) - 2 :].sum().item())
        num_right += max(range(3), key=scores.__getitem__) == example["label"]
        lengths = [score / len(choice) for score, choice in zip(scores, example["choices"], strict=True)]
        num_right_by_length += max(range(3), key=lengths.__getitem__) == example["label"]
    metrics = task_results["toy_choice"]["metrics"]
    assert metrics["acc"]["value"] == pytest.approx(num_right / 3)
    assert metrics["acc_norm"]["value"] == pytest.approx(num_right_by_length / 3)
    assert task_results["toy_choice"]["num_examples"] == 3


def test_only_a_group_with_figures_stands_for_its_tasks(task_results):
    groups = {name: result["group"] for name, result in task_results.items() if result["metrics"]}
    assert groups == {"toy_choice": None, "toy_text": None, "toy_mean": None, "toy_inner": "toy_mean"}


def test_perplexity_counts_bos_once_and_never_as_text(model, tokenizer, task_results):
    ids = encode_documents([example["text"] for example in EXAMPLES], tokenizer)
    nats = -sum(log_probabilities(model, document[:-1]).sum().item() for document in ids)
    num_bytes = sum(len(example["text"].encode()) for example in EXAMPLES)
    metrics = task_results["toy_text"]["metrics"]
    assert metrics["bits_per_byte"]["value"] == pytest.approx(nats / num_bytes / math.log(2), rel=1e-5)
    num_words = sum(len(example["text"].split()) for example in EXAMPLES)
    assert metrics["word_perplexity"]["value"] == pytest.approx(math.exp(nats / num_words), rel=1e-4)


# The recipe


@pytest.fixture(scope="module")
def run(talker, tmp_path_factory) -> tuple[Path, list[str]]:
    """Return a run of two steps, and the flags of its data."""
    path = tmp_path_factory.mktemp("run")
    texts = [f"It rains in Oslo, and {number} and two is four. " * (number % 5 + 1) for number in range(60)]
    write_jsonl(path / "train.jsonl", texts)
    data = ["--dataset_name", str(path / "train.jsonl"), "--max_length", "48", "--validation_fraction", "0.2"]
    arguments = ["--model_name_or_path", str(talker), "--output_dir", str(path / "run"), "--max_steps", "2"]
    command = [*launcher_command("python"), str(ROOT / "recipes/pretrain.py"), *arguments, *data]
    result = start([*command, "--save_strategy", "no", "--bf16", "false"])
    assert result.returncode == 0, result.stdout[-3000:]
    return path / "run", [*data, "--bf16", "false"]


def evaluate(launcher: str, *arguments: str, **environment: str):
    return start([*launcher_command(launcher), str(ROOT / "recipes/evaluate.py"), *arguments], **environment)


@pytest.mark.distributed
def test_the_recipe_gives_the_final_metrics_of_the_run(run, tmp_path):
    directory, data = run
    result = evaluate("torchrun", "--output_dir", str(directory), "--results_dir", str(tmp_path), *data)
    assert result.returncode == 0, result.stdout[-3000:]
    results = json.loads((tmp_path / "evaluation.json").read_text())
    history = json.loads((directory / "trainer_state.json").read_text())["log_history"]
    (final,) = [entry for entry in history if "eval_loss" in entry][-1:]
    assert results["held_out"] == {
        key: pytest.approx(final[key], rel=1e-6) for key in ("eval_loss", "eval_perplexity", "eval_bits_per_byte")
    }
    assert result.stdout.count(f"validation  loss (nats per token)  {final['eval_loss']:.4f}") == 1
    assert not (directory / "evaluation.json").exists()
    assert str(directory.parent) not in (tmp_path / "evaluation.json").read_text()


def evaluate_here(*words: str) -> None:
    words = [*words, "--use_cpu", "--bf16", "false", "--disable_tqdm", "true"]
    main(*parse_args(*ARGUMENTS, stage="evaluate", argv=words))


def test_a_test_file_is_evaluated_whole_and_tasks_beside_it(model, tokenizer, talker, tasks, tmp_path, capsys):
    texts = [f"{example['text']} {number}" for number, example in enumerate(EXAMPLES * 2)]
    words = ["--model_name_or_path", str(talker), "--results_dir", str(tmp_path), "--max_length", "128"]
    words += ["--eval_dataset_name", write_jsonl(tmp_path / "test.jsonl", texts), "--dataset_kind", "text"]
    evaluate_here(*words, "--tasks", "toy_choice,toy_text", "--include_path", str(tasks))
    scores = torch.cat([log_probabilities(model, document) for document in encode_documents(texts, tokenizer)])
    results = json.loads((tmp_path / "evaluation.json").read_text())
    assert results["held_out"]["eval_loss"] == pytest.approx(-scores.mean().item(), rel=1e-4)
    assert "6 documents" in results["data"] and results["tasks"].keys() == {"toy_choice", "toy_text"}
    bits = results["tasks"]["toy_text"]["metrics"]["bits_per_byte"]["value"]
    assert re.search(rf"^toy_text +bits_per_byte +{bits:.4f}$", capsys.readouterr().out, re.MULTILINE)


def test_another_scaling_of_the_positions_is_another_model(model, tokenizer, talker, tmp_path):
    texts = ["It rains in Oslo. " * 30, "two and two " * 100]
    data = write_jsonl(tmp_path / "test.jsonl", texts)
    words = ["--model_name_or_path", str(talker), "--eval_dataset_name", data, "--results_dir", str(tmp_path)]
    words += ["--max_length", "1024", "--dataset_kind", "text"]
    with LikeMPS():
        evaluate_here(*words, "--inference_rope_scaling", "256:4")
    # Another evaluation, without the flag, leaves the file alone.
    evaluate_here(*words)
    scaled = MiniMindForCausalLM(with_yarn(model.config, "256:4")).eval()
    scaled.load_state_dict(model.state_dict())
    documents = encode_documents(texts, tokenizer)
    assert 256 < max(map(len, documents)) <= 1024
    for name, scaling, each in (("evaluation", None, model), ("evaluation-256x4", "256:4", scaled)):
        results = json.loads((tmp_path / f"{name}.json").read_text())
        expected = -torch.cat([log_probabilities(each, ids) for ids in documents]).mean().item()
        assert results["inference_rope_scaling"] == scaling
        assert results["held_out"]["eval_loss"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.distributed
def test_two_processes_share_the_examples_of_tasks(talker, tasks, task_results, tmp_path):
    flags = ["--model_name_or_path", str(talker), "--results_dir", str(tmp_path), "--validation_fraction", "0"]
    flags += ["--tasks", "toy_choice,toy_text", "--include_path", str(tasks), "--apply_chat_template", "false"]
    result = evaluate("torchrun", *flags, "--bf16", "false", "--use_cpu")
    assert result.returncode == 0, result.stdout[-3000:]
    found = json.loads((tmp_path / "evaluation.json").read_text())["tasks"]
    for name in ("toy_choice", "toy_text"):
        # Bootstrapped errors depend on the order of the examples.
        for metric, figures in task_results[name]["metrics"].items():
            assert found[name]["metrics"][metric]["value"] == pytest.approx(figures["value"], rel=1e-5)


@pytest.mark.slow
def test_a_run_measures_tasks_with_each_evaluation_and_learns_the_same(run, talker, tasks, tmp_path):
    _, data = run
    command = [*launcher_command("python"), str(ROOT / "recipes/pretrain.py"), "--model_name_or_path", str(talker)]
    command += [*data, "--config_overrides", "dropout=0.1", "--max_steps", "2", "--eval_steps", "1", "--use_cpu"]
    command += ["--logging_steps", "1", "--save_strategy", "no", "--report_to", "none", "--output_dir"]
    logs = []
    for name in ("plain", "tasks"):
        flags = ["--eval_tasks", "toy_choice,toy_text", "--eval_tasks_path", str(tasks)] if name == "tasks" else []
        result = start([*command, str(tmp_path / name), *flags])
        assert result.returncode == 0, result.stdout[-3000:]
        logs.append(json.loads((tmp_path / name / "trainer_state.json").read_text())["log_history"])
    plain, measured = ([entry["loss"] for entry in log if "loss" in entry] for log in logs)
    # The dropout of step 2 does not depend on the tasks after step 1.
    assert plain == measured and len(plain) == 2
    evaluations = [entry for entry in logs[1] if "eval_loss" in entry]
    model, tokenizer = MiniMindForCausalLM.from_pretrained(tmp_path / "tasks").eval(), load_tokenizer(talker)
    after = evaluate_tasks(model, tokenizer, ["toy_text"], include_path=[str(tasks)])["toy_text"]["metrics"]
    figures = [entry["eval_toy_text_bits_per_byte"] for entry in evaluations]
    assert len(figures) == 2 and figures[1] == pytest.approx(after["bits_per_byte"]["value"], rel=1e-5)
    assert all("eval_toy_choice_acc" in entry for entry in evaluations)
    assert f"toy_text_bits_per_byte {figures[1]:.4f}" in result.stdout
    result = start([*command, str(tmp_path / "none"), *flags, "--validation_fraction", "0"])
    assert result.returncode == 2 and "--eval_tasks runs with each evaluation, and there is none" in result.stdout


def test_tasks_are_refused_where_a_process_holds_parts_of_the_model(tmp_path, monkeypatch):
    args = LMTrainingArguments(str(tmp_path), use_cpu=True)
    check_whole_model(args, "--eval_tasks")
    # `accelerate launch` sets these variables.
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    with pytest.raises(UserError):
        check_whole_model(args, "--eval_tasks")


def test_lm_eval_knows_the_model_type(caplog):
    from lm_eval.models.huggingface import HFLM

    harness = HFLM.__new__(HFLM)
    harness._get_backend(MiniMindConfig())
    assert harness.backend == "causal" and "neither marked" not in caplog.text
