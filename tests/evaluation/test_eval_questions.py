"""Questions with known answers, beside the answers of stock `generate`."""

import pytest
import torch

from hf_pretrain.evaluation.eval_questions import BATCH_SIZE, MAX_TOKENS, EvalQuestions
from hf_pretrain.tokenizer.control_tokens import set_stop_tokens
from hf_pretrain.tokenizer.training import train_tokenizer
from hf_pretrain.training.evaluation_arguments import EvalQuestionArguments
from tests.toys import toy_model, write_jsonl


QUESTIONS = ["What is two?", "Is it four, and what is two and two?", "said?"]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["What is two and two? It is four, said the user."] * 4, vocab_size=400)


@pytest.fixture(scope="module")
def model(tokenizer):
    model = toy_model(vocab_size=400).eval()
    # Greedy answers of the initial weights are empty.
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    set_stop_tokens(model, tokenizer)
    return model


def answer(model, tokenizer, question):
    """Return the greedy answer of transformers."""
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt"
    )
    ids = model.generate(**prompt, max_new_tokens=MAX_TOKENS, do_sample=False)[0, prompt.input_ids.shape[1] :]
    return tokenizer.decode(ids, skip_special_tokens=True).strip()


def test_the_share_of_right_answers(tmp_path, model, tokenizer):
    answers = [answer(model, tokenizer, question) for question in QUESTIONS]
    assert all(answers)
    states = [
        [answers[0][:4].upper()],  # in any case
        [["not said", answers[1][2:6]], answers[1][-3:]],  # one of the first two, and the last one
        [answers[2][:3], "never said"],
    ]
    records = [{"prompt": question, "states": said} for question, said in zip(QUESTIONS, states, strict=True)]
    questions = EvalQuestions(write_jsonl(tmp_path / "questions.jsonl", records), tokenizer)
    assert questions.ask(model) == {"eval_recall": pytest.approx(2 / 3)}
    assert questions.answers == [(0, answers)]
    questions.step = 8
    assert questions.ask(model) and len(questions.answers) == 2
    table = questions.format_table()
    assert "2 of 3 right at step 0, 2 at step 8" in table
    assert table.count("step 0, right") == table.count("step 8, right") == 2
    assert table.count("step 0, wrong") == 1 and all(question in table for question in QUESTIONS)


def test_numbers_and_thinking(tmp_path, tokenizer):
    records = [{"prompt": "How many?", "states": [[4, "four"]]}] * (BATCH_SIZE + 1)
    path = write_jsonl(tmp_path / "questions.jsonl", records)
    questions = EvalQuestions(path, tokenizer, enable_thinking=False)
    assert questions.are_right(["There are 4."] * len(records)) == [True] * len(records)
    assert questions.format_table() == "Questions: no evaluation asked them."
    user = [{"role": "user", "content": "How many?"}]
    prompt = tokenizer.apply_chat_template(user, add_generation_prompt=True, enable_thinking=False).input_ids
    assert questions.prompts[0][1] == prompt
    assert questions.ask(toy_model(vocab_size=400).eval()) and len(questions.answers[0][1]) == BATCH_SIZE + 1


def test_each_file_has_a_figure_of_its_own(tmp_path, tokenizer):
    paths = [
        str(write_jsonl(tmp_path / name, [{"prompt": f"{word}?", "states": states}]))
        for name, word, states in (("own.jsonl", "Who", ["nobody says this"]), ("general.jsonl", "What", [""]))
    ]
    arguments = EvalQuestionArguments(eval_questions=paths[0], general_questions=paths[1])
    model, asked = toy_model(vocab_size=400).eval(), arguments.callbacks(tokenizer)
    # Trainer warns of two callbacks of one class.
    assert len({type(each) for each in asked}) == 2
    figures = {name: value for each in asked for name, value in each.ask(model).items()}
    assert figures == {"eval_recall": 0.0, "eval_general_recall": 1.0}
    assert [each.format_table().split(":")[0].strip() for each in asked] == ["Questions", "General questions"]


def test_no_file_asks_nothing(tokenizer):
    assert EvalQuestionArguments().callbacks(tokenizer) == []
