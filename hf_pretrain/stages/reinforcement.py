"""
Reinforcement learning with TRL's trainers, our models and our flags: GRPO (https://huggingface.co/papers/2402.03300)
with its losses (`--loss_type grpo`, `dapo`, `dr_grpo`, `bnpo`, `cispo`, ...), and RLOO
(https://huggingface.co/papers/2402.14740).

This package adds the router loss, saving, pushing and the model card ([`~stages.trl_support.RouterLossMixin`]), a
reference model that is a copy of the initial policy, and an evaluation that reports rewards instead of a loss.
"""

import copy
import json
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import is_peft_model
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.integrations import is_deepspeed_zero3_enabled

from ..data.draws import check_ratio
from ..data.formats import BadRecord
from ..data.padding_rows import EpochSampler, PaddedDataset, RowSource
from ..data.preparation import PreparedData
from ..data.reward_tasks import load_tasks
from ..data.sources import name_eval_sets
from ..runtime.errors import UserError, as_user_errors, needing_extra
from ..tokenizer.control_tokens import template_errors, thinking_variables
from ..training.resume_check import digest_weights
from ..training.training_arguments import LMTrainingArguments
from .record_template import RecordTemplate, tools_of
from .rewards import REWARDS, answer_of, check_task
from .trl_support import RouterLossMixin


with needing_extra("trl", "Reinforcement learning needs TRL"):
    from trl import GRPOConfig, GRPOTrainer, RLOOTrainer
    from trl.chat_template_utils import qwen3_template
    from trl.models import prepare_deepspeed
    from trl.trainer.callbacks import SyncRefModelCallback
    from trl.trainer.utils import add_fused_lm_head, disable_dropout_in_model

# Maximum number of brackets in the tool calls of a completion. Real calls have ten or twenty.
MAX_BRACKETS = 200


@dataclass
class TaskArguments:
    """Tasks to train on, and the rewards for their answers."""

    dataset_name: list[str] = field(
        default_factory=lambda: ["embedded:answer-format"],
        metadata={
            "help": "One or more of embedded:answer-format, embedded:arithmetic, a path, glob "
            "or directory of JSONL, a Hub id."
        },
    )
    eval_dataset_name: list[str] | None = field(
        default=None,
        metadata={"help": "One or more names of validation tasks. The run then trains on all of --dataset_name."},
    )
    validation_fraction: float = field(
        default=0.01, metadata={"help": "Share of the tasks in the validation set, chosen by a hash of the prompt."}
    )
    add_system_ratio: float = field(
        default=0.0, metadata={"help": "Share of the prompts with a random system message, e.g. 0.2."}
    )
    max_rejected_ratio: float = field(
        default=0.01, metadata={"help": "Largest share of bad lines; the run lists them in rejected.jsonl."}
    )
    rewards: list[str] = field(
        default_factory=lambda: ["format"],
        metadata={
            "help": f"One or more of {', '.join(REWARDS)}, module.path:function, or a reward model's Hub id.",
        },
    )
    tools: list[str] | None = field(
        default=None,
        metadata={"help": "Tools that the model may call while it answers: calculator, or module.path:function."},
    )

    def __post_init__(self):
        check_ratio("--add_system_ratio", self.add_system_ratio)

    def load_tasks(
        self,
        training_args: "GRPOTrainingArguments",
        tokenizer: PreTrainedTokenizerFast,
        *,
        check: Callable[[dict[str, Any]], None],
    ) -> PreparedData:
        """
        Load the tasks by [`~data.reward_tasks.load_tasks`].

        Args:
            training_args ([`GRPOTrainingArguments`]): gives the seed and the directory of `rejected.jsonl`, which only
                the main process writes.
            tokenizer ([`PreTrainedTokenizerFast`]): the tokenizer of the run.
            check (`Callable`): as in [`~data.reward_tasks.load_tasks`].
        """
        is_main = training_args.process_index == 0
        how = {"seed": training_args.seed, "add_system_ratio": self.add_system_ratio, "check": check}
        how["max_rejected_ratio"] = self.max_rejected_ratio
        named = name_eval_sets(self.eval_dataset_name, self.dataset_name)
        # Without a fraction for validation, the training set is the whole set.
        eval_sets = {label: load_tasks([name], validation_fraction=0.0, **how)[0] for label, name in named.items()}
        how["validation_fraction"] = 0.0 if eval_sets else self.validation_fraction
        rejected_path = Path(training_args.output_dir, "rejected.jsonl") if is_main else None
        train, validation = load_tasks(self.dataset_name, rejected_path=rejected_path, **how)
        eval_sets = eval_sets or {"": validation}
        report = [
            f"Training: {len(train):,} tasks, {training_args.num_generations} completions each",
            *(f"Validation{label and ' '}{label}: {len(tasks):,} tasks" for label, tasks in eval_sets.items()),
            f"Rewards: {', '.join(self.rewards)}",
        ]
        names = self.eval_dataset_name or []
        return PreparedData(tokenizer, report, self.dataset_name, "tasks", train, eval_sets, names)


