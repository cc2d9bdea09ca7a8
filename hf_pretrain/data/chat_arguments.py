"""Command-line arguments that name conversations and choose their trained tokens."""

from dataclasses import dataclass, field

from .data_arguments import DataArguments
from .draws import check_ratio
from .encoding import ConversationEncoder


@dataclass
class ChatArguments(DataArguments):
    """
    Conversations to train on, and the choice of the trained tokens.

    Conversations are truncated at `max_length` tokens.
    """

    dataset_kind: str = field(
        default="auto",
        metadata={
            "help": "Kind of the records: conversations, whose fields tell their form (auto), or text.",
            "choices": ("auto", "text"),
        },
    )
    chat_template: str | None = field(
        default=None,
        metadata={"help": "Jinja file that replaces the tokenizer's chat template; or minimind, MiniMind's template."},
    )
    enable_thinking: bool | None = field(
        default=None,
        metadata={"help": "Variable of the chat template; false puts an empty <think> block in front of each answer."},
    )
    add_system_ratio: float = field(
        default=0.0, metadata={"help": "Share of the training conversations with a random system message, e.g. 0.2."}
    )
    empty_think_ratio: float | None = field(
        default=None, metadata={"help": "Share of the training conversations with empty <think> blocks, e.g. 0.2."}
    )
    train_on: str = field(
        default="assistant",
        metadata={
            "help": "The loss covers the answers (assistant), only those to the last question (last_turn), or all.",
            "choices": ("assistant", "last_turn", "all"),
        },
    )
    preview: int = field(
        default=0, metadata={"help": "Print this many packed sequences, with trained tokens in colour, and stop."}
    )

    def __post_init__(self):
        super().__post_init__()
        check_ratio("--add_system_ratio", self.add_system_ratio)
        check_ratio("--empty_think_ratio", self.empty_think_ratio, self.enable_thinking)

    @property
    def kind_name(self) -> str:
        return "text" if self.dataset_kind == "text" else "conversations"

    def encoder(self, seed: int | None = None) -> ConversationEncoder | None:
        if self.dataset_kind == "text":
            return None
        # Unset differs from false: the template then uses its own default.
        kwargs = () if self.enable_thinking is None else (("enable_thinking", self.enable_thinking),)
        ratios = (self.add_system_ratio, self.empty_think_ratio)
        # Without draws, the cached rows do not depend on the seed.
        return ConversationEncoder(self.train_on, kwargs, *ratios, seed=None if ratios == (0, None) else seed)
