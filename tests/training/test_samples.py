"""Samples at each evaluation have the same prompts, are in the record, and do not change the training."""

import json

import torch
from datasets import Dataset

from hf_pretrain.inference.samples import choose_questions, sample_answers
from hf_pretrain.run_directory.history import read_run
from hf_pretrain.tokenizer.training import train_tokenizer
from hf_pretrain.training.callbacks import AddedFigures
from hf_pretrain.training.run import train_and_evaluate
from tests.toys import toy_model
from tests.trainers import make_documents, make_model, make_trainer


FLAGS = {"max_steps": 6, "eval_strategy": "steps", "eval_steps": 2, "learning_rate": 0.1}


def test_evaluations_and_samples_do_not_change_the_training(tmp_path, capsys):
    """Dropout draws random numbers in each step, and the sample draws others."""
    weights = []
    draw = lambda model: [("once", f"{torch.rand(()).item():.4f}")]  # noqa: E731
    for number, (sample, more) in enumerate(((None, {"eval_strategy": "no"}), (None, {}), (draw, {}))):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "run.json").write_text("[{}]")
        model = toy_model(vocab_size=64, dropout=0.1)
        trainer = make_trainer(tmp_path / str(number), make_documents(), model=model, arguments=FLAGS | more)
        samples = train_and_evaluate(trainer, checkpoint=None, sample=sample)[1]
        weights.append(torch.nn.utils.parameters_to_vector(model.parameters()))
        assert samples[:1] == [] if sample is None else samples[0][0] == "once"
    assert torch.equal(weights[0], weights[1]) and torch.equal(weights[0], weights[2])
    kept = read_run(tmp_path / "2").samples
    assert list(kept) == [2, 4, 6] and kept[6] == [list(samples[0])]
    assert "step 6/6: 'once' -> " in capsys.readouterr().out


def test_lines_before_the_first_step_of_a_budget_of_time_name_no_last_step(tmp_path, capsys):
    flags = {"max_steps": -1, "max_minutes": 0.01, "eval_strategy": "steps", "eval_steps": 9, "eval_on_start": True}
    trainer = make_trainer(tmp_path, make_documents(), model=make_model(), arguments=flags)
    trainer.add_callback(AddedFigures(lambda model: {"eval_toy_acc": 0.5}, prints=True))
    train_and_evaluate(trainer, checkpoint=None, sample=lambda model: [("once", "upon")])
    output = capsys.readouterr().out
    assert "step 0: 'once' -> 'upon'\n" in output and "step 0: toy_acc 0.5000\n" in output


def test_answers_use_random_numbers_of_their_own():
    tokenizer = train_tokenizer(["one two three four"] * 4, vocab_size=320)
    model = toy_model(vocab_size=len(tokenizer))
    question = {"role": "user", "content": "one"}
    records = [{"prompt": [question]}, {"messages": [question, {"role": "assistant", "content": "two"}]}]
    conversations = Dataset.from_dict({"text": [json.dumps(record) for record in records]})
    state = torch.get_rng_state()
    first, second = sample_answers(model, tokenizer, conversations, num_samples=2)
    assert torch.equal(torch.get_rng_state(), state)
    # A preference and a conversation with the same question have the same prompt.
    assert first == second and first[0] == "one"


def test_questions_may_follow_a_greeting_and_long_prompts_lose_their_beginning():
    tokenizer = train_tokenizer(["one two three four"] * 4, vocab_size=320)
    turns = [{"role": "assistant", "content": "hello"}, {"role": "user", "content": "one " * 99}]
    record = json.dumps({"messages": [*turns, {"role": "assistant", "content": "two"}]})
    conversations = Dataset.from_dict({"text": [record]})
    (_, whole), (question, cut) = (
        choose_questions(tokenizer, conversations, 1, max_tokens=limit)[0] for limit in (1000, 8)
    )
    assert question == "one " * 99 and len(whole) > 99 and cut == whole[-8:]
