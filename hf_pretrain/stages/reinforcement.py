"""
Reinforcement learning with TRL's trainers, our models and our flags: GRPO (https://huggingface.co/papers/2402.03300)
with its losses (`--loss_type grpo`, `dapo`, `dr_grpo`, `bnpo`, `cispo`, ...), and RLOO
(https://huggingface.co/papers/2402.14740).

This package adds the router loss (`trl_trainer.py`), saving, pushing and the model card ([`RunTrainer`]), a reference
model that is a copy of the initial policy, and an evaluation that reports rewards instead of a loss.
"""

import copy
import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import is_peft_model, send_to_device
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.integrations import is_deepspeed_zero3_enabled

from ..data.reward_tasks import NUM_TASKS, load_tasks
from ..data.sources import name_eval_sets
from ..rows.data_arguments import ReadingArguments
from ..rows.preparation import PreparedData, end_preview
from ..runtime.errors import UserError, as_user_errors, needing_extra
from ..runtime.flags import content_flag, flag
from ..runtime.json_files import read_json
from ..runtime.names import public_name
from ..tokenizer.chat_template import fix_date
from ..tokenizer.control_tokens import thinking_variables
from ..training.base_trainer import RunTrainer
from ..training.resume_check import digest_weights
from ..training.run import Run
from ..training.settling import overriding
from ..training.training_arguments import LMTrainingArguments
from .log_probs import replace_heads
from .minimind_rewards import calls_in
from .record_template import RecordTemplate
from .reward_history import KnownFigures, TaskLevel
from .rewards import REWARDS, answer_of, task_check
from .shared_prompts import share_prompts
from .trl_trainer import TrlTrainer


with needing_extra("trl", "Reinforcement learning needs TRL"):
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
    from trl.chat_template_utils import qwen3_template
    from trl.import_utils import is_vllm_available
    from trl.models import prepare_deepspeed
    from trl.trainer.callbacks import SyncRefModelCallback
    from trl.trainer.utils import add_fused_lm_head, disable_dropout_in_model

# Maximum number of brackets in the tool calls of a completion. Real calls have ten or twenty.
MAX_BRACKETS = 200
# File of a checkpoint: the completions of each rank that later steps train on.
GENERATION_NAME = "generation.pt"
ENTROPY_NAME = "entropy_ctrl_state.json"


@dataclass
class TaskArguments(ReadingArguments):
    """Tasks to train on, and the rewards for their answers."""

    dataset_name: list[str] = flag(
        ["embedded:answer-format"],
        "One or more of embedded:answer-format, embedded:arithmetic, reasoning_gym:NAME, JSONL, a Hub id.",
    )
    num_tasks: int = content_flag(
        NUM_TASKS, "Largest number of tasks of each embedded:NAME and reasoning_gym:NAME.", bounds="at least 1"
    )
    task_level: int | None = content_flag(
        None, "Level of the tasks of reasoning_gym:NAME, from 0, the easiest; by default a mixture of the package."
    )
    add_system_ratio: float = flag(
        0.0, "Share of the prompts with a random system message, e.g. 0.2.", bounds="at least 0 and at most 1"
    )
    rewards: list[str] = flag(
        ["format"],
        f"One or more of {', '.join(REWARDS)}, module.path:function, or a reward model's Hub id.",
        form="What to train: Rewards",
    )
    tools: list[str] | None = flag(
        None, "Tools that the model may call: calculator, a Python file, or module.path:function.", names="code"
    )

    def prepare_tasks(
        self, training_args: "GRPOTrainingArguments", tokenizer: PreTrainedTokenizerFast, **limits: Any
    ) -> PreparedData:
        """
        Load the tasks by [`~data.reward_tasks.load_tasks`].

        Args:
            training_args ([`GRPOTrainingArguments`]): gives the seed, the variables of the chat template, and the
                directory of `rejected.jsonl`, which only the main process writes.
            tokenizer ([`PreTrainedTokenizerFast`]): the tokenizer of the run.
            limits: the other arguments of [`~stages.rewards.task_check`].
        """
        tokenizer.chat_template = fix_date(tokenizer.chat_template, training_args.date)
        check = task_check(tokenizer, **limits, **training_args.chat_template_kwargs or {})
        reading = self.reading(training_args.seed)
        raises = training_args.raise_level_at is not None
        level = 0 if raises and self.task_level is None else self.task_level
        # Without a fraction for validation, the training set is the whole set.
        whole = replace(reading, validation_fraction=0.0)
        options: dict[str, Any] = {"check": check, "num_tasks": self.num_tasks, "level": level}
        load: Any = partial(load_tasks, add_system_ratio=self.add_system_ratio, **options)
        named = name_eval_sets(self.eval_dataset_name, self.dataset_name)
        eval_sets = {label: load([name], whole)[0] for label, name in named.items()}
        is_kept = not (training_args.process_index or training_args.dry_run or training_args.preview)
        rejected_path = Path(training_args.output_dir, "rejected.jsonl") if is_kept else None
        found = {"rejected_path": rejected_path, "raises": raises}
        train, validation = load(self.dataset_name, whole if eval_sets else reading, **found)
        if self.task_level is not None and "reasoning_gym" not in train.column_names:
            raise UserError(f"--task_level {self.task_level} needs a --dataset_name reasoning_gym:NAME.")
        eval_sets = eval_sets or {"": validation}
        report = [
            f"Training: {len(train):,} tasks, {training_args.num_generations} completions each",
            *(f"Validation{label and ' '}{label}: {len(tasks):,} tasks" for label, tasks in eval_sets.items()),
            f"Rewards: {', '.join(map(public_name, self.rewards))}",
        ]
        names = self.eval_dataset_name or []
        end_preview(training_args, train, tokenizer)
        return PreparedData(tokenizer, report, self.dataset_name, "tasks", train, eval_sets, names)


