"""The figures of answers equal their formulas, and reach evaluation, page and card."""

import json

import pytest
import torch
from datasets import Dataset

from hf_pretrain.inference.samples import answer_figures, choose_questions, generate, measure_answers
from hf_pretrain.reports.page import write_page
from hf_pretrain.run_directory.history import RunHistory
from hf_pretrain.tokenizer.training import train_tokenizer
from hf_pretrain.training.callbacks import AddedFigures
from hf_pretrain.training.run import train_and_evaluate
from tests.toys import toy_model
from tests.trainers import make_documents, make_model, make_trainer


EOS = 2
FIGURES = {"eval_ended_answers": 2 / 3, "eval_answer_tokens": 9 / 3, "eval_distinct_2": 4 / 6}


def test_figures_equal_their_formulas():
    # Bigrams: 56, 65, 56, 65, 56, 65 | 78 | none. 4-grams: 5656, 6565, 5656, 6565.
    answers = [[5, 6, 5, 6, 5, 6, 5, EOS], [7, 8], [EOS]]
    expected = {"eval_ended_answers": 2 / 3, "eval_answer_tokens": 9 / 3, "eval_distinct_2": 3 / 7}
    assert answer_figures(answers, stop_tokens=[EOS]) == pytest.approx(expected | {"eval_repeated_4grams": 2 / 4})
    assert answer_figures([[5], [EOS]], stop_tokens=[EOS]) == {"eval_ended_answers": 0.5, "eval_answer_tokens": 0.5}


def test_padded_prompts_get_the_greedy_answers_of_single_ones():
    tokenizer = train_tokenizer(["one two three four"] * 4, vocab_size=320)
    torch.manual_seed(1)
    model = toy_model(vocab_size=len(tokenizer)).float()
    # Larger weights give answers that differ.
    for parameter in model.parameters():
        parameter.data *= 3
    records = [{"prompt": [{"role": "user", "content": "one two " * number}]} for number in (1, 5, 9)]
    conversations = Dataset.from_dict({"text": [json.dumps(record) for record in records]})
    prompts = [prompt for _, prompt in choose_questions(tokenizer, conversations, 32)]
    assert len(prompts) == 3
    settings = {"max_new_tokens": 20, "do_sample": False}
    single = [generate(model, tokenizer, [prompt], **settings)[0] for prompt in prompts]
    assert generate(model, tokenizer, prompts, **settings) == single and len(set(map(tuple, single))) > 1
    # `generate` ends an answer at its stop token, as this one does at its third.
    model.generation_config.eos_token_id = [single[0][2], EOS]
    stopped = generate(model, tokenizer, prompts, **settings)
    assert stopped[0] == single[0][: single[0].index(single[0][2]) + 1]
    assert measure_answers(model, tokenizer, conversations)["eval_ended_answers"] > 0


def test_an_evaluation_has_the_figures(tmp_path):
    arguments = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 1}
    trainer = make_trainer(tmp_path, make_documents(), model=make_model(), arguments=arguments)
    trainer.add_callback(AddedFigures(lambda model: FIGURES))
    metrics, _ = train_and_evaluate(trainer, checkpoint=None)
    assert metrics.items() >= FIGURES.items() and "eval_loss" in metrics
    log = trainer.state.log_history
    assert [entry["step"] for entry in log if FIGURES.items() <= entry.items()] == [1, 2]
    write_page([RunHistory("toy", [], log)], tmp_path / "page.html", language="en")
    assert "distinct-2 of the answers</th><td>0.6667" in (tmp_path / "page.html").read_text()
