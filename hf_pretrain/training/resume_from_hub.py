"""Resume a run from a checkpoint that an earlier run pushed."""

from pathlib import Path

from transformers.utils import logging

from ..checkpoints.directory import newest_checkpoint
from ..hub.repository import describe_error, download_checkpoint, newest_pushed_checkpoint
from .arguments import LMTrainingArguments


logger = logging.get_logger(__name__)


def pull_checkpoint(args: LMTrainingArguments) -> None:
    """
    Makes `--resume_from_hub ID` a local checkpoint: downloads the newest one that was pushed into `output_dir`, and
    points `resume_from_checkpoint` at it. A local checkpoint that is as new is taken instead.

    Without `--trust_checkpoint`, no file of it is unpickled: Trainer reads its own with `weights_only=True`, which
    neither DeepSpeed's shards nor those of torch.distributed.checkpoint are.

    Raises:
        `ValueError`: if the repository cannot be read, holds no checkpoint or one without the state of the optimizer,
            or if going on would unpickle it.
    """
    repo_id = args.resume_from_hub
    if repo_id is None:
        return
    if args.resume_from_checkpoint not in (None, "auto"):
        raise ValueError(
            f"--resume_from_hub {repo_id} and --resume_from_checkpoint {args.resume_from_checkpoint} name two "
            "checkpoints: leave one out."
        )
    if args.deepspeed_plugin is not None and not args.trust_checkpoint:
        raise ValueError(
            f"--resume_from_hub {repo_id}: DeepSpeed unpickles its shards (global_step*/*.pt), which runs whatever code "
            "was put into them. Add --trust_checkpoint if you trust everybody who can write to that repository."
        )
    output_dir = Path(args.output_dir)
    with args.main_process_first(desc="downloading the checkpoint"):
        try:
            folder, step, files = newest_pushed_checkpoint(repo_id, args.hub_revision)
            local = newest_checkpoint(output_dir, unverified=args.allow_inexact_resume)
            if local is None or int(local.rpartition("-")[2]) < step:
                local = str(output_dir / f"checkpoint-{step}")
                if not args.trust_checkpoint:
                    files = [path for path in files if path.count("/") == 1]
                state = "global_step" if args.deepspeed_plugin is not None else "optimizer"
                if not any(path.startswith(f"{folder}/{state}") for path in files):
                    raise ValueError(
                        f"--resume_from_hub {repo_id}: {folder}/ has no optimizer state that this run can read, and "
                        "would go on with a fresh one. It was saved with --save_only_model, or under "
                        f"another launcher. Start a new run from its weights: --model_name_or_path {repo_id}."
                    )
                download_checkpoint(repo_id, folder, files, Path(local), args.hub_revision)
        except OSError as error:
            raise ValueError(f"--resume_from_hub {repo_id}: {describe_error(error)}") from error
    logger.warning(f"Resuming from {local} ({repo_id} has step {step}).")
    args.resume_from_checkpoint = local


__all__ = ["pull_checkpoint"]