@dataclass
class GRPOTrainingArguments(LMTrainingArguments, GRPOConfig):
    """TRL's `GRPOConfig`. Flags that all recipes share keep this package's meaning and defaults."""

    default_optim_preset = "adamw"
    has_masked_loss = False
    output_dir: str | None = flag("out/grpo")
    algorithm: str = flag("grpo", "grpo (--loss_type) or rloo.", choices=("grpo", "rloo"))
    loss_type: str = flag(
        "dapo",
        "Loss of --algorithm grpo. grpo, bnpo and luspo normalise it otherwise than the others.",
        choices=("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"),
    )
    learning_rate: float = flag(3e-7, "Peak learning rate.")
    per_device_train_batch_size: int = flag(8, "Completions per device; a step must hold whole groups.")
    remove_unused_columns: bool | None = flag(False, "Must be false: the rewards read the columns.")
    thinking_ratio: float | None = flag(
        None,
        "Share of the prompts that ask for a thought; the others get an empty one.",
        bounds="at least 0 and at most 1",
    )
    raise_level_at: float | None = flag(
        None,
        "Mean reward of reasoning_gym, over ten generations, at which the level of its tasks rises, e.g. 0.8.",
        bounds="at least 0 and at most 1",
    )
    max_turn_length: int | None = flag(None, "New tokens between two results of tools.", bounds="at least 1")
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
        if self.algorithm == "rloo":
            self._refuse_flags_of_grpo()
        if self.temperature == 0:
            raise UserError("--temperature 0.0 must be above 0: training samples, and divides the logits by it.")
        if self.use_transformers_continuous_batching:
            raise UserError("--use_transformers_continuous_batching needs a paged cache, which MiniMind lacks.")
        if self.use_vllm and not is_vllm_available():
            raise UserError("--use_vllm needs vLLM, which is not installed: pip install vllm, or leave the flag out.")
        own_code = self.vllm_model_impl == "transformers" and self.trust_remote_code
        if self.use_vllm and self.vllm_mode == "colocate" and not own_code:
            raise UserError("--use_vllm runs our model: add --vllm_model_impl transformers --trust_remote_code true.")
        super().__post_init__()
        if self.thinking_ratio is not None:
            # `RecordTemplate` replaces these variables in the prompts that ask for a thought.
            self.chat_template_kwargs = (self.chat_template_kwargs or {}) | thinking_variables(False)

    def _refuse_flags_of_grpo(self) -> None:
        """Raise `UserError` for a flag that TRL's RLOO does not know. The presets set `--loss_type cispo`."""
        ignored = {each.name for each in fields(GRPOConfig)} - {each.name for each in fields(RLOOConfig)}
        typed = {word.partition("=")[0].lstrip("-").replace("-", "_") for word in sys.argv}
        for each in fields(self):
            value = vars(self)[each.name]
            if each.name in ignored and (each.name in typed or value not in (each.default, "cispo")):
                raise UserError(f"--{each.name} {value} has no effect with --algorithm rloo. Leave one of them out.")

    @property
    def loss_depends_on_micro_batch(self) -> bool:
        # They divide by the tokens of a micro-batch, or choose some of them.
        uses_entropy = self.entropy_coef != 0.0 or self.use_adaptive_entropy or self.top_entropy_quantile < 1.0
        return self.algorithm == "grpo" and (self.loss_type == "bnpo" or uses_entropy)

    @property
    def fixes_micro_batch(self) -> bool:
        # Checkpoints between two generations hold micro-batches, and vLLM in this process takes a share of the memory.
        per_step = self.num_iterations == 1 and self.steps_per_generation == self.gradient_accumulation_steps
        return not per_step or (self.use_vllm and self.vllm_mode == "colocate")

    @property
    def method(self) -> str:
        """Name of the algorithm, and of its loss if it has several, for messages and the model card."""
        return "rloo" if self.algorithm == "rloo" else f"{self.algorithm}, {self.loss_type} loss"


