"""
Tasks of EleutherAI's lm-evaluation-harness (https://github.com/EleutherAI/lm-evaluation-harness), run through its own
Hugging Face model.

Every document in training begins with bos, but the tokenizers do not add it. Without bos, the harness would measure
the model on texts that look as if their beginning were missing.
"""

import copy
import math
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import broadcast_object_list
from tokenizers import processors
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from ..rows.preparation import PreparedData
from ..runtime.errors import UserError, needing_extra
from ..runtime.names import hint
from ..runtime.signals import running_user_code
from ..tokenizer.content_parts import fit_contents
from ..training.callbacks import AddedFigures
from ..training.evaluation_arguments import EvalTaskArguments


with needing_extra("eval", "Evaluation tasks need lm-eval"):
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager


class RankHFLM(HFLM):
    """lm-eval's `HFLM` for a model in memory that each rank holds as a whole. The ranks share the examples."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, **options: Any):
        super().__init__(pretrained=model, tokenizer=tokenizer, backend="causal", **options)
        # NOTE: HFLM gathers by it, but for a model in memory it assumes a single process.
        self.accelerator = Accelerator()

    @property
    def rank(self) -> int:
        return PartialState().process_index

    @property
    def world_size(self) -> int:
        return PartialState().num_processes

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        messages = fit_contents(self.tokenizer, chat_history, self.tokenizer.get_chat_template())
        return super().apply_chat_template(messages, add_generation_prompt)


class BosHFLM(RankHFLM):
    """
    [`RankHFLM`] with exactly one bos at the beginning of every text.

    Args:
        model ([`PreTrainedModel`]): the model, in eval mode, on its device.
        tokenizer ([`PreTrainedTokenizerFast`]): a tokenizer with a bos token.
        batch_size (`int`): texts per batch.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, *, batch_size: int):
        # Copy: the caller's tokenizer must not add bos from now on.
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=[tokenizer.bos_token, "$A"], special_tokens=[(tokenizer.bos_token, tokenizer.bos_token_id)]
        )
        # HFLM encodes with special tokens, that is, with the post-processor above, if it adds bos.
        options = {"add_bos_token": True, "prefix_token_id": tokenizer.bos_token_id}
        super().__init__(model, tokenizer, batch_size=batch_size, **options)

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of whole texts, without scoring bos."""
        # NOTE: in this method, HFLM itself puts its prefix token before the text. It would score a second bos as text.
        self.add_bos_token = False
        scores = super().loglikelihood_rolling(requests, disable_tqdm=disable_tqdm)
        self.add_bos_token = True
        return scores


# A task's YAML may name functions.
@running_user_code("A task of --tasks")
def evaluate_tasks(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    tasks: list[str],
    *,
    include_path: list[str] | None = None,
    num_fewshot: int | None = None,
    limit: float | None = None,
    batch_size: int = 8,
    is_chat: bool = False,
    keeps_examples: bool = False,
) -> dict[str, dict[str, Any]]:
    """
    Run tasks of lm-eval. All ranks must call this function; they share the examples, and get the same results.

    Args:
        model ([`PreTrainedModel`]): the model, in eval mode.
        tokenizer ([`PreTrainedTokenizerFast`]): its tokenizer.
        tasks (`list[str]`): names of tasks or groups.
        include_path (`list[str]`, *optional*): directories with further task YAMLs.
        num_fewshot (`int`, *optional*): examples before each question; by default the task's own number.
        limit (`float`, *optional*): the number of examples per task; below 1, their share.
        batch_size (`int`, defaults to 8): texts per batch.
        is_chat (`bool`, defaults to `False`): put the questions into the chat template, as messages of the user.
        keeps_examples (`bool`, defaults to `False`): also return the `examples` of each task, by [`task_examples`].

    Returns:
        `dict`: for each task and each group of tasks its `num_fewshot`,
            `num_examples`, `metrics`, which holds the `value` and `stderr` of each metric, and `group`, the name of
            the group whose figures include it (or `None`).

    Raises:
        `UserError`: for a task that lm-eval does not know, naming the nearest one.
    """
    manager = index_tasks(tasks, include_path)
    # A rendered conversation begins with the template's own token, and some models know no bos.
    kind = RankHFLM if is_chat or tokenizer.bos_token is None else BosHFLM
    output = simple_evaluate(
        model=kind(model, tokenizer, batch_size=batch_size),
        apply_chat_template=is_chat,
        tasks=tasks,
        task_manager=manager,
        num_fewshot=num_fewshot,
        limit=limit,
        # Logged samples keep every question and answer in memory.
        log_samples=keeps_examples,
    )
    # lm-eval gives results to the first rank only.
    [output] = broadcast_object_list([output])
    summaries = {name: _summary(name, output) for name in output["results"]}
    for name, samples in output.get("samples", {}).items():
        summaries[name]["examples"] = task_examples(samples)
    for group, members in output["group_subtasks"].items():
        # Some groups have no figures of their own.
        if group in summaries and summaries[group]["metrics"]:
            for name in set(members) & summaries.keys():
                summaries[name]["group"] = group
    return summaries


def task_examples(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """
    Return the examples of a task from the samples that lm-eval logs, in the form of `against.py`. Their figures are
    accuracies, and for multiple choice the bits per byte of the right answer. There, `chance` is the share of guesses
    that are right.
    """
    examples: dict[Any, dict[str, Any]] = {}
    for sample in samples:
        # Each filter of the answers gives one sample.
        new = {"key": sample["doc_id"], "text": str(sample["arguments"][0][0]), "figures": {}}
        each = examples.setdefault(sample["doc_id"], new)
        suffix = "" if sample["filter"] == "none" else f" ({sample['filter']})"
        names = [name for name in sample["metrics"] if name.startswith(("acc", "exact_match"))]
        each["figures"] |= {name + suffix: (float(sample[name]), 1.0) for name in names}
        answers = [responses[0] for responses in sample["resps"]]
        each["answer"] = str(answers[0])
        if len(answers) > 1:
            _add_choices(each, sample, [log_probability for log_probability, _ in answers])
    return list(examples.values())


def _add_choices(example: dict[str, Any], sample: dict[str, Any], scores: list[float]) -> None:
    """Add the answer, the level of guessing and the bits of the right answer to an example with several choices."""
    # With mutual information, the choices come again, without the question.
    number = len(scores) // (2 if "acc_mutual_info" in sample["metrics"] else 1)
    choices = [str(arguments[1]).strip() for arguments in sample["arguments"][:number]]
    example["text"] = "\n- ".join([str(sample["arguments"][0][0]), *choices])
    example["chance"], example["answer"] = 1 / number, choices[int(np.argmax(scores[:number]))]
    # A target is the number of a choice, or its text. Where the choices are beginnings of one sentence, it is the end
    # of all of them.
    right = [n for n, choice in enumerate(choices) if sample["target"] in (n, choice)]
    if len(right) == 1:
        bits, num_bytes = -scores[right[0]] / math.log(2), len(choices[right[0]].encode())
        example["figures"]["bits per byte of the right answer"] = bits, float(num_bytes)


def read_questions(tasks: list[str]) -> Iterator[str]:
    """
    Yield the texts that tasks of lm-eval ask about: every text in their examples, such as questions and choices.

    Raises:
        `UserError`: in the cases of [`evaluate_tasks`].
    """
    loaded = index_tasks(tasks, None, "--held_out_tasks").load(tasks)["tasks"]
    for task in loaded.values():
        for example in task.eval_docs:
            yield from _texts_in(example)


def _texts_in(value: Any) -> Iterator[str]:
    """Yield the texts in a value of JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _texts_in(part)


