"""
Reinforcement with TRL: GRPO (https://huggingface.co/papers/2402.03300) with its losses (`--loss_type grpo`, `dapo`,
`dr_grpo`, `bnpo`, `cispo`, ...), and RLOO (https://huggingface.co/papers/2402.14740), on our models, with our flags.

What is ours: the router loss, saving, pushing and the card ([`~stages.trl_support.RouterLossMixin`]), a reference model that
is a copy of the policy at the start, and figures that mean what they say: evaluation reports rewards and no loss.
"""

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jinja2
import torch
from accelerate.utils import is_peft_model
from datasets import Dataset
from torch.utils.data import Sampler
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.integrations import is_deepspeed_zero3_enabled

from ..data.formats import BadRecord
from ..hub.model_card import RunFacts
from ..training.arguments import LMTrainingArguments
from ..training.row_source import RowSource
from .rewards import REWARDS, answer_of, check_rewards, check_task, load_function
from .trl_support import RouterLossMixin


try:
    from trl import GRPOConfig, GRPOTrainer, RLOOTrainer
    from trl.chat_template_utils import qwen3_template
    from trl.models import prepare_deepspeed
    from trl.trainer.callbacks import SyncRefModelCallback
    from trl.trainer.utils import RepeatSampler, add_fused_lm_head, disable_dropout_in_model
except ImportError as error:
    raise ImportError('Reinforcement needs TRL: pip install "hf_pretrain[trl]"') from error

# Levels of brackets in a tool call; arguments have one or two.
MAX_NESTING = 64


@dataclass
class TaskArguments:
    """Which tasks to train on, and what their answers are worth."""

    dataset_name: list[str] = field(
        default_factory=lambda: ["embedded:answer-format"],
        metadata={
            "help": "One or more of embedded:answer-format, embedded:arithmetic, embedded:idiom-task, "
            "embedded:tool-call, a path, glob or directory of JSONL, a Hub id."
        },
    )
    validation_fraction: float = field(
        default=0.01, metadata={"help": "Share of the tasks that is held out, chosen by a hash of their prompts."}
    )
    max_rejected_ratio: float = field(
        default=0.01, metadata={"help": "Share of bad lines that a run tolerates; they go to rejected.jsonl."}
    )
    rewards: list[str] = field(
        default_factory=lambda: ["format"],
        metadata={"help": f"One or more of {', '.join(REWARDS)}, module.path:function, or a reward model's Hub id."},
    )
    tools: list[str] | None = field(
        default=None,
        metadata={
            "help": "Tools that the model may call while it answers: calculator, minimind, or module.path:function."
        },
    )
    environment: str | None = field(
        default=None, metadata={"help": "module.path:Class of an environment with reset() and tools as its methods."}
    )

    def load_environment(self) -> Callable[[], Any] | None:
        """The class of the environment, if there is one."""
        if self.environment is None:
            return None
        return load_function(self.environment, flag="--environment", known={})


@dataclass
class GRPOTrainingArguments(LMTrainingArguments, GRPOConfig):
    """TRL's `GRPOConfig` in which the flags of every recipe mean and default to what they do everywhere."""

    output_dir: str | None = field(default="out/grpo", metadata={"help": "Where the run goes."})
    algorithm: str = field(default="grpo", metadata={"help": "grpo (see --loss_type) or rloo."})
    learning_rate: float = field(default=3e-7, metadata={"help": "Peak learning rate."})
    per_device_train_batch_size: int = field(
        default=8, metadata={"help": "Completions a process trains on at a time; a step's are whole groups."}
    )
    remove_unused_columns: bool | None = field(
        default=False, metadata={"help": "Must be false: the reward functions read the columns."}
    )
    enable_thinking: bool | None = field(
        default=None, metadata={"help": "Let the model think or not; unset leaves it to the model."}
    )
    normalize_advantages: bool = field(
        default=False, metadata={"help": "RLOO: of a batch, to mean 0 and deviation 1."}
    )
    reward_clip_range: tuple[float, float] | None = field(
        default=None, metadata={"help": "RLOO: clip rewards to this range."}
    )

    def __post_init__(self):
        if self.algorithm not in ALGORITHMS:
            raise ValueError(f"--algorithm {self.algorithm} is unknown; use one of {', '.join(ALGORITHMS)}.")
        default_loss = GRPOConfig.loss_type
        if self.algorithm == "rloo" and self.loss_type != default_loss:
            raise ValueError(
                f"--algorithm rloo has a loss of its own and would not use --loss_type {self.loss_type}. Leave it out, "
                f"or, where a config names it, give --loss_type {default_loss}, which is the default."
            )
        if self.remove_unused_columns:
            raise ValueError(
                "--remove_unused_columns would take the columns away that the rewards read; leave it out."
            )
        if self.fsdp_size > 1 and self.beta != 0.0:
            raise ValueError(
                f"--beta {self.beta} needs a reference model, which --fsdp_size does not shard. Use --beta 0, or ZeRO-3 "
                "(--deepspeed ds_configs/zero3.json)."
            )
        super().__post_init__()
        if self.use_transformers_continuous_batching and self.bf16:
            # NOTE: TRL's _generate_single_turn calls `model.to(torch.bfloat16)` on the policy itself, for good.
            raise ValueError(
                "--use_transformers_continuous_batching under bf16 makes TRL cast the weights that are trained to "
                "bfloat16, and small steps are lost. Add --bf16 false."
            )
        if self.use_transformers_continuous_batching and self.device.type == "cpu":
            # Of all memory of the machine; by TRL's default, half of it.
            given = self.transformers_continuous_batching_config or {}
            self.transformers_continuous_batching_config = {"max_memory_percent": 0.05} | given
        if self.enable_thinking is not None:
            # MiniMind-3's own template has another name for it.
            thinking = dict.fromkeys(("enable_thinking", "open_thinking"), self.enable_thinking)
            self.chat_template_kwargs = (self.chat_template_kwargs or {}) | thinking

    @property
    def method(self) -> str:
        """The algorithm, and its loss where it has several, for people."""
        return "rloo" if self.algorithm == "rloo" else f"{self.algorithm}, {self.loss_type} loss"


