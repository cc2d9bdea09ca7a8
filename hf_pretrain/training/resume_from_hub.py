"""Resume a run from a checkpoint that an earlier run pushed."""

from pathlib import Path

from huggingface_hub.errors import HTTPError
from transformers.utils import logging

from ..checkpoints.directory import newest_checkpoint
from ..hub.repository import describe_error, download_checkpoint, newest_pushed_checkpoint
from .arguments import LMTrainingArguments


logger = logging.get_logger(__name__)


def pull_checkpoint(args: LMTrainingArguments) -> None:
    """
    Download the newest checkpoint of `--resume_from_hub ID` into `output_dir`, and set `resume_from_checkpoint` to it.
    If a local checkpoint is as new, use that one and download nothing.

    Without `--trust_checkpoint`, download only files that Trainer loads with `weights_only=True`. Shards of DeepSpeed
    and of torch.distributed.checkpoint are pickles without restrictions.

    Raises:
        `ValueError`: if the repository cannot be read, holds no checkpoint, holds one without optimizer state, or
            would have to be unpickled without `--trust_checkpoint`.
    """
    repo_id = args.resume_from_hub
    if repo_id is None:
        return
    if args.resume_from_checkpoint not in (None, "auto"):
        raise ValueError(
            f"--resume_from_hub {repo_id} and --resume_from_checkpoint {args.resume_from_checkpoint} name two "
            "checkpoints: leave one out. Use --resume_from_checkpoint for a directory on this machine."
        )
    if args.deepspeed_plugin is not None and not args.trust_checkpoint:
        raise ValueError(
            f"--resume_from_hub {repo_id}: DeepSpeed unpickles its shards (global_step*/*.pt), which runs whatever "
            "code they contain. Add --trust_checkpoint if you trust everybody who can write to that repository."
        )
    output_dir = Path(args.output_dir)
    with args.main_process_first(desc="downloading the checkpoint"):
        try:
            folder, step, files = newest_pushed_checkpoint(repo_id, args.hub_revision)
            local = newest_checkpoint(output_dir, unverified=args.allow_inexact_resume)
            if local is None or int(local.rpartition("-")[2]) < step:
                local = str(output_dir / f"checkpoint-{step}")
                if not args.trust_checkpoint:
                    # Shards lie in subdirectories of the checkpoint.
                    files = [path for path in files if path.count("/") == 1]
                state = "global_step" if args.deepspeed_plugin is not None else "optimizer"
                if not any(path.startswith(f"{folder}/{state}") for path in files):
                    raise ValueError(
                        f"--resume_from_hub {repo_id}: {folder}/ has no optimizer state that this run can read. It "
                        "was saved with --save_only_model, or under another launcher. Start a new run from its "
                        f"weights: --model_name_or_path {repo_id}."
                    )
                download_checkpoint(repo_id, folder, files, Path(local), args.hub_revision)
        # NOTE: errors of huggingface_hub's HTTP client are not OSErrors.
        except (OSError, HTTPError) as error:
            raise ValueError(f"--resume_from_hub {repo_id}: {describe_error(error)}") from error
    logger.warning(f"Resuming from {local} ({repo_id} has step {step}).")
    args.resume_from_checkpoint = local


__all__ = ["pull_checkpoint"]