def index_tasks(tasks: list[str], include_path: list[str] | None, flag: str = "--tasks") -> TaskManager:
    """Return the index of tasks that has `tasks`. Raise `UserError` for an unknown one; `flag` named the tasks."""
    manager = TaskManager(include_path=include_path, include_defaults=False)
    # Indexing the thousands of tasks in lm-eval takes about ten seconds, so search the user's own tasks first.
    if any(not manager.match_tasks([task]) for task in tasks):
        manager = TaskManager(include_path=include_path)
    for task in tasks:
        if not manager.match_tasks([task]):
            raise UserError(f"{flag}: lm-eval has no task {task!r}{hint(task, manager.all_tasks)}.")
    return manager


def _summary(name: str, output: dict[str, Any]) -> dict[str, Any]:
    """Return the results of one task, without lm-eval's bookkeeping."""
    values = {key: value for key, value in output["results"][name].items() if isinstance(value, (int, float))}
    metrics = {}
    for key, value in values.items():
        # A key names a metric and the filter that selected the answers: "acc,none".
        metric, _, answer_filter = key.partition(",")
        if answer_filter and not metric.endswith("_stderr"):
            label = metric if answer_filter == "none" else f"{metric} ({answer_filter})"
            metrics[label] = {"value": value, "stderr": values.get(f"{metric}_stderr,{answer_filter}")}
    return {
        "num_fewshot": output["n-shot"].get(name),
        "num_examples": output["n-samples"].get(name, {}).get("effective"),
        "metrics": metrics,
        "group": None,
    }


class EvalTasks(AddedFigures):
    """
    With each evaluation, print the metrics of the tasks, and add them to the log and the metrics as
    `eval_<task>_<metric>`. A model that learns to chat gets its chat template.

    Args:
        args ([`EvalTaskArguments`]): the tasks.
        data ([`~rows.preparation.PreparedData`]): the data and the tokenizer of the run.
        batch_size (`int`): texts per batch.

    Raises:
        `UserError`: for an unknown task.
    """

    def __init__(self, args: EvalTaskArguments, data: PreparedData, *, batch_size: int):
        super().__init__(self._run, prints=True)
        self.tasks, self.tokenizer, path = str(args.eval_tasks).split(","), data.tokenizer, args.eval_tasks_path
        # Report an unknown task before the training.
        index_tasks(self.tasks, path, "--eval_tasks")
        self.options: dict[str, Any] = {"limit": args.eval_tasks_limit, "include_path": path, "batch_size": batch_size}
        self.options["is_chat"] = data.kind != "text"

    def _run(self, model: PreTrainedModel) -> dict[str, float]:
        # lm-eval seeds all random numbers, and the training must not depend on the tasks. `RunTrainer.evaluate`
        # restores torch's.
        states = random.getstate(), np.random.get_state()
        # A compiled layer would be compiled again for each length.
        with torch.compiler.set_stance("force_eager"):
            results = evaluate_tasks(model.eval(), self.tokenizer, self.tasks, **self.options)
        random.setstate(states[0])
        np.random.set_state(states[1])
        return {
            f"eval_{task}_{name}": metric["value"]
            for task, result in results.items()
            for name, metric in result["metrics"].items()
        }
