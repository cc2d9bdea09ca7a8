"""Training arguments: transformers' `TrainingArguments` with defaults for small language models."""

import os
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

import torch
from transformers import TrainingArguments
from transformers.distributed import DistributedConfig
from transformers.integrations import get_available_reporting_integrations
from transformers.trainer_utils import IntervalStrategy, SchedulerType
from transformers.training_args import OptimizerNames
from transformers.utils import is_liger_kernel_available, strtobool

from ..run_directory.metrics import LOWER_IS_BETTER, METRICS
from ..runtime.command_line import shows_bars
from ..runtime.devices import default_device_type, has_bfloat16_units, refuse_unused_gpu
from ..runtime.errors import UserError
from ..runtime.flags import check_flags, flag, ignored_flag
from ..runtime.launchers import launcher
from ..runtime.names import hint
from .budgets import MIN_EVAL_STEPS, check_budget
from .deepspeed_support import prepare_deepspeed_config, refuse_mismatches, turns_on_deepspeed
from .float8 import check_float8
from .launch import (
    check_device,
    check_launch,
    complete_fsdp_args,
    launchers_precision,
    start_cpu_ranks,
    start_deepspeed_cpu_ranks,
)
from .optimizers import OPTIMIZERS, check_optimizer
from .spikes import check_spikes


