"""Answers that loop: the example ends loops, terms equal formulas, and figures of the page those of the record."""

import json
import re
import sys
from types import SimpleNamespace

import pytest
import torch

from benchmarks import loops, unlikelihood
from examples import no_loops
from hf_pretrain import MiniMindForCausalLM
from hf_pretrain.inference.samples import generate
from hf_pretrain.runtime.errors import UserError
from hf_pretrain.tokenizer.control_tokens import encode_prompt
from hf_pretrain.tokenizer.pretrained import load_tokenizer
from hf_pretrain.tokenizer.training import train_tokenizer
from tests.invariants.launching import ROOT
from tests.toys import toy_model, write_jsonl


def test_repeated_tokens_and_prompts_are_found():
    marks = no_loops.mark_repeated([5, 6, 7, 8, 9, 5, 6, 7, 8])
    assert marks == [False] * 5 + [True] * 4
    # The 4-gram 3333 occurs again one token later, and so do all of its tokens but the first.
    assert no_loops.mark_repeated([3] * 6) == [False] + [True] * 5
    # Two documents in a row: only the first begins with a prompt of an answer.
    inputs = {
        "input_ids": torch.tensor([[11, 12, 13, 14, 21, 22]]),
        "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1]]),
        "labels": torch.tensor([[-100, -100, 13, 14, -100, -100]]),
    }
    assert unlikelihood.find_prompts(inputs) == [[11, 12]]


def test_steps_on_the_term_end_a_loop():
    tokenizer = train_tokenizer(["one two three four"] * 4, vocab_size=320)
    torch.manual_seed(0)
    model = toy_model(vocab_size=len(tokenizer)).float()
    arguments = unlikelihood.UnlikelihoodArguments(answer_tokens=16)
    trainer = SimpleNamespace(
        term_arguments=arguments, processing_class=tokenizer, args=SimpleNamespace(device=torch.device("cpu"))
    )
    # Learn to say one token for ever.
    optimizer, row = torch.optim.AdamW(model.parameters(), lr=1e-2), torch.tensor([[5, 6, *[7] * 20]])
    for _ in range(30):
        model(row, labels=row).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    term = unlikelihood.UnlikelihoodTrainer.unlikelihood
    first = term(trainer, model, [[5, 6]])
    # All but the first answer token are repeated: the mean of -log(1 - p) by its formula.
    answer = torch.tensor([[5, 6, *[7] * 16]])
    p = model(answer).logits.softmax(-1)[0, 2:-1, 7]
    torch.testing.assert_close(first, -(1 - p).clamp(min=1e-5).log().mean(), rtol=1e-3, atol=1e-3)
    # It ends much earlier, at a step that depends on the first weights.
    for _ in range(400):
        loss = term(trainer, model, [[5, 6]])
        if not loss.requires_grad:
            break
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert first > 1 and term(trainer, model, [[5, 6]]) == 0


def test_the_example_ends_loops_and_gives_a_penalty(talker, tmp_path, monkeypatch):
    """A model that says one token for ever learns real answers, and a model that does not loop is left alone."""
    model, tokenizer = MiniMindForCausalLM.from_pretrained(talker), load_tokenizer(talker)
    questions = ["two and two?", "hello"]
    prompts = [encode_prompt(tokenizer, [{"role": "user", "content": text}]) for text in questions]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for prompt in prompts * 25:
        row = torch.tensor([[*prompt, *[50] * 100]])
        model(row, labels=row).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(tmp_path / "loops")
    tokenizer.save_pretrained(tmp_path / "loops")
    turns = [(text, f"{answer}, I think.") for text in questions for answer in ("It is four", "It is five")]
    roles = ("user", "assistant")
    path = write_jsonl(
        tmp_path / "chats.jsonl",
        [{"messages": [{"role": r, "content": c} for r, c in zip(roles, turn, strict=True)]} for turn in turns],
    )
    words = ["no_loops", "--dataset_name", path, "--output_dir", str(tmp_path / "out/new"), "--eval_strategy", "no"]
    words += ["--max_steps", "60", "--learning_rate", "1e-3", "--per_device_train_batch_size", "2", "--model"]
    monkeypatch.setattr(sys, "argv", [*words, str(talker)])
    with pytest.raises(UserError):
        no_loops.main()
    monkeypatch.setattr(sys, "argv", [*words, str(tmp_path / "loops")])
    no_loops.main()
    pairs = [json.loads(line) for line in (tmp_path / "out/new.jsonl").read_text().splitlines()]
    loop = tokenizer.decode([50] * no_loops.ANSWER_TOKENS)
    assert [pair["rejected"] for pair in pairs] == [loop] * 4
    new = MiniMindForCausalLM.from_pretrained(tmp_path / "out/new")
    assert new.generation_config.repetition_penalty == 1.1
    for prompt in prompts:
        found = [
            sum(no_loops.mark_repeated(generate(each, tokenizer, [prompt], max_new_tokens=32, **no_loops.GREEDY)[0]))
            for each in (model, new)
        ]
        assert found[0] > 28 and found[1] < 10