@dataclass
class GRPOTrainingArguments(LMTrainingArguments, GRPOConfig):
    """TRL's `GRPOConfig`. Flags that all recipes share keep this package's meaning and defaults."""

    default_optim_preset = "adamw"
    takes_fp8 = False
    output_dir: str | None = field(default="out/grpo", metadata={"help": "Directory of the run."})
    algorithm: str = field(
        default="grpo", metadata={"help": "grpo (see --loss_type) or rloo.", "choices": ("grpo", "rloo")}
    )
    learning_rate: float = field(default=3e-7, metadata={"help": "Peak learning rate."})
    per_device_train_batch_size: int = field(
        default=8, metadata={"help": "Completions per device and micro-batch; a step must hold whole groups."}
    )
    remove_unused_columns: bool | None = field(
        default=False, metadata={"help": "Must be false: the reward functions read the columns."}
    )
    thinking_ratio: float | None = field(
        default=None, metadata={"help": "Share of the prompts that ask for a thought; the others get an empty one."}
    )
    # Settings of TRL's `RLOOConfig`, which its trainer reads, with TRL's defaults.
    normalize_advantages = False
    reward_clip_range = None

    def __post_init__(self):
        # The reference model would have to be sharded like the policy, and TRL does not do that.
        if self.distributed_config is not None and self.beta != 0.0:
            raise UserError(
                f"--beta {self.beta} needs a reference model, which --fsdp_size, --tp_size and --ep_size do not "
                "shard. Use --beta 0, or ZeRO-3 (--deepspeed ds_configs/zero3.json)."
            )
        if self.metric_for_best_model is None and (self.early_stopping_patience or self.load_best_model_at_end):
            # An evaluation has no loss.
            self.metric_for_best_model = "reward"
        if self.use_transformers_continuous_batching:
            raise UserError(
                "--use_transformers_continuous_batching needs a paged cache, which MiniMind's model lacks."
            )
        super().__post_init__()
        check_ratio("--thinking_ratio", self.thinking_ratio)
        if self.thinking_ratio is not None:
            # `RecordTemplate` replaces these variables in the prompts that ask for a thought.
            self.chat_template_kwargs = (self.chat_template_kwargs or {}) | thinking_variables(False)

    @property
    def loss_depends_on_micro_batch(self) -> bool:
        # The loss divides by the tokens of a micro-batch.
        return self.loss_type == "bnpo"

    @property
    def method(self) -> str:
        """Name of the algorithm, and of its loss if it has several, for messages and the model card."""
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
    Return a function that raises `BadRecord` for a task that the run cannot use.

    Args:
        rewards (`list`): reward functions; [`~stages.rewards.check_task`] knows the needs of the built-in ones.
        tokenizer ([`PreTrainedTokenizerFast`]): a tokenizer whose chat template must render the prompt.
        max_prompt_length (`int`): the longest prompt, in tokens, that leaves room for a completion.
        tools (`list` of functions, *optional*): tools that the template describes.
        chat_template_kwargs (`dict`, *optional*): variables of the template.

    Raises:
        `ValueError`: if no prompt would fit, or the template cannot render one.
    """
    if max_prompt_length < 1:
        raise UserError(
            f"--max_completion_length leaves {max_prompt_length} of the model's positions for the prompt. Lower it."
        )

    def check(task: dict[str, Any]) -> None:
        check_task(rewards, task)
        own = tools_of(task["prompt"])
        unknown = {tool["function"]["name"] for tool in own or []} - {tool.__name__ for tool in tools or []}
        if tools and unknown:
            raise BadRecord(f"it offers the tool {min(unknown)}, which is not in --tools; add it, or drop the line")
        how = {"add_generation_prompt": True, "return_dict": False, **(chat_template_kwargs or {})}
        with template_errors(task["prompt"]):
            prompt = tokenizer.apply_chat_template(task["prompt"], tools=own or tools, **how)
            if own and prompt == tokenizer.apply_chat_template(task["prompt"], **how):
                raise UserError("it describes no tools, but the task has some")
        if len(prompt) > max_prompt_length:
            raise BadRecord(
                f"the prompt is longer than the {max_prompt_length} tokens that --max_completion_length leaves of the "
                "model's positions; shorten it, or drop the line"
            )

    return check


def _copy(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of the model, whole on every rank, even if ZeRO-3 has sharded the weights of `model`."""
    # Under ZeRO-3, `copy.deepcopy(model)` would copy empty parameters.
    twin = type(model)(copy.deepcopy(model.config))
    gathered: AbstractContextManager = nullcontext()
    if is_deepspeed_zero3_enabled():
        import deepspeed

        gathered = deepspeed.zero.GatheredParameters(list(model.parameters()))
    # A collective under ZeRO-3: all ranks must enter it.
    with gathered:
        twin.load_state_dict(model.state_dict())
    return twin.to(model.device).eval()


