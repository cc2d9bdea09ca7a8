"""Resume a run from a checkpoint that an earlier run pushed."""

from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub.errors import HTTPError
from transformers.utils import logging

from ..checkpoints.directory import checkpoint_path
from ..hub.repository import describe_error, download_checkpoint, newest_pushed_checkpoint
from ..runtime.errors import UserError
from ..runtime.processes import on_main_process, on_processes
from .arguments import LMTrainingArguments
from .resuming import find_newest


logger = logging.get_logger(__name__)


def pull_checkpoint(args: LMTrainingArguments) -> None:
    """
    Download the newest checkpoint of `--resume_from_hub ID` into `output_dir`, and set `resume_from_checkpoint` to it.
    If a machine has a checkpoint that is as new, set it to `auto` and download nothing. All ranks must call this
    function.

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
        raise UserError(
            f"--resume_from_hub {repo_id} and --resume_from_checkpoint {args.resume_from_checkpoint} name two "
            "checkpoints: leave one out. Use --resume_from_checkpoint for a directory on this machine."
        )
    if args.deepspeed_plugin is not None and not args.trust_checkpoint:
        raise UserError(
            f"--resume_from_hub {repo_id}: DeepSpeed unpickles its shards (global_step*/*.pt), which runs whatever "
            "code they contain. Add --trust_checkpoint if you trust everybody who can write to that repository."
        )
    naming = _naming(repo_id)
    # All ranks must decide alike, although a push may be in progress, and each machine may have other checkpoints.
    folder, step, files, commit = on_main_process(
        args, naming(lambda: newest_pushed_checkpoint(repo_id, args.hub_revision))
    )
    local = find_newest(args, unverified=args.allow_inexact_resume)
    if local is not None and int(local[0].rpartition("-")[2]) >= step:
        logger.warning(f"Resuming from {local[0]} ({repo_id} has step {step}).")
        args.resume_from_checkpoint = "auto"
        return
    if not args.trust_checkpoint:
        # Shards lie in subdirectories of the checkpoint.
        files = [path for path in files if path.count("/") == 1]
    state = "global_step" if args.deepspeed_plugin is not None else "optimizer"
    if not any(path.startswith(f"{folder}/{state}") for path in files):
        raise UserError(
            f"--resume_from_hub {repo_id}: {folder}/ has no optimizer state that this run can read. It was saved with "
            "--save_only_model, or under another launcher. Start a new run from its weights: "
            f"--model_name_or_path {repo_id}."
        )
    target = checkpoint_path(args.output_dir, step)

    def download() -> None:
        if args.local_process_index == 0:
            download_checkpoint(repo_id, folder, files, target, commit)

    on_processes(args, naming(download))
    logger.warning(f"Resuming from {target} ({repo_id} has step {step}).")
    args.resume_from_checkpoint = str(target)


@contextmanager
def _naming(repo_id: str) -> Iterator[None]:
    """Raise errors of the Hub as `ValueError`, with the name of the repository."""
    try:
        yield
    # NOTE: errors of huggingface_hub's HTTP client are not OSErrors.
    except (OSError, HTTPError) as error:
        raise UserError(f"--resume_from_hub {repo_id}: {describe_error(error)}") from error


__all__ = ["pull_checkpoint"]
