"""How a model is trained: transformers' `TrainingArguments` with our defaults, and what a launch is checked for."""

import atexit
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from transformers import TrainingArguments
from transformers.distributed import DistributedConfig
from transformers.utils import logging, strtobool

from ..runtime.command_line import shows_bars
from ..runtime.devices import default_device_type, has_bfloat16_units, installed_plug_ins
from ..runtime.metrics import LOWER_IS_BETTER
from ..runtime.waiting import first_process_first
from ..weights.files import read_json
from .optimizers import OPTIM_PRESETS


logger = logging.get_logger(__name__)

_SHARED_MEMORY = "/dev/shm"
_MIN_SHARED_BYTES = 4 * 2**20

# Steps between evaluations that nobody asked for.
MIN_EVAL_STEPS = 50


@dataclass
class LMTrainingArguments(TrainingArguments):
    """transformers' `TrainingArguments` with defaults that hold for language models of this size."""

    config: str | None = field(
        default=None,
        metadata={"help": "A YAML file of all these flags; the command line wins. By default the preset's."},
    )
    output_dir: str | None = field(default="out/pretrain", metadata={"help": "Where the run goes."})
    fsdp_size: int = field(
        default=1, metadata={"help": "Shard parameters over this many processes with transformers' own FSDP2."}
    )
    tp_size: int = field(default=1, metadata={"help": "Tensor parallelism: cut matrices over this many GPUs."})
    ep_size: int = field(
        default=1, metadata={"help": "Expert parallelism: this many ranks of those above have experts of their own."}
    )
    dp_replicate_size: int = field(
        default=1, metadata={"help": "Replicas of what --fsdp_size shards: the number of machines, as a rule."}
    )
    resume_from_hub: str | None = field(
        default=None,
        metadata={"help": "Go on from the newest checkpoint pushed to this Hub id (--hub_strategy checkpoint)."},
    )
    allow_inexact_resume: bool = field(
        default=False,
        metadata={"help": "Go on from a checkpoint of other data, batch or seed, or without a manifest."},
    )
    on_nonfinite: str = field(
        default="stop",
        metadata={"help": "What to do about a loss or gradient that is not finite: stop, or skip the step."},
    )
    trust_checkpoint: bool = field(
        default=False,
        metadata={"help": "Unpickle DeepSpeed's shards of a checkpoint from the Hub or from outside output_dir."},
    )
    optim_preset: str = field(
        default="adamw", metadata={"help": "adamw (as --optim says), or muon for the matrices of the layers."}
    )
    profile: bool = field(default=False, metadata={"help": "Write a torch profiler trace of one step in so many."})
    profile_interval: int = field(default=100, metadata={"help": "One step in how many --profile traces."})
    hub_license: str | None = field(default=None, metadata={"help": "Licence of what is pushed, in its model card."})
    hub_language: list[str] | None = field(
        default=None, metadata={"help": "Languages of the data, as ISO codes, in the model card."}
    )
    # Unset means auto; declared as a plain bool so that a bare `--bf16` stays a flag.
    bf16: bool = field(
        default=cast(bool, None),
        metadata={"help": "bfloat16 autocast. On where the hardware has it unless `--bf16 false`."},
    )
    torch_compile: bool = field(
        default=cast(bool, None),
        metadata={"help": "Compile each decoder layer. On with CUDA and without DeepSpeed, unless false."},
    )
    learning_rate: float = field(default=1e-3, metadata={"help": "Peak learning rate."})
    lr_scheduler_type: str = field(
        default="cosine_with_min_lr",
        metadata={"help": "cosine_with_min_lr (to 10 %%), warmup_stable_decay (last 20 %%), or any of transformers'."},
    )
    warmup_steps: float = field(default=0.02, metadata={"help": "Steps, or below 1 the share of all steps."})
    weight_decay: float = field(default=0.1, metadata={"help": "On matrices only."})
    adam_beta2: float = field(default=0.95, metadata={"help": "AdamW's second decay rate."})
    num_train_epochs: float = field(default=1.0, metadata={"help": "Passes over the rows."})
    eval_strategy: str = field(default="steps", metadata={"help": "no, steps or epoch."})
    eval_steps: float | None = field(
        default=None,
        metadata={"help": f"Steps, or below 1 the share of all; by default a tenth, and at least {MIN_EVAL_STEPS}."},
    )
    save_steps: float = field(default=0.1, metadata={"help": "Steps, or below 1 the share of all steps."})
    save_total_limit: int | None = field(default=2, metadata={"help": "Checkpoints that are kept."})
    logging_steps: float = field(default=10, metadata={"help": "Steps, or below 1 the share of all steps."})
    # A filter that hides a NaN would let a broken run look healthy.
    logging_nan_inf_filter: bool = field(default=False, metadata={"help": "Leave non-finite losses out of the log."})
    include_num_input_tokens_seen: str = field(default="non_padding", metadata={"help": "no, all or non_padding."})
    ddp_find_unused_parameters: bool | None = field(default=False, metadata={"help": "Every parameter is used."})

    def __post_init__(self):
        self._hide_token()
        if self.disable_tqdm is None:
            self.disable_tqdm = not shows_bars()
        self.launcher = launcher()
        if self.accelerator_config is None:
            # Every rank reads a stream itself; the trainer fills up its last batch.
            self.accelerator_config = {"dispatch_batches": False}
        self.spaces_evaluations = self.eval_steps is None and not self.load_best_model_at_end
        if self.eval_steps is None:
            self.eval_steps = 0.1
        # transformers takes a larger value for the better one unless the metric's name ends in "loss".
        if self.greater_is_better is None and (self.metric_for_best_model or "").endswith(LOWER_IS_BETTER):
            self.greater_is_better = False
        schedule = str(self.lr_scheduler_type)
        if self.lr_scheduler_kwargs is None and schedule == "cosine_with_min_lr":
            self.lr_scheduler_kwargs = {"min_lr_rate": 0.1}
        self._choose_device()
        has_units = has_bfloat16_units(default_device_type(use_cpu=self.use_cpu))
        if self.bf16 is None:
            self.bf16 = not self.fp16 and has_units
        elif self.bf16 and self.use_cpu and not has_units:
            logger.warning_once(
                "--bf16: this CPU has no bfloat16 units and emulates them, so that a step takes several times as long as in "
                "float32. Pass --bf16 false unless you want just that."
            )
        # Trainer would compile the model as a whole, once for each length of a batch and each mode.
        given = {"backend": self.torch_compile_backend, "mode": self.torch_compile_mode}
        self.compile_options = {name: value for name, value in given.items() if value is not None}
        if self.torch_compile is None:
            # accelerate's DeepSpeed comes by an environment variable instead of the flag.
            is_deepspeed = bool(self.deepspeed) or strtobool(os.environ.get("ACCELERATE_USE_DEEPSPEED", "false"))
            is_cuda = default_device_type(use_cpu=self.use_cpu) == "cuda"
            self.torch_compile = bool(self.compile_options) or (is_cuda and not is_deepspeed)
        self.compiles_layers = self.torch_compile
        self.torch_compile, self.torch_compile_backend, self.torch_compile_mode = False, None, None
        if self.on_nonfinite not in ("stop", "skip"):
            raise ValueError(f"--on_nonfinite {self.on_nonfinite} is unknown; use stop or skip.")
        if self.optim_preset not in OPTIM_PRESETS:
            raise ValueError(f"--optim_preset {self.optim_preset} is unknown; use {' or '.join(OPTIM_PRESETS)}.")
        if self.optim_preset == "muon" and self.optim != TrainingArguments.default_optim:
            raise ValueError(
                f"--optim {self.optim} and --optim_preset muon exclude each other: leave one of them out."
            )
        if self.profile and self.profile_interval < 2:
            raise ValueError(
                f"--profile_interval {self.profile_interval}: at least 2, since the step before is the profiler's warm-up."
            )
        self._check_amounts()
        self._check_launch()
        if self.use_cpu and int(os.environ.get("WORLD_SIZE", 1)) > 1 and not dist.is_initialized():
            _start_gloo(timedelta(seconds=self.ddp_timeout))
        super().__post_init__()
        if self.deepspeed and self.device.type == "cpu":
            # NOTE: ZeRO-3's zero.Init counts ranks through DeepSpeed's own group, which Trainer sets up on GPUs alone.
            import deepspeed

            deepspeed.init_distributed(dist_backend="gloo")
            # NOTE: its CPU kernel leaves 66 MiB a rank and run in shared memory, until that is full.
            atexit.register(_remove_allreduce_buffers)
        if self.fp16 and self.device.type == "cpu":
            raise ValueError("--fp16 on a CPU would silently train in float32. Use --bf16, or leave both out.")
        if self.n_gpu > 1:
            raise ValueError(
                f"One process sees {self.n_gpu} GPUs and would use nn.DataParallel, which breaks the complex rotary "
                f"table. Launch one process a GPU: torchrun --standalone --nproc_per_node {self.n_gpu} "
                f"{' '.join(sys.argv)}"
            )
        if self.device.type == "cpu" and (self.fsdp or os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"):
            raise ValueError(
                "accelerate turns FSDP on CPU processes into DDP without a word. On CPU launch with torchrun and pass "
                "--fsdp_size N, which shards through transformers itself."
            )

    @contextmanager
    def main_process_first(self, local: bool = True, desc: str = "work") -> Iterator[None]:
        """transformers' own, without its limit of `--ddp_timeout`; the first process of each machine is let through."""
        if self.world_size > 1 and dist.is_initialized():
            with first_process_first(self.process_index, self.local_process_index, desc=desc):
                yield
        else:
            yield

    def evaluate_never(self) -> None:
        """For a run of which nothing is held out."""
        if self.load_best_model_at_end:
            logger.warning("Nothing is held out, so --load_best_model_at_end cannot tell: the last model is kept.")
        self.eval_strategy, self.eval_on_start, self.load_best_model_at_end = "no", False, False

    @property
    def distributed_config(self) -> DistributedConfig | None:
        """How transformers shards the model while it loads it; `None` where each process has it whole."""
        names = ("tp_size", "ep_size", "fsdp_size", "dp_replicate_size")
        sizes = {name: getattr(self, name) for name in names}
        return DistributedConfig(**sizes) if max(sizes.values()) > 1 else None

    @property
    def launch_description(self) -> str:
        """How many processes train on what: for the first line of a run's log."""
        if self.device.type == "cpu":
            devices = "CPU"
        else:
            is_cuda, visible = self.device.type == "cuda", os.environ.get("CUDA_VISIBLE_DEVICES")
            devices = torch.cuda.get_device_name(self.device) if is_cuda else self.device.type
            devices += f", CUDA_VISIBLE_DEVICES={visible}" if visible else ""
        precision = "bf16" if self.bf16 else "fp16" if self.fp16 else "float32"
        return f"{self.world_size} process(es) on {devices}, {precision}"

    def _hide_token(self):
        """Moves a token out of what a run logs and writes, to where the Hub's client looks for it."""
        if not self.hub_token:
            return
        os.environ["HF_TOKEN"] = self.hub_token
        sys.argv = [word.replace(self.hub_token, "<token>") for word in sys.argv]
        self.hub_token = None
        logger.warning(
            "--hub_token stands in the process list of this machine and in the logs of some launchers: log in with "
            "`hf auth login` or set HF_TOKEN instead."
        )

    def _check_amounts(self):
        """Meets numbers with which nothing would be trained."""
        if self.max_steps == 0 or self.max_steps < -1:
            raise ValueError(
                f"--max_steps {self.max_steps} must be at least 1. Leave it out to train for --num_train_epochs."
            )
        if self.max_steps == -1 and not 0 < self.num_train_epochs < float("inf"):
            raise ValueError(
                f"--num_train_epochs {self.num_train_epochs:g} must be above 0 and finite. Use 1 for one pass over the "
                "rows, or --max_steps."
            )
        for name in ("gradient_accumulation_steps", "per_device_train_batch_size", "per_device_eval_batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} {getattr(self, name)} must be at least 1.")

    def _choose_device(self):
        """The CPU where it is asked for or nothing else is found, which Trainer has to be told."""
        if self.use_cpu or torch.accelerator.is_available():
            return
        plug_ins = installed_plug_ins()
        if plug_ins and not strtobool(os.environ.get("ACCELERATE_USE_CPU", "false")):
            raise ValueError(
                f"{', '.join(plug_ins)} is installed for an accelerator, but torch {torch.__version__} finds none, and the "
                "run would train on the CPU. Trained with it nobody has yet: pass --use_cpu, or look at what "
                "`torch.accelerator.current_accelerator()` says."
            )
        self.use_cpu = True

    def _check_launch(self):
        """Meets mistakes in the launch command before any process group is set up."""
        self._check_layout(int(os.environ.get("WORLD_SIZE", 1)))
        local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        num_devices = torch.accelerator.device_count()
        if not self.use_cpu and 0 < num_devices < local_world_size:
            kind = default_device_type(use_cpu=False)
            raise ValueError(
                f"{local_world_size} processes were started on this machine but it has {num_devices} {kind} device(s) to "
                f"offer: start at most {num_devices}, or pass --use_cpu."
            )
        if self.deepspeed and isinstance(self.deepspeed, str):
            if not Path(self.deepspeed).is_file():
                raise ValueError(f"--deepspeed {self.deepspeed}: no such file. The repository's are in ds_configs/.")
            read_json(Path(self.deepspeed))
        if self.deepspeed and "RANK" not in os.environ:
            # DeepSpeed would look for MPI.
            raise ValueError(
                "--deepspeed needs a launcher, also for one process: put `deepspeed --include localhost:0`, or `torchrun "
                f"--standalone`, in place of python before {sys.argv[0]}."
            )
        is_deepspeed_on_cpu = self.use_cpu and (self.deepspeed or self.launcher == "deepspeed")
        if self.dataloader_num_workers > 0 or is_deepspeed_on_cpu:
            _check_shared_memory()

    def _check_layout(self, world_size: int):
        """Meets sizes that do not fit together, or that Trainer cannot train with."""
        num_ranks = self.fsdp_size * self.tp_size * self.dp_replicate_size
        if num_ranks not in (1, world_size):
            sizes = f"--fsdp_size {self.fsdp_size} x --tp_size {self.tp_size} x --dp_replicate_size {self.dp_replicate_size}"
            raise ValueError(
                f"{sizes} needs {num_ranks} processes, and {world_size} run. Launch with "
                f"torchrun --standalone --nproc_per_node {num_ranks} {' '.join(sys.argv)}"
            )
        if self.ep_size > 1 and self.fsdp_size * self.tp_size % self.ep_size:
            raise ValueError(
                f"--ep_size {self.ep_size} shares out experts among the ranks of --fsdp_size: give it as many, or a multiple."
            )
        if self.tp_size > 1 and self.use_cpu:
            raise ValueError(
                f"--tp_size {self.tp_size}: accelerate trains with tensor parallelism on GPUs alone. Use --fsdp_size here."
            )
        if self.distributed_config is not None and self.deepspeed:
            raise ValueError(
                "--deepspeed and transformers' own sharding (--fsdp_size, --tp_size, --ep_size) exclude each other: leave "
                "one of them out."
            )


@dataclass
class SFTTrainingArguments(LMTrainingArguments):
    """Defaults for fine-tuning: lower rates, and the held-out loss before the first step."""

    output_dir: str | None = field(default="out/sft", metadata={"help": "Where the run goes."})
    learning_rate: float = field(default=1e-4, metadata={"help": "Peak learning rate."})
    eval_on_start: bool = field(default=True, metadata={"help": "Evaluate before the first step."})


def _check_shared_memory() -> None:
    """Raises `ValueError` where processes cannot share memory; they would crash or wait for each other."""
    if sys.platform != "linux":
        return
    try:
        with tempfile.TemporaryFile(dir=_SHARED_MEMORY) as file:
            os.posix_fallocate(file.fileno(), 0, _MIN_SHARED_BYTES)
    except OSError as error:
        raise ValueError(
            f"{_SHARED_MEMORY} cannot be used: {error}. Workers of the loader and DeepSpeed's CPU ranks pass data "
            "through it. Make room there (docker run --shm-size 1g), or pass --dataloader_num_workers 0 and use "
            "torchrun."
        ) from error


def _start_gloo(timeout: timedelta):
    """
    The process group of CPU ranks. NOTE: Trainer would leave the timeout out; and torchrun keeps one store over its
    restarts, in which the ranks of the next attempt would find the addresses of the dead.
    """
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"attempt-{attempt}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    atexit.register(_end_gloo)


def _end_gloo():
    """
    Leaves the process group. NOTE: gloo's threads free the tensors of the last collective a little after it is over.
    They need the interpreter for that, and abort the process if it is ending already (`terminate called without an
    active exception`), as 5 of 136 processes did on a busy machine.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    time.sleep(0.2)


def _remove_allreduce_buffers():
    """Removes this run's buffers of DeepSpeed's CPU kernel; whoever still has them open keeps them."""
    address, port = (os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    for path in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{address}_{port}_*"):
        path.unlink(missing_ok=True)


def launcher() -> str:
    """The program that started this process, by the variables that it leaves."""
    if "ACCELERATE_DYNAMO_USE_DYNAMIC" in os.environ:
        return "accelerate launch"
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return "torchrun"
    return "deepspeed" if "CROSS_SIZE" in os.environ else "python"


__all__ = ["LMTrainingArguments", "SFTTrainingArguments", "launcher"]