def _copy(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of the model, whole on every rank, even if ZeRO-3 has sharded the weights of `model`."""
    # Under ZeRO-3, `copy.deepcopy(model)` would copy empty parameters.
    twin = type(model)(copy.deepcopy(model.config))
    with ExitStack() as gathered:
        if is_deepspeed_zero3_enabled():
            import deepspeed

            # A collective: all ranks must enter it.
            gathered.enter_context(deepspeed.zero.GatheredParameters(list(model.parameters())))
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
    text = decode(ids, skip_special_tokens=True)
    if "<tool_call>" in text:
        # The parser also reads a call without an end, such as one that the limit of a turn has cut off.
        del message.get("tool_calls", [])[len(calls_in(text)) :]
    calls = json.dumps(message.get("tool_calls"))
    if calls.count("[") + calls.count("{") > MAX_BRACKETS:
        raise ValueError("The tool calls have too many brackets.")
    # The parts do not tell whether the thought was closed, nor how often. Some rewards need to know.
    return message | {"text": text}


class SavedGeneration:
    """
    The completions that later steps train on, which TRL keeps in memory only, and the adaptive coefficient of the
    entropy, which TRL saves, but would load where Trainer loads the optimizer.
    """

    def save(self, trainer: Any, directory: Path) -> None:
        if trainer._step % (trainer.args.steps_per_generation * trainer.num_iterations):
            state = trainer._step, send_to_device(trainer._buffered_inputs, "cpu")
            generation = trainer.run.ranks.gather(state)
            if trainer.args.should_save:
                torch.save(generation, directory / GENERATION_NAME)

    def load(self, trainer: Any, checkpoint: str) -> None:
        args, path, entropy = trainer.args, Path(checkpoint, GENERATION_NAME), Path(checkpoint, ENTROPY_NAME)
        if entropy.exists():
            state = read_json(entropy)
            trainer.entropy_coef, trainer._last_world_entropy = state["entropy_coef"], state["last_world_entropy"]
        if not path.exists():
            return
        generation = torch.load(path, map_location="cpu", weights_only=True)
        if (len(generation), len(generation[0][1])) != (args.world_size, args.steps_per_generation):
            raise UserError(
                f"{checkpoint} holds completions for the next steps, {len(generation[0][1])} micro-batches on each "
                f"of {len(generation)} process(es). Launch as many, with the same --per_device_train_batch_size."
            )
        trainer._step, trainer._buffered_inputs = send_to_device(generation[args.process_index], args.device)


def _prepare_reference(trainer: Any, reference: PreTrainedModel) -> torch.nn.Module:
    """Prepare our reference model as TRL prepares its own."""
    args = trainer.args
    if args.disable_dropout:
        disable_dropout_in_model(reference)
    # As for the policy: both models compute log-probabilities alike.
    share_prompts(reference, args)
    add_fused_lm_head(reference, temperature=trainer.temperature, cast_lm_head_to_fp32=args.cast_lm_head_to_fp32)
    if trainer.is_deepspeed_enabled:
        prepared = prepare_deepspeed(reference, trainer.accelerator)
    else:
        prepared = trainer.accelerator.prepare_model(reference, evaluation_mode=True)
    if args.sync_ref_model:
        trainer.add_callback(SyncRefModelCallback(ref_model=prepared, accelerator=trainer.accelerator))
    return prepared


def last_answers(trainer: Any, model: PreTrainedModel) -> list[tuple[str, str]]:
    """Return pairs of question and answer: the last three prompts, each with one completion of the model."""
    # The logs hold `num_generations_eval` consecutive completions of each prompt.
    every = slice(None, None, trainer.num_generations_eval)
    prompts, completions = (list(trainer._logs[name])[every][-3:] for name in ("prompt", "completion"))
    return [(prompt[-1]["content"], answer_of(text)) for prompt, text in zip(prompts, completions, strict=True)]


class ReinforcementTrainer(TrlTrainer):
    """What TRL's GRPO and RLOO share."""

    def __init__(self, model: PreTrainedModel, *, args: Any = None, run: Run | None = None, **kwargs: Any):
        run = run or Run.of_trainer(args, model, kwargs)
        args, tokenizer, tools = run.args, kwargs["processing_class"], kwargs.pop("tools", None)
        if tools and args.algorithm == "rloo":
            raise UserError("--algorithm rloo supports no tools in TRL: use --algorithm grpo.")
        kwargs |= {"tools": tools} if tools else {}
        # NOTE: TRL loads the reference model again from the path in the config, but a converted or new model has no
        # path. With an adapter, TRL itself uses the policy without its adapter as the reference.
        has_adapter = is_peft_model(model) or kwargs.get("peft_config") is not None
        needs_reference = args.beta != 0.0 and not has_adapter
        # Copy before TRL's constructor, which changes the policy's head.
        reference = _copy(model).requires_grad_(False) if needs_reference else None
        if tools and tokenizer.response_template is None:
            # Our template writes reasoning and tool calls like Qwen3's, but TRL recognises only its own templates.
            tokenizer.response_template = qwen3_template
        # Replace the methods of this object: TRL calls them on the tokenizer that it gets.
        tokenizer.parse_response = partial(_parse_response, tokenizer.parse_response, tokenizer.decode)
        tokenizer.apply_chat_template = RecordTemplate(tokenizer, thinking_ratio=args.thinking_ratio, seed=args.seed)
        # With beta = 0, TRL's constructor loads no reference model.
        hidden: dict[str, Any] = {"beta": 0.0, "sync_ref_model": False} if needs_reference else {}
        # TRL's constructor passes this limit to what generates one turn. Its loop over turns reads the attribute.
        limits = args.max_turn_length, args.max_completion_length
        hidden["max_completion_length"] = min(filter(None, limits), default=None)
        # TRL checks some flags only now.
        with as_user_errors(), overriding(args, **hidden):
            super().__init__(model, run=run, **kwargs)
        self.beta, self.max_completion_length = args.beta, args.max_completion_length
        run.saved_states.append(SavedGeneration())
        self.callback_handler.callbacks.insert(0, KnownFigures())
        if reference is not None:
            run.fixed_weights["reference model"] = digest_weights(reference.parameters())
            self.ref_model = _prepare_reference(self, reference)
            self._keep_reference()
        raises = args.raise_level_at is not None
        self.task_level = TaskLevel(self.train_dataset, args.raise_level_at) if raises else None
        run.saved_states += [self.task_level] if raises else []
        share_prompts(self.model, args)
        if not args.cast_lm_head_to_fp32:
            replace_heads(self, "entropy", temperature=self.temperature)

    @property
    def rows_per_item(self) -> int:  # type: ignore[override]
        return self.num_generations_eval

    def _track_num_input_tokens(self, *args: Any) -> None:
        """Do nothing: TRL counts tokens where it generates them."""

    def training_step(self, model: Any, inputs: Any, *args: Any) -> torch.Tensor:
        rows = inputs if self.task_level is None else [self.task_level.choose(row) for row in inputs]
        return super().training_step(model, rows, *args)

    def _calculate_rewards(self, *args: Any) -> torch.Tensor:
        """Calculate the rewards, and keep the shares of completions that each reward rates."""
        rewards = super()._calculate_rewards(*args)
        # A reward may be `None` for some completions.
        is_scored = (~rewards.isnan()).float()
        names = ["reward", *(f"rewards/{name}/mean" for name in self.reward_func_names)]
        self.shares = dict(zip(names, [is_scored.amax(1).mean().item(), *is_scored.mean(0).tolist()], strict=True))
        if self.task_level is not None and self.model.training:
            reward = rewards[:, self.reward_func_names.index("reasoning_gym_reward")].nanmean().item()
            self._metrics["train"]["task_level"].append(float(self.task_level.level))
            self.task_level.count(reward, self.state)
        return rewards

    def prediction_step(self, *args: Any, **kwargs: Any) -> tuple[None, None, None]:
        """Generate and score, but return no loss: its mean over a group is near zero for any policy."""
        super().prediction_step(*args, **kwargs)
        del self.item_sums["loss"]
        return None, None, None


class MiniMindGRPOTrainer(ReinforcementTrainer, GRPOTrainer):
    """TRL's [`~trl.GRPOTrainer`] for [`MiniMindForCausalLM`]."""


class MiniMindRLOOTrainer(ReinforcementTrainer, RLOOTrainer):
    """TRL's [`~trl.RLOOTrainer`] for [`MiniMindForCausalLM`]. It supports no tools."""


ALGORITHMS: dict[str, type[RunTrainer]] = {"grpo": MiniMindGRPOTrainer, "rloo": MiniMindRLOOTrainer}