def _parse_response(
    parse: Callable[..., dict[str, Any]], decode: Callable[..., str], ids: list[int], **kwargs: Any
) -> dict[str, Any]:
    """
    Parse a completion into a message that also has its `text`, and raise `ValueError` for one that TRL cannot process
    further.

    NOTE: TRL treats a completion as plain text only if its parser raises a `ValueError`. But nested brackets raise a
    `RecursionError`, here or later, when TRL copies or renders the call. Half of a surrogate pair cannot be tokenized.
    """
    try:
        message = parse(ids, **kwargs)
        json.dumps(message, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError("The completion has too many brackets.") from error
    calls = json.dumps(message.get("tool_calls"))
    if calls.count("[") + calls.count("{") > MAX_BRACKETS:
        raise ValueError("The tool calls have too many brackets.")
    # The parts do not tell whether the thought was closed, nor how often. Some rewards need to know.
    return message | {"text": decode(ids, skip_special_tokens=True)}


class _OnlineTrainer(RouterLossMixin):
    """Common base of our GRPO and RLOO trainers."""

    def __init__(self, model: PreTrainedModel, *, args: GRPOTrainingArguments, **kwargs: Any):
        # NOTE: TRL loads the reference model again from the path in the config, but a converted or new model has no
        # path. With an adapter, TRL itself uses the policy without its adapter as the reference.
        has_adapter = is_peft_model(model) or kwargs.get("peft_config") is not None
        needs_reference = args.beta != 0.0 and not has_adapter
        # Copy before TRL's constructor, which changes the policy's head.
        reference = _copy(model).requires_grad_(False) if needs_reference else None
        tokenizer = kwargs["processing_class"]
        if kwargs.get("tools") and tokenizer.response_template is None:
            # Our template writes reasoning and tool calls like Qwen3's, but TRL recognises only its own templates.
            tokenizer.response_template = qwen3_template
        # Replace the methods of this object: TRL calls them on the tokenizer that it gets.
        tokenizer.parse_response = partial(_parse_response, tokenizer.parse_response, tokenizer.decode)
        tokenizer.apply_chat_template = RecordTemplate(
            tokenizer.apply_chat_template, thinking_ratio=args.thinking_ratio, seed=args.seed
        )
        # With beta = 0, TRL's constructor loads no reference model. Ours is set below.
        beta, is_synced = args.beta, args.sync_ref_model
        if needs_reference:
            args.beta, args.sync_ref_model = 0.0, False
        # TRL checks some flags only now.
        with as_user_errors():
            super().__init__(model, args=args, **kwargs)
        # TRL's constructor has read beta = 0 into `self.beta`. Restore the user's value in both places.
        args.beta, args.sync_ref_model = beta, is_synced
        self.beta = beta
        if reference is not None:
            self._fixed_weights["reference model"] = digest_weights(reference.parameters())
            self.ref_model = self._prepare_reference(reference)

    # NOTE: TRL's sampler draws all epochs from one generator, and a resumed run seeds it again. A run that resumes in
    # a later epoch would therefore repeat the order of the first epoch.

    def _row_source(self, dataset, description, batch_size, sampler_fn, is_training) -> RowSource:
        """Return a source of tasks whose dataset passes the epoch on to the sampler. It adds no padding rows."""
        if is_training and isinstance(dataset, Dataset):
            dataset = PaddedDataset(dataset)
        return super()._row_source(dataset, description, batch_size, sampler_fn, is_training)

    def _get_train_sampler(self, dataset=None):
        """Return TRL's sampler with an order that depends only on the seed and the epoch."""
        sampler = super()._get_train_sampler(dataset)
        # Epoch 0 keeps TRL's own order.
        sampler = EpochSampler(sampler, seed=sampler.seed)
        if isinstance(dataset, PaddedDataset):
            dataset.sampler = sampler
        return sampler

    def _prepare_reference(self, reference: PreTrainedModel) -> torch.nn.Module:
        """Prepare our reference model as TRL prepares its own."""
        if self.args.disable_dropout:
            disable_dropout_in_model(reference)
        # TRL replaces the policy's head in the same way. Both models must compute log-probabilities alike.
        add_fused_lm_head(reference, temperature=self.temperature, cast_lm_head_to_fp32=self.args.cast_lm_head_to_fp32)
        if self.is_deepspeed_enabled:
            prepared = prepare_deepspeed(reference, self.accelerator)
        else:
            prepared = self.accelerator.prepare_model(reference, evaluation_mode=True)
        if self.args.sync_ref_model:
            self.add_callback(SyncRefModelCallback(ref_model=prepared, accelerator=self.accelerator))
        return prepared

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Do nothing: TRL counts tokens where it generates them."""

    def last_answers(self, model: PreTrainedModel) -> list[tuple[str, str]]:
        """Return pairs of question and answer: the last three prompts, each with one completion of the model."""
        # The logs hold `num_generations_eval` consecutive completions of each prompt.
        every = slice(None, None, self.num_generations_eval)
        prompts, completions = (list(self._logs[name])[every][-3:] for name in ("prompt", "completion"))
        return [(prompt[-1]["content"], answer_of(text)) for prompt, text in zip(prompts, completions, strict=True)]

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        """Generate and score, but return no loss: its mean over a group is near zero for any policy."""
        super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        return None, None, None

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log without the figures that no completion has, such as the mean of a reward that gave only `None`."""
        metrics = self._metrics["train" if self.model.training else "eval"]
        for name, values in list(metrics.items()):
            # NOTE: TRL would log None, which no display expects.
            if all(map(math.isnan, values)):
                del metrics[name]
        super().log(logs, *args, **kwargs)


class MiniMindGRPOTrainer(_OnlineTrainer, GRPOTrainer):
    """TRL's [`~trl.GRPOTrainer`] for [`MiniMindForCausalLM`]."""


class MiniMindRLOOTrainer(_OnlineTrainer, RLOOTrainer):
    """TRL's [`~trl.RLOOTrainer`] for [`MiniMindForCausalLM`]. It supports no tools."""

    def __init__(self, *args: Any, tools: Any = None, **kwargs: Any):
        if tools:
            raise UserError("--algorithm rloo supports no tools in TRL: use --algorithm grpo.")
        super().__init__(*args, **kwargs)


ALGORITHMS: dict[str, type[_OnlineTrainer]] = {"grpo": MiniMindGRPOTrainer, "rloo": MiniMindRLOOTrainer}