@dataclass
class LMTrainingArguments(TrainingArguments):
    """
    transformers' `TrainingArguments` with defaults for small language models.

    The class holds and checks values. When an instance is made, transformers' constructor chooses the device and
    starts the process group; [`~training.launch`] starts it for CPU ranks.
    """

    config: str | None = ignored_flag(None, "YAML file with values of these flags.")
    output_dir: str | None = flag("out/pretrain", "Directory of the run.")
    fsdp_size: int = ignored_flag(1, "Shard the model over this many processes (FSDP2).", bounds="at least 1")
    tp_size: int = ignored_flag(1, "Split matrices over this many GPUs (tensor parallelism).", bounds="at least 1")
    ep_size: int = ignored_flag(1, "Split the experts over this many processes.", bounds="at least 1")
    dp_replicate_size: int = ignored_flag(
        1, "Copies of the sharded model, usually one per machine.", bounds="at least 1"
    )
    dataloader_num_workers: int | None = flag(
        None, "Processes that read the batches of a rank; by default 2 on NVIDIA GPUs. Streams: 0, at most 1."
    )
    resume_from_checkpoint: str | None = flag(
        None, "Checkpoint to resume from; auto takes the newest intact one, or starts a new run."
    )
    allow_inexact_resume: bool = ignored_flag(False, "Resume although settings or data differ.")
    # The stages after pretraining use adamw.
    default_optim_preset: ClassVar[str] = "muon"
    optim_preset: str | None = ignored_flag(
        None,
        "Optimizer: muon (default in pretraining) or adamw. adamw stands for any optimizer of --optim.",
        form="Optimization: Optimizer",
        choices=tuple(OPTIMIZERS),
    )
    optim: str = flag(None, f"An optimizer of transformers, not Muon. AdamW is {TrainingArguments.default_optim}.")
    fit_micro_batch: bool = ignored_flag(
        False,
        "On CUDA, choose the largest micro-batch that fits, at the same rows per step. Recipes turn it on, unless you "
        "pass a batch size or an accumulation.",
    )
    dry_run: bool = ignored_flag(False, "Train four steps, print the plan of the run, and stop.")
    price_per_hour: float | None = ignored_flag(None, "Price of an hour of all devices, for the plan of --dry_run.")
    preview: int = ignored_flag(0, "Print this many rows of data, with trained tokens in colour, and stop.")
    report_to: None | str | list[str] = flag(
        None, "Trackers of the run, or none. By default trackio, if it is installed."
    )
    profile: bool = ignored_flag(False, "Write traces of torch's profiler.")
    profile_interval: int = ignored_flag(100, "Steps per trace of --profile.", bounds="at least 2")
    hub_license: str | None = ignored_flag(None, "Licence of the pushed model.")
    hub_language: list[str] | None = ignored_flag(None, "ISO codes of the data's languages.")
    # `None` means auto. The type is a plain bool, so that HfArgumentParser accepts a bare `--bf16`.
    bf16: bool = flag(
        None, "bfloat16 autocast. On by default where the hardware has it; older NVIDIA GPUs take --fp16."
    )
    fp8: bool = flag(False, "float8 in the linear layers, beside bf16. It needs compute capability 8.9 and torchao.")
    fp8_emulate: bool = flag(False, "Round as --fp8 does, on any device, without its speed.")
    # Whether the stage trains with the masked loss, and not with one of TRL.
    has_masked_loss: ClassVar[bool] = True
    torch_compile: bool = flag(None, "Compile each layer and the loss. On by default with CUDA, not with DeepSpeed.")
    # GPT-3 has these betas and weight decay, and a cosine down to 10 % (https://arxiv.org/abs/2005.14165, appendix B).
    learning_rate: float = flag(None, "Peak learning rate. By default as optimizer and width need it.")
    max_grad_norm: float = flag(None, "Largest norm of the gradients, 0 for any. By default 1, Muon 0.")
    lr_scheduler_type: str = flag(
        "cosine_with_min_lr",
        "cosine_with_min_lr (down to 10 %%), warmup_stable_decay (over the last 20 %%), or another "
        "schedule of transformers.",
        choices=[kind.value for kind in SchedulerType],
    )
    warmup_steps: float = flag(0.02, "Warmup in steps, or as a share of all if below 1.")
    skip_spikes: bool = flag(False, "Leave out the update of a step whose loss or gradient is a spike.")
    weight_decay: float = flag(0.1, "Weight decay of matrices. Vectors have none.")
    adam_beta2: float = flag(0.95, "AdamW's decay rate of the second moment.")
    num_train_epochs: float = flag(1.0, "Passes over the training data.")
    max_tokens: str | None = flag(None, "Train on this many tokens: 2B, 500M or 1e9.")
    tokens_per_parameter: float | None = flag(None, "Train on so many per parameter.", bounds="above 0")
    max_minutes: float | None = flag(
        None, "Train for this time, evaluations included.", bounds="above 0", form="Duration: Most minutes"
    )
    early_stopping_patience: int | None = ignored_flag(
        None, "Stop after this many evaluations without a better one, and keep the best model.", bounds="at least 1"
    )
    eval_strategy: str = flag(
        "steps", "When to evaluate: no, steps or epoch.", choices=[kind.value for kind in IntervalStrategy]
    )
    eval_steps: float | None = flag(
        None,
        "Steps between evaluations, or a share of all steps if below 1. By default a tenth of all steps, "
        f"and at least {MIN_EVAL_STEPS}.",
    )
    save_steps: float = flag(0.1, "Steps between checkpoints, or a share of all steps if below 1.")
    save_dtype: str | None = ignored_flag(
        None,
        "Data type of the final model's files, by default float32. Checkpoints keep float32.",
        choices=("float16", "bfloat16", "float32"),
    )
    # With two checkpoints, a run can resume although the newest one is damaged.
    save_total_limit: int | None = flag(2, "Number of checkpoints to keep.")
    logging_steps: float = flag(10, "Steps between log entries, or a share of all steps if below 1.")
    # transformers' default, True, replaces a NaN by the mean of earlier losses, so that a broken run looks healthy.
    logging_nan_inf_filter: bool = flag(False, "Leave non-finite losses out of the log.")
    include_num_input_tokens_seen: str = flag("non_padding", "Which tokens to count: no, all or non_padding.")
    # Every step uses every parameter, so DDP's search through the graph would find nothing and cost time.
    ddp_find_unused_parameters: bool | None = flag(
        False, "Let DDP search for parameters without a gradient. MiniMind has none."
    )

    def __post_init__(self):
        if self.hub_token:
            # Logs and records quote the arguments.
            raise UserError(
                "--hub_token would be visible in the process list and in logs. Log in with `hf auth login` or set "
                "HF_TOKEN instead."
            )
        self.launcher = launcher()
        # The date that chat templates write; `begin_run` sets it.
        self.date: str | None = None
        self._choose_reports()
        self._choose_evaluations()
        self._choose_device()
        check_flags(self)
        for name, value in vars(self).items():
            if name.endswith("_kwargs") and isinstance(value, str) and not value.lstrip().startswith("{"):
                raise UserError(f"--{name} {value} must be a JSON object, such as '{{\"name\": 0.1}}'.")
        if self.max_steps == 0:
            raise UserError("--max_steps 0 trains nothing. Leave it out to train for --num_train_epochs.")
        check_budget(self)
        if self.use_liger_kernel and not is_liger_kernel_available():
            raise UserError("--use_liger_kernel needs a package: pip install liger-kernel")
        # Check before the calls of `start_cpu_ranks` and `super`, in which the ranks wait for each other.
        check_launch(self)
        self._choose_optimizer()
        start_cpu_ranks(self)
        super().__post_init__()
        if self.deepspeed and self.device.type == "cpu":
            start_deepspeed_cpu_ranks()
        if self.deepspeed_plugin is not None:
            prepare_deepspeed_config(self.deepspeed_plugin.deepspeed_config, self)
        if self.deepspeed:
            refuse_mismatches(self.hf_deepspeed_config)
        check_device(self)
        check_optimizer(self)
        check_float8(self)
        check_spikes(self)

    def _choose_reports(self) -> None:
        """Choose the progress bar and the trackers if the user left them out."""
        # A run has its own display. Without one, such as in a notebook, Trainer shows its progress bar.
        if self.disable_tqdm is None:
            self.disable_tqdm = not shows_bars()
        if self.report_to is None:
            self.report_to = "trackio" if "trackio" in get_available_reporting_integrations() else "none"
        for tracker in [self.report_to] if isinstance(self.report_to, str) else self.report_to:
            if tracker not in (known := [*get_available_reporting_integrations(), "flyte", "all", "none"]):
                raise UserError(f"--report_to {tracker} is unknown or not installed. Here: {', '.join(known)}.")
        if self.trackio_static_space_id is None and self.trackio_space_id is None:
            # NOTE: with --push_to_hub, transformers would otherwise publish the tracked figures as a Space.
            self.trackio_static_space_id = False

    def _choose_evaluations(self) -> None:
        """Choose when to evaluate and how to compare models, if the user left it out."""
        if self.load_best_model_at_end and self.eval_strategy == "no":
            raise UserError("--load_best_model_at_end has no evaluations to choose by: pass --eval_strategy steps.")
        if self.early_stopping_patience is not None:
            # Each evaluation may be the best one, which needs a checkpoint.
            self.load_best_model_at_end = True
            self.save_strategy, self.save_steps = self.eval_strategy, self.eval_steps or 0.1
        # --load_best_model_at_end needs an evaluation at each checkpoint, so their interval must not grow.
        self.spaces_evaluations = self.eval_steps is None and not self.load_best_model_at_end
        if self.eval_steps is None:
            self.eval_steps = 0.1
        # Tasks and further validation sets have names of their own, so refuse only what looks like a typing error.
        best = (self.metric_for_best_model or "loss").removeprefix("eval_")
        known = [metric.name for metric in METRICS]
        if best not in known and (nearest := hint(best, known)):
            raise UserError(f"--metric_for_best_model {self.metric_for_best_model} is unknown{nearest}.")
        # NOTE: transformers treats larger values as better, unless the metric's name ends in "loss".
        if self.greater_is_better is None and (self.metric_for_best_model or "").endswith(LOWER_IS_BETTER):
            self.greater_is_better = False

    def _choose_device(self) -> None:
        """Choose the device, and the precision and the compilation if the user left them out: they depend on it."""
        # `accelerate launch --cpu` sets the variable.
        use_cpu = self.use_cpu or bool(strtobool(os.environ.get("ACCELERATE_USE_CPU", "false")))
        device_type = default_device_type(use_cpu=use_cpu)
        if not use_cpu:
            refuse_unused_gpu("--use_cpu")
        self.use_cpu = device_type == "cpu"
        self.bf16, self.fp16, self.fp8 = launchers_precision(self)
        if self.bf16 is None:
            self.bf16 = not self.fp16 and has_bfloat16_units(device_type)
            # NVIDIA GPUs before capability 8.0, such as the T4, only have float16 units.
            self.fp16 = self.fp16 or (device_type == "cuda" and not self.bf16)
        # NOTE: torch pins no memory for Apple GPUs, and would warn.
        self.dataloader_pin_memory = self.dataloader_pin_memory and device_type != "mps"
        self.has_default_workers = self.dataloader_num_workers is None
        if self.dataloader_num_workers is None:
            self.dataloader_num_workers = 2 if device_type == "cuda" else 0
        # Hide these options from Trainer, which would compile the whole model, again for each length of a batch and
        # for each mode. `RunTrainer` compiles single layers and the loss with them.
        given = {"backend": self.torch_compile_backend, "mode": self.torch_compile_mode}
        self.compile_options = {name: value for name, value in given.items() if value is not None}
        if self.torch_compile is None:
            is_deepspeed = turns_on_deepspeed(self)
            self.torch_compile = bool(self.compile_options) or (device_type == "cuda" and not is_deepspeed)
        self.compiles_layers = self.torch_compile
        self.torch_compile, self.torch_compile_backend, self.torch_compile_mode = False, None, None

    @classmethod
    def of(cls, args: TrainingArguments) -> Self:
        """
        Return plain `TrainingArguments` as ours, with AdamW and with our other flags off. Fields that a subclass adds
        stay.
        """
        values = {each.name: vars(args)[each.name] for each in fields(args)}
        if (values["metric_for_best_model"] or "").endswith(LOWER_IS_BETTER):
            # transformers has chosen it by the end of the name.
            values["greater_is_better"] = None
        names = {each.name for each in fields(TrainingArguments)}
        ours = cls(**{name: value for name, value in values.items() if name in names}, optim_preset="adamw")
        ours.__dict__.update({name: value for name, value in values.items() if name not in names})
        return ours

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments as records and trackers show them: with the compilation that Trainer does not see."""
        options = {f"torch_compile_{name}": value for name, value in self.compile_options.items()}
        return super().to_dict() | {"torch_compile": self.compiles_layers} | options

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares the model with its first weights. Stages with such a loss override it."""
        return False

    @property
    def loss_depends_on_micro_batch(self) -> bool:
        """Whether the loss depends on the rows per device, not only on the rows of a step. Stages override it."""
        return False

    @property
    def fixes_micro_batch(self) -> bool:
        """Whether a run depends on the rows per device beside its loss. Stages override it."""
        return False

    @property
    def distributed_config(self) -> DistributedConfig | None:
        """Sizes by which transformers shards the model that it loads; `None` if each process holds it whole."""
        sizes = {name: vars(self)[name] for name in ("tp_size", "ep_size", "fsdp_size", "dp_replicate_size")}
        return DistributedConfig(**sizes) if max(sizes.values()) > 1 else None

    @property
    def shards_weights(self) -> bool:
        """Whether a process holds only parts of the weights: ZeRO-3, FSDP of accelerate, or `distributed_config`."""
        is_zero3 = self.deepspeed_plugin is not None and self.deepspeed_plugin.zero_stage == 3
        return is_zero3 or self.distributed_config is not None or complete_fsdp_args(self.fsdp_plugin_args) is not None

    @property
    def launch_description(self) -> str:
        """Number of processes, device and precision, for the first line of a run's log."""
        kind = self.device.type
        device = torch.cuda.get_device_name(self.device) if kind == "cuda" else kind.replace("cpu", "CPU")
        precision = "bf16" if self.bf16 else "fp16" if self.fp16 else "float32"
        if self.fp8:
            precision += " and emulated fp8" if self.fp8_emulate else " and fp8"
        return f"{self.world_size} process(es) on {device}, {precision}"

    @property
    def rows_per_step(self) -> int:
        """Rows of an optimizer step, over all processes and accumulated batches. Tensor-parallel ranks share rows."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps * (self.world_size // self.tp_size)

    def _choose_optimizer(self):
        """Set the optimizer and its clipping where the user left them out. The trainer sets the learning rate."""
        default = TrainingArguments.default_optim
        if self.optim_preset is None:
            self.optim_preset = "adamw" if self.optim else self.default_optim_preset
        preset = OPTIMIZERS[self.optim_preset]
        if preset.build is not None and self.optim not in (None, default):
            raise UserError(
                f"--optim {self.optim} and --optim_preset {self.optim_preset} exclude each other: leave one out."
            )
        self.optim = self.optim or default
        if self.max_grad_norm is None:
            self.max_grad_norm = preset.max_grad_norm


def default_learning_rate(optim_preset: str, hidden_size: int) -> float:
    """
    Return the peak learning rate of pretraining for a model of the given width.

    Both rates fall with the width. At width 512, a rate of Muon that fell with its square root only was too high for
    runs of more than a few steps (docs/performance.md). At width 768, AdamW's rate is MiniMind's 5e-4.
    """
    return OPTIMIZERS[optim_preset].learning_rate * 192 / hidden_size


def values_by_name(args: LMTrainingArguments, others: Iterable[Any]) -> dict[str, Any]:
    """Return the values of all arguments of a run. `others` are the dataclasses beside its training arguments."""
    return {name: value for part in others for name, value in vars(part).items()} | args.to_dict()


def optimizer_name(args: LMTrainingArguments) -> str:
    """Return the name of the optimizer: the `--optim_preset` if it is one itself, otherwise the value of `--optim`."""
    has_own = OPTIMIZERS[args.optim_preset].build is not None
    return args.optim_preset if has_own else OptimizerNames(args.optim).value


@dataclass
class SFTTrainingArguments(LMTrainingArguments):
    """Defaults for fine-tuning: AdamW, a lower learning rate, and an evaluation before the first step."""

    default_optim_preset = "adamw"
    output_dir: str | None = flag("out/sft")
    learning_rate: float = flag(1e-4, "Peak learning rate.")
    eval_on_start: bool = flag(True, "Evaluate before the first step.")


@dataclass
class DistillationTrainingArguments(SFTTrainingArguments):
    """Defaults for distillation."""

    output_dir: str | None = flag("out/distill")