def test_a_penalty_can_leave_the_prompt_out():
    settings = loops.penalize(2.0, "answer", width=2)
    (processor,) = settings["logits_processor"]
    scores = processor(torch.tensor([[0, 1, 2]]), torch.full((1, 4), 3.0))
    assert scores.tolist() == [[3.0, 3.0, 1.5, 3.0]]
    # A penalty of the model's own would count twice.
    assert settings["repetition_penalty"] == 1.0


def record() -> dict:
    return json.loads((ROOT / "benchmarks/results/loops.json").read_text(encoding="utf-8"))


NAMES = {"whole text": "prompt and answer", "answer": "answer"}


@pytest.mark.documents
def test_the_table_of_the_page_is_that_of_the_record():
    page = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (greedy|sampled) \| (none|[\d.]+ on the (?:whole text|answer)) \| (.*) \|$", page, re.M)
    models = [model["rows"] for name, model in record()["models"].items() if re.fullmatch(r"tiny, seed \d", name)]
    assert len(models) == 3 and len(rows) == 8
    for sampling, penalty, figures in rows:
        value, _, where = penalty.partition(" on the ")
        wanted = (1.0, None) if penalty == "none" else (float(value), NAMES[where])
        found = [
            row
            for model in models
            for row in model
            if (row["sampling"], row["penalty"], row["counted"]) == (sampling, *wanted)
        ]
        columns = [("repeated_4grams", ".3f"), ("ended_answers", ".2f"), ("answer_tokens", ".1f")]
        expected = [", ".join(format(row[name], how) for row in found) for name, how in columns]
        assert figures.split(" | ") == expected


@pytest.mark.documents
def test_the_table_of_mends_is_that_of_the_record():
    page = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
    rows = page.split("| training | loss")[1].split("\n\n")[0].splitlines()[2:]
    variants = record()["variants"]
    expected = []
    for name, variant in variants.items():
        control = variants.get(variant["control"])
        cost = f"{variant['answer_loss'] - control['answer_loss']:+.3f}" if control else ""
        shares = {(row["sampling"], row["penalty"]): f"{row['repeated_4grams']:.3f}" for row in variant["rows"]}
        figures = [shares[key] for key in (("greedy", 1.0), ("greedy", 1.1), ("sampled", 1.0))]
        expected.append(" | ".join([f"| {name}", f"{variant['answer_loss']:.3f}", cost, *figures]) + " |")
    assert rows == expected


@pytest.mark.documents
def test_the_tables_of_the_example_and_of_smollm2_are_those_of_the_record():
    page, models = (ROOT / "docs/performance.md").read_text(encoding="utf-8"), record()["models"]

    def figures(name: str, *wanted: tuple[str, float], figure: str = "repeated_4grams") -> list[float]:
        rows = {(r["sampling"], r["penalty"]): r[figure] for r in models[name]["rows"] if r["counted"] != "answer"}
        return [rows[each] for each in wanted]

    def text(values: list[float]) -> str:
        return ", ".join(f"{value:.3f}" for value in values)

    expected = []
    for seed in (1, 2, 3):
        old, new = f"tiny, seed {seed}", f"tiny, seed {seed}, examples/no_loops.py"
        losses = [models[name]["answer_loss"] for name in (old, new)]
        # The aim: 15% of the 4-grams of greedy answers, 2% of those of sampled answers, 0.01 nats.
        greedy, sampled = figures(new, ("greedy", 1.1), ("sampled", 1.1))
        assert greedy <= 0.15 and sampled <= 0.02 and losses[1] - losses[0] <= 0.01
        shares = [
            text(figures(old, (how, 1.0)) + figures(new, (how, 1.0), (how, 1.1))) for how in ("greedy", "sampled")
        ]
        expected.append(f"| {seed} | {models[new]['num_pairs']:,} | {text(losses)} | {shares[0]} | {shares[1]} |")
    for seed in (1, 2, 3, 42):
        name = f"smollm2 after make teach, seed {seed}"
        shares = [text(figures(name, (how, 1.0), (how, 1.1))) for how in ("greedy", "sampled")]
        right = [round(14 * share) for share in figures(name, ("greedy", 1.0), ("greedy", 1.1), figure="right")]
        expected.append(f"| {seed} | {shares[0]} | {shares[1]} | {right[0]}, {right[1]} |")
    section = page.split("`examples/no_loops.py` ends them")[1].split("| training |")[0]
    assert re.findall(r"^\| \d.*$", section, re.M) == expected
