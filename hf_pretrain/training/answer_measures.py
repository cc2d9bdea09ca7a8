"""Measures of the answers of a chat model: variety, repetition, length, and whether they end by themselves."""

from itertools import chain
from statistics import fmean

from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from .end_report import choose_questions, generate


NUM_ANSWERS = 32
MAX_TOKENS = 64


def answer_figures(answers: list[list[int]], *, eos_token_id: int) -> dict[str, float]:
    """
    Return the figures of generated answers. The table of metrics names them.

    - distinct-2: the different bigrams of all answers, divided by all their bigrams (https://arxiv.org/abs/1510.03055).
    - repeated 4-grams: the share of the 4-grams that occurred earlier in the same answer. The divisor is the number of
      all 4-grams, so an answer counts as much as it is long (https://arxiv.org/abs/1908.04319 takes the mean over the
      answers).

    Args:
        answers (`list[list[int]]`): token ids. An answer that ended by itself ends with its stop token, which is no
            part of the n-grams and of the length. A figure without n-grams is left out.
        eos_token_id (`int`): the stop token.
    """
    texts = [[token for token in answer if token != eos_token_id] for answer in answers]
    pairs = list(chain.from_iterable(_ngrams(text, 2) for text in texts))
    fours = [_ngrams(text, 4) for text in texts]
    figures = {
        "eval_ended_answers": fmean(answer[-1:] == [eos_token_id] for answer in answers),
        "eval_answer_tokens": fmean(map(len, texts)),
    }
    if pairs:
        figures["eval_distinct_2"] = len(set(pairs)) / len(pairs)
    if any(fours):
        figures["eval_repeated_4grams"] = 1 - sum(len(set(grams)) for grams in fours) / sum(map(len, fours))
    return figures


def _ngrams(tokens: list[int], n: int) -> list[tuple[int, ...]]:
    return list(zip(*(tokens[start:] for start in range(n)), strict=False))


def measure_answers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, conversations: Dataset
) -> dict[str, float]:
    """
    Return the figures of greedy answers to questions of the validation set, with at most `MAX_TOKENS` tokens each. All
    ranks of a sharded model must call this function with the same arguments.
    """
    prompts = [prompt for _, prompt in choose_questions(tokenizer, conversations, NUM_ANSWERS)]
    # Greedy search ignores these three, and transformers warns about a chat model's own values.
    settings = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    answers = generate(model, tokenizer, prompts, max_new_tokens=MAX_TOKENS, **settings)
    return answer_figures(answers, eos_token_id=tokenizer.eos_token_id)


class AnswerMeasures(TrainerCallback):
    """Add the figures of [`measure_answers`] to each evaluation of the first validation set."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, conversations: Dataset):
        self.tokenizer, self.conversations = tokenizer, conversations

    def on_evaluate(self, args, state, control, model=None, metrics=None, **kwargs):
        # Only the first of several validation sets has figures with plain names.
        if "eval_runtime" in metrics:
            metrics.update(measure_answers(model, self.tokenizer, self.conversations))
            # Trainer has already logged a copy of `metrics`.
            state.log_history[-1].update(metrics)
