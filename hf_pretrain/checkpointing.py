"""Which checkpoint a run goes on from, the refusal to write over another run, and which run is the newest."""

import json
import os
from pathlib import Path

from transformers import TrainingArguments
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import logging


logger = logging.get_logger(__name__)


def checkpoint_to_resume(args: TrainingArguments) -> str | None:
    """
    The checkpoint directory that `--resume_from_checkpoint` means, or `None` to start afresh. `auto` is the newest one
    in `output_dir`, if any, and the default after a restart by torchrun's elastic agent or SLURM.

    Raises:
        `ValueError`: if the checkpoint named does not exist, or if a run would start in an `output_dir` that holds
            files already.
    """
    resume = args.resume_from_checkpoint
    restarts = max(int(os.environ.get(name) or 0) for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))
    if resume is None and restarts:
        resume = "auto"
    output_dir = Path(args.output_dir)
    if resume in ("auto", "true", "True", True):
        checkpoint = get_last_checkpoint(str(output_dir)) if output_dir.is_dir() else None
        logger.warning(f"Resuming from {checkpoint}." if checkpoint else f"No checkpoint in {output_dir}: starting.")
    elif resume is not None:
        checkpoint = str(resume)
        if not Path(checkpoint, "trainer_state.json").is_file():
            raise ValueError(f"--resume_from_checkpoint {resume} is not a checkpoint: it has no trainer_state.json.")
    else:
        checkpoint = None
        # A run that bad data stopped before it started leaves its list of them, and may be tried again.
        if output_dir.is_dir() and any(path.name != "rejected.jsonl" for path in output_dir.iterdir()):
            raise ValueError(
                f"--output_dir {output_dir} is not empty. Go on with `--resume_from_checkpoint auto`, choose another "
                "directory, or delete this one."
            )
    # Nobody may write there before everybody has looked.
    if args.distributed_state is not None:
        args.distributed_state.wait_for_everyone()
    return checkpoint


def find_newest_run(directory: str = "out") -> str:
    """
    The directory of the MiniMind model that was saved last in `directory`, by the time of its weights.

    Raises:
        `ValueError`: if there is none.
    """
    runs = []
    for config in Path(directory).glob("*/config.json"):
        weights = max((path.stat().st_mtime for path in config.parent.glob("model*.safetensors")), default=None)
        is_minimind = json.loads(config.read_text(encoding="utf-8")).get("model_type") == "minimind"
        if weights is not None and is_minimind and (config.parent / "tokenizer.json").is_file():
            runs.append((weights, str(config.parent)))
    if not runs:
        raise ValueError(
            f"No model in {directory}/: run `make pretrain` first, or name one: --model_name_or_path DIR."
        )
    return max(runs)[1]