def task_check(
    rewards: list[Any],
    tokenizer: PreTrainedTokenizerFast,
    *,
    max_prompt_length: int,
    tools: list[Callable[..., Any]] | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> Callable[[dict[str, Any]], None]:
    """
    What raises `BadRecord` for a task that a run cannot train on.

    Args:
        rewards (`list`): reward functions; the built-in ones say what they need ([`~stages.rewards.check_task`]).
        tokenizer ([`PreTrainedTokenizerFast`]): with a chat template, which must render the prompt.
        max_prompt_length (`int`): tokens of a prompt that leave room for a completion.
        tools (`list` of functions, *optional*): that the template describes.
        chat_template_kwargs (`dict`, *optional*): what the template is given.

    Raises:
        `ValueError`: if there is room for no prompt.
    """
    if max_prompt_length < 1:
        raise ValueError(
            f"--max_completion_length leaves {max_prompt_length} of the model's positions to the prompt. Lower it."
        )

    def check(task: dict[str, Any]) -> None:
        check_task(rewards, task)
        try:
            prompt = tokenizer.apply_chat_template(
                task["prompt"],
                tools=tools,
                add_generation_prompt=True,
                return_dict=False,
                **chat_template_kwargs or {},
            )
        except jinja2.TemplateError as error:
            raise BadRecord(f"the chat template cannot render the prompt ({error}); mend or drop the line") from error
        if len(prompt) > max_prompt_length:
            raise BadRecord(
                f"the prompt is longer than {max_prompt_length} tokens, what --max_completion_length leaves of the "
                "model's positions; shorten it, or drop the line"
            )

    return check


def _copy(model: PreTrainedModel) -> PreTrainedModel:
    """A model with the same weights, whole on every rank, also where ZeRO-3 has taken those of `model` apart."""
    twin = type(model)(copy.deepcopy(model.config))
    gathered: AbstractContextManager = nullcontext()
    if is_deepspeed_zero3_enabled():
        import deepspeed

        gathered = deepspeed.zero.GatheredParameters(list(model.parameters()))
    with gathered:
        twin.load_state_dict(model.state_dict())
    return twin.to(model.device).eval()


def _parse_response(parse: Callable[..., dict[str, Any]], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """
    What `parse` makes of a completion. NOTE: TRL takes a completion for plain text where that raises a `ValueError`. But
    1,000 brackets raise a `RecursionError`, fewer do so later, where a call is copied or rendered, and half a surrogate
    pair cannot be tokenized.
    """
    try:
        message = parse(*args, **kwargs)
        json.dumps(message, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError("The completion has too many brackets.") from error
    if _is_deeper(message, MAX_NESTING):
        raise ValueError(f"The completion has more than {MAX_NESTING} levels of brackets.")
    return message


def _is_deeper(value: Any, depth: int) -> bool:
    """Whether lists and dictionaries lie in each other more than `depth` times."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return depth < 0 or any(_is_deeper(part, depth - 1) for part in parts)


class _EpochSampler(Sampler[int]):
    """The prompts as TRL's sampler repeats them, in an order that depends on seed and epoch alone."""

    def __init__(self, sampler: RepeatSampler):
        self.sampler = sampler
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[int]:
        if self.sampler.shuffle:
            self.sampler.generator.manual_seed(self.sampler.seed + self.epoch)
        yield from self.sampler

    def set_epoch(self, epoch: int):
        self.epoch = epoch


class _EpochTasks(torch.utils.data.Dataset):
    """Tasks that tell the epoch to their sampler."""

    def __init__(self, tasks: Dataset):
        self.tasks = tasks
        self.sampler: _EpochSampler | None = None

    def __len__(self) -> int:
        return len(self.tasks)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.tasks[index]

    def set_epoch(self, epoch: int):
        # NOTE: after a resume on several ranks accelerate finds no way to the sampler below its own, but asks us.
        if self.sampler is not None:
            self.sampler.set_epoch(epoch)


class _OnlineTrainer(RouterLossMixin):
    """What GRPO and RLOO of ours have in common."""

    def __init__(self, model: PreTrainedModel, *, args: GRPOTrainingArguments, **kwargs: Any):
        rewards, tasks = kwargs.get("reward_funcs") or [], kwargs.get("train_dataset")
        if isinstance(tasks, Dataset) and rewards and not kwargs.get("environment_factory"):
            run_facts = kwargs.get("run_facts") or RunFacts()
            check_rewards(rewards if isinstance(rewards, list) else [rewards], tasks, dataset_names=run_facts.datasets)
        # NOTE: TRL reads the reference again from where the config says that the policy came from, which a converted or
        # new model has not. With an adapter, the policy without it is the reference, and TRL sees to that.
        has_adapter = is_peft_model(model) or kwargs.get("peft_config") is not None
        needs_reference = args.beta != 0.0 and not has_adapter
        reference = _copy(model).requires_grad_(False) if needs_reference else None
        tokenizer = kwargs["processing_class"]
        if (kwargs.get("tools") or kwargs.get("environment_factory")) and tokenizer.response_template is None:
            # Ours writes thoughts and tool calls as Qwen3's does. TRL recognises its own templates alone.
            tokenizer.response_template = qwen3_template
        tokenizer.parse_response = partial(_parse_response, tokenizer.parse_response)
        beta, is_synced = args.beta, args.sync_ref_model
        if needs_reference:
            args.beta, args.sync_ref_model = 0.0, False
        super().__init__(model, args=args, **kwargs)
        args.beta, args.sync_ref_model = beta, is_synced
        self.beta = beta
        if reference is not None:
            self.ref_model = self._prepare_reference(reference)

    # NOTE: TRL's sampler draws from one generator, which a resumed run starts anew: in a later epoch, it would go on
    # in the order of the first.

    def _row_source(self, dataset, description, batch_size, sampler_fn, is_training) -> RowSource:
        if is_training and isinstance(dataset, Dataset):
            dataset = _EpochTasks(dataset)
        return super()._row_source(dataset, description, batch_size, sampler_fn, is_training)

    def _get_train_sampler(self, dataset=None):
        sampler = _EpochSampler(super()._get_train_sampler(dataset))
        if isinstance(dataset, _EpochTasks):
            dataset.sampler = sampler
        return sampler

    def _prepare_reference(self, reference: PreTrainedModel) -> torch.nn.Module:
        """As TRL prepares its own."""
        if self.args.disable_dropout:
            disable_dropout_in_model(reference)
        add_fused_lm_head(reference, temperature=self.temperature, cast_lm_head_to_fp32=self.args.cast_lm_head_to_fp32)
        if self.is_deepspeed_enabled:
            prepared = prepare_deepspeed(reference, self.accelerator)
        else:
            prepared = self.accelerator.prepare_model(reference, evaluation_mode=True)
        if self.args.sync_ref_model:
            self.add_callback(SyncRefModelCallback(ref_model=prepared, accelerator=self.accelerator))
        return prepared

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """TRL counts tokens where it generates them."""

    def last_answers(self, num_samples: int = 3) -> list[tuple[str, str]]:
        """Completions of the last prompts, one of each, as pairs of question and answer."""
        every = slice(None, None, self.num_generations_eval)
        prompts, completions = (list(self._logs[name])[every][-num_samples:] for name in ("prompt", "completion"))
        return [(prompt[-1]["content"], answer_of(text)) for prompt, text in zip(prompts, completions, strict=True)]

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        """Generates and scores; the loss, whose mean over a group is near zero whatever the policy, is left out."""
        super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        return None, None, None


class MiniMindGRPOTrainer(_OnlineTrainer, GRPOTrainer):
    """TRL's [`~trl.GRPOTrainer`] for [`MiniMindForCausalLM`]."""


class MiniMindRLOOTrainer(_OnlineTrainer, RLOOTrainer):
    """TRL's [`~trl.RLOOTrainer`] for [`MiniMindForCausalLM`]; it has no tools and no environments."""

    def __init__(self, *args: Any, tools: Any = None, environment_factory: Any = None, **kwargs: Any):
        if tools or environment_factory:
            raise ValueError("--algorithm rloo has no tools and no environment in TRL: use --algorithm grpo.")
        super().__init__(*args, **kwargs)


ALGORITHMS: dict[str, type[_OnlineTrainer]] = {"grpo": MiniMindGRPOTrainer, "rloo": MiniMindRLOOTrainer}

__all__ = [
    "ALGORITHMS",
    "GRPOTrainingArguments",
    "MiniMindGRPOTrainer",
    "MiniMindRLOOTrainer",
    "TaskArguments",
    "task_check",
]
