"""Raw continuation in the terminal, for models that were pretrained and have not learnt to chat."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..reports.runs import read_launches, trained_on_text
from ..runtime.errors import UserError
from ..runtime.names import split_hub_name
from ..tokenizer.encoding import encode_documents
from .generating import COMMON_HELP, Generator, PartsStreamer, append_record, check_text


HELP = f"""\
The model continues each line that you type, as the beginning of a document. An empty line continues the last text.

/reset          forget the last text
/save FILE      append the last text to a JSONL file that pretraining can read
{COMMON_HELP}"""


class Continuation:
    """
    A text that the user begins and a model continues.

    Args:
        generator ([`Generator`]): the model.
    """

    def __init__(self, generator: Generator):
        self.generator = generator
        self.text = ""

    @property
    def prompt(self) -> str:
        """Text that asks the user for the next line."""
        return "> "

    def say(self, text: str) -> bool:
        """
        Begin a new text, or keep the last one if `text` is empty.

        Returns:
            `bool`: whether there is a text to continue.

        Raises:
            `ValueError`: for text that is not UTF-8.
        """
        check_text(text)
        # Keep the white space of a line: the model continues exactly this text.
        self.text = text or self.text
        return bool(self.text)

    def answer(self, write: Callable[[str], Any]) -> str:
        """
        Continue the text. Ctrl-C ends the continuation early.

        Args:
            write (`Callable`): receives the text to show, piece by piece.

        Returns:
            `str`: the continuation.

        Raises:
            `ValueError`: if the text fills the model's positions.
        """
        # A document begins with bos. Leave out its eos, which would end it.
        ids = encode_documents([self.text], self.generator.tokenizer)[0][:-1]
        streamer = PartsStreamer(self.generator.tokenizer, write)
        self.generator.run(ids, streamer)
        continuation = streamer.message["content"]
        self.text += continuation
        return continuation

    def run_command(self, line: str) -> str:
        """
        Run a line that begins with a slash, and return the reply to the user.

        Raises:
            `ValueError`: for an unknown command, or a value or file that it cannot use.
        """
        check_text(line)
        name, _, value = line.partition(" ")
        value = value.strip()
        if name == "/temperature":
            return self.generator.set_temperature(value)
        if name == "/reset":
            self.text = ""
            return "the text is empty"
        if name == "/save" and value:
            if not self.text:
                raise UserError("/save: there is no text yet. Type its beginning first.")
            append_record(value, {"text": self.text})
            return f"{len(self.text)} characters are in {value}"
        if name == "/help":
            return HELP
        raise UserError(f"{line!r} is not a command for raw continuation.\n{HELP}")


def is_base_model(name_or_path: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> bool:
    """
    Return whether a model has never seen a chat: its tokenizer has no chat template, or the last run in its directory
    trained on text. If there is no record of a run, as on the Hub, the generation config of a model that was trained
    on text turns sampling off.

    Args:
        name_or_path (`str`): a Hub id, or the directory of a model, a run or a checkpoint.
        model ([`PreTrainedModel`]): the model.
        tokenizer ([`PreTrainedTokenizerFast`]): its tokenizer.
    """
    if tokenizer.chat_template is None:
        return True
    path = Path(split_hub_name(os.path.expanduser(name_or_path))[0])
    # The record of a run lies beside its checkpoints.
    run = path.parent if path.name.startswith(PREFIX_CHECKPOINT_DIR) else path
    is_base = trained_on_text(read_launches(run))
    if is_base is None:
        return model.generation_config is not None and model.generation_config.do_sample is False
    return is_base


__all__ = ["HELP", "Continuation", "is_base_model"]
