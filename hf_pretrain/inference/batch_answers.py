"""
Answer a file of prompts in batches.

Line N of the output belongs to record N of the input, so the output itself says where an interrupted run goes on.
"""

import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerFast, set_seed

from ..data.conversations import GENERATED
from ..data.formats import BadRecord, check_values, parse_json, read_file
from ..data.messages import as_text, check_record_fields, is_blank, parse_tools, read_turn, take_weights
from ..rows.reading import Reading
from ..runtime.command_line import progress
from ..runtime.errors import UserError
from ..runtime.writing import locked
from ..tokenizer.control_tokens import encode_documents, encode_prompt


def read_prompts(
    path: Path, tokenizer: PreTrainedTokenizerFast, *, encoding: str = "utf-8", **options: Any
) -> list[tuple[dict, list[int]]]:
    """
    Return the records of a file, each with the token ids of its prompt.

    Args:
        path (`Path`): a file of records with prompts.
        encoding (`str`, defaults to `"utf-8"`): encoding of the file.
        tokenizer ([`PreTrainedTokenizerFast`]), options: the other arguments of [`encode_record`].

    Raises:
        `UserError`: for a record without a usable prompt.
    """
    prompts = []
    for number, content in read_file(path, Reading(kind="conversation", encoding=encoding)):
        try:
            record = parse_json(content)
            if not isinstance(record, dict) or GENERATED in record:
                raise BadRecord(f"not an object, or one with the field {GENERATED!r}, which is for the answer")
            # The model sees no image.
            check_record_fields(record, has_loss=False)
            # The whole record goes into the output.
            for name, value in record.items():
                check_values(value, name)
            prompts.append((record, encode_record(record, tokenizer, **options)))
        except BadRecord as error:
            raise UserError(f"{path}, line {number}: {error.reason}.") from error
    return prompts


def encode_record(
    record: dict[str, Any],
    tokenizer: PreTrainedTokenizerFast,
    *,
    is_raw: bool = False,
    enable_thinking: bool | None = None,
    max_tokens: int,
) -> list[int]:
    """
    Return the token ids of the prompt of a record: `prompt`, a text or messages, or `messages` if it is blank. Answers
    at the end of the messages are left out, because the model is to give them.

    Args:
        is_raw (`bool`): continue the text of `prompt` instead of answering it.
        enable_thinking (`bool`, *optional*): with or without reasoning; by default the chat template decides.
        max_tokens (`int`): length of the longest prompt that leaves room for an answer.

    Raises:
        `BadRecord`: for a record without a prompt, or with one that is malformed or too long.
    """
    prompt = record.get("prompt")
    if is_raw:
        # A document begins with bos. Leave out its eos, which would end it.
        ids = encode_documents([as_text(None if is_blank(prompt) else prompt, "prompt")], tokenizer)[0][:-1]
    else:
        messages, tools = read_turn(record.get("messages") if is_blank(prompt) else prompt, "prompt", "user")
        take_weights(messages)
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
        if not messages:
            raise BadRecord("no message comes before the answer; write one of the user")
        ids = encode_prompt(tokenizer, messages, parse_tools(record) or tools, enable_thinking)
    if len(ids) > max_tokens:
        raise BadRecord(
            f"a prompt of {len(ids)} tokens; --max_new_tokens leaves {max_tokens} of the model's positions"
        )
    return ids


def count_answers(path: Path, records: list[dict[str, Any]]) -> int:
    """
    Return the number of answers in an output file. Cut off a last line that a killed run has not completed.

    Raises:
        `UserError`: if a line does not begin as [`write_answers`] begins the line of the record in its place. The file
            then stays as it is.
    """
    path.touch()
    with path.open("r+b") as file:
        *lines, tail = file.read().split(b"\n")
        # After the last record nothing may follow, and no line begins with a line break.
        beginnings = [*map(_begin_line, records), b"\n"]
        for number, (line, beginning) in enumerate(zip([*lines, tail], beginnings, strict=False)):
            if not (line.startswith(beginning) or number == len(lines) and beginning.startswith(line)):
                raise UserError(f"{path}, line {number + 1} answers no record in its place. Name another --output.")
        file.truncate(sum(len(line) + 1 for line in lines))
    return len(lines)


def _begin_line(record: dict[str, Any]) -> bytes:
    """Return the line of a record up to its answer."""
    return json.dumps(record | {GENERATED: ""}, ensure_ascii=False).removesuffix('"}').encode()


def write_answers(
    prompts: list[tuple[dict, list[int]]],
    path: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    *,
    batch_size: int,
    seed: int = 0,
    **sampling: Any,
) -> int:
    """
    Append each record with its answer, without special tokens, to a JSONL file that may hold the first ones already.

    Args:
        prompts (`list`): the result of [`read_prompts`].
        path (`Path`): the JSONL file.
        model ([`PreTrainedModel`]), tokenizer ([`PreTrainedTokenizerFast`]): the model, in eval mode, on its device.
        batch_size (`int`): prompts per call of `generate`, whose arguments are `sampling`.
        seed (`int`): seed of the sampling.

    Returns:
        `int`: the number of answers that were there already.

    Raises:
        `UserError`: if another process writes this file.
    """
    with locked(path.with_name(f".{path.name}.lock")):
        num_old = count_answers(path, [record for record, _ in prompts])
        with path.open("a", encoding="utf-8") as file, progress("generating", len(prompts)) as bar:
            bar.update(num_old)
            for start in range(num_old, len(prompts), batch_size):
                records, ids = zip(*prompts[start : start + batch_size], strict=True)
                # On the left: a decoder continues the right end of each sequence.
                batch = tokenizer.pad({"input_ids": ids}, padding_side="left", return_tensors="pt").to(model.device)
                # A run that goes on must not draw the random numbers of its first batch again.
                set_seed(seed + start)
                output = model.generate(**batch, **sampling)[:, batch["input_ids"].shape[1] :]
                answers = tokenizer.batch_decode(output, skip_special_tokens=True)
                for record, answer in zip(records, answers, strict=True):
                    file.write(json.dumps(record | {GENERATED: answer}, ensure_ascii=False) + "\n")
                file.flush()
                bar.update(len(answers))
    return num_old
