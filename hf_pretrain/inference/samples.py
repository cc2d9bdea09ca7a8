"""Texts that show what a model learnt: continuations and answers for the log, and measures of its answers."""

import itertools
import json
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import chain
from statistics import fmean
from typing import Any

import datasets
import numpy as np
import torch
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..loading.native import DEFAULT_SAMPLING
from ..rows.preparation import PreparedData
from ..rows.unigram import tokens_and_starts
from ..tokenizer.control_tokens import encode_prompt


# Answers that an evaluation of a chat model measures, and their tokens.
NUM_ANSWERS = 32
MAX_TOKENS = 64
# Greedy search ignores three of these, and transformers warns about a chat model's own values. Without the last one,
# figures would depend on a model's own penalty.
GREEDY = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None, "repetition_penalty": 1.0}


def make_sampler(data: PreparedData) -> Callable[[PreTrainedModel], list[tuple[str, str]]] | None:
    """Return a function that samples answers or continuations of the validation set; `None` without such texts."""
    if data.conversations is not None:
        return partial(sample_answers, tokenizer=data.tokenizer, conversations=data.conversations)
    # Only packed sequences have a collator.
    if data.first_eval is not None and data.collator is not None:
        return partial(sample_continuations, tokenizer=data.tokenizer, eval_rows=data.first_eval)
    return None


def sample_continuations(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, eval_rows: datasets.Dataset, *, num_samples: int = 3
) -> list[tuple[str, str]]:
    """
    Return pairs of prompt and continuation for documents of the validation set. All ranks of a sharded model must call
    this function with the same arguments.

    Args:
        eval_rows ([`~datasets.Dataset`]): packed rows of the validation set.
        num_samples (`int`): number of documents. A prompt has 16 tokens, or half the document if that is shorter.
    """
    tokens, starts = tokens_and_starts(eval_rows)
    ends = np.append(starts[1:], len(tokens))
    samples = []
    # Evenly spaced documents come from different sources: the set follows the order of `--dataset_name`.
    for number in np.linspace(0, len(starts) - 1, num_samples).astype(int):
        length = max(2, min(16, (ends[number] - starts[number]) // 2))
        prompt = tokens[starts[number] : starts[number] + length]
        (continuation,) = generate(model, tokenizer, [prompt], max_new_tokens=48)
        samples.append(tuple(tokenizer.decode(ids, skip_special_tokens=True) for ids in (prompt, continuation)))
    return samples


def sample_answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    conversations: datasets.Dataset,
    *,
    num_samples: int = 3,
) -> list[tuple[str, str]]:
    """
    Return pairs of question and answer for questions of validation conversations or preferences. An answer includes
    its stop token, which shows whether the model learnt to stop. All ranks of a sharded model must call this function
    with the same arguments.

    Args:
        conversations ([`~datasets.Dataset`]): the conversations or preferences, as JSON in the column `text`.
        num_samples (`int`): number of conversations.
    """
    return [
        (question, tokenizer.decode(generate(model, tokenizer, [prompt], max_new_tokens=64)[0]))
        for question, prompt in choose_questions(tokenizer, conversations, num_samples)
    ]


def choose_questions(
    tokenizer: PreTrainedTokenizerBase, conversations: datasets.Dataset, number: int, *, max_tokens: int = 512
) -> list[tuple[str, list[int]]]:
    """
    Return questions of at most `number` evenly spaced conversations with the prompts of their answers. A prompt of
    more than `max_tokens` loses its beginning.
    """
    questions = []

    def says(message: dict[str, Any]) -> bool:
        return message["role"] == "assistant"

    # Fewer conversations are not asked twice: repeated answers would count as repetition.
    for index in np.unique(np.linspace(0, len(conversations) - 1, number).astype(int)):
        record = json.loads(conversations[int(index)]["text"])
        # A preference has a prompt. The prompt of a conversation ends before the first answer, after any greeting.
        messages = record.get("prompt") or list(
            itertools.takewhile(lambda message: not says(message), itertools.dropwhile(says, record["messages"]))
        )
        questions.append((messages[-1]["content"], encode_prompt(tokenizer, messages)[-max_tokens:]))
    return questions


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[int] | np.ndarray],
    *,
    max_new_tokens: int,
    **settings: Any,
) -> list[list[int]]:
    """
    Return the token ids that follow each prompt, up to a stop token of the model. By default they are sampled; the
    same prompts, model and `settings` of `generate` always give the same ids.
    """
    model.eval()
    settings = settings or {"do_sample": True} | DEFAULT_SAMPLING
    # Shorter prompts begin with padding, so that all answers begin at the same position.
    width = max(map(len, prompts))
    rows = [[*[tokenizer.pad_token_id] * (width - len(prompt)), *prompt] for prompt in prompts]
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    attention_mask = (torch.arange(width) >= width - lengths[:, None]).long().to(model.device)
    # `generate` draws only torch's random numbers. The training must not depend on the texts.
    device_type = model.device.type
    kept_random = torch.random.fork_rng([] if device_type == "cpu" else [model.device], device_type=device_type)
    with kept_random, torch.no_grad():
        # Seed each call, so that its texts do not depend on earlier calls. This seeds the generators of all devices.
        torch.manual_seed(0)
        output = model.generate(
            torch.tensor(rows, device=model.device).long(),
            attention_mask=attention_mask,
            max_new_tokens=max_new_tokens,
            pad_token_id=tokenizer.pad_token_id,
            **settings,
        )
    answers = output[:, width:].tolist()
    stops = stop_tokens_of(model)
    return [answer[: next((n for n, token in enumerate(answer, 1) if token in stops), None)] for answer in answers]


def stop_tokens_of(model: PreTrainedModel) -> list[int]:
    """Return the tokens that end the answers of a model."""
    return np.atleast_1d(model.generation_config.eos_token_id).tolist()


def answer_figures(answers: list[list[int]], *, stop_tokens: Collection[int]) -> dict[str, float]:
    """
    Return the figures of generated answers. The table of metrics names them.

    - distinct-2: the different bigrams of all answers, divided by all their bigrams (https://arxiv.org/abs/1510.03055).
    - repeated 4-grams: the share of the 4-grams that occurred earlier in the same answer. The divisor is the number of
      all 4-grams, so an answer counts as much as it is long (https://arxiv.org/abs/1908.04319 takes the mean over the
      answers).

    Args:
        answers (`list[list[int]]`): token ids. An answer that ended by itself ends with its stop token, which is no
            part of the n-grams and of the length. A figure without n-grams is left out.
        stop_tokens (`Collection[int]`): the tokens that end an answer.
    """
    texts = [[token for token in answer if token not in stop_tokens] for answer in answers]
    pairs = list(chain.from_iterable(_ngrams(text, 2) for text in texts))
    fours = [_ngrams(text, 4) for text in texts]
    figures = {
        "eval_ended_answers": fmean(answer[-1] in stop_tokens for answer in answers),
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
    answers = generate(model, tokenizer, prompts, max_new_tokens=MAX_TOKENS, **GREEDY)
    return answer_figures(answers, stop_tokens=stop_tokens_of(model))
