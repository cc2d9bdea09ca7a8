"""
What users type: which model, which data, and the parser that reads a recipe's flags ([`~training_args`] has the rest).

`--config file.yaml` gives defaults, the command line wins, and a key that no dataclass knows is an error.
"""

import dataclasses
import difflib
import json
import re
import sys
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from datasets import Dataset, IterableDataset
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast, TrainingArguments
from transformers.distributed import DistributedConfig
from transformers.utils import logging

from .adapters import adapter_base, load_adapter
from .command_line import RecipeParser
from .config_fields import check_fields
from .configuration_minimind import PRESETS, MiniMindConfig
from .conversion import is_ours, load_ours, load_upstream
from .data.conversations import CONVERSATION_KEYS, ConversationEncoder, parse_span_weights
from .data.loading import load_documents
from .data.packing import PackingReport, prepare_rows
from .modeling_minimind import MiniMindForCausalLM
from .tokenization import check_tokenizer


logger = logging.get_logger(__name__)


def default_preset() -> str:
    """The preset that this machine can train in a sitting."""
    return "minimind2-small" if torch.cuda.is_available() else "tiny"


class _FieldLoader(yaml.SafeLoader):
    """YAML in which 1e6 is a number: for PyYAML it is text, because it has no point."""


_FieldLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def parse_fields(text: str, *, flag: str, also_known: Collection[str] = ()) -> dict[str, Any]:
    """
    Config fields as they are typed: `name=value, name={key: value}`, the values in YAML. Raises `ValueError`, naming
    `flag`, for what is not of that form, or neither a field of the config nor `also_known`; and for values of a wrong type.
    """
    try:
        fields = yaml.load("{" + text.replace("=", ": ") + "}", Loader=_FieldLoader)
    except yaml.YAMLError:
        fields = {text: None}
    known = {f.name for f in dataclasses.fields(MiniMindConfig)} | MiniMindConfig.attribute_map.keys()
    for name, value in fields.items():
        if value is None:
            raise ValueError(f"{flag}: {name!r} is not of the form name=value.")
        if name not in known and name not in also_known:
            raise ValueError(f"{flag}: {name!r} is not a field of MiniMindConfig.")
    check_fields(fields)
    return fields


