"""
Tasks of EleutherAI's lm-evaluation-harness (https://github.com/EleutherAI/lm-evaluation-harness), through its own
Hugging Face model.

A document begins with bos here, and the tokenizers do not put it there by themselves: without it the harness would show
the model texts that begin in the middle of nowhere.
"""

import copy
import difflib
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from tokenizers import processors
from transformers import PreTrainedModel, PreTrainedTokenizerFast


class BosHFLM(HFLM):
    """
    lm-eval's `HFLM` of a model in memory, whose texts begin with bos, exactly once.

    Args:
        model ([`PreTrainedModel`]): the model, in eval mode, on its device.
        tokenizer ([`PreTrainedTokenizerFast`]): with bos.
        batch_size (`int`): texts at a time.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, *, batch_size: int):
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=[tokenizer.bos_token, "$A"], special_tokens=[(tokenizer.bos_token, tokenizer.bos_token_id)]
        )
        super().__init__(
            pretrained=model,
            tokenizer=tokenizer,
            backend="causal",
            batch_size=batch_size,
            add_bos_token=True,
            prefix_token_id=tokenizer.bos_token_id,
        )

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        # NOTE: HFLM puts its prefix token before whatever it encodes, and would score the bos behind that as text.
        self.add_bos_token = False
        try:
            return super().loglikelihood_rolling(requests, disable_tqdm=disable_tqdm)
        finally:
            self.add_bos_token = True


def evaluate_tasks(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    tasks: list[str],
    *,
    include_path: list[str] | None = None,
    num_fewshot: int | None = None,
    limit: float | None = None,
    batch_size: int = 8,
) -> dict[str, dict[str, Any]]:
    """
    Runs tasks of lm-eval.

    Args:
        model ([`PreTrainedModel`]): the model, in eval mode.
        tokenizer ([`PreTrainedTokenizerFast`]): its tokenizer.
        tasks (`list[str]`): names of tasks or groups.
        include_path (`list[str]`, *optional*): directories of more task YAMLs.
        num_fewshot (`int`, *optional*): examples before each question; by default as the task has it.
        limit (`float`, *optional*): examples of each task, or below 1 the share of them.
        batch_size (`int`, defaults to 8): texts at a time.

    Returns:
        `dict`: for each task its `dataset` (a Hub id, or `None`), `num_fewshot`, `num_examples`, and `metrics`: for
        each metric its `value` and `stderr`.

    Raises:
        `ValueError`: for a task that lm-eval does not know, naming the nearest known one.
    """
    manager = TaskManager(include_path=include_path, include_defaults=False)
    # Reading the thousands that come with lm-eval takes ten seconds.
    if any(not manager.match_tasks([task]) for task in tasks):
        manager = TaskManager(include_path=include_path)
    for task in tasks:
        if not manager.match_tasks([task]):
            nearest = difflib.get_close_matches(task, manager.all_tasks, n=1, cutoff=0)[0]
            raise ValueError(f"--tasks: lm-eval has no task {task!r}; the nearest one is {nearest!r}.")
    output = simple_evaluate(
        model=BosHFLM(model, tokenizer, batch_size=batch_size),
        tasks=tasks,
        task_manager=manager,
        num_fewshot=num_fewshot,
        limit=limit,
        log_samples=False,
    )
    return {name: _summary(name, output) for name in output["results"]}


def _summary(name: str, output: dict[str, Any]) -> dict[str, Any]:
    """What lm-eval says of one task, without its bookkeeping."""
    config = output["configs"].get(name, {})
    path = config.get("dataset_path") or ""
    values = {key: value for key, value in output["results"][name].items() if isinstance(value, (int, float))}
    metrics = {}
    for key, value in values.items():
        # A key is a metric and the filter of the answers that it was computed on: "acc,none".
        metric, _, answer_filter = key.partition(",")
        if metric.endswith("_stderr") or not answer_filter:
            continue
        label = metric if answer_filter == "none" else f"{metric} ({answer_filter})"
        metrics[label] = {"value": value, "stderr": values.get(f"{metric}_stderr,{answer_filter}")}
    return {
        "dataset": path if path.count("/") == 1 and not path.startswith((".", "/")) else None,
        "num_fewshot": output["n-shot"].get(name),
        "num_examples": output["n-samples"].get(name, {}).get("effective"),
        "metrics": metrics,
    }


__all__ = ["BosHFLM", "evaluate_tasks"]
