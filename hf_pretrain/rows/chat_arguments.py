"""Command-line arguments that name conversations and choose their trained tokens."""

from dataclasses import dataclass

from ..runtime.errors import UserError
from ..runtime.flags import content_flag, flag
from .data_arguments import DataArguments
from .encoding import ConversationEncoder


@dataclass
class ChatArguments(DataArguments):
    """
    Conversations to train on, and the choice of the trained tokens.

    Conversations are truncated at `max_length` tokens.
    """

    dataset_kind: str = content_flag(
        "auto",
        "Kind of the records: conversations, whose fields tell their form (auto), or text.",
        choices=("auto", "text"),
    )
    chat_template: str | None = content_flag(
        None, "Jinja file that replaces the tokenizer's chat template; or minimind, MiniMind's template."
    )
    enable_thinking: bool | None = content_flag(
        None, "Variable of the chat template; false puts an empty <think> block in front of each answer."
    )
    add_system_ratio: float = flag(
        0.0,
        "Share of the training conversations with a random system message, e.g. 0.2.",
        bounds="at least 0 and at most 1",
    )
    empty_think_ratio: float | None = flag(
        None,
        "Share of the training conversations with empty <think> blocks, e.g. 0.2.",
        bounds="at least 0 and at most 1",
    )
    train_on: str = content_flag(
        "assistant",
        "The loss covers the answers (assistant), only those to the last question (last_turn), or all.",
        choices=("assistant", "last_turn", "all"),
    )

    def __post_init__(self):
        super().__post_init__()
        if self.empty_think_ratio is not None and self.enable_thinking is not None:
            raise UserError("--empty_think_ratio and --enable_thinking contradict each other. Leave one of them out.")

    @property
    def kind(self) -> str:
        return "text" if self.dataset_kind == "text" else "conversation"

    def encoder(self, seed: int | None = None) -> ConversationEncoder | None:
        if self.dataset_kind == "text":
            return None
        # Unset differs from false: the template then uses its own default.
        kwargs = () if self.enable_thinking is None else (("enable_thinking", self.enable_thinking),)
        ratios = (self.add_system_ratio, self.empty_think_ratio)
        # Without draws, the cached rows do not depend on the seed.
        return ConversationEncoder(self.train_on, kwargs, *ratios, seed=None if ratios == (0, None) else seed)