@dataclass
class ModelArguments:
    """Which model to train."""

    model_preset: str | None = field(
        default=None,
        metadata={"help": f"One of {', '.join(PRESETS)}. By default minimind2-small on a GPU, tiny on a CPU."},
    )
    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Start from this checkpoint directory or Hub id instead of from scratch."}
    )
    config_overrides: str | None = field(
        default=None, metadata={"help": "Config fields on top of the preset: num_hidden_layers=4,hidden_size=128"}
    )
    tokenizer_name_or_path: str | None = field(
        default=None,
        metadata={
            "help": "Tokenizer directory or Hub id. Without it, one is trained on the data and kept with the run."
        },
    )
    vocab_size: int = field(default=6400, metadata={"help": "Entries of a tokenizer that is trained here."})
    attn_implementation: str = field(
        default="auto", metadata={"help": "auto (packed), eager, sdpa or flex_attention."}
    )

    def __post_init__(self):
        if self.model_preset is not None and self.model_preset not in PRESETS:
            raise ValueError(f"--model_preset {self.model_preset} is unknown; use one of {', '.join(PRESETS)}.")

    @property
    def base_model(self) -> str:
        """`model_name_or_path`, for a stage that cannot do without; raises `ValueError` if it is not given."""
        if self.model_name_or_path is None:
            raise ValueError("This stage goes on from a model: pass --model_name_or_path with a directory or Hub id.")
        return self.model_name_or_path

    @property
    def overrides(self) -> dict[str, Any]:
        """`config_overrides` as a dictionary; raises `ValueError` as [`parse_fields`] does."""
        return parse_fields(self.config_overrides or "", flag="--config_overrides")

    def load_config(self, tokenizer: PreTrainedTokenizerBase) -> MiniMindConfig:
        """The config that these arguments ask for, with the special tokens of `tokenizer`."""
        try:
            if self.model_name_or_path:
                return MiniMindConfig.from_pretrained(self.model_name_or_path, **self.overrides)
            fields = dict(PRESETS[self.model_preset or default_preset()])
            fields |= {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
            if self.tokenizer_name_or_path is None:
                fields["vocab_size"] = self.vocab_size
            return MiniMindConfig(**fields | self.overrides)
        except StrictDataclassError as error:
            raise ValueError(f"--config_overrides {self.config_overrides}: {error}") from error

    def load_model(
        self, tokenizer: PreTrainedTokenizerBase, *, distributed: DistributedConfig | None = None
    ) -> MiniMindForCausalLM:
        """
        The model that these arguments ask for, in float32, sharded as `distributed` says. Weights that MiniMind
        itself wrote are converted on the way ([`~conversion.load_upstream`]); an adapter is put on its base model.

        Raises:
            `ValueError`: for an unknown config field or a value of the wrong type, a tokenizer whose ids exceed the
                vocabulary, or a checkpoint that cannot be converted.
        """
        base = adapter_base(self.model_name_or_path)
        if base is not None:
            model = dataclasses.replace(self, model_name_or_path=base).load_model(tokenizer, distributed=distributed)
            return load_adapter(model, self.model_name_or_path)
        upstream = None
        if self.model_name_or_path and not is_ours(self.model_name_or_path):
            logger.warning(f"{self.model_name_or_path} was not written by hf_pretrain: converting it.")
            upstream = load_upstream(self.model_name_or_path, config=self.overrides)
            try:
                config = MiniMindConfig.from_dict(upstream.config.to_dict() | self.overrides)
            except StrictDataclassError as error:
                raise ValueError(f"--config_overrides {self.config_overrides}: {error}") from error
        else:
            config = self.load_config(tokenizer)
        check_tokenizer(tokenizer, vocab_size=config.vocab_size, name=self.tokenizer_name_or_path or "the trained one")

        attn_implementation = "packed" if self.attn_implementation == "auto" else self.attn_implementation
        loading: dict[str, Any] = {
            "config": config,
            "attn_implementation": attn_implementation,
            "dtype": torch.float32,
        }
        if config.num_experts and not torch.accelerator.is_available():
            # NOTE: on a CPU, torch's grouped product takes half as long again as a loop over the experts.
            loading["experts_implementation"] = config._experts_implementation = "eager"
        if distributed is not None:
            if distributed.ep_size > 1 and not config.num_experts:
                raise ValueError(f"--ep_size {distributed.ep_size}: the model has no experts. Use --fsdp_size.")
            loading["distributed_config"] = distributed
        if upstream is not None:
            return MiniMindForCausalLM.from_pretrained(None, state_dict=upstream.state_dict(), **loading)
        if self.model_name_or_path:
            return load_ours(self.model_name_or_path, **loading)
        # Built whole on every rank, also under ZeRO-3: the first weights are then the same bits under every launcher.
        config._attn_implementation = attn_implementation
        model = MiniMindForCausalLM(config)
        if distributed is not None:
            return MiniMindForCausalLM.from_pretrained(None, state_dict=model.state_dict(), **loading)
        return model


@dataclass
class SourceArguments:
    """Which data to train on."""

    dataset_name: list[str] = field(
        default_factory=lambda: ["embedded"],
        metadata={"help": "One or more of embedded[:part], a path, glob or directory, a Hub id name:config@revision."},
    )
    dataset_weights: list[float] | None = field(
        default=None, metadata={"help": "How often each dataset is drawn from; by default they are concatenated."}
    )
    validation_fraction: float = field(
        default=0.01, metadata={"help": "Share of the documents that is held out, chosen by a hash of their text."}
    )
    train_fraction: float = field(
        default=1.0, metadata={"help": "Share of the other documents to train on, chosen by the same hash."}
    )
    num_proc: int | None = field(
        default=None, metadata={"help": "Processes that read and tokenize large data; by default one a core, up to 8."}
    )
    max_rejected_ratio: float = field(
        default=0.01, metadata={"help": "Share of bad lines that a run tolerates; they go to rejected.jsonl."}
    )

    def load_documents(
        self, training_args: TrainingArguments, *, schema: str = "text", keep_rejected: bool = True, **reading: Any
    ) -> tuple[Dataset | IterableDataset, Dataset]:
        """
        Documents to train on and documents held out, as [`~data.loading.load_documents`] gives them and raises; the
        main process lists bad lines in `output_dir`.
        """
        is_main = training_args.process_index == 0
        return load_documents(
            self.dataset_name,
            schema=schema,
            weights=self.dataset_weights,
            validation_fraction=self.validation_fraction,
            train_fraction=self.train_fraction,
            seed=training_args.seed,
            num_proc=self.num_proc,
            max_rejected_ratio=self.max_rejected_ratio,
            rejected_path=Path(training_args.output_dir, "rejected.jsonl") if is_main and keep_rejected else None,
            **reading,
        )


@dataclass
class DataArguments(SourceArguments):
    """Which text to train on, and how it becomes rows."""

    streaming: bool = field(default=False, metadata={"help": "Read while training; needs --max_steps."})
    text_column: str = field(default="text", metadata={"help": "The column or JSON field that holds the text."})
    max_length: int = field(default=512, metadata={"help": "Tokens a row."})
    packing: str = field(default="bfd", metadata={"help": "bfd (best fit decreasing), none, or of text also wrapped."})

    @property
    def row_length(self) -> int | None:
        """Tokens of every packed row: one width, so one compiled graph. `None` where a row is one document."""
        return None if self.packing == "none" else self.max_length

    @property
    def schema(self) -> str:
        """What a record is, for [`~data.loading.load_documents`]."""
        return "text"

    @property
    def encoder(self) -> ConversationEncoder | None:
        """From conversations to ids and weights; `None` for text."""
        return None

    def load_documents(self, training_args: TrainingArguments, **reading: Any):
        """The same; a stream is shuffled."""
        own: dict[str, Any] = {"schema": self.schema, "text_column": self.text_column, "streaming": self.streaming}
        train, held_out = super().load_documents(training_args, **own | reading)
        return (train.shuffle(seed=training_args.seed, buffer_size=10_000) if self.streaming else train), held_out

    def prepare_rows(
        self, documents: Dataset | IterableDataset, tokenizer: PreTrainedTokenizerFast
    ) -> tuple[Dataset | IterableDataset | None, PackingReport | None]:
        """Rows and what was counted, as [`~data.packing.prepare_rows`] gives them; `None` where there are no documents."""
        if isinstance(documents, Dataset) and len(documents) == 0:
            return None, None
        return prepare_rows(
            documents,
            tokenizer,
            max_length=self.max_length,
            packing=self.packing,
            num_proc=self.num_proc,
            encoder=self.encoder,
        )


@dataclass
class ChatArguments(DataArguments):
    """Which conversations to train on, and what of them. What is over `max_length` is cut off."""

    dataset_kind: str = field(
        default="auto", metadata={"help": f"What the records are: auto, {', '.join(CONVERSATION_KEYS)}; or text."}
    )
    chat_template: str | None = field(
        default=None, metadata={"help": "A Jinja file in place of the tokenizer's own template; or minimind."}
    )
    enable_thinking: bool | None = field(
        default=None, metadata={"help": "Given to the template: false puts an empty thought in front of each answer."}
    )
    train_on_inputs: bool = field(default=False, metadata={"help": "Train on what the assistant is given, too."})
    span_weights: str = field(
        default="",
        metadata={"help": "Weights within the answers: <think>=10 of the marks, think=0.5 of what is between them."},
    )
    preview: int = field(default=0, metadata={"help": "Print this many rows, what is trained on in colour, and stop."})

    def __post_init__(self):
        if self.dataset_kind not in ("auto", "text", *CONVERSATION_KEYS):
            raise ValueError(
                f"--dataset_kind {self.dataset_kind} is unknown; use auto, {', '.join(CONVERSATION_KEYS)} or text."
            )

    @property
    def schema(self) -> str:
        """The name of the reader in `SCHEMAS`."""
        kinds = {"auto": "conversation", "text": "text"}
        return kinds.get(self.dataset_kind) or f"conversation:{self.dataset_kind}"

    @property
    def kind_name(self) -> str:
        """What the records are, for people."""
        return "text" if self.dataset_kind == "text" else "conversations"

    @property
    def encoder(self) -> ConversationEncoder | None:
        """From conversations to ids and weights; `None` for text."""
        if self.dataset_kind == "text":
            return None
        kwargs = () if self.enable_thinking is None else (("enable_thinking", self.enable_thinking),)
        return ConversationEncoder(self.train_on_inputs, parse_span_weights(self.span_weights), kwargs)


def _known_keys(dataclass_types: tuple[type, ...]) -> list[str]:
    return [f.name for cls in dataclass_types for f in dataclasses.fields(cls) if f.init]


def _yaml_to_argv(path: str, known_keys: list[str]) -> list[str]:
    """Turns a YAML file into command-line words, so that its values are checked as typed ones are."""
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"--config {path}: no such file.") from None
    except yaml.YAMLError as error:
        raise ValueError(f"--config {path} is not YAML: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"--config {path} must hold `key: value` lines.")
    argv = []
    for key, value in content.items():
        if key not in known_keys:
            nearest = difflib.get_close_matches(str(key), known_keys, n=1, cutoff=0)[0]
            raise ValueError(f"{path}: unknown key `{key}`; the nearest known one is `{nearest}`.")
        if isinstance(value, list):
            argv += [f"--{key}", *map(str, value)]
        elif value is not None:
            argv.append(f"--{key}={json.dumps(value) if isinstance(value, dict) else value}")
    return argv


def parse_args(*dataclass_types: type, stage: str = "pretrain", argv: list[str] | None = None) -> tuple[Any, ...]:
    """
    Parses the command line into instances of `dataclass_types`.

    Args:
        stage (`str`): where no `--config` is given, `recipes/<preset>/<stage>.yaml` beside the recipe is read, with
            the preset of `--model_preset`, or the default for this machine.
        argv (`list[str]`, *optional*): the words after the program's name; `sys.argv[1:]` by default.

    Raises:
        `ValueError`: for an unknown YAML key or flag, naming the nearest known one; for a value of the wrong type, or
            one that a dataclass refuses.
    """
    argv = sys.argv[1:] if argv is None else argv
    # Bare, --debug is for `one_line_errors`; with a value, it is TrainingArguments' own.
    pairs = zip(argv, [*argv, "--"][1:], strict=True)
    argv = [word for word, after in pairs if word != "--debug" or not after.startswith("--")]
    parser = RecipeParser(dataclass_types, allow_abbrev=False, epilog="--debug shows the traceback of a mistake, too.")
    known_keys = _known_keys(dataclass_types)

    config = None
    if "config" in known_keys:
        known, _ = parser.parse_known_args(argv)
        config = known.config or _default_config(known, stage)
    defaults = _yaml_to_argv(config, known_keys) + ["--config", config] if config else []
    namespace, rest = parser.parse_known_args(defaults + argv)
    unknown = [word for word in rest if word.startswith("--")]
    if rest:
        word = (unknown or rest)[0]
        nearest = difflib.get_close_matches(word.lstrip("-").split("=")[0], known_keys, n=1, cutoff=0)[0]
        raise ValueError(f"Unknown argument {word!r}; the nearest known one is --{nearest}.")
    try:
        return parser.parse_dict(vars(namespace), allow_extra_keys=False)
    except ValueError as error:
        # transformers and TRL check their own flags there.
        raise ValueError(str(error)) from error


def _default_config(known: Any, stage: str) -> str | None:
    """The YAML of the preset, from the repository that the running recipe belongs to."""
    if known.model_name_or_path:
        return None
    path = Path(sys.argv[0]).parent / (known.model_preset or default_preset()) / f"{stage}.yaml"
    return str(path) if path.is_file() else None
