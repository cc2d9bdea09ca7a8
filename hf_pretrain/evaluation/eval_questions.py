"""Questions with known answers (`--eval_questions`, `--general_questions`), before, during and after training."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerFast

from ..inference.batch_answers import read_prompts
from ..inference.samples import GREEDY, generate
from ..runtime.errors import UserError
from ..training.callbacks import AddedFigures


MAX_TOKENS = 64
MAX_PROMPT_TOKENS = 1024
BATCH_SIZE = 16


class EvalQuestions(AddedFigures):
    """
    Ask the questions of a file at each evaluation, with greedy answers, and add the share of right ones.

    Args:
        path (`str`): a file of prompts, as `recipes/generate.py` reads it. Each record has a field `states`, a list of
            texts, or of lists of texts of which one suffices. A right answer contains them all, in any case.
        tokenizer ([`~transformers.PreTrainedTokenizerFast`]): the tokenizer of the run.
        enable_thinking (`bool`, *optional*): with or without reasoning, as in the training.

    Raises:
        `UserError`: for a record without a prompt or without `states`.
    """

    # The flag that names the file, the share in the log, and the title in the report.
    flag, figure, title = "eval_questions", "eval_recall", "Questions"

    def __init__(self, path: str, tokenizer: PreTrainedTokenizerFast, *, enable_thinking: bool | None = None):
        super().__init__(self.ask, prints=True)
        self.prompts = read_prompts(
            Path(path), tokenizer, encoding="utf-8", max_tokens=MAX_PROMPT_TOKENS, enable_thinking=enable_thinking
        )
        self.tokenizer = tokenizer
        for record, _ in self.prompts:
            if not (states := record.get("states")) or not isinstance(states, list) or [] in states:
                raise UserError(f"--{self.flag} {path}: {record} has no list `states` of what a right answer says.")
        if not self.prompts:
            raise UserError(f"--{self.flag} {path} holds no question.")
        # The step and the answers of each evaluation.
        self.step = 0
        self.answers: list[tuple[int, list[str]]] = []

    def on_evaluate(self, args, state, control, model=None, metrics=None, **kwargs):
        self.step = state.global_step
        super().on_evaluate(args, state, control, model=model, metrics=metrics, **kwargs)

    def ask(self, model: PreTrainedModel) -> dict[str, float]:
        prompts = [ids for _, ids in self.prompts]
        answers = []
        for start in range(0, len(prompts), BATCH_SIZE):
            batch = prompts[start : start + BATCH_SIZE]
            ids = generate(model, self.tokenizer, batch, max_new_tokens=MAX_TOKENS, **GREEDY)
            answers += [self.tokenizer.decode(answer, skip_special_tokens=True).strip() for answer in ids]
        self.answers.append((self.step, answers))
        return {self.figure: sum(self.are_right(answers)) / len(prompts)}

    def are_right(self, answers: Sequence[str]) -> list[bool]:
        return [_says(answer, record["states"]) for answer, (record, _) in zip(answers, self.prompts, strict=True)]

    def format_table(self, *, limit: int = 10) -> str:
        """Return the first questions with their answers of the first and of the last evaluation of this process."""
        if not self.answers:
            return f"{self.title}: no evaluation asked them."
        (start, first), (end, last) = self.answers[0], self.answers[-1]
        counts = [sum(self.are_right(answers)) for answers in (first, last)]
        lines = ["", f"{self.title}: {counts[0]} of {len(first)} right at step {start}, {counts[1]} at step {end}"]
        marks = ["wrong", "right"]
        both = zip(self.prompts, first, last, self.are_right(first), self.are_right(last), strict=True)
        for (record, _), before, after, was_right, is_right in list(both)[:limit]:
            prompt = record["prompt"] if isinstance(record.get("prompt"), str) else str(record.get("messages"))
            lines += [
                prompt,
                f"  step {start}, {marks[was_right]}: {_line(before)}",
                f"  step {end}, {marks[is_right]}: {_line(after)}",
            ]
        return "\n".join(lines)


class GeneralQuestions(EvalQuestions):
    """The questions whose answers a training should keep. Trainer warns of two callbacks of one class."""

    flag, figure, title = "general_questions", "eval_general_recall", "General questions"


def _says(answer: str, states: Sequence[Any]) -> bool:
    texts = [text if isinstance(text, list) else [text] for text in states]
    return all(any(str(text).casefold() in answer.casefold() for text in texts_of_one) for texts_of_one in texts)


def _line(text: str) -> str:
    return " ".join(text.split())[:150]
